/**
 * Packets: parsed, checked and built (RFC-0002 §3–§4).
 *
 * A packet is its canonical text. A `Packet` is a view of it, and exists only if the schema holds, the form is
 * canonical, and `packetId` is the BLAKE3 hash of the rest. It does not prove that the signature is the author's, which
 * `verify` checks, nor that the packet is fresh, which `checkFreshness` does.
 */

// Core: no I/O, no clock, no randomness (held by tests/layout.test.ts).

import { blake3 } from "@noble/hashes/blake3.js";

import { fromHex, hex, utf8 } from "./bytes.js";
import * as canonical from "./canonical.js";
import * as ed25519 from "./ed25519.js";
import { InvalidPacket } from "./errors.js";
import { isDid, publicKeyFromDid, type Signer } from "./ids.js";
import { isObject, type Json, type JsonObject, member, refuse } from "./json.js";

/** The packet version that this library supports. */
export const VERSION = 1;

/** The canonical size of the largest packet built, and the relay's default limit. */
export const DEFAULT_MAX_PACKET_BYTES = 262_144;

/** How far in the past a packet's timestamp may be when the packet is published. */
export const DEFAULT_MAX_PACKET_AGE_SECONDS = 86_400;

/** How far in the future the timestamp may be. */
export const MAX_FUTURE_SECONDS = 300;

/** The provenance header of a packet with media of unknown origin. */
export const MINIMAL_PROVENANCE_HEADER: JsonObject = {
  origin_type: "UNKNOWN",
  genesis_media_hash: null,
  edit_history: [],
};

/** What `Packet.parse` allows; the defaults are those of a relay. */
export interface ParseOptions {
  /** The largest canonical form, in bytes; by default without limit. */
  readonly maxBytes?: number | undefined;
  /** The deepest nesting. */
  readonly maxDepth?: number;
  /** Whether media without a provenance header is refused. A reader treats its origin as unknown. */
  readonly mediaNeedsHeader?: boolean;
}

/** The members of a new packet besides its content, and limits. Undefined members are left out. */
export interface BuildOptions {
  /** Unix seconds. */
  readonly timestamp: number;
  /** Unix seconds. */
  readonly expiresAt?: number | undefined;
  readonly nonce?: string | undefined;
  readonly provenanceHeader?: Readonly<Record<string, unknown>> | undefined;
  /** Further top-level members. */
  readonly extra?: Readonly<Record<string, unknown>> | undefined;
  readonly maxBytes?: number;
  /** Whether a header may claim an origin without a `client_attestation`; relays serve it as unknown origin. */
  readonly allowUnattested?: boolean;
}

const UNSIGNED = ["packet_id", "signature"];
const BUILT = ["author_id", "content", "expires_at", "nonce", "provenance_header", "timestamp", "version", ...UNSIGNED];
const CONTENT_ID = /^0x[0-9a-f]{64}$/;

/** One packet whose schema, canonical form and id have been checked. All times are Unix seconds. */
export class Packet {
  private constructor(
    /** The whole packet in canonical form, as it is stored and sent. */
    readonly canonical: string,
    /** The size that every limit refers to: the length of the canonical form in UTF-8. */
    readonly sizeBytes: number,
    /** The canonical form without `packet_id` and `signature`, as it is hashed and signed. */
    readonly signedText: string,
    readonly packetId: string,
    readonly timestamp: number,
    readonly authorId: string,
    readonly contentType: string,
    readonly expiresAt: number | undefined,
    readonly nonce: string | undefined,
    /** As received, in either letter case. */
    readonly signature: string,
    /** The decoded packet. Do not modify it: the text above would not change with it. */
    readonly value: JsonObject,
  ) {}

