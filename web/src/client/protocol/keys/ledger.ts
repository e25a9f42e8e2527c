/**
 * The running state of a chain: keys, documents and pending recovery, updated packet by packet.
 *
 * A chain copies its ledger before updating it, and never shares a ledger that is being updated. `receive` judges a
 * packet completely before it changes anything, so a refused packet has only one effect: the state advances to its
 * time.
 */

// Core: no I/O, no clock, no randomness (held by tests/layout.test.ts).

import { hex } from "../bytes.js";
import { type DidDocument, type KeyHex, MAX_METHODS, methodId, spelledKey } from "../documents.js";
import { InvalidPacket } from "../errors.js";
import { publicKeyFromDid } from "../ids.js";
import { refuse } from "../json.js";
import type { Entry } from "./entries.js";
import { type Electorate, electorates, isApproved, type PendingEvent } from "./recovery.js";
import { earlier, underDocument } from "./roles.js";
import type { KeyEvent, RecoveryApproval } from "./statements.js";
import { explain, isOver, type KeyRules, type KeyState, may, newestFirst, newKey, refused, standing } from "./states.js";

/** The most valid identity packets of one DID. Beyond that, each key can still be revoked, once. */
export const MAX_CHAIN_EVENTS = 1024;

const MAX_CHAIN_EVENTS_A_SECOND = 32;
const EFFECTIVE = ["ADD", "ROTATE", "REVOKE"];

/** Everything known about one DID after some packets have been received. */
export class KeyLedger {
  /** By public key, in order of introduction. */
  keys = new Map<KeyHex, KeyState>();
  /** Each succeeds the previous one; in a conflict the last ones are rivals. */
  documents: readonly DidDocument[] = [];
  /** Why no key resolves any more, or undefined. */
  conflict: string | undefined;
  private superseded: ReadonlySet<string> = new Set(); // hashes of documents that have a successor
  private pending = new Map<string, PendingEvent>(); // by packet id
  private events: ReadonlySet<string> = new Set(); // the KEY_EVENTs that an approval may name
  private at = 0; // the second in which the last packet was received
  private count = 0;
  private countInSecond = 0;

  private constructor(
    readonly did: string,
    readonly rules: KeyRules,
  ) {}

  /** The initial state: from documents, else a configured key, else the DID's own key. */
  static begin(
    did: string,
    documents: Iterable<DidDocument>,
    staticKey: Uint8Array | undefined,
    rules: KeyRules,
  ): KeyLedger {
    const ledger = new KeyLedger(did, rules);
    ledger.beginWith(documents);
    const key = staticKey ?? publicKeyFromDid(did);
    if (ledger.documents.length === 0 && key !== undefined) {
      ledger.keys.set(hex(key), newKey(methodId(did), hex(key), 0));
    }
    return ledger;
  }

  /** An equal ledger that can be updated independently. */
  copy(): KeyLedger {
    const twin = new KeyLedger(this.did, this.rules);
    twin.keys = new Map(this.keys);
    twin.documents = this.documents;
    twin.conflict = this.conflict;
    twin.superseded = this.superseded;
    twin.pending = new Map(this.pending);
    twin.events = this.events;
    twin.at = this.at;
    twin.count = this.count;
    twin.countInSecond = this.countInSecond;
    return twin;
  }

  /** The newest document; undefined if no document is known or there is a conflict. */
  get head(): DidDocument | undefined {
    return this.conflict === undefined ? this.documents.at(-1) : undefined;
  }

  /** When the next pending event becomes due; infinity if there is none. */
  get nextDueAt(): number {
    return Math.min(...[...this.pending.values()].map((one) => one.dueAt));
  }

  /** Whether this event has not yet taken effect; without an id, whether there is any such event. */
  isPending(packetId?: string): boolean {
    return packetId ? this.pending.has(packetId) : this.pending.size > 0;
  }

  /** The key with this id; `<did>#<multibase>` always names the key that it spells. */
  named(keyId: string): KeyState | undefined {
    for (const key of this.keys.values()) if (key.keyId === keyId) return key;
    const spelled = spelledKey(keyId);
    return spelled === undefined ? undefined : this.keys.get(spelled);
  }

