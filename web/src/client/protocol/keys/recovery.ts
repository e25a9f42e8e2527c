/** Recovery: pending events, and the keys whose approval they need (RFC-0001 §5.3; …R-088). */

// Core: no I/O, no clock, no randomness (held by tests/layout.test.ts).

import { type KeyHex, type RecoveryPolicy, spelledKey } from "../documents.js";
import type { KeyEvent } from "./statements.js";
import { type KeyState, standing } from "./states.js";

/** An event signed by a recovery key that has not taken effect. */
export interface PendingEvent {
  readonly packetId: string;
  readonly event: KeyEvent;
  readonly signer: KeyHex;
  /** When its delay ends; approvals never make this earlier. */
  readonly dueAt: number;
  /** The recovery keys that have approved it, including its signer from the start. */
  readonly approvedBy: ReadonlySet<KeyHex>;
}

/** The keys whose approvals count at one moment. */
export interface Electorate {
  /** The declared recovery keys that are not revoked. */
  readonly unrevoked: ReadonlySet<KeyHex>;
  /** Those of them that the policy names, or all of them if it names none. */
  readonly eligible: ReadonlySet<KeyHex>;
  /** How many of these must approve; 1 without a policy, undefined if the policy cannot be met. */
  readonly needed: number | undefined;
}

/** Whether enough keys approve at that moment; those revoked by then no longer count. */
export function isApproved(pending: PendingEvent, electorate: Electorate): boolean {
  const { unrevoked, eligible, needed } = electorate;
  // The signer must not be revoked, whether or not the policy names it.
  if (needed === undefined || pending.approvedBy.size < needed || !unrevoked.has(pending.signer)) return false;
  return [...pending.approvedBy].filter((key) => eligible.has(key)).length >= needed;
}

/** A function from a moment to its electorate, for one state; the policy is applied to the keys only once. */
export function electorates(
  keys: Iterable<KeyState>,
  policy: RecoveryPolicy | undefined,
): (moment: number) => Electorate {
  const recovery = [...keys].filter((key) => key.recovery);
  const names = new Set(policy?.keyIds);
  const spelled = new Set([...names].map(spelledKey));
  const named = recovery.filter((key) => names.size === 0 || names.has(key.keyId) || spelled.has(key.publicKey));
  return (moment) => {
    const at = (some: KeyState[]) =>
      new Set(some.filter((key) => standing(key, moment, 0) !== "revoked").map((key) => key.publicKey));
    const eligible = at(named);
    const wanted = policy === undefined ? 1 : policy.threshold;
    const isMet = policy === undefined || (wanted !== undefined && wanted >= 1 && wanted <= eligible.size);
    return { unrevoked: at(recovery), eligible, needed: isMet ? wanted : undefined };
  };
}
