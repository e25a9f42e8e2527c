/** When to say what was received. Each sync, and each message, says it all: one is enough for many, and often another's. */

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

  /** A message was received that its sender does not know to be received. */
  owe(message: Message, now: number): void {
    if (this.owed.size === 0) this.syncAt = Math.min(this.syncAt, now + this.within * (0.25 + 0.75 * this.random()));
    this.owed.add(message.messageId);
  }

  /** Somebody says what they have: that need not be acknowledged by us too, and an idle room has been heard of. */
  heard(message: Message, now: number): void {
    for (const { messageId } of message.causalHistory) this.owed.delete(messageId);
    if (this.owed.size === 0) this.putOff(now);
  }

  /** We have said what we have. */
  said(now: number): void {
    this.owed.clear();
    this.putOff(now);
  }

  private putOff(now: number): void {
    this.syncAt = now + this.every * (0.5 + this.random());
  }
}
