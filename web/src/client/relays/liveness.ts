/**
 * Whether the relay is still there, and whether the program looked.
 *
 * Silence means something only while the program looks. It looks at every message and every timer, and asks for a look
 * at least every `LOOK_SECONDS`. A look that comes later than that ends a *pause*: the tab was frozen, the page busy,
 * or the process stopped, and what the relay has sent waits to be heard. The owner then moves every deadline that
 * judges the relay by the length of the pause. While a machine sleeps the monotonic clock may stand still, so a wall
 * clock that has gone further is a sign of a pause too.
 *
 * A relay that is silent for `pingInterval` while something is awaited is probed, and left after `pingTimeout`. After a
 * long pause, and if a publish has waited for some seconds in which nothing came, the probe goes out at once, and its
 * answer is expected soon. A WebSocket in a browser cannot ping, so the probe is a request. Only its own answer shows
 * that the relay is there, because other messages may have waited since before the pause. A SUBSCRIBE that waits is no
 * reason to probe: a relay may read its history first, and the probe's answer would come as late.
 */

// Core: no I/O, no clock, no randomness (held by tests/layout.test.ts).

import type { Options } from "./options.js";

const LOOK_SECONDS = 1;
/** A look that is late by no more than this ends no pause; hidden tabs round their timers up to whole seconds. */
const LATE_SECONDS = 1.5;
/** How long, after a pause, hearing what has waited may take before anything is judged. */
const READ_SECONDS = 0.5;
/** A pause of this length is a reason to doubt that the connection still exists. */
const AWAY_SECONDS = 5;
/** For so long nothing came while a publish waited: another reason. */
const SILENT_SECONDS = 2;
/** How long the answer to a probe may take that goes out because of a doubt. */
const PROBE_SECONDS = 3;
/** Bytes per second of the slowest line on which requests ahead of a probe do not count as silence. */
const SLOWEST_BYTES = 65_536;
/** The same for the largest request: nothing comes until all of it is there. */
const SLOWEST_BYTES_OF_ONE = 8192;
/** The most seconds that the largest request has for its way: what a publish has by default. */
const LONGEST_SENDING = 30;

/** Judges one relay over all connections. While there is none, only pauses are noted. */
export class Liveness {
  /** When to call `handleTimer`; infinity before the first `look`. */
  wakeAt = Infinity;
  /** Whether the owner must send a probe and call `probed`. */
  wantsProbe = false;
  /** Whether the connection must be dropped, because nobody answers. */
  isGone = false;
  private patience = PROBE_SECONDS;
  private isConnected = false;
  private hasEnded = false;
  private lookedAt: number | undefined;
  private unixAt = 0;
  private resumedAt = -Infinity;
  private heardAt = -Infinity;
  private quietAt = -Infinity;
  private isDoubting = false;
  /** How long the probe under way may go unanswered while nothing comes, and until when. */
  private timeout = Infinity;
  private endsAt = Infinity;

  constructor(private readonly options: Options) {}

  /** Note that the program looks. Returns by how much to move deadlines, and whether it was away for long. */
  look(now: number, unixNow: number): { by: number; isAway: boolean } {
    if (this.hasEnded) return { by: 0, isAway: false };
    const last = this.lookedAt ?? now;
    const unixLast = this.lookedAt === undefined ? unixNow : this.unixAt;
    this.lookedAt = now;
    this.unixAt = unixNow;
    if (this.wakeAt === Infinity) this.wakeAt = now;
    const passed = now - last;
    const isAway = Math.max(passed, unixNow - unixLast) >= AWAY_SECONDS + LOOK_SECONDS;
    if (isAway) {
      this.patience = PROBE_SECONDS;
      this.doubt();
    }
    if (passed <= LOOK_SECONDS + LATE_SECONDS) return { by: 0, isAway };
    // In a hidden tab every timer may come a minute late: a program that pauses again as soon as it goes on must not
    // put a deadline off for ever.
    const calm = Math.min((last - this.resumedAt) / LOOK_SECONDS, 1);
    const by = passed - LOOK_SECONDS + calm * (LOOK_SECONDS + READ_SECONDS);
    this.resumedAt = now;
    this.endsAt += by;
    this.quietAt += by;
    return { by, isAway };
  }

  /** Ask for no further look. */
  end(): void {
    this.connectionLost();
    this.hasEnded = true;
    this.wakeAt = Infinity;
  }

  /** Note a connection on which requests may be sent. */
  connectionMade(now: number): void {
    this.isConnected = true;
    this.heardAt = this.quietAt = now;
  }

  /** Note the end of the connection. */
  connectionLost(): void {
    this.isConnected = this.isDoubting = this.wantsProbe = this.isGone = false;
    this.endsAt = Infinity;
  }

  /** Note a message of the relay. */
  heard(now: number): void {
    this.heardAt = now;
    if (this.endsAt !== Infinity) this.endsAt = Math.max(this.endsAt, now + this.timeout); // the answer is behind it
  }

  /** Probe at once, and expect an answer soon. */
  doubt(): void {
    if (this.isConnected && !this.isDoubting) this.isDoubting = this.wantsProbe = true;
  }

  /** As `doubt`, unless the relay was just heard. */
  check(now: number): void {
    if (now - this.heardAt >= SILENT_SECONDS) this.doubt();
  }

  /** Note that the probe was sent, after requests of these sizes that have no answer yet; undefined if it cannot be. */
  probed(now: number, ahead: readonly number[] | undefined): void {
    this.wantsProbe = false;
    if (ahead === undefined) {
      this.isDoubting = false;
      return;
    }
    const { pingTimeout } = this.options;
    const bytes = ahead.reduce((sum, size) => sum + size, 0);
    const largest = Math.min(Math.max(0, ...ahead) / SLOWEST_BYTES_OF_ONE, LONGEST_SENDING);
    const patience = this.patience + Math.max(bytes / SLOWEST_BYTES, largest);
    this.timeout = this.isDoubting ? Math.min(patience, pingTimeout) : pingTimeout;
    this.endsAt = now + this.timeout;
    this.wakeAt = Math.min(this.wakeAt, this.endsAt);
  }

  /** Note that every probe has its answer. */
  answered(): void {
    this.isDoubting = false;
    this.endsAt = Infinity;
    this.patience = PROBE_SECONDS;
  }

  /** Probe, or give the connection up, if that is due: `isWaiting` for anything at all, `isPublishing` in particular. */
  handleTimer(now: number, isWaiting: boolean, isPublishing: boolean): void {
    if (now < this.wakeAt) return;
    const { pingInterval } = this.options;
    if (!isPublishing) this.quietAt = now;
    const silentAt = Math.max(this.heardAt, this.quietAt) + SILENT_SECONDS;
    if (now >= this.endsAt) {
      this.endsAt = Infinity;
      this.isGone = true;
      this.patience *= 2; // it may be too busy to answer: do not come back ever so often
    } else if (now >= silentAt) {
      this.doubt();
    } else if (isWaiting && this.endsAt === Infinity && now - this.heardAt >= pingInterval) {
      this.wantsProbe = this.isConnected;
    }
    this.wakeAt = Math.min(now + Math.min(LOOK_SECONDS, pingInterval / 4), this.endsAt, silentAt > now ? silentAt : Infinity);
  }
}
