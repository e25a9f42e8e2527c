/**
 * An SDS message as the content of a packet, as the Python library's channels write it:
 *
 *     { type: <content topic>, profile: "reliable-channel/1", payload: <base64> }
 *
 * `again: true` means that the signer repeats another participant's message. In place of the payload there may be
 * `original`: that participant's packet, whose signature proves who sent it. `ephemeral: true` means that nobody keeps
 * the message.
 */

// Core: no I/O, no clock, no randomness (held by tests/layout.test.ts).

import { ContentMessage, type EphemeralMessage, Message, SyncMessage } from "@waku/sds";

import { base64Length } from "../protocol/bytes.js";
import { isObject, type JsonObject } from "../protocol/json.js";
import { Packet } from "../protocol/packets.js";
import { encode } from "../protocol/canonical.js";

const MAX_MESSAGE_BYTES = 1 << 20;
const MAX_ENTRIES = 1_000;
const FAR_AHEAD_MS = 86_400_000;
const FILTER_BYTES = 18_752; // for 10 000 ids, with one false positive in a thousand

/** The value that distinguishes packets of channels from others of the same type. */
export const PROFILE = "reliable-channel/1";

/** The content of a packet for an SDS message. */
export function messageContent(topic: string, wire: Uint8Array, again = false): JsonObject {
  let text = "";
  for (let at = 0; at < wire.length; at += 8192) text += String.fromCharCode(...wire.subarray(at, at + 8192));
  return { type: topic, profile: PROFILE, payload: btoa(text), ...(again ? { again: true } : {}) };
}

/** The content of a packet that repeats another participant's packet. */
export function repairContent(original: Packet): JsonObject {
  return { type: original.contentType, profile: PROFILE, original: original.value };
}

/** An SDS message, and what the packet around it proves. */
export interface Envelope {
  readonly wire: Uint8Array;
  /** The DID that signed it, and when by its clock; undefined if another participant repeats it without proof. */
  readonly author: string | undefined;
  readonly sentAt: number | undefined;
  /** The embedded packet, if any; its signature has not been checked yet. */
  readonly original: Packet | undefined;
}

/** The message in a verified packet; undefined if the packet has none of this topic. */
export function readEnvelope(packet: Packet, topic: string): Envelope | undefined {
  if (!isMessage(packet, topic)) return undefined;
  const { content } = packet;
  if (!Object.hasOwn(content, "original")) return unwrap(packet, undefined);
  if (Object.hasOwn(content, "payload") || !isObject(content["original"])) return undefined;
  try {
    const original = Packet.read(encode(content["original"]));
    const isWhole = isMessage(original, topic) && !Object.hasOwn(original.content, "original");
    return isWhole ? unwrap(original, original) : undefined;
  } catch {
    return undefined; // not a packet
  }
}

function isMessage(packet: Packet, topic: string): boolean {
  const { content } = packet;
  return packet.contentType === topic && content["profile"] === PROFILE && content["ephemeral"] !== true;
}

function unwrap(carrier: Packet, original: Packet | undefined): Envelope | undefined {
  const { payload, again } = carrier.content;
  if (typeof payload !== "string" || base64Length(payload) === undefined) return undefined;
  const wire = Uint8Array.from(atob(payload), (character) => character.charCodeAt(0));
  if (again === true) return { wire, author: undefined, sentAt: undefined, original };
  return { wire, author: carrier.authorId, sentAt: carrier.timestamp, original };
}

/** The SDS message in these bytes; undefined if there is none, or if it would take too much work or memory. */
export function readMessage(wire: Uint8Array): ContentMessage | SyncMessage | EphemeralMessage | undefined {
  if (wire.length > MAX_MESSAGE_BYTES) return undefined;
  const message = decodeMessage(wire);
  if (message === undefined) return undefined;
  return Math.max(message.causalHistory.length, message.repairRequest.length) > MAX_ENTRIES ? undefined : message;
}

/** Whether a Lamport time is more than a day ahead of `now` (Unix milliseconds): a clock was wrong, or somebody lied. */
export function isFarAhead(lamport: bigint, now: number): boolean {
  return lamport > BigInt(now + FAR_AHEAD_MS);
}

/** The message as the package gets it, which sets its own Lamport clock by it: with a time of `now` if far ahead (C-119). */
export function credible(message: ContentMessage, now: number): ContentMessage {
  if (!isFarAhead(message.lamportTimestamp, now)) return message;
  const { messageId, channelId, senderId, causalHistory, bloomFilter, content, repairRequest, retrievalHint } = message;
  const parts = [bloomFilter, content, repairRequest, retrievalHint] as const;
  return new ContentMessage(messageId, channelId, senderId, causalHistory, BigInt(now), ...parts);
}

/** A sync that acknowledges one message: the package has no other way to drop an own message that could not be kept. */
export function dismissal({ messageId, channelId, lamportTimestamp }: ContentMessage): SyncMessage {
  return new SyncMessage(`dropped-${messageId}`, channelId, "", [{ messageId }], lamportTimestamp, undefined, undefined);
}

/** When a message was sent, by its signer's clock; undefined if more than a day ahead of `now` (Unix milliseconds). */
export function timeOfSending(sentAt: number | undefined, now: number): number | undefined {
  return sentAt !== undefined && 1000 * sentAt <= now + FAR_AHEAD_MS ? sentAt : undefined;
}

/**
 * The SDS message in these bytes, in a form that the package accepts; undefined if there is none.
 *
 * A filter of another size was made with other parameters and is meaningless here, so it is removed. The package would
 * read it as one of its own, and drop the message if the filter is shorter.
 */
export function decodeMessage(wire: Uint8Array): ContentMessage | SyncMessage | EphemeralMessage | undefined {
  const message = Message.decode(wire);
  if (message !== undefined && message.bloomFilter?.length !== FILTER_BYTES) message.bloomFilter = undefined;
  return message;
}