  /**
   * Apply one packet, received no earlier than the last one.
   *
   * Rejects with `InvalidPacket` if the packet is not valid; then the state has only advanced to its time.
   */
  async receive(entry: Entry): Promise<void> {
    const at = entry.receivedAt;
    this.settle(at);
    if (this.conflict !== undefined) throw conflictRefusal();
    this.requireRoom(entry);
    const signer = await this.signer(entry);
    const statement = entry.statement;
    switch (statement.kind) {
      case "event":
        if (signer.recovery) this.propose(entry.packetId, statement, signer, at);
        else this.decide(entry.packetId, statement, signer, at);
        this.events = new Set([...this.events, entry.packetId]);
        break;
      case "approval":
        this.approve(statement, signer, at);
        break;
      case "document":
        this.publish(entry.packetId, statement.document, at);
    }
    this.countInSecond = at === this.at ? this.countInSecond + 1 : 1;
    this.count++;
    this.at = at;
    this.settle(at);
  }

  /**
   * Apply the pending events that are due by `until` and have their approvals.
   *
   * Each is judged as of the moment it became due, or of the last packet, whichever is later.
   */
  settle(until: number): void {
    const due = [...this.pending.values()].filter((pending) => pending.dueAt <= until);
    if (due.length === 0) return;
    due.sort((one, other) => one.dueAt - other.dueAt || (one.packetId < other.packetId ? -1 : 1));
    let electorate = this.electorates();
    for (const pending of due) {
      const moment = Math.max(pending.dueAt, this.at);
      if (isApproved(pending, electorate(moment))) {
        this.pending.delete(pending.packetId);
        this.fulfil(pending, moment);
        electorate = this.electorates();
      }
    }
  }

  // Signers

  private requireRoom(entry: Entry): void {
    const inSecond = entry.receivedAt === this.at ? this.countInSecond : 0;
    if (this.count < MAX_CHAIN_EVENTS && inSecond < MAX_CHAIN_EVENTS_A_SECOND) return;
    const statement = entry.statement;
    if (statement.kind === "event" && statement.event === "REVOKE") {
      const key = this.named(statement.keyId);
      // A thief must not be able to fill the chain so that the stolen key cannot be revoked.
      if (key !== undefined && key.revokedAt === undefined) return;
    }
    throw policyRefusal("the DID has too many identity packets", "too_many_key_events");
  }

  /**
   * The key that signed, if it is valid in that second and may sign such a packet. Rejects with
   * `InvalidPacket` otherwise.
   */
  private async signer(entry: Entry): Promise<KeyState> {
    const at = entry.receivedAt;
    const skew = this.rules.clockSkewSeconds;
    const recoveryToo = entry.statement.kind !== "document";
    for (const key of newestFirst(this.keys.values())) {
      const allowed = may(key, "packet") || (key.recovery && recoveryToo);
      if (allowed && standing(key, at, skew) === "valid" && (await entry.isSignedBy(key.publicKey))) return key;
    }
    if (this.keys.size === 0) throw refused("the author's key is not known here", "unresolved_key");
    throw await explain(this.keys.values(), at, skew, "packet", entry.isSignedBy);
  }

  // KEY_EVENT

  /** Apply an event by a signing key: it takes effect at once, and overrides pending events. */
  private decide(packetId: string, event: KeyEvent, signer: KeyState, at: number): void {
    requireBegun(signer, at);
    const overridden = this.overriddenBy(event);
    const isVeto = event.event === "REVOKE" && overridden.length > 0 && this.named(event.keyId) === undefined;
    if (!isVeto) {
      this.checkNames(event);
      this.requireKeyRoom(event, MAX_METHODS, at);
    }
    for (const pending of overridden) this.drop(pending);
    if (!isVeto) this.takeEffect(event, packetId);
  }

  /** Keep an event by a recovery key, to wait for its delay and its approvals. */
  private propose(packetId: string, event: KeyEvent, signer: KeyState, at: number): void {
    requireBegun(signer, at);
    this.requirePolicy(at);
    this.checkNames(event);
    if (!EFFECTIVE.includes(event.event)) return;
    this.pending.set(packetId, {
      packetId,
      event,
      signer: signer.publicKey,
      dueAt: at + this.rules.recoveryDelaySeconds,
      approvedBy: new Set([signer.publicKey]),
    });
  }

