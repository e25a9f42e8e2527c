/**
 * Canonical JSON (RFC 8785): the text of a value that is hashed, signed, stored and sent.
 *
 * Input that has no single canonical form is refused. So is a number whose canonical text would be an
 * integer beyond ±(2**53 − 1): a canonical form must not be refused when it is read back.
 */

// Core: no I/O, no clock, no randomness (held by tests/layout.test.ts).

import { type Json, parseStrictly, refuse, requireNumber } from "./json.js";

/** How deeply objects and arrays may be nested. */
export const MAX_DEPTH = 64;

/** The nesting that readers of admitted packets allow: the deepest that a relay can be configured to admit. */
export const DEEPEST = 512;

const LONE_SURROGATE = /[\ud800-\udfff]/u;

/** A decoded value and its canonical text. */
export interface Parsed {
  readonly value: Json;
  readonly text: string;
}

/**
 * Decode JSON text, given as text or as UTF-8 bytes.
 *
 * Throws `InvalidPacket` (`invalid_schema`); `detail` is one of `malformed_json`, `not_utf8`,
 * `duplicate_member`, `lone_surrogate`, `number_out_of_range`, `integer_out_of_range`, `too_deep`.
 */
export function parse(raw: string | Uint8Array, options: { maxDepth?: number } = {}): Parsed {
  const source = typeof raw === "string" ? raw : decodeUtf8(raw);
  const maxDepth = options.maxDepth ?? MAX_DEPTH;
  try {
    const value = JSON.parse(source) as Json;
    const text = write(value, maxDepth);
    // If the output equals the input, nothing was lost: no member, no digit.
    if (text === source) return { value, text };
  } catch {
    // The strict parser will find the same fault, and name it.
  }
  const value = parseStrictly(source);
  return { value, text: write(value, maxDepth) };
}

/** The canonical text of JSON text. Throws as `parse` does. */
export function canonicalize(raw: string | Uint8Array, options: { maxDepth?: number } = {}): string {
  return parse(raw, options).text;
}

/**
 * The canonical text of a value made of plain objects, arrays, strings, numbers, booleans and null.
 *
 * Throws `InvalidPacket` as `parse` does, with detail `not_json` for a value that JSON cannot express: undefined, a
 * date, a bigint, an instance of a class.
 */
export function encode(value: unknown, options: { maxDepth?: number } = {}): string {
  return write(value, options.maxDepth ?? MAX_DEPTH);
}

/**
 * The canonical text of an object without some of its members, and with others added or replaced. The object itself is
 * not copied, because copies lose members named `__proto__`.
 */
export function encodeWith(
  members: object,
  without: readonly string[],
  added: Readonly<Record<string, unknown>> = {},
  options: { maxDepth?: number } = {},
): string {
  const names = Object.keys(members).filter((name) => !without.includes(name) && !Object.hasOwn(added, name));
  const all = [...names, ...Object.keys(added)].sort(byUnits);
  const depth = (options.maxDepth ?? MAX_DEPTH) - 1;
  const parts = all.map((name) => {
    const from = (Object.hasOwn(added, name) ? added : members) as Record<string, unknown>;
    return `${quoted(name)}:${write(from[name], depth)}`;
  });
  return `{${parts.join(",")}}`;
}

function decodeUtf8(bytes: Uint8Array): string {
  try {
    return new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(bytes);
  } catch {
    refuse("the text is not UTF-8", "not_utf8");
  }
}

function write(value: unknown, depth: number): string {
  switch (typeof value) {
    case "string":
      return quoted(value);
    case "number":
      requireNumber(value);
      return String(value); // the text of RFC 8785 is that of ECMAScript; for -0 it is 0
    case "boolean":
      return value ? "true" : "false";
    case "object":
      return value === null ? "null" : writeParts(value, depth);
    default:
      refuse("the value has no form in JSON", "not_json");
  }
}

function writeParts(value: object, depth: number): string {
  if (depth <= 0) refuse("objects and arrays are nested too deeply", "too_deep");
  if (Array.isArray(value)) {
    let text = "[";
    for (let at = 0; at < value.length; at++) text += (at === 0 ? "" : ",") + write(value[at], depth - 1);
    return `${text}]`;
  }
  const prototype: unknown = Object.getPrototypeOf(value);
  // A plain object from another realm, such as a frame, has another Object.prototype, whose own prototype is null.
  if (prototype !== null && Object.getPrototypeOf(prototype) !== null) {
    refuse("the value has no form in JSON", "not_json");
  }
  const members = value as Record<string, unknown>;
  const parts: string[] = [];
  for (const name of Object.keys(members).sort(byUnits)) {
    parts.push(`${quoted(name)}:${write(members[name], depth - 1)}`);
  }
  return `{${parts.join(",")}}`;
}

function quoted(text: string): string {
  if (LONE_SURROGATE.test(text)) refuse("a string holds a lone surrogate", "lone_surrogate");
  return JSON.stringify(text); // it writes every other character as RFC 8785 does
}

/** Compare by UTF-16 code units (RFC 8785 §3.2.3), as `<` does. */
function byUnits(one: string, other: string): number {
  return one < other ? -1 : one > other ? 1 : 0;
}
