/**
 * One subscription across any number of connections.
 *
 * The consumer is promised every matching packet once and in the relay's order. This rests on three things:
 *
 * *The position.* `position` is the last cursor queued. Whatever interrupts the stream, reading resumes strictly after
 * it. Events are queued in the order the relay sends them, so nothing up to it is missing.
 *
 * *The wire id.* Every SUBSCRIBE uses a fresh `subscription_id`. Events that still arrive for an old one belong to a
 * stream that was left, and are ignored: they will come again after the position.
 *
 * *The window.* Delivered ids are remembered (`Inspector`), so where streams must overlap, repeats are dropped.
 *
 *     waiting ──SUBSCRIBE──▶ history ──▶ live          waiting: not on the wire, because there is no connection,
 *        ▲                      │   ◀──    │                    the queue has no room, or the relay said later.
 *        └──────────────────────┴──────────┘           ended:   nothing more will be queued.
 *
 * History is read in pages. Each page starts after the cursor of the last one, and is requested when the queue has
 * room for it. Then `gapless` gives one live stream in which every event has its cursor. When the queue is full, the
 * stream is left with UNSUBSCRIBE, and resumed from the position, by pages, once the consumer has made room: the
 * relay's store is the buffer. A browser cannot stop reading its socket, so a relay that never gives a cursor leaves
 * no such buffer: its subscription ends with an error when four times the usual number of events wait.
 *
 * A plain relay does not mark the end of history: only an empty page, ended by silence, proves that history is
 * complete. That last subscription then stays open, and has been live since it was made. Its live events need not
 * carry cursors; after half a window of those, the subscription is made anew from the position.
 */

// Core: no I/O, no clock, no randomness (held by tests/layout.test.ts).

import { ConnectionFailed, type RequestRefused, RequestTimeout, type StrataError } from "../protocol/errors.js";
import { type JsonObject, MAX_SAFE_INTEGER } from "../protocol/json.js";
import { encode, type EndOfHistory, type Event } from "../protocol/wire.js";
import { MAX_RETRY_AFTER_SECONDS, type Random, retryDelay } from "./backoff.js";
import type { Options } from "./options.js";
import { type Announced, type LogReset, type Query, RESUME_MARGIN_SECONDS, type Statistics } from "./values.js";

const EVENT_OVERHEAD_BYTES = 256;
const MAX_RESETS = 3;
const UNBUFFERED_ROOM = 4;

/** The state of a subscription with the relay. */
export type Phase = "waiting" | "history" | "live" | "ended";

const MOVES: Readonly<Record<Phase, readonly Phase[]>> = {
  waiting: ["history", "ended"],
  history: ["waiting", "live", "ended"],
  live: ["waiting", "history", "ended"],
  ended: [],
};

/** An event as it arrived: its contents are unchecked. */
export interface QueuedEvent {
  readonly kind: "event";
  /** The packet's JSON text. */
  readonly packet: string;
  /** Clamped to safe integers: a relay may send any integer. */
  readonly receivedAt: number;
  readonly cursor: string | undefined;
  readonly live: boolean | undefined;
  readonly annotations: JsonObject | undefined;
  /** When it arrived, on the connection's clock. */
  readonly arrivedAt: number;
  /** The length of the whole message: cursor and annotations may be larger than the packet. */
  readonly length: number;
  /** Whether the relay was asked to apply the bounds on the time of receipt. */
  readonly byReceipt: boolean;
  /** How often the stream had gone back before: what was delivered may come again. */
  readonly turn: number;
}

/** Notice of a reset, at its place between two events. */
export interface QueuedReset {
  readonly kind: "reset";
  readonly reset: LogReset;
}

