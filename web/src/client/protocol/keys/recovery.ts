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

/** Whose approvals count at one moment. */
export interface Electorate {
  /** The declared recovery keys that are not revoked. */
  readonly unrevoked: ReadonlySet<KeyHex>;
  /** Those of them that the policy names; without names all of them. */
  readonly eligible: ReadonlySet<KeyHex>;
  /** How many of these must agree, without a policy one; undefined if that cannot be met. */
  readonly needed: number | undefined;
}

/** Whether enough keys agree at that moment; those revoked by then no longer do. */
export function isApproved(pending: PendingEvent, electorate: Electorate): boolean {
  const { unrevoked, eligible, needed } = electorate;
  // The signer stands for the event, whatever its part in the policy.
  if (needed === undefined || pending.approvedBy.size < needed || !unrevoked.has(pending.signer)) return false;
  return [...pending.approvedBy].filter((key) => eligible.has(key)).length >= needed;
}

/** The recovery keys of one state, and what its policy says of them, for a thousand events in one go. */
export class Electors {
  private readonly keys: readonly KeyState[];
  private readonly named: ReadonlySet<KeyHex>;
  private known: { readonly since: number; readonly until: number; readonly electorate: Electorate } | undefined;

  constructor(
    keys: Iterable<KeyState>,
    private readonly policy: RecoveryPolicy | undefined,
  ) {
    this.keys = [...keys].filter((key) => key.recovery);
    const names = new Set(policy?.keyIds);
    const spelled = new Set([...names].map(spelledKey));
    const named = this.keys.filter(
      (key) => names.size === 0 || names.has(key.keyId) || spelled.has(key.publicKey),
    );
    this.named = new Set(named.map((key) => key.publicKey));
  }

  /** The electorate of this moment. It is worked out anew only where a revocation lies in between. */
  at(moment: number): Electorate {
    const known = this.known;
    if (known !== undefined && known.since <= moment && moment <= known.until) return known.electorate;
    const unrevoked = this.keys.filter((key) => standing(key, moment, 0) !== "revoked").map((key) => key.publicKey);
    const eligible = new Set(unrevoked.filter((key) => this.named.has(key)));
    const electorate = { unrevoked: new Set(unrevoked), eligible, needed: threshold(this.policy, eligible) };
    const ends = this.keys.map((key) => key.revokedAt ?? Number.POSITIVE_INFINITY).filter((end) => end >= moment);
    this.known = { since: moment, until: Math.min(...ends), electorate };
    return electorate;
  }
}

/** How many eligible keys must agree; undefined if that cannot be met. */
function threshold(policy: RecoveryPolicy | undefined, eligible: ReadonlySet<KeyHex>): number | undefined {
  if (policy === undefined) return 1;
  const wanted = policy.threshold;
  return wanted === undefined || wanted < 1 || wanted > eligible.size ? undefined : wanted;
}
