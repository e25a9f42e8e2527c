/** One key at one moment: its window, its uses, and why a use is refused. */

// Core: no I/O, no clock, no randomness (held by tests/layout.test.ts).

import type { Custody, KeyHex } from "../documents.js";
import { type ErrorCode, InvalidPacket } from "../errors.js";

/** By how many seconds clocks may differ. */
export const DEFAULT_CLOCK_SKEW_SECONDS = 300;

/** How many keys that may not sign are tried, newest first, to explain why a signature fails. */
export const MAX_DEAD_KEYS_TRIED = 16;

/** What a signature is for. */
export type Use = "packet" | "auth";

/** The status of a key at a moment, by its window. */
export type KeyStanding = "valid" | "not_yet_valid" | "expired" | "revoked";

/** Whether the signature in question verifies under a public key. */
export type SignedBy = (publicKey: KeyHex) => Promise<boolean>;

/** The settings that key validity depends on. */
export interface KeyRules {
  readonly clockSkewSeconds: number;
  readonly recoveryDelaySeconds: number;
}

/** The default rules. */
export const DEFAULT_RULES: KeyRules = {
  clockSkewSeconds: DEFAULT_CLOCK_SKEW_SECONDS,
  recoveryDelaySeconds: 86_400,
};

/** One key of a chain. Times are Unix seconds; undefined means no end. */
export interface KeyState {
  readonly keyId: string;
  /** The public key in hex. */
  readonly publicKey: KeyHex;
  readonly validFrom: number;
  readonly validUntil: number | undefined;
  readonly revokedAt: number | undefined;
  readonly recovery: boolean;
  readonly custody: Custody;
  /** Whether the key may answer AUTH. */
  readonly authentication: boolean;
  /** Whether the key may sign packets. */
  readonly assertion: boolean;
  /** The id of the packet that introduced it; undefined for a key known in advance. */
  readonly introducedBy: string | undefined;
}

/** A key that may sign everything from `validFrom` on, unless `more` says otherwise. */
export function newKey(keyId: string, publicKey: KeyHex, validFrom: number, more: Partial<KeyState> = {}): KeyState {
  return {
    keyId,
    publicKey,
    validFrom,
    validUntil: undefined,
    revokedAt: undefined,
    recovery: false,
    custody: "unknown",
    authentication: true,
    assertion: true,
    introducedBy: undefined,
    ...more,
  };
}

/** The key's status at `at`: both ends are inclusive; a revocation has no skew. */
export function standing(key: KeyState, at: number, skew: number): KeyStanding {
  if (key.revokedAt !== undefined && at > key.revokedAt) return "revoked";
  if (key.validUntil !== undefined && at > key.validUntil + skew) return "expired";
  return at < key.validFrom - skew ? "not_yet_valid" : "valid";
}

/** Whether the key can never be valid again. */
export function isOver(key: KeyState, at: number, skew: number): boolean {
  return ["revoked", "expired"].includes(standing(key, at, skew));
}

/** Whether the key has the role that `use` requires, regardless of its window. */
export function may(key: KeyState, use: Use): boolean {
  return !key.recovery && (use === "packet" ? key.assertion : key.authentication);
}

/** The keys in the order in which they are tried, from keys in order of introduction. */
export function newestFirst(keys: Iterable<KeyState>): KeyState[] {
  return [...keys].reverse().sort((one, other) => other.validFrom - one.validFrom);
}

/** The error that explains why a signature by no valid key does not count. */
export async function explain(
  keys: Iterable<KeyState>,
  at: number,
  skew: number,
  use: Use,
  signedBy: SignedBy,
): Promise<InvalidPacket> {
  let dead = 0;
  for (const key of newestFirst(keys)) {
    if (!key.recovery && ++dead > MAX_DEAD_KEYS_TRIED) continue;
    if (await signedBy(key.publicKey)) return explainedBy(key, at, skew, use);
  }
  return refused("the signature is not the author's");
}

/** An `invalid_signature` for the caller to throw. */
export function refused(reason: string, detail?: string): InvalidPacket {
  return new InvalidPacket("invalid_signature", reason, detail);
}

const STANDING_CODES: Partial<Record<KeyStanding, readonly [ErrorCode, string]>> = {
  revoked: ["key_revoked", "the signing key is revoked"],
  expired: ["key_expired", "the signing key has expired"],
  not_yet_valid: ["key_not_yet_valid", "the signing key is not valid yet"],
};

function explainedBy(key: KeyState, at: number, skew: number, use: Use): InvalidPacket {
  const found = STANDING_CODES[standing(key, at, skew)];
  if (found !== undefined) {
    const [code, reason] = found;
    return use === "auth" ? refused(reason, code) : new InvalidPacket(code, reason);
  }
  if (key.recovery) return refused("a recovery key signs recovery packets alone", "recovery_key_not_allowed");
  return refused("the author's document does not let this key sign here", "key_use_not_allowed");
}
