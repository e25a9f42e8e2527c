/** The log of a participant, in the form that `@waku/sds` expects. */

// Core: no I/O, no clock, no randomness (held by tests/layout.test.ts).

import type { ContentMessage } from "@waku/sds";

type Predicate = (value: ContentMessage, index: number, all: ContentMessage[]) => unknown;

/**
 * The log of one participant, bounded.
 *
 * It also does what the package leaves out. A message that nothing waits for any more (`settle`) counts as present;
 * otherwise the package would drop the messages that follow it. And `slice`, from which the package makes the history
 * that a message names, returns the released messages in the order of their release: a message that is still held back
 * is not acknowledged, and one that is dated far ahead is named only while it is new.
 */
export class History {
  private readonly items = new Map<string, ContentMessage>();
  private readonly settled = new Map<string, ContentMessage>();
  private readonly released = new Set<string>();

  constructor(private readonly limit: number) {}

  get length(): number {
    return this.items.size;
  }

  push(...messages: ContentMessage[]): number {
    for (const message of messages) if (!this.items.has(message.messageId)) this.items.set(message.messageId, message);
    while (this.items.size > this.limit) {
      const oldest = this.items.keys().next().value as string;
      this.items.delete(oldest);
      this.settle(oldest);
      this.released.delete(oldest);
    }
    return this.items.size;
  }

  some(predicate: Predicate): boolean {
    return this.find(predicate) !== undefined || found(this.settled, predicate) !== undefined;
  }

  find(predicate: Predicate): ContentMessage | undefined {
    return found(this.items, predicate);
  }

  findIndex(predicate: Predicate): number {
    return [...this.items.values()].findIndex(predicate);
  }

  slice(start?: number, end?: number): ContentMessage[] {
    const released = [...this.released].map((id) => this.items.get(id));
    return released.filter((each) => each !== undefined).slice(start, end);
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

/** The first message that the predicate holds for; the package's predicates look at nothing else. */
function found(messages: ReadonlyMap<string, ContentMessage>, predicate: Predicate): ContentMessage | undefined {
  for (const each of messages.values()) if (predicate(each, 0, [])) return each;
  return undefined;
}
