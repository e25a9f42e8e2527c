/** The contents of identity packets: reading them, checking each field, and writing them. */

// Core: no I/O, no clock, no randomness (held by tests/layout.test.ts).

import { checkKeyId, DidDocument, type KeyHex, keyMultibase, readKey } from "../documents.js";
import { type JsonObject, member, refuse } from "../json.js";
import * as members from "../members.js";
import { isContentId, type Packet } from "../packets.js";

/** The content types that make up a chain. */
export const IDENTITY_TYPES: readonly string[] = ["DID_DOCUMENT", "KEY_EVENT", "RECOVERY_APPROVAL"];

/** A KEY_EVENT. Members that its `event` does not use are undefined. */
export interface KeyEvent {
  readonly kind: "event";
  /** `ADD`, `ROTATE`, `REVOKE`, or another word, which has no effect. */
  readonly event: string;
  readonly keyId: string;
  readonly publicKey?: KeyHex | undefined;
  readonly validFrom?: number | undefined;
  readonly validUntil?: number | undefined;
  readonly revokedAt?: number | undefined;
  readonly replaces?: string | undefined;
}

/** A RECOVERY_APPROVAL: its signer approves the event with this packet id. */
export interface RecoveryApproval {
  readonly kind: "approval";
  readonly targetEvent: string;
}

/** A DID_DOCUMENT: its signer publishes this document. */
export interface PublishedDocument {
  readonly kind: "document";
  readonly document: DidDocument;
}

/** The content of an identity packet. */
export type Statement = KeyEvent | RecoveryApproval | PublishedDocument;

/** Whether packets of this type belong in a chain. */
export function isIdentityType(contentType: string): boolean {
  return IDENTITY_TYPES.includes(contentType);
}

/**
 * Read the statement of an identity packet.
 *
 * Throws `InvalidPacket` (`invalid_schema`) if a member is missing or malformed, and `TypeError` for a packet
 * of another type.
 */
export function readStatement(packet: Packet): Statement {
  const content = packet.content;
  switch (packet.contentType) {
    case "KEY_EVENT":
      return readKeyEvent(packet.authorId, content);
    case "RECOVERY_APPROVAL":
      return readApproval(content);
    case "DID_DOCUMENT": {
      const document = DidDocument.fromValue(member(content, "document"));
      if (document.did !== packet.authorId) refuse("the document is another DID's");
      return { kind: "document", document };
    }
    default:
      throw new TypeError(`${packet.contentType} is not an identity packet`);
  }
}

/** A key that a KEY_EVENT introduces. Times are Unix seconds. */
export interface NewKey {
  /** The DID, `#` and a name. */
  readonly keyId: string;
  readonly publicKey: Uint8Array;
  readonly validFrom: number;
  readonly validUntil?: number;
  readonly reason?: string;
}

/** The content of a KEY_EVENT that adds a key. */
export function addContent(key: NewKey): Record<string, unknown> {
  return introduction("ADD", key, {});
}

/** The content of a KEY_EVENT that replaces a key by another; the old key ends at `validFrom`. */
export function rotateContent(key: NewKey & { readonly replaces: string }): Record<string, unknown> {
  return introduction("ROTATE", key, { replaces: key.replaces });
}

/** The content of a KEY_EVENT that revokes a key permanently. */
export function revokeContent(key: {
  readonly keyId: string;
  readonly revokedAt: number;
  readonly reason?: string;
}): Record<string, unknown> {
  const content = { type: "KEY_EVENT", event: "REVOKE", key_id: key.keyId, revoked_at: key.revokedAt };
  return key.reason === undefined ? content : { ...content, reason: key.reason };
}

function introduction(event: string, key: NewKey, more: Record<string, unknown>): Record<string, unknown> {
  const content = {
    type: "KEY_EVENT",
    event,
    key_id: key.keyId,
    public_key_multibase: keyMultibase(key.publicKey),
    valid_from: key.validFrom,
    valid_until: key.validUntil ?? 0,
    ...more,
  };
  return key.reason === undefined ? content : { ...content, reason: key.reason };
}

function readKeyEvent(did: string, content: JsonObject): KeyEvent {
  const event = members.text(content, "event");
  const keyId = members.text(content, "key_id");
  checkKeyId(did, keyId, undefined);
  members.optionalText(content, "reason");
  switch (event) {
    case "ADD":
      return readIntroduction(did, event, keyId, content, undefined);
    case "ROTATE":
      return readIntroduction(did, event, keyId, content, members.text(content, "replaces"));
    case "REVOKE":
      return { kind: "event", event, keyId, revokedAt: members.integer(content, "revoked_at") };
    default:
      return { kind: "event", event, keyId };
  }
}

function readIntroduction(
  did: string,
  event: string,
  keyId: string,
  content: JsonObject,
  replaces: string | undefined,
): KeyEvent {
  const publicKey = readKey(undefined, members.text(content, "public_key_multibase"));
  checkKeyId(did, keyId, publicKey);
  const validFrom = members.integer(content, "valid_from");
  const validUntil = members.optionalInteger(content, "valid_until") || undefined;
  if (validUntil !== undefined && validUntil < validFrom) refuse("valid_until lies before valid_from");
  return { kind: "event", event, keyId, publicKey, validFrom, validUntil, replaces };
}

function readApproval(content: JsonObject): RecoveryApproval {
  const targetEvent = members.text(content, "target_event");
  if (!isContentId(targetEvent)) refuse("target_event is not a packet id");
  members.integer(content, "approved_at");
  members.optionalText(content, "note");
  return { kind: "approval", targetEvent };
}