  /**
   * Check a packet given as JSON text or UTF-8 bytes.
   *
   * Throws `InvalidPacket`: `invalid_schema` for schema and canonical form (the detail names what has no canonical
   * form), `packet_too_large`, `invalid_signature` with detail `packet_id_mismatch` if the id is not the hash of the
   * packet.
   */
  static parse(raw: string | Uint8Array, options: ParseOptions = {}): Packet {
    const maxDepth = options.maxDepth ?? canonical.MAX_DEPTH;
    const { value, text } = canonical.parse(raw, { maxDepth });
    if (!isObject(value)) refuse("a packet is a JSON object");
    const packetId = member(value, "packet_id");
    if (!isContentId(packetId)) refuse("packet_id is not 0x and 64 lowercase hex digits");
    const signature = member(value, "signature");
    if (typeof signature !== "string" || !/^0x[0-9a-fA-F]{128}$/.test(signature)) {
      refuse("signature is not 0x and 128 hex digits");
    }
    const version = integer(member(value, "version"), "version");
    if (version !== VERSION) refuse(`packet version ${version} is not known here`);
    const authorId = member(value, "author_id");
    if (typeof authorId !== "string" || !isDid(authorId)) refuse("author_id is not a DID");
    const content = member(value, "content");
    if (!isObject(content)) refuse("content is not an object");
    const contentType = member(content, "type");
    if (typeof contentType !== "string") refuse("content.type is not a string");
    const timestamp = integer(member(value, "timestamp"), "timestamp");
    const expiry = member(value, "expires_at");
    const expiresAt = expiry === undefined ? undefined : integer(expiry, "expires_at");
    const nonce = optional(value, "nonce", isText, "a string");
    checkOptional(value);
    checkContent(value, content, options.mediaNeedsHeader ?? true);
    const bytes = utf8(text);
    if (options.maxBytes !== undefined && bytes.length > options.maxBytes) {
      throw new InvalidPacket(
        "packet_too_large",
        `packet exceeds ${options.maxBytes} bytes`,
        undefined,
        options.maxBytes,
      );
    }
    const signedText = canonical.encodeWith(value, UNSIGNED, {}, { maxDepth });
    if (packetId !== byteHash(utf8(signedText))) {
      throw new InvalidPacket("invalid_signature", "packet_id is not the hash of the packet", "packet_id_mismatch");
    }
    return new Packet(
      text,
      bytes.length,
      signedText,
      packetId,
      timestamp,
      authorId,
      contentType,
      expiresAt,
      nonce,
      signature,
      value,
    );
  }

  /**
   * Read a packet that some relay has accepted: a stored, sent or archived one.
   *
   * Relays differ in what they accept, so every reader allows the deepest nesting that a relay can be configured to
   * accept, and media without a header. Throws `InvalidPacket` as `parse` does.
   */
  static read(raw: string | Uint8Array, options: { maxBytes?: number } = {}): Packet {
    return Packet.parse(raw, { ...options, maxDepth: canonical.DEEPEST, mediaNeedsHeader: false });
  }

  /** The content; `content.type` is `contentType`. */
  get content(): JsonObject {
    return this.value["content"] as JsonObject;
  }

  /** The bytes that are hashed and signed. */
  get signedBytes(): Uint8Array {
    return utf8(this.signedText);
  }

  /** The 64 bytes of the signature. */
  get signatureBytes(): Uint8Array {
    return fromHex(this.signature.slice(2)) as Uint8Array;
  }

  /** Whether the packet's signature verifies under this key. */
  isSignedBy(publicKey: Uint8Array): Promise<boolean> {
    return ed25519.verify(publicKey, this.signedBytes, this.signatureBytes);
  }

  /**
   * Check the signature with the key in the author's own DID and, if `now` is given, the expiry.
   *
   * Rejects with `InvalidPacket`: `invalid_signature` (detail `unresolved_key` if the DID contains no key),
   * `packet_expired`. An author may have other keys, which `KeyChain.verify` takes into account.
   */
  async verify(now?: number): Promise<void> {
    if (now !== undefined) checkExpiry(this, now);
    const publicKey = publicKeyFromDid(this.authorId);
    if (publicKey === undefined) {
      throw new InvalidPacket("invalid_signature", "the author's key is not known here", "unresolved_key");
    }
    if (!(await this.isSignedBy(publicKey))) {
      throw new InvalidPacket("invalid_signature", "the signature is not the author's");
    }
  }

