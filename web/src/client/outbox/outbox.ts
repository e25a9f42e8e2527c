/**
 * Packets that wait until a relay has them.
 *
 * `add` resolves when the packet is durable in its store. From then on it is sent, over reconnects and restarts of the
 * program, until the relay acknowledges it or refuses it permanently. The store has the canonical text, and the same
 * text is sent every time: a packet is never signed again. Sending it again is safe, because a relay stores a packet
 * once and answers `duplicate` to further copies. If several tabs share a store, one of them sends at a time, provided
 * that the browser has locks. A tab whose session may not publish leaves its turn to the others.
 */

import { InvalidPacket, MissingCapability, OutboxError, RequestRefused, type StrataError } from "../protocol/errors.js";
import { DEFAULT_MAX_PACKET_AGE_SECONDS, Packet } from "../protocol/packets.js";
import { afterRetryAfter, Refusals } from "../relays/backoff.js";
import type { Published, PublishOptions } from "../relays/values.js";
import { after, type Timer } from "../timers.js";
import type { OutboxNews, OutboxStore, Refusal, StoredEntry } from "./store.js";

/** A packet of the outbox, and its state. */
export interface OutboxEntry {
  readonly packet: Packet;
  /** `refused`: the relay has refused it permanently, and `refusal` says why; the program decides what to do. */
  readonly state: "waiting" | "refused";
  readonly refusal: Refusal | undefined;
  /** Whether it is older than relays accept. It is still sent, as a relay may have it; it is never signed again. */
  readonly isStale: boolean;
}

/** A packet that was added. */
export interface Queued {
  readonly packetId: string;
  /**
   * The relay's confirmation, whichever tab sent the packet. Rejects with the relay's final refusal, with `Closed` or
   * `ConnectionFailed` if the relay connection ends permanently first (the packet then waits in the store), and with
   * `OutboxError` if the packet was removed, or another program that shares a folder has sent it. May be ignored.
   */
  readonly sent: Promise<Published>;
}

/** Sends a packet within a timeout. */
export type Send = (packet: Packet, options: PublishOptions) => Promise<Published>;

/** The most packets that an outbox holds, including refused ones. */
export const MAX_OUTBOX_PACKETS = 1_000;

const AT_ONCE = 16;
/** How many of them may be packets that were left before, for want of an answer: the rest is free for later packets. */
const LEFT_AT_ONCE = 8;
const ATTEMPT_SECONDS = 60;
/** How long one that is sent for the first time may get no answer from a connected relay, if others wait for its place. */
const SILENT_SECONDS = 5;
const RETRY_SECONDS = 2;
/** How long a notice of what another tab has done may take to arrive. */
const NEWS_SECONDS = 1;

/** Why the sending of a packet ends that has got no answer for long. */
const MADE_ROOM = new OutboxError("others wait for its place");

interface Promised {
  readonly promise: Promise<Published>;
  /** Whether the store has said that the packet is durable. */
  isStored: boolean;
  /** How many calls of `add` for the packet are in progress. */
  adding: number;
  /** Since when the packet has been missing from the store without a notice why. */
  missingSince: number | undefined;
  resolve(published: Published): void;
  reject(error: unknown): void;
}

/**
 * The outcome of sending a packet. The packet has left the queue (`settled`), waits for a time that the relay gave
 * (`quiet`), waits with all others for a session that may publish (`unwelcome`), or waits for a moment (`left`).
 */
type Sending = "settled" | "quiet" | "unwelcome" | "left";