  /** Apply a pending event, unless the id or key that it introduces has been used in the meantime. */
  private fulfil(pending: PendingEvent, at: number): void {
    try {
      this.checkNames(pending.event);
      // Twice the room: a thief must not be able to fill the room that recovery needs.
      this.requireKeyRoom(pending.event, 2 * MAX_METHODS, at);
    } catch (error) {
      if (!(error instanceof InvalidPacket)) throw error;
      this.forget(pending.packetId);
      return;
    }
    this.takeEffect(pending.event, pending.packetId);
  }

  /** Refuse an event that names keys which it cannot name. No key and no id is used twice. */
  private checkNames(event: KeyEvent): void {
    if (event.event === "REVOKE" && this.named(event.keyId) === undefined) {
      refuse("key_id names no key of this DID", "unknown_key");
    }
    if (event.publicKey === undefined) return;
    if (this.keys.has(event.publicKey) || [...this.keys.values()].some((key) => key.keyId === event.keyId)) {
      refuse("the key or its id is in the chain already", "key_known");
    }
    if (event.replaces !== undefined && this.named(event.replaces) === undefined) {
      refuse("replaces names no key of this DID", "unknown_key");
    }
  }

  private requireKeyRoom(event: KeyEvent, most: number, at: number): void {
    const skew = this.rules.clockSkewSeconds;
    const signing = [...this.keys.values()].filter((key) => !key.recovery && !isOver(key, at, skew)).length;
    if (event.publicKey !== undefined && signing >= most) {
      throw policyRefusal("the DID has too many live keys", "too_many_keys");
    }
  }

  private takeEffect(event: KeyEvent, packetId: string): void {
    const revoked = event.event === "REVOKE" ? this.named(event.keyId) : undefined;
    if (revoked !== undefined) {
      const revokedAt = earlier(revoked.revokedAt, event.revokedAt); // never undone
      this.keys.set(revoked.publicKey, { ...revoked, revokedAt });
    }
    if (event.publicKey === undefined || event.validFrom === undefined) return;
    let role = { authentication: true, assertion: true };
    const old = event.replaces === undefined ? undefined : this.named(event.replaces);
    if (old !== undefined) {
      // The new key takes over the role of the old one.
      if (!old.recovery) role = { authentication: old.authentication, assertion: old.assertion };
      this.keys.set(old.publicKey, { ...old, validUntil: earlier(old.validUntil, event.validFrom) });
    }
    const more = { ...role, validUntil: event.validUntil, introducedBy: packetId };
    this.keys.set(event.publicKey, newKey(event.keyId, event.publicKey, event.validFrom, more));
  }

  // Recovery

  /** Apply an approval. By itself it changes no key. */
  private approve(approval: RecoveryApproval, signer: KeyState, at: number): void {
    if (!signer.recovery) throw refused("an approval is signed by a recovery key", "recovery_key_required");
    this.requirePolicy(at);
    if (!this.electorates()(at).eligible.has(signer.publicKey)) {
      throw refused("this recovery key has no say in the policy", "recovery_key_not_eligible");
    }
    if (!this.events.has(approval.targetEvent)) {
      refuse("target_event names no valid KEY_EVENT of this DID", "unknown_target");
    }
    const pending = this.pending.get(approval.targetEvent);
    if (pending !== undefined) {
      const approvedBy = new Set([...pending.approvedBy, signer.publicKey]); // a second one changes nothing
      this.pending.set(pending.packetId, { ...pending, approvedBy });
    }
  }

  private electorates(): (moment: number) => Electorate {
    return electorates(this.keys.values(), this.documents.at(-1)?.recoveryPolicy);
  }

  private requirePolicy(at: number): void {
    if (this.electorates()(at).needed === undefined) {
      throw refused("the document's recovery policy cannot be met", "recovery_policy_invalid");
    }
  }

  /** The pending events that name a key which this event also names. */
  private overriddenBy(event: KeyEvent): PendingEvent[] {
    if (!EFFECTIVE.includes(event.event)) return [];
    const named = this.names(event);
    return [...this.pending.values()].filter((one) => [...this.names(one.event)].some((name) => named.has(name)));
  }