  /** A text for logs, without payload and signature. */
  toString(): string {
    return `Packet(${this.packetId}, ${this.contentType}, ${this.sizeBytes} bytes)`;
  }

  /** The decoded packet, for `JSON.stringify`, whose output need not be in canonical form. */
  toJSON(): JsonObject {
    return this.value;
  }
}

/**
 * Make and sign a packet.
 *
 * Media without a header get the minimal one. Rejects with `InvalidPacket` for a packet that a relay would
 * refuse, `TypeError` if `extra` names a member that is written here or the header claims an origin without a
 * `client_attestation` (unless `allowUnattested`), and what the signer rejects with.
 */
export async function buildAt(
  identity: Signer,
  content: Readonly<Record<string, unknown>>,
  options: BuildOptions,
): Promise<Packet> {
  const clash = Object.keys(options.extra ?? {}).filter((name) => BUILT.includes(name));
  if (clash.length > 0) throw new TypeError(`extra cannot set ${clash.sort().join(", ")}`);
  const media = Object.hasOwn(content, "media") ? content["media"] : undefined;
  const header =
    options.provenanceHeader ?? (Array.isArray(media) && media.length > 0 ? MINIMAL_PROVENANCE_HEADER : undefined);
  if (header !== undefined && options.allowUnattested !== true) requireAttested(header);
  const members: Record<string, unknown> = {
    version: VERSION,
    timestamp: options.timestamp,
    author_id: identity.did,
    content,
  };
  if (header !== undefined) members["provenance_header"] = header;
  if (options.expiresAt !== undefined) members["expires_at"] = options.expiresAt;
  if (options.nonce !== undefined) members["nonce"] = options.nonce;
  const extra = options.extra ?? {};
  const signed = utf8(canonical.encodeWith(extra, [], members));
  const signature = await identity.sign(signed);
  const sealed = { ...members, packet_id: byteHash(signed), signature: `0x${hex(signature)}` };
  const text = canonical.encodeWith(extra, [], sealed);
  return Packet.parse(text, { maxBytes: options.maxBytes ?? DEFAULT_MAX_PACKET_BYTES });
}

/**
 * Refuse a packet that is from the future, too old, or expired, at the time `now`.
 *
 * Throws `InvalidPacket` with `timestamp_in_future`, `timestamp_too_old` or `packet_expired`.
 */
export function checkFreshness(
  packet: Packet,
  now: number,
  maxAgeSeconds: number = DEFAULT_MAX_PACKET_AGE_SECONDS,
): void {
  if (packet.timestamp - now > MAX_FUTURE_SECONDS) {
    throw new InvalidPacket("timestamp_in_future", `timestamp is more than ${MAX_FUTURE_SECONDS} s in the future`);
  }
  if (now - packet.timestamp > maxAgeSeconds) {
    throw new InvalidPacket("timestamp_too_old", `timestamp is more than ${maxAgeSeconds} s in the past`);
  }
  checkExpiry(packet, now);
}

/** Refuse a packet that has expired: it is served up to and including the second it names. */
export function checkExpiry(packet: Packet, now: number): void {
  if (packet.expiresAt !== undefined && now > packet.expiresAt) {
    throw new InvalidPacket("packet_expired", "the packet has expired");
  }
}

/** `0x` and the BLAKE3-256 of `data` in lowercase hex: the form of every id and media hash. */
export function byteHash(data: Uint8Array): string {
  return `0x${hex(blake3(data))}`;
}

/** Whether a value is text of the form of an id or media hash. */
export function isContentId(value: unknown): value is string {
  return typeof value === "string" && CONTENT_ID.test(value);
}