/** The outbox of one relay connection. */
export class Outbox {
  private readonly awaited = new Map<string, Promised>();
  private readonly stopping = new AbortController();
  private draining: Promise<void> | undefined;
  private stopWatching: (() => void) | undefined;
  /** Whether it is this tab's turn to send. */
  private isSending = false;
  /** Wakes the sending loop where it pauses. */
  private bell: () => void = () => undefined;
  private hasRung = false;
  /** The times before which the relay does not want to receive a packet again. */
  private readonly quietUntil = new Map<string, number>();
  /** When packets were left, since there has been this connection: they are sent again after all others. */
  private readonly leftAt = new Map<string, number>();
  /** Refusals because this session may not publish, and until when nothing is sent because of them. */
  private readonly unwelcome = new Refusals(Math.random);
  private heldUntil: number | undefined;
  /** The packets that are being sent or have their turn next, and what ends the sending of each if it is removed. */
  private readonly turns = new Map<string, AbortController>();
  /** The packets that are being sent, at most `AT_ONCE`: one that gets no answer holds up no other. */
  private readonly underWay = new Map<string, Promise<void>>();
  /** When each of them was begun, and when the relay was last found to be there. */
  private readonly begunAt = new Map<string, number>();
  private wokenAt = -Infinity;
  /** The packets that have left the store since it was last asked for its list, which may name them still. */
  private readonly gone = new Set<string>();
  /** What the relay has said of packets, for as long as the store fails to note it: they need not be sent again. */
  private readonly unnoted = new Map<string, Published | InvalidPacket | RequestRefused>();

  /** @internal Made by `Relay`. */
  constructor(
    private readonly store: OutboxStore,
    private readonly send: Send,
    /** Whether the relay is there, so that it could answer. */
    private readonly isOnline: () => boolean = () => true,
    /** Seconds on a clock that stands still while the program does not look: others' silence is judged by it. */
    private readonly watched: () => number = now,
  ) {}

  /**
   * Keep a packet until the relay has it; resolves when it is durable in the store.
   *
   * Rejects with `OutboxError` if there is no room or the store cannot be used, `Closed` and `ConnectionFailed`.
   */
  async add(packet: Packet): Promise<Queued> {
    const { signal } = this.stopping;
    signal.throwIfAborted();
    const { packetId, canonical } = packet;
    if (await this.hasNoRoomFor(packetId)) throw new OutboxError(`${MAX_OUTBOX_PACKETS} packets wait already`);
    // Before it is stored: it may be sent, and settled, before `store.add` resolves.
    const promised = this.promise(packetId);
    promised.adding++;
    try {
      await this.store.add({ packetId, canonical });
    } catch (error) {
      if (!promised.isStored && promised.adding === 1) this.awaited.delete(packetId);
      throw error;
    } finally {
      promised.adding--;
    }
    promised.isStored = true;
    if (signal.aborted) promised.reject(signal.reason);
    this.ring();
    void this.lookFor(packetId);
    return { packetId, sent: promised.promise };
  }

  /** Whether the outbox is full of other packets. */
  private async hasNoRoomFor(packetId: string): Promise<boolean> {
    if ((await this.store.count()) < MAX_OUTBOX_PACKETS) return false;
    return !(await this.store.list()).some((entry) => entry.packetId === packetId);
  }

  /** Look for a refusal in the store: a tab that sends reports it once, perhaps before the packet was added here. */
  private async lookFor(packetId: string): Promise<void> {
    while (!this.isSending && this.awaited.has(packetId)) {
      try {
        const found = (await this.store.list()).find((entry) => entry.packetId === packetId);
        return this.heed(packetId, found?.refusal);
      } catch (error) {
        this.warn(error);
        await new Promise<void>((resolve) => after(RETRY_SECONDS, resolve));
      }
    }
  }

  /** The packets that wait and those that were refused, in the order they were added. */
  async list(): Promise<readonly OutboxEntry[]> {
    const oldest = Date.now() / 1000 - DEFAULT_MAX_PACKET_AGE_SECONDS;
    return (await this.store.list()).map(({ canonical, refusal }) => {
      const packet = Packet.read(canonical);
      const state = refusal === undefined ? "waiting" : "refused";
      return { packet, state, refusal, isStale: packet.timestamp < oldest };
    });
  }