/** The protocol state of one subscription, over all connections, and its bounded queue. */
export class Stream {
  phase: Phase = "waiting";
  error: StrataError | undefined;
  /** The `subscription_id` now on the wire, if any. */
  wireId: string | undefined;
  /** When `handleTimer` has work to do. */
  wakeAt = Infinity;
  private announced: Announced | undefined; // undefined: not connected
  private forbidden: StrataError | undefined;
  private parked: RequestRefused | undefined;
  private anonymous = false;
  private queue: (QueuedEvent | QueuedReset)[] = [];
  private first = 0; // where the queue begins: removing the first element of an array takes time linear in its length
  private queuedBytes = 0;
  private resets = 0;
  private delivered = 0;
  private attempt = 0;
  private position: string | undefined;
  private askedPosition: string | undefined;
  private landmark: string | undefined; // a position that an earlier page led to
  private pages = 0;
  private since: number | undefined;
  private newestReceivedAt: number | undefined;
  private clockOffset = 0;
  private gapless = false;
  private marked = false;
  private byReceipt = false;
  private turns = 0;
  private behind = true;
  private pageLimit = 0;
  private pageEvents = 0;
  private caughtUp = false;
  private withoutCursor = 0;
  private refusals = 0;
  private retryAt = -Infinity;

  constructor(
    private readonly name: string,
    readonly query: Query,
    private readonly options: Options,
    private readonly statistics: Statistics,
    private readonly random: Random,
    private readonly outbox: string[],
  ) {
    this.position = query.cursor;
    this.since = query.since;
  }

  // What the application does.

  /** How many events and resets wait for the consumer. */
  get queued(): number {
    return this.queue.length - this.first;
  }

  /** Take the next queued event or notice of a reset, if any. The caller must then call `taken`. */
  take(): QueuedEvent | QueuedReset | undefined {
    const item = this.queue[this.first];
    if (item === undefined) return undefined;
    this.first++;
    if (this.first >= 64 && this.first * 2 >= this.queue.length) {
      this.queue = this.queue.slice(this.first);
      this.first = 0;
    }
    if (item.kind === "event") this.queuedBytes -= item.length + EVENT_OVERHEAD_BYTES;
    return item;
  }

  /** The queued events, without taking them. */
  waiting(): QueuedEvent[] {
    return this.queue.slice(this.first).filter((item) => item.kind === "event");
  }

  /** Note that the event last taken was delivered, or dropped; resume reading if that awaited room. */
  taken(delivered: boolean, now: number): void {
    if (delivered) this.delivered++;
    if (this.delivered === this.query.limit) {
      this.queue = [];
      this.first = 0;
      this.close();
    } else if (this.phase === "waiting") {
      this.subscribeIfPossible(now);
    }
  }

  /** End the subscription; what is queued can still be taken. */
  close(error?: StrataError): void {
    if (this.phase === "ended") return;
    this.leave();
    this.error = error;
    this.move("ended");
    this.wakeAt = Infinity;
  }

  // What the connection brings.

  /**
   * Note a new connection: resume after the position. `clockOffset` is Unix time minus `now`. `forbidden` is why this
   * session must not subscribe, if so; then the subscription ends with it.
   */
  connectionMade(
    announced: Announced,
    now: number,
    clockOffset: number,
    forbidden: StrataError | undefined,
  ): void {
    this.announced = announced;
    this.clockOffset = clockOffset;
    this.forbidden = forbidden;
    this.refusals = 0;
    this.subscribeIfPossible(now);
  }

  /** Note that the session is authenticated: subscribe again, if that was refused for lack of it. */
  authorize(now: number, forbidden: StrataError | undefined): void {
    this.forbidden = forbidden;
    this.anonymous = this.wireId !== undefined;
    this.parked = undefined;
    this.subscribeIfPossible(now);
  }

  /** Note that authentication failed: the relay's refusal stands, with `error` as its cause. */
  giveUp(error: StrataError): void {
    if (this.parked === undefined) return;
    this.parked.cause = error;
    this.close(this.parked);
  }

  /** Note that the relay has announced more extensions; the next SUBSCRIBE uses them. */
  learn(announced: Announced): void {
    this.announced = announced;
  }