/**
 * Whether the id in a possibly malformed packet is the hash of its bytes. Also true if that cannot be determined: for
 * text without a canonical form, and for a packet with a provenance header, which a relay may have downgraded.
 */
export function idHolds(raw: string): boolean {
  try {
    const { value } = canonical.parse(raw);
    if (!isObject(value)) return false;
    if (Object.hasOwn(value, "provenance_header")) return true;
    return member(value, "packet_id") === byteHash(utf8(canonical.encodeWith(value, UNSIGNED)));
  } catch {
    return true;
  }
}

function requireAttested(header: Readonly<Record<string, unknown>>): void {
  const claim = header["origin_type"];
  if (claim !== undefined && claim !== null && claim !== "UNKNOWN" && !header["client_attestation"]) {
    throw new TypeError(`a packet that claims the origin ${String(claim)} needs a client_attestation`);
  }
}

function checkOptional(value: JsonObject): void {
  const attestations = optional(value, "attestations", Array.isArray, "an array") as Json[] | undefined;
  if (attestations !== undefined && !attestations.every(isObject)) refuse("attestations is not an array of objects");
  const metrics = member(value, "consensus_metrics");
  if (metrics !== undefined && !(isObject(metrics) && Object.keys(metrics).length === 0)) {
    refuse("consensus_metrics is reserved");
  }
}

function checkContent(value: JsonObject, content: JsonObject, mediaNeedsHeader: boolean): void {
  optional(content, "text", isText, "a string", "content.");
  const thread = member(content, "thread_ref");
  if (thread !== undefined && !isContentId(thread)) refuse("content.thread_ref is not a packet id");
  const header = optional(value, "provenance_header", isObject, "an object");
  if (header !== undefined) checkHeader(header);
  const media = optional(content, "media", Array.isArray, "an array", "content.") as Json[] | undefined;
  if (media === undefined || media.length === 0) return;
  if (header === undefined && mediaNeedsHeader) refuse("content.media without provenance_header");
  media.forEach(checkMediaReference);
}

function checkHeader(header: JsonObject): void {
  checkByteHash(member(header, "genesis_media_hash"), "provenance_header.genesis_media_hash");
  const edits = member(header, "edit_history");
  for (const edit of Array.isArray(edits) ? (edits as Json[]) : []) {
    if (isObject(edit)) checkByteHash(member(edit, "resulting_media_hash"), "edit_history.resulting_media_hash");
  }
}

function checkByteHash(value: Json | undefined, name: string): void {
  if (value !== undefined && !isContentId(value)) refuse(`${name} is not 0x and 64 lowercase hex digits`);
}

function checkMediaReference(reference: Json): void {
  if (!isObject(reference)) refuse("content.media is not an array of objects");
  if (!isContentId(member(reference, "media_hash"))) refuse("media_hash is not 0x and 64 lowercase hex digits");
  optional(reference, "media_type", isText, "a string", "content.media.");
  const size = member(reference, "size_bytes");
  if (size !== undefined) integer(size, "content.media.size_bytes");
  const uris = optional(reference, "media_uris", Array.isArray, "an array", "content.media.") as Json[] | undefined;
  if (uris !== undefined && !uris.every(isText)) refuse("content.media.media_uris is not an array of strings");
}

function isText(value: unknown): value is string {
  return typeof value === "string";
}

/** An optional member; null means the same as absence. */
function optional<T extends Json>(
  members: JsonObject,
  name: string,
  fits: (value: unknown) => value is T,
  kind: string,
  path = "",
): T | undefined {
  const value = member(members, name);
  if (value === undefined) return undefined;
  if (!fits(value)) refuse(`${path}${name} is not ${kind}`);
  return value;
}

function integer(value: Json | undefined, name: string): number {
  if (!Number.isSafeInteger(value)) refuse(`${name} is not an integer`);
  return value as number;
}
