/** The log of a participant, in the form that `@waku/sds` expects. */

// Core: no I/O, no clock, no randomness (held by tests/layout.test.ts).

import type { ContentMessage } from "@waku/sds";

/** Compare two messages by the order that all participants share; negative if the first one comes first. */
export function compare(
  one: { readonly lamport: bigint; readonly id: string },
  other: { readonly lamport: bigint; readonly id: string },
): number {
  if (one.lamport !== other.lamport) return one.lamport < other.lamport ? -1 : 1;
  return one.id < other.id ? -1 : one.id > other.id ? 1 : 0;
}

/**
 * The log of one participant, bounded, in the shared order.
 *
 * It also does what the package leaves out. A message that nothing waits for any more (`settle`) counts as present;
 * otherwise the package would drop the messages that follow it. And `slice`, from which the package makes the history
 * that a message names, returns only released messages: a message that is still held back is not acknowledged.
 */
export class History {
  private items: ContentMessage[] = [];
  private readonly settled = new Map<string, ContentMessage>();
  private readonly released = new Set<string>();

  constructor(private readonly limit: number) {}

  get length(): number {
    return this.items.length;
  }

  push(...messages: ContentMessage[]): number {
    for (const message of messages) {
      if (this.items.some((each) => each.messageId === message.messageId)) continue;
      let at = this.items.length;
      while (at > 0 && isBefore(message, this.items[at - 1] as ContentMessage)) at--;
      this.items.splice(at, 0, message);
    }
    while (this.items.length > this.limit) {
      const oldest = this.items.shift() as ContentMessage;
      this.settle(oldest.messageId);
      this.released.delete(oldest.messageId);
    }
    return this.items.length;
  }

  some(predicate: (value: ContentMessage, index: number, all: ContentMessage[]) => unknown): boolean {
    if (this.items.some(predicate)) return true;
    for (const each of this.settled.values()) if (predicate(each, 0, this.items)) return true;
    return false;
  }

  find(predicate: (value: ContentMessage, index: number, all: ContentMessage[]) => unknown): ContentMessage | undefined {
    return this.items.find(predicate);
  }

  findIndex(predicate: (value: ContentMessage, index: number, all: ContentMessage[]) => unknown): number {
    return this.items.findIndex(predicate);
  }

  slice(start?: number, end?: number): ContentMessage[] {
    return this.items.filter(({ messageId }) => this.released.has(messageId)).slice(start, end);
  }

  /** Note that the message was released to the program. */
  release(id: string): void {
    this.released.add(id);
  }

  /** Remove a message that no relay will have: others must not learn that it exists, because they would wait for it. */
  withdraw(id: string): void {
    this.released.delete(id);
    this.settle(id);
  }

  /** Whether nothing needs to wait for this message: it was released, forgotten, withdrawn, or given up. */
  isSettled(id: string): boolean {
    return this.released.has(id) || this.settled.has(id);
  }

  /** Let nothing wait for this message any more. */
  settle(id: string): void {
    this.settled.set(id, { messageId: id } as ContentMessage); // the package looks only at the id
    if (this.settled.size > 20 * this.limit) this.settled.delete(this.settled.keys().next().value as string);
  }
}

function isBefore(one: ContentMessage, other: ContentMessage): boolean {
  return (
    compare(
      { lamport: one.lamportTimestamp, id: one.messageId },
      { lamport: other.lamportTimestamp, id: other.messageId },
    ) < 0
  );
}
