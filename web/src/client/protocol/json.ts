/**
 * A strict JSON parser: it refuses what different readers are known to treat differently, and names the fault.
 *
 * `JSON.parse` silently keeps the last of two members with the same name, and silently rounds long integers. Text that
 * people paste, or that a peer sends, is parsed here instead.
 */

// Core: no I/O, no clock, no randomness (held by tests/layout.test.ts).

import { InvalidPacket } from "./errors.js";

/** A JSON value. */
export type Json = null | boolean | number | string | readonly Json[] | JsonObject;

/** A JSON object. Use `member` to read it: a name may be `__proto__`, or one that objects inherit. */
export interface JsonObject {
  readonly [name: string]: Json;
}

/** The largest integer that every JSON reader represents exactly. */
export const MAX_SAFE_INTEGER = Number.MAX_SAFE_INTEGER;

const DEEPEST_TEXT = 900;
const SPACE = /[ \t\n\r]*/y;
const NUMBER = /-?(?:0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?/y;
const PLAIN = /[^"\\\u0000-\u001f]*/y;
const ESCAPES: Record<string, string> = {
  '"': '"',
  "\\": "\\",
  "/": "/",
  b: "\b",
  f: "\f",
  n: "\n",
  r: "\r",
  t: "\t",
};

/** Whether the value is an object, and not an array. */
export function isObject(value: unknown): value is JsonObject {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}

/** The object's own member of this name; undefined also for null. */
export function member(members: JsonObject, name: string): Exclude<Json, null> | undefined {
  return Object.hasOwn(members, name) ? (members[name] ?? undefined) : undefined;
}

/** Throw `InvalidPacket` with `invalid_schema`. */
export function refuse(reason: string, detail?: string): never {
  throw new InvalidPacket("invalid_schema", reason, detail);
}

/** Refuse an integer that a double does not represent exactly. */
export function refuseInteger(): never {
  refuse("an integer is beyond 2**53 - 1", "integer_out_of_range");
}

/**
 * Decode JSON text. Objects have no prototype, so `__proto__` is a member like any other.
 *
 * Throws `InvalidPacket` (`invalid_schema`) with detail `malformed_json`, `duplicate_member`,
 * `integer_out_of_range`, `number_out_of_range` or `too_deep`.
 */
export function parseStrictly(text: string): Json {
  const reader = new Reader(text);
  const value = reader.value(0);
  reader.end();
  return value;
}

class Reader {
  private at = 0;

  constructor(private readonly text: string) {}

  value(depth: number): Json {
    this.skip();
    const next = this.text[this.at];
    switch (next) {
      case "{":
        return this.object(depth + 1);
      case "[":
        return this.array(depth + 1);
      case '"':
        return this.string();
      case "t":
        return this.word("true", true);
      case "f":
        return this.word("false", false);
      case "n":
        return this.word("null", null);
      default:
        return this.number();
    }
  }

  end(): void {
    this.skip();
    if (this.at !== this.text.length) malformed();
  }

  private skip(): void {
    SPACE.lastIndex = this.at;
    SPACE.test(this.text);
    this.at = SPACE.lastIndex;
  }

  private take(expected: string): boolean {
    this.skip();
    if (this.text[this.at] !== expected) return false;
    this.at++;
    return true;
  }

  private word<T extends Json>(word: string, value: T): T {
    if (!this.text.startsWith(word, this.at)) malformed();
    this.at += word.length;
    return value;
  }

  private number(): number {
    NUMBER.lastIndex = this.at;
    const found = NUMBER.exec(this.text);
    if (found === null) malformed();
    this.at = NUMBER.lastIndex;
    const number = Number(found[0]);
    if (found[1] === undefined && found[2] === undefined && Math.abs(number) > MAX_SAFE_INTEGER) refuseInteger();
    requireNumber(number);
    return number;
  }

  private string(): string {
    this.at++;
    let value = "";
    for (;;) {
      PLAIN.lastIndex = this.at;
      PLAIN.test(this.text);
      value += this.text.slice(this.at, PLAIN.lastIndex);
      this.at = PLAIN.lastIndex;
      const stop = this.text[this.at++];
      if (stop === '"') return value;
      if (stop !== "\\") malformed();
      const letter = this.text[this.at++] ?? "";
      if (letter === "u") {
        const digits = this.text.slice(this.at, this.at + 4);
        if (!/^[0-9a-fA-F]{4}$/.test(digits)) malformed();
        value += String.fromCharCode(Number.parseInt(digits, 16));
        this.at += 4;
      } else if (Object.hasOwn(ESCAPES, letter)) {
        value += ESCAPES[letter];
      } else {
        malformed();
      }
    }
  }

  private array(depth: number): Json[] {
    requireDepth(depth);
    this.at++;
    const items: Json[] = [];
    if (this.take("]")) return items;
    do items.push(this.value(depth));
    while (this.take(","));
    if (!this.take("]")) malformed();
    return items;
  }

  private object(depth: number): JsonObject {
    requireDepth(depth);
    this.at++;
    const members: Record<string, Json> = Object.create(null) as Record<string, Json>;
    if (this.take("}")) return members;
    let repeats = false;
    do {
      this.skip();
      if (this.text[this.at] !== '"') malformed();
      const name = this.string();
      if (!this.take(":")) malformed();
      const value = this.value(depth);
      repeats ||= Object.hasOwn(members, name);
      members[name] = value;
    } while (this.take(","));
    if (!this.take("}")) malformed();
    if (repeats) refuse("an object has two members of one name", "duplicate_member");
    return members;
  }
}

/** Refuse a number that does not survive JSON: outside double range, or an integer that readers may change. */
export function requireNumber(number: number): void {
  if (!Number.isFinite(number)) refuse("a number is outside double range", "number_out_of_range");
  // From 1e21 on ECMAScript writes a number with an exponent, so that its text is not an integer.
  if (Math.abs(number) > MAX_SAFE_INTEGER && Math.abs(number) < 1e21) refuseInteger();
}

function requireDepth(depth: number): void {
  if (depth > DEEPEST_TEXT) refuse("objects and arrays are nested too deeply", "too_deep");
}

function malformed(): never {
  refuse("the text is not JSON", "malformed_json");
}
