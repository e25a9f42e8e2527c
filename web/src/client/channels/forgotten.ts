/** Messages that a channel has handed over and no longer keeps. */

// Core: no I/O, no clock, no randomness (held by tests/layout.test.ts).

import type { ContentMessage } from "@waku/sds";

/** The most ids kept of messages that are no longer kept. */
export const MAX_FORGOTTEN = 20_000;

const RUN = 256;
const MAX_DOUBTFUL = 1_000;

/** What is known of messages whose ids are no longer kept, or will not be: Lamport times, which are milliseconds. */
export interface Horizon {
  /** A message of this time or earlier may have been handed over and its id forgotten. */
  readonly past: number;
  /** Runs of the ids that are kept, the oldest first: how many ids, and the latest time among them. */
  readonly runs: readonly (readonly [count: number, latest: number])[];
}

/**
 * The ids of the latest messages that were handed over and are no longer kept.
 *
 * When an id is forgotten too, its message's Lamport time remains as a horizon, as in Python: a message from before the
 * horizon may have been handed over already.
 */
export class Forgotten {
  private readonly ids: Set<string>;
  private readonly runs: [count: number, latest: number][];
  private readonly doubtful = new Set<string>();
  private past: number;

  constructor({ forgotten, horizon }: { readonly forgotten: readonly string[]; readonly horizon?: Horizon | undefined }) {
    this.ids = new Set(forgotten);
    this.past = horizon?.past ?? -1;
    this.runs = (horizon?.runs ?? []).map(([count, latest]) => [count, latest]);
    // The store trims ids one by one, and a store of an earlier version has no times.
    const unknown = this.ids.size - this.runs.reduce((sum, [count]) => sum + count, 0);
    if (unknown > 0) this.runs.unshift([unknown, -1]);
  }

  /** The horizon, which a store keeps with the ids. */
  get horizon(): Horizon {
    return { past: this.past, runs: this.runs.map(([count, latest]) => [count, latest]) };
  }

  /** Whether the message was handed over, as far as is known. */
  has({ messageId, lamportTimestamp }: ContentMessage): boolean {
    return this.ids.has(messageId) || lamportTimestamp <= this.past;
  }

  /**
   * Note a message that `has` knows only by the horizon: it may never have been handed over. Returns false for others,
   * and for each of the last thousand that were noted.
   */
  noteDoubtful({ messageId }: ContentMessage): boolean {
    if (this.ids.has(messageId) || this.doubtful.has(messageId)) return false;
    this.doubtful.add(messageId);
    if (this.doubtful.size > MAX_DOUBTFUL) this.doubtful.delete(this.doubtful.values().next().value as string);
    return true;
  }

  /**
   * Add messages that were handed over. A time after `now` (Unix milliseconds) sets no horizon, because that would
   * exclude future messages.
   */
  add(messages: readonly ContentMessage[], now: number): void {
    for (const { messageId, lamportTimestamp } of messages) {
      if (this.ids.has(messageId)) continue;
      this.ids.add(messageId);
      let last = this.runs.at(-1);
      if (last === undefined || last[0] >= RUN) this.runs.push((last = [0, -1]));
      last[0]++;
      if (lamportTimestamp <= now) last[1] = Math.max(last[1], Number(lamportTimestamp));
    }
    while (this.ids.size > MAX_FORGOTTEN) {
      const [count, latest] = this.runs.shift() ?? [1, -1];
      this.past = Math.max(this.past, latest);
      for (const id of [...this.ids].slice(0, count)) this.ids.delete(id);
    }
  }
}
