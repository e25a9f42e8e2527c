/**
 * The bytes that AUTH signs, and the checks before a client signs them (RFC-0004 §3.7).
 *
 * The relay sends a challenge and its own DID; the client answers with a signature over both. No separator is between
 * the two, so a hostile relay could forward another relay's challenge, or move the border between the two parts.
 * `checkChallenge` makes a signature useless anywhere else: the challenge has no `:` and a DID begins with
 * `did:`, so the signed text can be split in only one way, and it names the relay that this client meant to talk to.
 */

// Core: no I/O, no clock, no randomness (held by tests/layout.test.ts).

import { base64Length, utf8 } from "./bytes.js";
import { InvalidMessage } from "./errors.js";
import { isDid } from "./ids.js";
import type { AuthChallenge } from "./wire.js";

/** The least number of random bytes in a challenge. */
export const MIN_CHALLENGE_BYTES = 32;

/** The least time for which a challenge can be answered. */
export const MIN_LIFETIME_SECONDS = 60;

/** The longest lifetime that is used. */
export const MAX_LIFETIME_SECONDS = 600;

const MAX_CHALLENGE_CHARACTERS = 1024;

/** The bytes that an AUTH signature covers: the text of the challenge as received, then the relay's DID. */
export function signingInput(challenge: string, serverId: string): Uint8Array {
  return utf8(challenge + serverId);
}

/**
 * Throw `InvalidMessage` for a challenge that must not be signed.
 *
 * `expectedServerId` is the known DID of this relay; undefined means that no DID is known yet. The error's `detail` is
 * `challenge_malformed`, `server_id_malformed` or `server_id_unexpected`.
 */
export function checkChallenge(challenge: AuthChallenge, expectedServerId: string | undefined): void {
  const { challenge: text, server_id: serverId } = challenge;
  const length = text.length > MAX_CHALLENGE_CHARACTERS ? undefined : base64Length(text);
  if (length === undefined || length < MIN_CHALLENGE_BYTES) {
    throw unfit(`the relay's challenge is not the base64 of ${MIN_CHALLENGE_BYTES} bytes`, "challenge_malformed");
  }
  if (!isDid(serverId)) throw unfit("the name that the relay gives itself is not a DID", "server_id_malformed");
  if (expectedServerId !== undefined && serverId !== expectedServerId) {
    throw unfit("the relay is not the one expected at this address", "server_id_unexpected");
  }
}

/** The error for a challenge that must not be signed, for the caller to throw. */
export function unfit(reason: string, detail: string): InvalidMessage {
  return new InvalidMessage(reason, { code: "unauthenticated", detail });
}