  /**
   * Forget a packet, refused or waiting: it is not sent from now on. The relay may have it, or may still receive it if
   * it is on its way.
   */
  async remove(packetId: string): Promise<void> {
    await this.store.remove(packetId);
    this.abandon(packetId);
  }

  /** Send a packet no more that was removed, here or in another tab. */
  private abandon(packetId: string): void {
    const reason = new OutboxError("the packet was removed");
    this.turns.get(packetId)?.abort(reason);
    if (this.isSending) this.gone.add(packetId);
    this.unnoted.delete(packetId);
    this.settle(packetId)?.reject(reason);
  }

  /** Send again at once: there is a new connection, or a session with a new budget. */
  wake(): void {
    this.quietUntil.clear();
    this.leftAt.clear();
    this.unwelcome.over();
    this.heldUntil = undefined;
    this.wokenAt = this.watched();
    this.ring();
  }

  private ring(): void {
    this.hasRung = true;
    this.bell();
  }

  /** @internal Begin to send waiting packets. */
  start(): void {
    if (this.draining !== undefined || this.stopping.signal.aborted) return;
    this.stopWatching = this.store.watch((news) => this.hear(news));
    this.draining = this.takeTurns();
  }

  /** @internal Stop sending, for this reason; waiting packets stay in the store. Idempotent. */
  async stop(reason: StrataError): Promise<void> {
    this.stopping.abort(reason);
    for (const each of this.turns.values()) each.abort(reason);
    this.stopWatching?.();
    this.wake();
    await this.draining;
    for (const promised of this.awaited.values()) promised.reject(this.stopping.signal.reason);
    this.awaited.clear();
  }

  /** Report the refusal of a packet, if there is one, to the caller that waits for it. */
  private heed(packetId: string, refusal: Refusal | undefined): void {
    if (refusal !== undefined) this.settle(packetId)?.reject(new RequestRefused(refusal.code, refusal.reason));
  }

  /** Send whenever it is this tab's turn. The turn lasts as long as the tab, unless its session may not publish. */
  private async takeTurns(): Promise<void> {
    const { signal } = this.stopping;
    while (!signal.aborted) {
      let seconds = RETRY_SECONDS;
      await this.store.exclusively(async () => void (seconds = await this.drain()), signal).catch(this.warn);
      if (!signal.aborted) await this.pause(seconds);
    }
  }

  /** Send what waits, until stopped or not welcome. Returns for how many seconds to wait for the next turn. */
  private async drain(): Promise<number> {
    this.isSending = true;
    for (;;) {
      this.hasRung = false;
      let isSomeLeft = true; // a store that fails now may work later, for example if the browser closed the database
      try {
        isSomeLeft = await this.sendAll();
      } catch (error) {
        this.warn(error);
      }
      const seconds = isSomeLeft ? RETRY_SECONDS : this.nextAt() - now();
      if (this.stopping.signal.aborted || this.heldUntil !== undefined) {
        await Promise.all(this.underWay.values());
        this.isSending = false;
        return seconds;
      }
      await this.pause(seconds);
    }
  }

  /** The earliest time at which a packet that waits for a time may be sent. */
  private nextAt(): number {
    return Math.min(this.heldUntil ?? Infinity, ...this.quietUntil.values());
  }

