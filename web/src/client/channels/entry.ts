/** A message in an open channel. */

// Core: no I/O, no clock, no randomness (held by tests/layout.test.ts).

import type { ContentMessage } from "@waku/sds";

import { isFarAhead } from "./envelope.js";
import type { StoredMessage } from "./store.js";
import type { ChannelMessage, ChannelStatus } from "./values.js";

/** What the store keeps of a message, and what is known of it only while the channel is open. */
export interface Entry extends StoredMessage {
  readonly message: ContentMessage;
  /** The payload; undefined before the release, and for a segment that does not complete a payload. */
  payload: Uint8Array | undefined;
  /** Whether the package has delivered the message. */
  isDelivered: boolean;
  /** Whether the channel has released the message, after all messages that it follows. */
  isReleased: boolean;
  /** For an own message: how often it was sent again, and when that is due next. */
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

/** The counts of a channel's status that its entries give. */
export function standing(entries: Iterable<Entry>): Pick<ChannelStatus, "heldBack" | "sending" | "unacknowledged"> {
  const all = [...entries];
  const sending = all.filter(({ state }) => state === "sending").length;
  const sent = all.filter(({ state }) => state === "sent").length;
  return { heldBack: all.filter((each) => !each.isReleased).length, sending, unacknowledged: sent + sending };
}

/** Compare two entries by the order that all participants share; negative if the first one comes first. */
export function inOrder({ id, message: { lamportTimestamp } }: Entry, other: Entry): number {
  if (lamportTimestamp !== other.message.lamportTimestamp) return lamportTimestamp < other.message.lamportTimestamp ? -1 : 1;
  return id < other.id ? -1 : id > other.id ? 1 : 0;
}

/**
 * The Lamport time of a new own message, for which the package suggests one: later than those of the others.
 *
 * The package forgets its Lamport time over a reload and takes the clock's, which may have been set back. While it is
 * open it keeps the time of a clock that was far ahead of `now` (Unix milliseconds).
 */
function nextOwnTime(entries: Iterable<Entry>, suggested: bigint, now: number): bigint {
  let next = isFarAhead(suggested, now) ? BigInt(now) : suggested;
  for (const { isOwn, message } of entries) if (isOwn && message.lamportTimestamp >= next) next = message.lamportTimestamp + 1n;
  return next;
}

/** Let a new own message be later than all earlier ones of its sender, and name the last of them. */
export function asNextOwn(message: ContentMessage, entries: ReadonlyMap<string, Entry>, now: number): void {
  message.lamportTimestamp = nextOwnTime(entries.values(), message.lamportTimestamp, now);
  const before = laterOwn(entries, message.causalHistory.map(({ messageId }) => messageId));
  if (before === undefined) return;
  const hint = before.hint === undefined ? {} : { retrievalHint: before.hint };
  message.causalHistory.push({ messageId: before.id, ...hint, senderId: message.senderId });
}

/**
 * The last own message, if it is later than each message that the next one would name by these ids. The package takes the
 * messages that were released last, and those are older ones while the relay's history is read.
 */
function laterOwn(entries: ReadonlyMap<string, Entry>, named: readonly string[]): Entry | undefined {
  const own = [...entries.values()].filter(({ isOwn, state }) => isOwn && state !== "failed").at(-1);
  if (own === undefined) return undefined;
  const isEarlier = (id: string) => (entries.get(id)?.message.lamportTimestamp ?? 0n) < own.message.lamportTimestamp;
  return named.every(isEarlier) ? own : undefined;
}

/**
 * The entries to forget if there are too many: the oldest released ones, at least a tenth, and none being sent.
 *
 * An own message that was sent while older ones were still being read is newer than these. If it were forgotten first,
 * all that is still to be read would count as forgotten once its id is forgotten too.
 */
export function beyond(entries: Iterable<Entry>, mostMessages: number, mostBytes: number): Entry[] {
  const known = [...entries].filter((each) => each.state !== "sending");
  const bytes = known.reduce((sum, { wire }) => sum + wire.length, 0);
  if (known.length <= 1.1 * mostMessages && bytes <= mostBytes) return [];
  const released = known.filter((each) => each.isReleased);
  const lastRead = released.filter(({ isOwn }) => !isOwn).at(-1)?.message.lamportTimestamp ?? 0n;
  const isNewer = ({ isOwn, message }: Entry) => isOwn && message.lamportTimestamp > lastRead;
  const oldestFirst = [...released.filter((each) => !isNewer(each)), ...released.filter(isNewer)];
  return oldestFirst.slice(0, Math.max(known.length - mostMessages, Math.ceil(released.length / 10)));
}
