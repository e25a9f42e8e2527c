/** Recovery: pending events, and whose approval they need (RFC-0001 §5.3; …R-088). */

// Core: no I/O, no clock, no randomness (held by tests/layout.test.ts).

import { type KeyHex, type RecoveryPolicy, spelledKey } from "../documents.js";
import type { KeyEvent } from "./statements.js";
import { type KeyState, standing } from "./states.js";

/** An event signed by a recovery key that has not taken effect. */
export interface PendingEvent {
  readonly packetId: string;
  readonly event: KeyEvent;
  readonly signer: KeyHex;
  /** When it has waited long enough; approvals never bring this forward. */
  readonly dueAt: number;
  /** The recovery keys that agree, the signer from the start. */
  readonly approvedBy: ReadonlySet<KeyHex>;
}

/** Whether enough keys agree at `at`; those revoked by then no longer do. */
export function isApproved(
  pending: PendingEvent,
  keys: readonly KeyState[],
  policy: RecoveryPolicy | undefined,
  at: number,
): boolean {
  // The signer stands for the event, whatever its part in the policy.
  if (!eligibleKeys(keys, undefined, at).has(pending.signer)) return false;
  const eligible = eligibleKeys(keys, policy, at);
  const needed = threshold(policy, eligible);
  return needed !== undefined && [...eligible].filter((key) => pending.approvedBy.has(key)).length >= needed;
}

/** The declared, unrevoked recovery keys, or those of them that the policy names. */
export function eligibleKeys(
  keys: Iterable<KeyState>,
  policy: RecoveryPolicy | undefined,
  at: number,
): Set<KeyHex> {
  const eligible = [...keys].filter((key) => key.recovery && standing(key, at, 0) !== "revoked");
  const named = new Set(policy?.keyIds);
  const spelled = new Set([...named].map(spelledKey));
  const counted =
    named.size === 0 ? eligible : eligible.filter((key) => named.has(key.keyId) || spelled.has(key.publicKey));
  return new Set(counted.map((key) => key.publicKey));
}

/** How many eligible keys must agree, without a policy one; undefined if that cannot be met. */
export function threshold(policy: RecoveryPolicy | undefined, eligible: ReadonlySet<KeyHex>): number | undefined {
  if (policy === undefined) return 1;
  const wanted = policy.threshold;
  return wanted === undefined || wanted < 1 || wanted > eligible.size ? undefined : wanted;
}
