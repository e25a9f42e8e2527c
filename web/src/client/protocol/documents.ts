/**
 * DID Documents: which keys a DID begins with, what each may do, and who may recover it (RFC-0001 §3.2–§3.3).
 *
 * A document is its canonical text, and its name is the hash of that text. It carries no signature: whether it
 * counts depends on where it came from, which `KeyChain` decides. This module only reads a document and checks that it
 * is consistent.
 */

// Core: no I/O, no clock, no randomness (held by tests/layout.test.ts).

import { blake3 } from "@noble/hashes/blake3.js";

import { concat, hex, utf8 } from "./bytes.js";
import * as canonical from "./canonical.js";
import { IdentityError } from "./errors.js";
import {
  base58Decode,
  base58Encode,
  didFromPublicKey,
  isDid,
  MAX_DID_CHARACTERS,
  publicKeyFromDid,
  publicKeyFromMethod,
} from "./ids.js";
import { isObject, type Json, type JsonObject, member, refuse } from "./json.js";
import * as members from "./members.js";

/** The longest document accepted, in bytes of its canonical form. */
export const MAX_DOCUMENT_BYTES = 65_536;

/** How many signing methods, and how many recovery methods, one document may list. */
export const MAX_METHODS = 16;

const METHOD_TYPE = "Ed25519VerificationKey2020";
const MULTIHASH = new Uint8Array([0x1e, 0x20]);
const MAX_KEY_ID_CHARACTERS = MAX_DID_CHARACTERS + 128;
const CUSTODIES = ["hardware", "wrapped", "software", "unknown"] as const;

/** Where a private key is kept, according to its holder. */
export type Custody = (typeof CUSTODIES)[number];

/** A public key as 64 lowercase hex digits: the form in which keys are compared and listed. */
export type KeyHex = string;

/** One key of a document. Times are Unix seconds; undefined means no end. */
export interface VerificationMethod {
  readonly keyId: string;
  readonly publicKey: KeyHex;
  readonly validFrom: number;
  readonly validUntil: number | undefined;
  readonly revokedAt: number | undefined;
  /** Whether the key signs recovery packets and nothing else. */
  readonly recovery: boolean;
  readonly custody: Custody;
}

/** How many recovery keys must agree, and which. A policy that makes no sense is kept as it is. */
export interface RecoveryPolicy {
  /** How many distinct eligible keys must approve; undefined if the document does not have an integer here. */
  readonly threshold: number | undefined;
  /** The eligible keys; if empty, every recovery key of the document. */
  readonly keyIds: readonly string[];
}

/** A document whose form has been checked. */
export class DidDocument {
  private constructor(
    /** The document in canonical form, as it is hashed. */
    readonly canonical: string,
    /** The `did_doc_hash`. */
    readonly hash: string,
    readonly did: string,
    readonly createdAt: number,
    /** The hash of the document that this one succeeds; undefined for the first. */
    readonly prevHash: string | undefined,
    readonly methods: readonly VerificationMethod[],
    /** The ids of the keys that may answer AUTH; undefined means every signing key. */
    readonly authentication: readonly string[] | undefined,
    /** The ids of the keys that may sign packets; undefined means every signing key. */
    readonly assertion: readonly string[] | undefined,
    readonly recoveryPolicy: RecoveryPolicy | undefined,
  ) {}

  /** Read a document from JSON text. Throws `InvalidPacket` with `invalid_schema`. */
  static parse(raw: string | Uint8Array): DidDocument {
    const { value, text } = canonical.parse(raw, { maxDepth: canonical.DEEPEST });
    return DidDocument.read(value, text);
  }

  /** Read a decoded document, for instance the one inside a packet. Throws as `parse` does. */
  static fromValue(value: Json | undefined): DidDocument {
    return DidDocument.read(value ?? null, canonical.encode(value ?? null, { maxDepth: canonical.DEEPEST }));
  }

  /** The method with this key, or undefined. */
  methodOf(publicKey: KeyHex): VerificationMethod | undefined {
    return this.methods.find((method) => method.publicKey === publicKey);
  }

  /** Whether a method of this document may answer AUTH. */
  mayAuthenticate(method: VerificationMethod): boolean {
    return !method.recovery && isListed(method, this.authentication);
  }

  /** Whether a method of this document may sign packets. */
  mayAssert(method: VerificationMethod): boolean {
    return !method.recovery && isListed(method, this.assertion);
  }

  private static read(value: Json, text: string): DidDocument {
    if (!isObject(value)) refuse("a DID document is a JSON object");
    const bytes = utf8(text);
    if (bytes.length > MAX_DOCUMENT_BYTES) refuse(`a DID document exceeds ${MAX_DOCUMENT_BYTES} bytes`);
    const did = members.text(value, "id");
    if (!isDid(did)) refuse("the document's id is not a DID");
    const prevHash = members.optionalText(value, "prev_did_doc_hash");
    if (prevHash !== undefined && !isDocumentHash(prevHash)) {
      refuse("prev_did_doc_hash is not a multihash in base58btc");
    }
    const document = new DidDocument(
      text,
      `z${base58Encode(concat(MULTIHASH, blake3(bytes)))}`,
      did,
      members.integer(value, "created_at"),
      prevHash,
      readMethods(did, member(value, "verification_method")),
      readKeyIds(did, value, "authentication"),
      readKeyIds(did, value, "assertion"),
      readRecoveryPolicy(member(value, "recovery_policy")),
    );
    const own = publicKeyFromDid(did);
    if (prevHash === undefined && own !== undefined && document.methodOf(hex(own)) === undefined) {
      refuse("the first document of a self-certifying DID lacks the DID's own key");
    }
    return document;
  }
}

