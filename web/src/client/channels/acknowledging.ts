/**
 * When to acknowledge. Each sync and each message names what its sender has received, so one is enough to acknowledge
 * many messages, and often another participant's makes ours unnecessary.
 */

// Core: no I/O, no clock, no randomness (held by tests/layout.test.ts).

import type { Message } from "@waku/sds";

/** Decides when one participant syncs. Times are milliseconds. */
export class Acknowledging {
  /** When a sync is due. */
  syncAt = Infinity;
  private readonly owed = new Set<string>();

  constructor(
    private readonly within: number,
    private readonly every: number,
    private readonly random: () => number,
  ) {}

  /** Note that a message was received, and that its sender does not know this yet. */
  owe(message: Message, now: number): void {
    if (this.owed.size === 0) this.syncAt = Math.min(this.syncAt, now + this.within * (0.25 + 0.75 * this.random()));
    this.owed.add(message.messageId);
  }

  /** Note that another participant has acknowledged: we need not do the same, and the next idle sync can wait. */
  heard(message: Message, now: number): void {
    for (const { messageId } of message.causalHistory) this.owed.delete(messageId);
    if (this.owed.size === 0) this.putOff(now);
  }

  /** Note that we have acknowledged everything. */
  said(now: number): void {
    this.owed.clear();
    this.putOff(now);
  }

  private putOff(now: number): void {
    this.syncAt = now + this.every * (0.5 + this.random());
  }
}
