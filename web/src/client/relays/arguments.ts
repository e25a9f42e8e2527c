/**
 * Checking the arguments of a program that has no types: an error names the argument and says what it must be.
 */

// Core: no I/O, no clock, no randomness (held by tests/layout.test.ts).

import { isDid } from "../protocol/ids.js";
import { isContentId } from "../protocol/packets.js";

const TIMES = ["since", "until", "receivedSince", "receivedUntil", "cursorFallbackSince"];
const LISTS = ["authors", "types", "packetIds"];
const OPTIONS = [...TIMES, ...LISTS, "cursor", "order", "limit", "live", "onLogReset", "signal"];

/** Throw `TypeError` for options of a subscription that do not exist, or that no relay could serve. */
export function checkSelection(options: object): void {
  for (const [name, value] of Object.entries(options)) {
    if (!OPTIONS.includes(name)) throw new TypeError(`there is no option ${name}; SubscribeOptions has them all`);
    if (value === undefined || value === null) continue;
    if (TIMES.includes(name)) check(name, value, Number.isSafeInteger(value), "Unix seconds as a whole number");
    if (LISTS.includes(name)) check(name, value, isText(value) || isTexts(value), "a string, or several in an array");
  }
  const { authors, packetIds, cursor, order, limit, live, onLogReset, signal } = options as Readonly<Record<string, unknown>>;
  for (const author of asArray(authors)) check("authors", author, isDid(author), "DIDs, as did:strata:z6Mk…");
  for (const id of asArray(packetIds)) check("packetIds", id, isContentId(id), "packet ids: 0x and 64 hex digits in lower case");
  check("cursor", cursor, isText(cursor ?? ""), "a string");
  check("order", order, ["asc", "desc"].includes((order as string | undefined) ?? "asc"), "asc or desc");
  check("limit", limit, limit === undefined || Number.isSafeInteger(limit), "a whole number of packets");
  if (limit !== undefined && (limit as number) < 1) throw new TypeError("limit must be at least 1");
  check("live", live, typeof (live ?? true) === "boolean", "true or false");
  check("onLogReset", onLogReset, typeof (onLogReset ?? check) === "function", "a function of a LogReset");
  checkSignal(signal);
}

/** Throw `TypeError` unless this is undefined, null or a signal, which may be of another window. */
export function checkSignal(signal: unknown): void {
  const { aborted } = (signal ?? { aborted: false }) as { aborted?: unknown };
  check("signal", signal, typeof aborted === "boolean", "an AbortSignal");
}

/** Throw `TypeError` unless this is a packet. */
export function checkPacket(packet: unknown): void {
  const { packetId, canonical } = (packet ?? {}) as { packetId?: unknown; canonical?: unknown };
  check("packet", packet, isText(packetId) && isText(canonical), "a Packet, as `build` and `Packet.read` make it");
}

/** Throw `TypeError` unless this is a packet id. */
export function checkPacketId(packetId: unknown): void {
  check("packetId", packetId, isText(packetId) && isContentId(packetId), "a packet id: 0x and 64 hex digits in lower case");
}

/** Throw `TypeError` unless this is undefined, null or a number of seconds, which may be negative. */
export function checkTimeout(timeout: unknown): void {
  check("timeout", timeout, (timeout ?? undefined) === undefined || (typeof timeout === "number" && !Number.isNaN(timeout)), "a number of seconds");
}

function check(name: string, value: unknown, isRight: boolean, wanted: string): void {
  if (!isRight) throw new TypeError(`${name} must be ${wanted}, not ${shown(value)}`);
}

function isText(value: unknown): value is string {
  return typeof value === "string";
}

function isTexts(value: unknown): value is readonly string[] {
  return typeof value === "object" && value !== null && Symbol.iterator in value && [...(value as Iterable<unknown>)].every(isText);
}

function asArray(value: unknown): readonly string[] {
  return value === undefined || value === null ? [] : isText(value) ? [value] : [...(value as Iterable<string>)];
}

function shown(value: unknown): string {
  const text = isText(value) ? `"${value}"` : typeof value === "object" && value !== null ? value.constructor?.name : String(value);
  return text === undefined ? "an object" : text.length <= 80 ? text : `${text.slice(0, 79)}…`;
}