  /** Note a lost connection. Queued events stay; the rest will be read after the position. */
  connectionLost(): void {
    this.announced = this.forbidden = this.parked = undefined;
    this.behind = true;
    this.wireId = undefined;
    this.wakeAt = Infinity;
    if (this.position === undefined) this.turns++; // then everything is read again
    if (this.phase === "history" || this.phase === "live") this.move("waiting");
  }

  /**
   * Queue an event for `wireId`, or leave the stream if the event belongs to a later page. `length` is the length of
   * the whole message.
   */
  receiveEvent(message: Event, now: number, length: number): void {
    this.refusals = this.resets = 0;
    const cursor = message.cursor;
    if (this.phase === "live" && cursor !== undefined && !this.gapless && !this.marked) {
      // A plain relay's live event with a cursor, or its history after a long silence: they cannot be
      // distinguished, and treating it as history costs one empty page.
      this.caughtUp = false;
      this.move("history");
    }
    if (!this.gapless && this.phase === "history") {
      if (cursor === undefined && !this.marked) {
        // Historical events carry a cursor, so this one is live and the page is over. Only an empty
        // page shows that nothing is left between the position and this event.
        if (this.pageEvents > 0 || !this.query.live) {
          this.endPage(now);
          return;
        }
        this.catchUp();
      } else if (this.pageEvents === this.pageLimit) {
        // More than requested: live, or a relay that ignores limits. The next page has it in order.
        this.endPage(now);
        return;
      }
    }
    this.enqueue(message, now, length);
    if (this.phase === "history") {
      this.pageEvents++;
      this.watch(now);
      if (!this.gapless && !this.marked && this.pageEvents === this.pageLimit) {
        this.endPage(now);
        return;
      }
    }
    if (!this.hasRoom(0) && this.position !== undefined) {
      this.statistics.subscriptionsDeferred++;
      this.behind = true;
      this.leave();
      this.move("waiting");
      this.wakeAt = Infinity;
    } else if (this.queued >= UNBUFFERED_ROOM * this.options.queueEvents) {
      this.close(new ConnectionFailed("the relay gives no cursors, and events come faster than they are taken"));
    } else if (this.withoutCursor >= Math.floor(this.options.dedupPackets / 2)) {
      this.resubscribe(now);
    }
  }

  /** Note the end of the requested history; `message.complete` says whether that was all of it. */
  receiveEndOfHistory(message: EndOfHistory, now: number): void {
    this.refusals = this.resets = 0;
    if (this.phase !== "history") return;
    if (message.cursor !== undefined) this.advance(message.cursor);
    if (!message.complete && this.hasMoved()) {
      this.resubscribe(now);
      return;
    }
    this.behind = false;
    if (this.canBeGapless && !this.gapless) this.resubscribe(now);
    else this.finishHistory();
  }

  /**
   * Handle a refused SUBSCRIBE: start elsewhere, try later, or end with the refusal. `park` means that authentication
   * is under way: a SUBSCRIBE refused for lack of it waits for the outcome.
   */
  receiveError(refusal: RequestRefused, now: number, park: boolean): void {
    this.wireId = undefined;
    let delay = 0;
    if (refusal.retry === "authenticate" && (park || this.anonymous)) {
      this.parked = park ? refusal : undefined;
    } else if (!(refusal.code === "invalid_cursor" && this.turnBack(refusal))) {
      if (this.isFinal(refusal)) {
        this.close(refusal);
        return;
      }
      delay = retryDelay(this.refusals++, this.options, refusal.retryAfter, this.random);
    }
    if (this.phase !== "waiting") this.move("waiting");
    this.retryAt = now + delay;
    this.subscribeIfPossible(now);
  }

