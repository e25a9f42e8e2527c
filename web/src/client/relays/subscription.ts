/** A subscription as a program sees it: an asynchronous iterator of verified packets. */

import { after } from "../timers.js";
import type { Driver } from "./driver.js";
import { authorOf, type Candidate, Inspector, KEYS_WANTED } from "./inspection.js";
import { type KeyFetcher, MAX_AUTHORS } from "./keyfetch.js";
import type { Options } from "./options.js";
import type { Stream } from "./stream.js";
import type { Delivery, FetchOptions, LogReset, Query } from "./values.js";

/** Milliseconds of checking before other tasks get their turn: a page must not freeze. */
const TURN_MS = 8;

/**
 * Verified packets, each once and in the relay's order, across any number of reconnects: iterate it with `for await`.
 *
 * Leaving the loop closes the subscription, with UNSUBSCRIBE. A slow loop loses nothing: packets for which the queue
 * has no room wait in the relay's store.
 */
export class Subscription implements AsyncIterableIterator<Delivery> {
  private readonly stream: Stream;
  private readonly inspector: Inspector;
  private candidate: Candidate | undefined; // taken, but not judged before its author's keys have arrived
  private isReceiving = false;
  private isClosed = false;
  private isAborted = false;
  private readonly signal: AbortSignal | undefined;
  private readonly onLogReset: (reset: LogReset) => void;
  private arrived: () => void = () => undefined;
  private closed: () => void = () => undefined;
  private turnEndsAt = 0;

  /** @internal Made by `Relay.subscribe`. */
  constructor(
    private readonly driver: Driver,
    /** The query that the subscription was made for. */
    readonly query: Query,
    options: Options,
    private readonly keys: KeyFetcher,
    { onLogReset = warn, signal }: FetchOptions = {},
  ) {
    this.onLogReset = onLogReset;
    this.signal = signal ?? undefined;
    const ring = options.resolveKeys ? keys.ring : undefined;
    this.inspector = new Inspector(query, options, driver.core.statistics, ring);
    this.stream = driver.subscribe(query, () => this.arrived());
    this.signal?.addEventListener("abort", this.abort);
  }

  [Symbol.asyncIterator](): this {
    return this;
  }

  /**
   * Return the next packet.
   *
   * Rejects with `RequestRefused` if the relay refuses the subscription permanently, `MissingCapability` if it does not
   * let the authenticated session subscribe, `RequestTimeout` if promised history or an author's keys do not arrive,
   * `ConnectionFailed`, `Closed`, and the reason of the option `signal` once that aborts. An error that ends the
   * subscription is thrown only after the packets that had arrived were delivered. A failure to fetch keys loses no
   * packet: the next call continues.
   */
  async next(): Promise<IteratorResult<Delivery, undefined>> {
    if (this.isReceiving) throw new TypeError("another call is already receiving from this subscription");
    this.isReceiving = true;
    try {
      const value = await this.receive();
      return value === undefined ? { done: true, value } : { done: false, value };
    } finally {
      this.isReceiving = false;
    }
  }

  /** End at once: iteration stops and packets that have arrived are dropped. Idempotent. */
  close(): void {
    this.isClosed = true;
    this.forgetSignal();
    this.end();
    this.arrived();
    this.closed();
  }

  /** Request nothing more; packets that have arrived can still be taken, and then iteration stops. */
  end(): void {
    this.driver.step((core) => core.unsubscribe(this.stream));
  }

  /** Close the subscription; called when a `for await` loop is left. */
  return(): Promise<IteratorResult<Delivery, undefined>> {
    this.close();
    return Promise.resolve({ done: true, value: undefined });
  }

  private readonly abort = (): void => {
    this.isAborted = true;
    this.close();
  };

  /** A signal may outlive many subscriptions. */
  private forgetSignal(): void {
    this.signal?.removeEventListener("abort", this.abort);
  }

  private async receive(): Promise<Delivery | undefined> {
    while (!this.isClosed) {
      const candidate = this.candidate ?? this.take();
      if (candidate === "dropped") {
        this.taken(false);
      } else if (candidate !== undefined) {
        this.candidate = candidate;
        const verdict = await this.inspector.judge(candidate);
        if (verdict === KEYS_WANTED) {
          await new Promise<void>((resolve, reject) => {
            this.closed = resolve; // keys may take long: closing must not wait for them
            this.fetchKeys(candidate).then(resolve, reject);
          });
        } else if (!this.isClosed) {
          this.candidate = undefined;
          this.taken(verdict !== undefined);
          if (verdict !== undefined) return verdict;
        }
      } else if (this.stream.phase === "ended") {
        this.forgetSignal();
        const error = this.stream.error;
        this.stream.error = undefined; // thrown once
        if (error !== undefined) throw error;
        return undefined;
      } else {
        await new Promise<void>((resolve) => (this.arrived = resolve));
        this.turnEndsAt = performance.now() + TURN_MS;
      }
      if (performance.now() >= this.turnEndsAt) {
        await new Promise<void>((resolve) => after(0, resolve));
        this.turnEndsAt = performance.now() + TURN_MS;
      }
    }
    if (this.isAborted) {
      this.isAborted = false; // thrown once
      throw this.signal?.reason;
    }
    return undefined;
  }

  private take(): Candidate | "dropped" | undefined {
    const item = this.stream.take();
    if (item === undefined) return undefined;
    if (item.kind === "event") return this.inspector.read(item) ?? "dropped";
    this.taken(false);
    this.onLogReset(item.reset);
    return this.take();
  }

  private taken(delivered: boolean): void {
    this.driver.step((core) => core.taken(this.stream, delivered, this.driver.now()));
    this.keys.refreshStale();
  }

  private async fetchKeys(candidate: Candidate): Promise<void> {
    const others = new Set<string>();
    for (const event of this.stream.waiting()) {
      if (others.size >= MAX_AUTHORS) break;
      const author = authorOf(event);
      if (author !== undefined && this.keys.ring.wants(author)) others.add(author);
    }
    await this.keys.fetch(candidate.packet.authorId, others, candidate.event.arrivedAt);
  }
}

function warn(reset: LogReset): void {
  console.warn("the relay's log has lost its end; packets may be missing", reset);
}