/** Whether text is a BLAKE3 multihash in base58btc multibase. */
export function isDocumentHash(text: string): boolean {
  if (!/^z[1-9A-HJ-NP-Za-km-z]{44,48}$/.test(text)) return false;
  const decoded = base58Decode(text.slice(1));
  return decoded?.length === 34 && decoded[0] === MULTIHASH[0] && decoded[1] === MULTIHASH[1];
}

/** The id of a key of `did`. */
export function methodId(did: string, fragment = "keys-1"): string {
  return `${did}#${fragment}`;
}

/** The multibase text of a public key: the part after `did:strata:` in its DID. */
export function keyMultibase(publicKey: Uint8Array): string {
  return didFromPublicKey(publicKey).slice("did:strata:".length);
}

/** Refuse an id that does not belong to this DID, or that spells a different key than `publicKey`. */
export function checkKeyId(did: string, keyId: string, publicKey: KeyHex | undefined): void {
  const prefix = `${did}#`;
  if (!keyId.startsWith(prefix) || keyId.length <= prefix.length || [...keyId].length > MAX_KEY_ID_CHARACTERS) {
    refuse("a key id is not the DID, # and a name");
  }
  if (publicKey !== undefined) {
    const spelled = spelledKey(keyId);
    if (spelled !== undefined && spelled !== publicKey) refuse("a key id spells a different key");
  }
}

/** The key that the fragment of `keyId` spells, if it spells one. */
export function spelledKey(keyId: string): KeyHex | undefined {
  const hash = keyId.indexOf("#");
  return multibaseKey(hash === -1 ? "" : keyId.slice(hash + 1));
}

function multibaseKey(text: string): KeyHex | undefined {
  try {
    return hex(publicKeyFromMethod(undefined, text));
  } catch (error) {
    if (error instanceof IdentityError) return undefined;
    throw error;
  }
}

/** Do as `publicKeyFromMethod`, but refuse with `invalid_schema` instead of `IdentityError`. */
export function readKey(asHex: string | undefined, asMultibase: string | undefined): KeyHex {
  try {
    return hex(publicKeyFromMethod(asHex, asMultibase));
  } catch (error) {
    if (error instanceof IdentityError) refuse(error.message);
    throw error;
  }
}

function readMethods(did: string, listed: Json | undefined): VerificationMethod[] {
  if (!Array.isArray(listed) || listed.length === 0) refuse("a document without verification_method");
  const methods = (listed as readonly Json[]).map((item) => readMethod(did, item));
  const recovery = methods.filter((method) => method.recovery).length;
  if (recovery > MAX_METHODS || methods.length - recovery > MAX_METHODS) {
    refuse(`a document lists more than ${MAX_METHODS} methods of a kind`);
  }
  if (new Set(methods.map((method) => method.keyId)).size < methods.length) refuse("two methods have one id");
  // If one key had two roles, it would be unclear what its signatures may do.
  if (new Set(methods.map((method) => method.publicKey)).size < methods.length) refuse("two methods have one key");
  return methods;
}

function readMethod(did: string, value: Json): VerificationMethod {
  if (!isObject(value)) refuse("verification_method is not an array of objects");
  if (members.text(value, "type") !== METHOD_TYPE) refuse("a method's type is not known here");
  if (members.text(value, "controller") !== did) refuse("a method's controller is not the DID");
  const publicKey = readKey(
    members.optionalText(value, "public_key_hex"),
    members.optionalText(value, "public_key_multibase"),
  );
  const keyId = members.text(value, "id");
  checkKeyId(did, keyId, publicKey);
  const custody = members.optionalText(value, "custody");
  return {
    keyId,
    publicKey,
    validFrom: members.integer(value, "valid_from"),
    validUntil: members.optionalInteger(value, "valid_until") || undefined,
    revokedAt: members.optionalInteger(value, "revoked_at"),
    recovery: members.optionalText(value, "usage") === "recovery",
    custody: CUSTODIES.find((known) => known === custody) ?? "unknown",
  };
}

function readKeyIds(did: string, value: JsonObject, name: string): readonly string[] | undefined {
  const keyIds = members.optionalTexts(value, name);
  for (const keyId of keyIds ?? []) checkKeyId(did, keyId, undefined);
  return keyIds;
}

function readRecoveryPolicy(value: Json | undefined): RecoveryPolicy | undefined {
  if (value === undefined) return undefined;
  if (!isObject(value)) return { threshold: undefined, keyIds: [] };
  const keyIds = member(value, "key_ids");
  if (keyIds !== undefined && !(Array.isArray(keyIds) && keyIds.every((id) => typeof id === "string"))) {
    return { threshold: undefined, keyIds: [] };
  }
  const threshold = member(value, "threshold");
  return {
    threshold: Number.isInteger(threshold) ? (threshold as number) : undefined,
    keyIds: (keyIds ?? []) as readonly string[],
  };
}

function isListed(method: VerificationMethod, keyIds: readonly string[] | undefined): boolean {
  return keyIds === undefined || keyIds.some((id) => id === method.keyId || spelledKey(id) === method.publicKey);
}
