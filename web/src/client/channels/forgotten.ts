/** What a channel has handed over and keeps no more. */

// Core: no I/O, no clock, no randomness (held by tests/layout.test.ts).

import type { ContentMessage } from "@waku/sds";

/** Most ids kept of messages that are kept no more. */
export const MAX_FORGOTTEN = 20_000;

const RUN = 256;

/** What is known of messages whose ids are kept no more, or will not be: Lamport times, which are milliseconds. */
export interface Horizon {
  /** A message that is not later may have been handed over, and its id forgotten. */
  readonly past: number;
  /** Of the ids that are kept, the oldest first: how many, and the latest time among them. */
  readonly runs: readonly (readonly [count: number, latest: number])[];
}

/**
 * The ids of messages that were handed over, the latest of them.
 *
 * An id that is forgotten too leaves its message's Lamport time as a horizon, as in Python: what is from before that may
 * have been handed over already.
 */
export class Forgotten {
  private readonly ids: Set<string>;
  private readonly runs: [count: number, latest: number][];
  private past: number;

  constructor({ forgotten, horizon }: { readonly forgotten: readonly string[]; readonly horizon?: Horizon | undefined }) {
    this.ids = new Set(forgotten);
    this.past = horizon?.past ?? -1;
    this.runs = (horizon?.runs ?? []).map(([count, latest]) => [count, latest]);
    // The store trims one by one; and one of an earlier version has not noted times.
    const unknown = this.ids.size - this.runs.reduce((sum, [count]) => sum + count, 0);
    if (unknown > 0) this.runs.unshift([unknown, -1]);
  }

  /** What a store keeps beside the ids. */
  get horizon(): Horizon {
    return { past: this.past, runs: this.runs.map(([count, latest]) => [count, latest]) };
  }

  /** Whether the message was handed over, as far as can be told. */
  has({ messageId, lamportTimestamp }: ContentMessage): boolean {
    return this.ids.has(messageId) || lamportTimestamp <= this.past;
  }

  /** These were handed over. A time after `now` (Unix milliseconds) sets no horizon: it would shut out what is to come. */
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
