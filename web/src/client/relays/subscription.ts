/** A subscription as a program sees it: verified packets, in the relay's order, each once. */

import { after } from "../timers.js";
import type { Driver } from "./driver.js";
import { authorOf, type Candidate, Inspector, KEYS_WANTED } from "./inspection.js";
import { type KeyFetcher, MAX_AUTHORS } from "./keyfetch.js";
import type { Options } from "./options.js";
import type { Stream } from "./stream.js";
import type { Delivery, LogReset, Query } from "./values.js";

/** Milliseconds of checking after which others get a turn: a page must not freeze. */
const TURN_MS = 8;

/**
 * An open subscription: iterate it with `for await`. It survives cuts of the connection without gap or repeat.
 *
 * Leaving the loop closes it, with UNSUBSCRIBE. Nothing is lost by a slow loop: what does not fit waits in the relay.
 */
export class Subscription implements AsyncIterableIterator<Delivery> {
  private readonly stream: Stream;
  private readonly inspector: Inspector;
  private candidate: Candidate | undefined; // taken, and not judged before its author's keys are here
  private isReceiving = false;
  private isClosed = false;
  private arrived: () => void = () => undefined;
  private closed: () => void = () => undefined;
  private turnEndsAt = 0;

  /** @internal Made by `Relay.subscribe`. */
  constructor(
    private readonly driver: Driver,
    /** What the subscription is for. */
    readonly query: Query,
    options: Options,
    private readonly keys: KeyFetcher,
    private readonly onLogReset: (reset: LogReset) => void = warn,
  ) {
    const ring = options.resolveKeys ? keys.ring : undefined;
    this.inspector = new Inspector(query, options, driver.core.statistics, ring);
    this.stream = driver.subscribe(query, () => this.arrived());
  }

  [Symbol.asyncIterator](): this {
    return this;
  }

  /**
   * The next packet.
   *
   * Rejects with `RequestRefused` if the relay refuses the subscription for good, `MissingCapability`,
   * `RequestTimeout` if promised history or an author's keys do not come, `ConnectionFailed`, `Closed`; each only
   * after the packets that had arrived were handed on. An error of the keys loses nothing: the next call goes on.
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

  /** End at once: iteration stops and what has arrived is dropped. Idempotent. */
  close(): void {
    this.isClosed = true;
    this.end();
    this.arrived();
    this.closed();
  }

  /** Ask the relay for nothing more; what has arrived can still be taken, then iteration stops. */
  end(): void {
    this.driver.step((core) => core.unsubscribe(this.stream));
  }

  /** What leaving a `for await` loop calls. */
  return(): Promise<IteratorResult<Delivery, undefined>> {
    this.close();
    return Promise.resolve({ done: true, value: undefined });
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
            this.closed = resolve; // keys may take long, and then nobody waits for them
            this.fetchKeys(candidate).then(resolve, reject);
          });
        } else if (!this.isClosed) {
          this.candidate = undefined;
          this.taken(verdict !== undefined);
          if (verdict !== undefined) return verdict;
        }
      } else if (this.stream.phase === "ended") {
        const error = this.stream.error;
        this.stream.error = undefined; // told once
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
      if (author !== undefined && !this.keys.ring.has(author)) others.add(author);
    }
    await this.keys.fetch(candidate.packet.authorId, others, candidate.event.arrivedAt);
  }
}

function warn(reset: LogReset): void {
  console.warn("the relay's log has lost its end; packets may be missing", reset);
}