  /** The keys that an event names: by id, and by public key if that is known. */
  private names(event: KeyEvent): Set<string> {
    const names = new Set<string>();
    for (const keyId of [event.keyId, event.replaces]) {
      if (keyId === undefined) continue;
      names.add(keyId);
      const key = this.named(keyId)?.publicKey ?? spelledKey(keyId);
      if (key !== undefined) names.add(key);
    }
    if (event.publicKey !== undefined) names.add(event.publicKey);
    return names;
  }

  private drop(pending: PendingEvent): void {
    this.pending.delete(pending.packetId);
    this.forget(pending.packetId);
  }

  private forget(packetId: string): void {
    this.events = new Set([...this.events].filter((id) => id !== packetId));
  }

  // Documents

  /** Take over configured documents, in the order of their links, which is not that of the argument. */
  private beginWith(documents: Iterable<DidDocument>): void {
    const waiting = new Map([...documents].map((document) => [document.hash, document]));
    if ([...waiting.values()].some((document) => document.did !== this.did)) {
      refuse("a configured document is another DID's");
    }
    while (waiting.size > 0) {
      // A document whose predecessor is not among them begins the chain: the program vouches for it.
      const head = this.head;
      const following = [...waiting.values()].filter(({ prevHash }) =>
        head === undefined ? prevHash === undefined || !waiting.has(prevHash) : prevHash === head.hash,
      );
      const [next] = following;
      if (next === undefined || following.length > 1) {
        this.documents = [...this.documents, ...waiting.values()];
        this.conflict = "the configured documents do not form one chain";
        return;
      }
      waiting.delete(next.hash);
      this.becomeHead(next, undefined);
    }
  }

  /** Apply a published document: the first one, or a successor of the head. */
  private publish(packetId: string, document: DidDocument, at: number): void {
    const head = this.head;
    if (head !== undefined && document.hash === head.hash) return; // published again
    const isRival = document.prevHash !== undefined && this.superseded.has(document.prevHash);
    const isKnown = this.documents.some((known) => known.canonical === document.canonical);
    if (isKnown || !(isRival || document.prevHash === head?.hash)) {
      refuse("the document does not succeed the newest one", "document_not_linked");
    }
    if (head !== undefined) this.checkMethods(document);
    if (isRival) {
      this.documents = [...this.documents, document];
      this.conflict = `two documents succeed ${document.prevHash}`;
      return;
    }
    const after = underDocument(this.keys, document, packetId);
    const skew = this.rules.clockSkewSeconds;
    if (![...after.values()].some((key) => may(key, "packet") && !isOver(key, at, skew))) {
      // If accepted, it would permanently prevent the DID from signing: nothing could correct it.
      refuse("the document leaves no key that may sign", "document_without_keys");
    }
    this.becomeHead(document, packetId);
  }

  /** Refuse a successor that lists a key unknown to the chain or under another id: only KEY_EVENTs add keys. */
  private checkMethods(document: DidDocument): void {
    for (const method of document.methods) {
      if (this.keys.get(method.publicKey)?.keyId !== method.keyId) {
        refuse("the document lists a key that no event has introduced", "document_key_unknown");
      }
    }
  }

  private becomeHead(document: DidDocument, introducedBy: string | undefined): void {
    this.keys = underDocument(this.keys, document, introducedBy);
    this.documents = [...this.documents, document];
    if (document.prevHash !== undefined) this.superseded = new Set([...this.superseded, document.prevHash]);
  }
}

/** The error for any signature while the documents of a DID conflict, for the caller to throw. */
export function conflictRefusal(): InvalidPacket {
  return refused("the author's documents are in conflict", "document_conflict");
}

function requireBegun(signer: KeyState, at: number): void {
  // a chain begins with a key whose window has begun; the clock skew does not count here.
  if (signer.introducedBy === undefined && at < signer.validFrom) {
    throw new InvalidPacket("key_not_yet_valid", "the signing key is not valid yet");
  }
}

function policyRefusal(reason: string, detail: string): InvalidPacket {
  return new InvalidPacket("policy_rejected", reason, detail);
}