  /** Act on a silence that has lasted long enough, or try again when that is due. */
  handleTimer(now: number): void {
    if (now < this.wakeAt) return;
    this.wakeAt = Infinity;
    if (this.phase === "waiting") this.subscribeIfPossible(now);
    else if (this.phase !== "history") return;
    else if (this.marked) this.close(new RequestTimeout("SUBSCRIBE", this.options.historyTimeout));
    else if (this.pageEvents > 0) this.endPage(now);
    else this.finishHistory();
  }

  /** Nobody looked for `by` seconds: the relay has that much more time. */
  postpone(by: number): void {
    if (this.phase === "history") this.wakeAt += by;
  }

  // Moves.

  private move(phase: Phase): void {
    if (!MOVES[this.phase].includes(phase)) throw new Error(`${this.phase} -> ${phase}`);
    this.phase = phase;
  }

  private subscribeIfPossible(now: number): void {
    const announced = this.announced;
    if (announced === undefined || this.phase !== "waiting" || this.parked !== undefined) return;
    if (this.forbidden !== undefined) {
      this.close(this.forbidden);
      return;
    }
    if (now < this.retryAt) {
      this.wakeAt = this.retryAt;
      return;
    }
    this.marked = announced.extensions.has("history_marker");
    this.byReceipt = announced.extensions.has("received_range");
    // A gapless stream sends history faster than it can be left, and discarded events must be sent again. So if the
    // relay marks the end of history, pages come first.
    this.gapless = this.canBeGapless && !(this.behind && this.marked);
    const limit = this.gapless ? undefined : this.nextPageLimit(announced);
    if (limit === 0 || !this.hasRoom(limit ?? Math.floor(this.options.queueEvents / 2))) return; // `taken` asks again
    this.attempt++;
    const wireId = `${this.name}.${this.attempt}`;
    this.wireId = wireId;
    this.askedPosition = this.position;
    this.pageLimit = limit ?? 0;
    this.pageEvents = this.withoutCursor = 0;
    this.outbox.push(
      encode({
        type: "SUBSCRIBE",
        subscription_id: wireId,
        filters: this.query.filters(announced, { cursor: this.position, since: this.since, limit }),
        history_marker: this.marked ? true : undefined,
        gapless: this.gapless ? true : undefined,
        // A plain relay names the request, not the subscription, in its ERROR.
        client_msg_id: wireId,
      }),
    );
    this.caughtUp = this.anonymous = false;
    this.move("history");
    this.watch(now);
  }

  private get canBeGapless(): boolean {
    return this.query.live && this.announced !== undefined && this.announced.extensions.has("gapless");
  }

  private leave(): void {
    if (this.wireId === undefined) return;
    this.outbox.push(encode({ type: "UNSUBSCRIBE", subscription_id: this.wireId }));
    this.wireId = undefined;
  }

  private resubscribe(now: number): void {
    this.leave();
    this.move("waiting");
    this.wakeAt = Infinity;
    this.subscribeIfPossible(now);
  }

  /** Note that a plain relay's page is over; there may be more history. */
  private endPage(now: number): void {
    // If it gave events but no new position, it does not page, so this is all there is.
    if (this.hasMoved()) this.resubscribe(now);
    else this.finishHistory();
  }

  private finishHistory(): void {
    if (this.query.live) this.catchUp();
    else this.close();
  }

  private catchUp(): void {
    this.caughtUp = true;
    this.wakeAt = Infinity;
    this.move("live");
  }

  /** Set how long silence may last in this phase before it means something. */
  private watch(now: number): void {
    const { historyTimeout, idleTimeout } = this.options;
    // In a gapless stream, silence means that there is nothing to send; the probe checks the connection.
    this.wakeAt = this.gapless ? Infinity : now + (this.marked ? historyTimeout : idleTimeout);
  }

