/** Bytes and their text encodings. */

// Core: no I/O, no clock, no randomness (held by tests/layout.test.ts).

/** Bytes over an unshared buffer, as WebCrypto requires. */
export type Bytes = Uint8Array<ArrayBuffer>;

const ENCODER = new TextEncoder();
const HEX = Array.from({ length: 256 }, (_, byte) => byte.toString(16).padStart(2, "0"));

/** The UTF-8 bytes of text that must be well-formed. */
export function utf8(text: string): Bytes {
  return ENCODER.encode(text);
}

/** Lowercase hex digits, without `0x`. */
export function hex(bytes: Uint8Array): string {
  let text = "";
  for (const byte of bytes) text += HEX[byte];
  return text;
}

/** Decode hex digits of either case; undefined for other text, or bytes of another size. */
export function fromHex(text: string, size?: number): Bytes | undefined {
  if (text.length % 2 !== 0 || !/^[0-9a-fA-F]*$/.test(text)) return undefined;
  if (size !== undefined && text.length !== 2 * size) return undefined;
  const bytes = new Uint8Array(text.length / 2);
  for (let at = 0; at < bytes.length; at++) bytes[at] = Number.parseInt(text.slice(2 * at, 2 * at + 2), 16);
  return bytes;
}

/** The parts, joined. */
export function concat(...parts: Uint8Array[]): Bytes {
  const whole = new Uint8Array(parts.reduce((sum, part) => sum + part.length, 0));
  let at = 0;
  for (const part of parts) {
    whole.set(part, at);
    at += part.length;
  }
  return whole;
}

/** Whether both hold the same bytes. Not in constant time: nothing compared here is secret. */
export function equal(one: Uint8Array, other: Uint8Array): boolean {
  return one.length === other.length && one.every((byte, at) => byte === other[at]);
}

/** How many bytes standard, padded base64 encodes; undefined for any other text. */
export function base64Length(text: string): number | undefined {
  if (text.length % 4 !== 0 || !/^[A-Za-z0-9+/]*={0,2}$/.test(text)) return undefined;
  return (text.length / 4) * 3 - (text.endsWith("==") ? 2 : text.endsWith("=") ? 1 : 0);
}