  /** Begin to send each packet that does not wait for a time; true if something else is left to do. */
  private async sendAll(): Promise<boolean> {
    const durable = [...this.awaited].filter(([, { isStored }]) => isStored);
    this.gone.clear();
    const entries = await this.store.list();
    const found = new Map(entries.map((entry) => [entry.packetId, entry]));
    let isSomeLeft = false;
    for (const [packetId, promised] of durable) {
      const entry = found.get(packetId);
      if (entry !== undefined) {
        promised.missingSince = undefined;
        this.heed(packetId, entry.refusal); // it may have been refused before it was added here
      } else if (this.watched() - (promised.missingSince ??= this.watched()) >= NEWS_SECONDS) {
        this.settle(packetId)?.reject(new OutboxError("another program has sent the packet, or removed it"));
      } else {
        isSomeLeft = true; // another tab reports what it has done only after the store has changed
      }
    }
    if (this.heldUntil !== undefined && now() >= this.heldUntil) this.heldUntil = undefined;
    for (const [name, until] of this.quietUntil) if (now() >= until) this.quietUntil.delete(name);
    for (const packetId of this.leftAt.keys()) if (!found.has(packetId)) this.leftAt.delete(packetId);
    for (const packetId of this.turns.keys()) if (!this.underWay.has(packetId)) this.turns.delete(packetId);
    const isElsewhere = (id: string) => this.quietUntil.has(id) || this.underWay.has(id) || this.gone.has(id);
    // Each packet once: a folder may have one of them in two files, as after a backup was put back into it.
    const waiting = [...found.values()].filter(({ packetId, refusal }) => refusal === undefined && !isElsewhere(packetId));
    const leftAt = ({ packetId }: StoredEntry) => this.leftAt.get(packetId) ?? 0;
    waiting.sort((one, other) => leftAt(one) - leftAt(other));
    for (const { packetId } of waiting) this.turns.set(packetId, new AbortController());
    for (const entry of waiting) {
      const again = [...this.underWay.keys()].filter((packetId) => this.leftAt.has(packetId));
      if (leftAt(entry) > 0 && again.length >= LEFT_AT_ONCE) break;
      while (this.underWay.size >= AT_ONCE) await this.waitForRoom();
      if (this.heldUntil !== undefined || this.stopping.signal.aborted) break;
      // Passed on in their order, which is the order of sending.
      this.begunAt.set(entry.packetId, this.watched());
      this.underWay.set(entry.packetId, this.sendInTurn(entry));
    }
    return isSomeLeft;
  }

  /**
   * Wait until the sending of a packet ends. A relay that is silent about many must not hold up the others: one that has
   * no answer for long is left. It is sent again in one of the few places for these, where it may take its time.
   */
  private async waitForRoom(): Promise<void> {
    const isEnding = (packetId: string) => this.turns.get(packetId)?.signal.aborted === true;
    const first = [...this.underWay.keys()].find((packetId) => !this.leftAt.has(packetId) && !isEnding(packetId));
    const untilSilent = () => Math.max(this.begunAt.get(first ?? "") ?? Infinity, this.wokenAt) + SILENT_SECONDS - this.watched();
    let timer: Timer;
    const isLong = new Promise<void>((resolve) => {
      timer = after(this.isOnline() ? Math.max(untilSilent(), 0) : SILENT_SECONDS, resolve);
    });
    await Promise.race([...this.underWay.values(), isLong]);
    clearTimeout(timer);
    if (first !== undefined && this.isOnline() && untilSilent() <= 0) this.turns.get(first)?.abort(MADE_ROOM);
  }

  private async sendInTurn(entry: StoredEntry): Promise<void> {
    const { packetId } = entry;
    const outcome = await this.sendOne(entry);
    const signal = this.turns.get(packetId)?.signal;
    const isAbandoned = signal?.aborted === true && signal.reason !== MADE_ROOM;
    this.underWay.delete(packetId);
    this.begunAt.delete(packetId);
    this.turns.delete(packetId);
    const hadBeenLeft = this.leftAt.delete(packetId); // then another one may have waited for its place
    if (outcome === "settled") {
      this.gone.add(packetId);
      if (this.heldUntil === undefined && !isAbandoned) this.unwelcome.over();
    } else if (outcome === "left") {
      this.quietUntil.set(packetId, now() + RETRY_SECONDS);
      this.leftAt.set(packetId, now());
    } else if (outcome === "unwelcome") {
      this.heldUntil ??= now() + this.unwelcome.another(); // only the first of those that were under way together counts
    }
    // It may have been added again while it was under way.
    if (outcome !== "settled" || isAbandoned || hadBeenLeft || this.underWay.size === 0) this.ring();
  }

