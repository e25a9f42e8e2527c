/** The effect of a document on the keys of a DID: their roles, and windows that only shrink. */

// Core: no I/O, no clock, no randomness (held by tests/layout.test.ts).

import { fromHex } from "../bytes.js";
import { type DidDocument, type KeyHex, keyMultibase, methodId, type VerificationMethod } from "../documents.js";
import type { KeyState } from "./states.js";

/** Keys by public key, in order of introduction. */
export type Keys = ReadonlyMap<KeyHex, KeyState>;

/**
 * The keys after `document` has become the newest.
 *
 * `introducedBy` is the packet that published it. Undefined means that the program vouches for the document: it then
 * determines everything about its keys, except that a revocation is never undone.
 */
export function underDocument(
  keys: Keys,
  document: DidDocument,
  introducedBy: string | undefined,
): Map<KeyHex, KeyState> {
  const after = new Map<KeyHex, KeyState>();
  const given = new Set(document.methods.map((method) => method.keyId));
  for (const [publicKey, key] of keys) {
    const method = document.methodOf(publicKey);
    if (method === undefined) {
      after.set(publicKey, unlisted(key, document.did, given));
    } else if (introducedBy === undefined) {
      const revokedAt = earlier(key.revokedAt, method.revokedAt);
      after.set(publicKey, { ...introduced(method, document, undefined), revokedAt });
    } else {
      after.set(publicKey, merged(key, method, document));
    }
  }
  for (const method of document.methods) {
    if (!after.has(method.publicKey)) after.set(method.publicKey, introduced(method, document, introducedBy));
  }
  return after;
}

/** The earlier of two ends; undefined means no end. */
export function earlier(one: number | undefined, other: number | undefined): number | undefined {
  return one === undefined ? other : other === undefined ? one : Math.min(one, other);
}

function introduced(
  method: VerificationMethod,
  document: DidDocument,
  introducedBy: string | undefined,
): KeyState {
  const authentication = document.mayAuthenticate(method);
  return { ...method, authentication, assertion: document.mayAssert(method), introducedBy };
}

/** A key that a new head does not list. It no longer belongs to the DID, but is kept to explain old signatures. */
function unlisted(key: KeyState, did: string, given: ReadonlySet<string>): KeyState {
  const spelled = () => methodId(did, keyMultibase(fromHex(key.publicKey) as Uint8Array));
  const keyId = given.has(key.keyId) ? spelled() : key.keyId;
  return { ...key, keyId, authentication: false, assertion: false, recovery: false };
}

/** A known key that a new head lists: its role is the document's, and its window only shrinks. */
function merged(key: KeyState, method: VerificationMethod, document: DidDocument): KeyState {
  return {
    ...introduced(method, document, key.introducedBy),
    validFrom: Math.max(key.validFrom, method.validFrom),
    validUntil: earlier(key.validUntil, method.validUntil),
    revokedAt: earlier(key.revokedAt, method.revokedAt),
  };
}