  /**
   * Whether the page has led to a new position: a relay that leads back, or nowhere, would be asked forever. One
   * landmark detects a circle of any length, because it is replaced after 1, 2, 4, 8… pages.
   */
  private hasMoved(): boolean {
    if (this.position === this.askedPosition || this.position === this.landmark) return false;
    this.pages++;
    if ((this.pages & (this.pages - 1)) === 0) this.landmark = this.position;
    return true;
  }

  /** Continue from the last place that is good; false if there is none. */
  private turnBack(refusal: RequestRefused): boolean {
    this.landmark = undefined;
    this.pages = 0;
    this.turns++;
    const lost = this.askedPosition;
    if (refusal.detail !== "log_reset" || lost === undefined) return this.fallBack();
    this.resets++;
    if (this.resets > MAX_RESETS) return false;
    if (refusal.cursor !== undefined) this.position = refusal.cursor;
    else if (!this.fallBack()) return false;
    this.behind = true;
    this.statistics.logResets++;
    const since = refusal.cursor === undefined ? this.since : undefined;
    this.queue.push({ kind: "reset", reset: { lost, cursor: refusal.cursor, since } });
    return true;
  }

  /**
   * the relay no longer knows the cursor, so start at a time no later than any packet missed. False if there is
   * nothing to fall back to.
   */
  private fallBack(): boolean {
    const newest = this.newestReceivedAt;
    const floor = newest === undefined ? this.query.cursorFallbackSince : newest - RESUME_MARGIN_SECONDS;
    const starts = [floor, this.query.since].filter((moment) => moment !== undefined);
    if (this.askedPosition === undefined || this.query.order === "desc" || starts.length === 0) return false;
    this.position = undefined;
    this.since = Math.max(...starts);
    this.statistics.cursorFallbacks++;
    return true;
  }

  // The queue.

  private enqueue(message: Event, now: number, length: number): void {
    const receivedAt = Math.min(Math.max(message.received_at, -MAX_SAFE_INTEGER), MAX_SAFE_INTEGER);
    this.queue.push({
      kind: "event",
      packet: message.packet,
      receivedAt,
      cursor: message.cursor,
      live: this.marked || this.caughtUp ? this.caughtUp : undefined,
      annotations: message.relay_annotations,
      arrivedAt: now,
      length,
      byReceipt: this.byReceipt,
      turn: this.turns,
    });
    this.queuedBytes += length + EVENT_OVERHEAD_BYTES;
    // If a relay's clock is ahead, what it receives after the clock is corrected must not be skipped.
    const byNow = Math.min(receivedAt, Math.trunc(now + this.clockOffset));
    this.newestReceivedAt = Math.max(this.newestReceivedAt ?? 0, byNow);
    if (message.cursor === undefined) this.withoutCursor++;
    else this.advance(message.cursor);
  }

  private advance(cursor: string): void {
    this.position = cursor;
    this.withoutCursor = 0;
  }

  private hasRoom(events: number): boolean {
    const { queueEvents, queueBytes } = this.options;
    if (events === 0) return this.queued < queueEvents && this.queuedBytes < queueBytes;
    return this.queued + events <= queueEvents && this.queuedBytes <= Math.floor(queueBytes / 2);
  }

  /** How many packets to request: none while those queued may already reach the query's limit. */
  private nextPageLimit(announced: Announced): number {
    let limit = this.options.pageEvents;
    if (this.query.limit !== undefined && this.query.isServedBy(announced)) {
      limit = Math.min(limit, this.query.limit - this.delivered - this.queued);
    }
    return Math.max(limit, 0);
  }

  // Refusals.

  private isFinal(refusal: RequestRefused): boolean {
    if (refusal.retry === "never" || refusal.retry === "authenticate") return true;
    // Better to report the refusal now than to wait in silence.
    if (refusal.retryAfter !== undefined && refusal.retryAfter > MAX_RETRY_AFTER_SECONDS) return true;
    // Our own subscriptions use up the limit, so trying again later does not help.
    return refusal.detail === "too_many_subscriptions" || refusal.detail === "too_many_filter_bytes";
  }
}
