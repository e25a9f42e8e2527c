/** Requesting authors' identity packets from a relay: many authors at once, one request at a time. */

import { RequestRefused, RequestTimeout, StrataError } from "../protocol/errors.js";
import type { ReceivedPacket } from "../protocol/keys/entries.js";
import { MAX_CHAIN_EVENTS } from "../protocol/keys/ledger.js";
import type { KeyRing } from "./keyring.js";

/** The most authors in one request. */
export const MAX_AUTHORS = 500;
/** After a request that took too long, the next one is for this many times fewer authors. */
const FEWER = 8;

const MAX_EVENTS = 2 * MAX_CHAIN_EVENTS;
const MAX_BYTES = 8 * 2 ** 20;
/** The most that is kept of one answer. If a relay sends more, it is asked about fewer authors at a time. */
const MOST_BYTES = 4 * MAX_BYTES;
/**
 * If this much of one author has arrived when the time is over, the author has too much for this connection: all
 * packets of the author fail, because those behind them must not wait for ever.
 */
const LONG_BYTES = 64 * 1024;

/** The answer about several authors is too long to be kept. */
class TooMuch extends Error {}

interface Question {
  readonly askedAt: number;
  readonly answered: Promise<void>;
}

interface Wish {
  readonly answered: Promise<void>;
  resolve(): void;
  reject(error: unknown): void;
}

/** What a fetcher needs of the connection. */
export interface KeySource {
  /** Yield the identity packets of some authors, unverified, until the relay has no more. */
  read(authors: readonly string[], signal: AbortSignal): AsyncIterable<ReceivedPacket>;
  /** The connection's clock, in seconds. */
  now(): number;
  /** Call `act` once the program has looked for `seconds`. Returns what calls it off. */
  patience(seconds: number, act: () => void): () => void;
}

/** Fills a `KeyRing` on demand. At most one request is under way; authors wanted meanwhile go into the next one. */
export class KeyFetcher {
  private wanted = new Map<string, Wish>();
  private asking = new Map<string, Question>();
  private isWorking = false;
  /** The authors in the next request: fewer after one that took too long, because chains can be long. */
  private most = MAX_AUTHORS;

  constructor(
    readonly ring: KeyRing,
    private readonly source: KeySource,
    private readonly timeout: number,
  ) {}

  /**
   * Have the ring learn `author`, by a request made no earlier than `since`. `others` are requested along with the
   * author, and not waited for. Rejects with `RequestTimeout`, or the relay's refusal.
   */
  fetch(author: string, others: Iterable<string>, since: number): Promise<void> {
    const answered = this.want(author, since);
    for (const other of others) if (!this.wanted.has(other) && !this.asking.has(other)) this.want(other, since);
    return answered;
  }

  /** Ask again, in the background, for the authors that the ring calls stale. */
  refreshStale(): void {
    for (const author of this.ring.stale) {
      this.ring.stale.delete(author);
      this.want(author, this.source.now());
    }
  }

  private want(author: string, since: number): Promise<void> {
    const asked = this.asking.get(author);
    if (asked !== undefined && asked.askedAt >= since) return asked.answered;
    let wish = this.wanted.get(author);
    if (wish === undefined) {
      wish = newWish();
      this.wanted.set(author, wish);
    }
    if (!this.isWorking) void this.work();
    return wish.answered;
  }

  private async work(): Promise<void> {
    this.isWorking = true;
    await Promise.resolve(); // authors wanted in the same step share the request
    while (this.wanted.size > 0) {
      const askedAt = this.source.now();
      const batch = [...this.wanted].slice(0, this.most);
      for (const [author, wish] of batch) {
        this.wanted.delete(author);
        this.asking.set(author, { askedAt, answered: wish.answered });
      }
      try {
        await this.ask(
          batch.map(([author]) => author),
          askedAt,
        );
        this.most = Math.min(2 * this.most, MAX_AUTHORS);
        for (const [, wish] of batch) wish.resolve();
      } catch (error) {
        const isRefused = error instanceof RequestRefused && error.retryAfter === undefined;
        const isTooMuch = error instanceof TooMuch;
        if (isRefused || isTooMuch || error instanceof RequestTimeout) this.most = Math.max(1, Math.floor(batch.length / FEWER));
        if ((isRefused || isTooMuch) && batch.length > 1) {
          this.askAgain(batch); // a relay may take fewer authors at once
          continue;
        }
        for (const [, wish] of batch) wish.reject(error);
      }
      this.asking = new Map();
    }
    this.isWorking = false;
  }

  /** Want these authors again, before the others; an author wanted since then shares its later answer. */
  private askAgain(batch: readonly [string, Wish][]): void {
    const later = this.wanted;
    this.wanted = new Map(batch);
    this.asking = new Map();
    for (const [author, wish] of later) {
      const earlier = this.wanted.get(author);
      if (earlier !== undefined) wish.answered.then(earlier.resolve, earlier.reject);
      this.wanted.set(author, wish);
    }
  }

  private async ask(authors: readonly string[], askedAt: number): Promise<void> {
    const events = new Map(authors.map((author) => [author, [] as ReceivedPacket[]]));
    const sizes = new Map(authors.map((author) => [author, 0]));
    const late = new AbortController();
    const stopWaiting = this.source.patience(this.timeout, () => late.abort());
    let kept = 0;
    try {
      for await (const event of this.source.read(authors, late.signal)) {
        const author = event.packet.authorId;
        const size = (sizes.get(author) ?? 0) + event.packet.sizeBytes;
        sizes.set(author, size);
        const found = events.get(author);
        if (found !== undefined && size <= MAX_BYTES && found.length <= MAX_EVENTS) {
          found.push(event);
          kept += event.packet.sizeBytes;
        }
        if (kept > MOST_BYTES && authors.length > 1) throw new TooMuch();
      }
    } finally {
      stopWaiting();
    }
    const isLate = late.signal.aborted;
    const isTheAuthors = authors.length === 1 && (sizes.get(authors[0] as string) ?? 0) >= LONG_BYTES;
    if (isLate && !isTheAuthors) throw new RequestTimeout("the question for authors' keys", this.timeout);
    for (const [author, found] of events) {
      if (isLate || (sizes.get(author) ?? 0) > MAX_BYTES || found.length > MAX_EVENTS) {
        await this.ring.learn(author, undefined, askedAt, { isOvergrown: true });
      } else {
        await this.ring.learn(author, await this.ring.build(author, found), askedAt);
      }
    }
  }
}

function newWish(): Wish {
  let resolve!: () => void;
  let reject!: (error: unknown) => void;
  const answered = new Promise<void>((done, failed) => {
    resolve = done;
    reject = failed;
  });
  answered.catch((error: unknown) => {
    if (!(error instanceof StrataError)) throw error; // errors in our own code must not go unnoticed
  }); // nothing may be waiting for a refresh
  return { answered, resolve, reject };
}
