/**
 * The form in which SDS messages carry a payload: `SegmentMessageProto`, as the Python library writes it.
 *
 * The fields written are 1 to 4, and 1001, the request id. The request id makes the bytes of every message unique:
 * `@waku/sds` names a message by the hash of its bytes, and would take a second "yes" for the first one.
 */

// Core: no I/O, no clock, no randomness (held by tests/layout.test.ts).

import { keccak_256 } from "@noble/hashes/sha3.js";

import { type Bytes, concat, equal, hex, utf8 } from "../protocol/bytes.js";

/** The most segments that a message may have in order to be read. */
export const MAX_SEGMENTS = 256;

const HASH_BYTES = 32;
const MAX_PARTIAL_MESSAGES = 16;
const MAX_PARTIAL_BYTES = 32 << 20;
const MAX_REQUEST_ID_BYTES = 128;
const DECODER = new TextDecoder("utf-8", { fatal: true });

/** One piece of a payload. */
export interface Segment {
  /** The Keccak-256 hash of the whole payload. */
  readonly hash: Uint8Array;
  readonly index: number;
  readonly count: number;
  readonly payload: Uint8Array;
  readonly requestId: string;
  /** Whether this is parity, which serves to recover lost segments. It is not read here: SDS recovers them. */
  readonly isParity: boolean;
}

/** Encode a payload as a single segment. */
export function encodeSegment(payload: Uint8Array, requestId: string): Bytes {
  const name = utf8(requestId);
  return concat(
    lengthPrefixed(1, keccak_256(payload)),
    varint(3 << 3),
    varint(1),
    lengthPrefixed(4, payload),
    lengthPrefixed(1001, name),
  );
}

/** Decode a segment; undefined if the bytes are not one. */
export function decodeSegment(bytes: Uint8Array): Segment | undefined {
  const texts = new Map<number, Uint8Array>();
  const numbers = new Map<number, number>();
  let at = 0;
  const number = (): number | undefined => {
    let value = 0;
    for (let shift = 0; shift < 49; shift += 7) {
      const byte = bytes[at++];
      if (byte === undefined) return undefined;
      value += (byte & 127) * 2 ** shift;
      if (byte < 128) return value;
    }
    return undefined;
  };
  while (at < bytes.length) {
    const tag = number();
    const value = number();
    if (tag === undefined || value === undefined) return undefined;
    const field = Math.floor(tag / 8);
    if (tag % 8 === 0) numbers.set(field, value);
    else if (tag % 8 === 2 && at + value <= bytes.length) texts.set(field, bytes.subarray(at, (at += value)));
    else return undefined;
  }
  const [hash, payload] = [texts.get(1), texts.get(4)];
  const [index, count] = [numbers.get(2) ?? 0, numbers.get(3) ?? 0];
  const isParity = (numbers.get(7) ?? 0) !== 0;
  if (hash?.length !== HASH_BYTES || payload === undefined || payload.length === 0) return undefined;
  if (count < 1 || count + (numbers.get(6) ?? 0) > MAX_SEGMENTS || (!isParity && index >= count)) return undefined;
  const requestId = texts.get(1001) ?? new Uint8Array();
  if (requestId.length > MAX_REQUEST_ID_BYTES) return undefined;
  try {
    return { hash, index, count, payload, requestId: DECODER.decode(requestId), isParity };
  } catch {
    return undefined;
  }
}

interface Partial {
  readonly parts: (Uint8Array | undefined)[];
  left: number;
  bytes: number;
}

/** Reassembles payloads. The incomplete ones are bounded; beyond that the oldest are given up. */
export class Reassembly {
  private readonly partial = new Map<string, Partial>();
  private bytes = 0;

  /** Take a message of this sender. Returns the payload that it completes, or its content if that is not a segment. */
  take(sender: string, content: Uint8Array): Uint8Array | undefined {
    const segment = decodeSegment(content);
    if (segment === undefined) return content; // as js-waku sends
    if (segment.isParity) return undefined;
    if (segment.count === 1) return equal(keccak_256(segment.payload), segment.hash) ? segment.payload : undefined;
    const key = JSON.stringify([sender, hex(segment.hash), segment.count, segment.requestId]);
    const found = this.partial.get(key) ?? { parts: new Array<undefined>(segment.count), left: segment.count, bytes: 0 };
    if (found.parts[segment.index] !== undefined) return undefined;
    found.parts[segment.index] = segment.payload;
    found.left--;
    found.bytes += segment.payload.length;
    this.bytes += segment.payload.length;
    this.partial.set(key, found);
    if (found.left === 0) {
      this.forget(key, found);
      const whole = concat(...(found.parts as Uint8Array[]));
      return equal(keccak_256(whole), segment.hash) ? whole : undefined;
    }
    for (const [oldest, each] of this.partial) {
      if (this.partial.size <= MAX_PARTIAL_MESSAGES && this.bytes <= MAX_PARTIAL_BYTES) break;
      this.forget(oldest, each);
    }
    return undefined;
  }

  private forget(key: string, partial: Partial): void {
    this.partial.delete(key);
    this.bytes -= partial.bytes;
  }
}

function varint(value: number): Bytes {
  const bytes: number[] = [];
  for (; value > 127; value >>>= 7) bytes.push((value & 127) | 128);
  return new Uint8Array([...bytes, value]);
}

function lengthPrefixed(field: number, value: Uint8Array): Bytes {
  return concat(varint((field << 3) | 2), varint(value.length), value);
}