  private async sendOne({ packetId, canonical }: StoredEntry): Promise<Sending> {
    const { signal } = this.turns.get(packetId) as AbortController;
    if (signal.aborted) return "settled"; // it was removed before its turn came
    try {
      const said = this.unnoted.get(packetId);
      if (said instanceof Error) return this.refuse(packetId, said);
      const published = said ?? (await this.send(Packet.read(canonical), { timeout: ATTEMPT_SECONDS, signal }));
      this.unnoted.set(packetId, published);
      await this.store.remove(packetId, published);
      this.unnoted.delete(packetId);
      this.settle(packetId)?.resolve(published);
    } catch (error) {
      if (signal.aborted) return signal.reason === MADE_ROOM ? "left" : "settled";
      const isFinal = error instanceof InvalidPacket || (error instanceof RequestRefused && isForGood(error));
      const wait = (error as Partial<RequestRefused>).retryAfter ?? 0;
      if (wait > 0) this.quietUntil.set(packetId, now() + afterRetryAfter(wait, Math.random));
      if (isFinal) return this.refuse(packetId, error);
      if (wait > 0) return "quiet";
      return isForWantOfSession(error) ? "unwelcome" : "left";
    }
    return "settled";
  }

  private async refuse(packetId: string, error: InvalidPacket | RequestRefused): Promise<Sending> {
    const { code, reason } = error;
    this.unnoted.set(packetId, error);
    try {
      await this.store.refuse(packetId, { code, reason });
    } catch (problem) {
      this.warn(problem);
      return "left";
    }
    this.unnoted.delete(packetId);
    this.settle(packetId)?.reject(error);
    return "settled";
  }

  private readonly warn = (error: unknown): void => {
    if (!this.stopping.signal.aborted) console.warn("the outbox cannot be used", error);
  };

  /** Handle a notice of what another tab has done. */
  private hear(news: OutboxNews): void {
    if (news.kind === "added") this.ring();
    else if (news.kind === "sent") this.settle(news.published.packetId)?.resolve(news.published);
    else if (news.kind === "removed") this.abandon(news.packetId);
    else this.heed(news.packetId, news.refusal);
  }

  /** Remove and return the promise for a packet, if there is one. */
  private settle(packetId: string): Promised | undefined {
    const promised = this.awaited.get(packetId);
    this.awaited.delete(packetId);
    return promised;
  }

  /** Wait until there is something to do, but no longer than `seconds`. */
  private async pause(seconds: number): Promise<void> {
    if (this.hasRung) return;
    await new Promise<void>((resolve) => {
      const timer = after(seconds, resolve);
      this.bell = () => {
        clearTimeout(timer);
        resolve();
      };
    });
  }

  private promise(packetId: string): Promised {
    const known = this.awaited.get(packetId);
    if (known !== undefined) return known;
    let resolve!: (published: Published) => void;
    let reject!: (error: unknown) => void;
    const promise = new Promise<Published>((done, failed) => {
      resolve = done;
      reject = failed;
    });
    promise.catch(() => undefined); // it may be ignored
    const promised = { promise, isStored: false, adding: 0, missingSince: undefined, resolve, reject };
    this.awaited.set(packetId, promised);
    return promised;
  }
}

/** Seconds on a monotonic clock. */
function now(): number {
  return performance.now() / 1000;
}

/** Whether the same packet would always be refused, not only for lack of a session or for a temporary limit. */
function isForGood(refusal: RequestRefused): boolean {
  return refusal.retry === "never";
}

/** Whether this session may not publish any packet, so that asking again at once changes nothing. */
function isForWantOfSession(error: unknown): boolean {
  return error instanceof MissingCapability || (error instanceof RequestRefused && error.retry === "authenticate");
}
