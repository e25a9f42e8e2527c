/** A message as an open channel has it. */

// Core: no I/O, no clock, no randomness (held by tests/layout.test.ts).

import type { ContentMessage } from "@waku/sds";

import { compare } from "./history.js";
import type { StoredMessage } from "./store.js";
import type { ChannelMessage } from "./values.js";

/** What is kept of a message, and what is known of it until the page is left. */
export interface Entry extends StoredMessage {
  readonly message: ContentMessage;
  /** What was said; undefined before the release, and for a segment that completes nothing. */
  payload: Uint8Array | undefined;
  /** The package has handed it on. */
  isDelivered: boolean;
  /** The channel has, after all that it follows. */
  isReleased: boolean;
  /** Of an own message: how often it was sent again, and when it is due next. */
  attempts: number;
  resendAt: number;
}

/** The entry of a message. */
export function makeEntry(message: ContentMessage, kept: StoredMessage): Entry {
  return { ...kept, message, payload: undefined, isDelivered: false, isReleased: false, attempts: 0, resendAt: 0 };
}

/** The part of an entry that a store keeps. */
export function stored({ id, wire, isOwn, author, sentAt, hint, state }: Entry): StoredMessage {
  return { id, wire, isOwn, author, sentAt, hint, state };
}

/** An entry as the program sees it. */
export function asMessage({ id, author, sentAt, isOwn, state, message, payload }: Entry): ChannelMessage {
  const follows = message.causalHistory.map(({ messageId }) => messageId);
  const { senderId: sender, lamportTimestamp: lamport } = message;
  return { id, author, sentAt, isOwn, state, follows, sender, lamport, payload: payload ?? new Uint8Array() };
}

/** For sorting by the order that all participants share. */
export function inOrder(one: Entry, other: Entry): number {
  return compare(
    { lamport: one.message.lamportTimestamp, id: one.id },
    { lamport: other.message.lamportTimestamp, id: other.id },
  );
}

/** The latest Lamport time of an own message; 0 if there is none. */
export function lastOwnTime(entries: Iterable<Entry>): bigint {
  let last = 0n;
  for (const { isOwn, message } of entries) if (isOwn && message.lamportTimestamp > last) last = message.lamportTimestamp;
  return last;
}

/** What to forget of these where it is too much: the oldest, a tenth at least, and nothing that no relay has yet. */
export function beyond(entries: Iterable<Entry>, mostMessages: number, mostBytes: number): Entry[] {
  const known = [...entries].filter((each) => each.state !== "sending");
  const bytes = known.reduce((sum, { wire }) => sum + wire.length, 0);
  if (known.length <= 1.1 * mostMessages && bytes <= mostBytes) return [];
  const released = known.filter((each) => each.isReleased);
  return released.slice(0, Math.max(known.length - mostMessages, Math.ceil(released.length / 10)));
}
