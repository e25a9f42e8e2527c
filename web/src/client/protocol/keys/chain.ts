/**
 * Which keys speak for a DID, and when: a function of its identity packets and of time (RFC-0001 §5).
 *
 * All that is known of a DID at a moment follows from its identity packets, each with the second in which a
 * relay received it, and from that moment; neither from the order in which they were handed over nor from when
 * anybody looked. `strata.protocol.keys` in Python states the rules in full, and shared vectors hold both to
 * the same verdicts.
 */

// Core: no I/O, no clock, no randomness (held by tests/layout.test.ts).

import { fromHex, hex } from "../bytes.js";
import type { DidDocument, KeyHex } from "../documents.js";
import * as ed25519 from "../ed25519.js";
import { InvalidPacket } from "../errors.js";
import type { Packet } from "../packets.js";
import { Entry, inSeconds, readEntries, type ReceivedPacket } from "./entries.js";
import { conflictRefusal, KeyLedger } from "./ledger.js";
import { isIdentityType } from "./statements.js";
import {
  DEFAULT_RULES,
  explain,
  type KeyRules,
  type KeyState,
  may,
  newestFirst,
  refused,
  type SignedBy,
  standing,
  type Use,
} from "./states.js";

/** What is known of a DID beforehand, and the rules by which its keys are judged. */
export interface ChainOptions {
  /** Documents that are trusted, by configuration or bootstrap. */
  readonly documents?: readonly DidDocument[];
  /** A key that is trusted where no document is. */
  readonly staticKey?: Uint8Array | undefined;
  readonly rules?: KeyRules;
}

/** Why packets do not hold, by packet id. */
type Refusals = Map<string, InvalidPacket>;

/** The state after the packets that were received by some second. */
type Mark = readonly [second: number, ledger: KeyLedger];

/**
 * Everything known about the keys of one DID, as an immutable value. Made by `genesis` and `replay`; `apply`
 * makes the next one.
 */
export class KeyChain {
  private readonly cache = new Map<string, readonly KeyHex[]>();
  /** Past states: one for every so many packets, and at the end the last one asked for. */
  private past: readonly Mark[] = [];

  private constructor(
    private readonly beginning: KeyLedger,
    private readonly before: KeyLedger, // the state before the last second
    private readonly ledger: KeyLedger, // the state after it
    private readonly held: readonly Entry[],
    private readonly second: readonly Entry[], // all accepted in the last second, held or not
  ) {}

  /**
   * What is known of a DID before any packet of its own.
   *
   * With neither documents nor a key, a self-certifying DID has its own key; any other has none, and nothing
   * it signs counts. Throws `InvalidPacket` for another DID's document and `IdentityError` for no DID.
   */
  static genesis(did: string, options: ChainOptions = {}): KeyChain {
    const ledger = KeyLedger.begin(did, options.documents ?? [], options.staticKey, options.rules ?? DEFAULT_RULES);
    return new KeyChain(ledger, ledger, ledger, [], []);
  }

  /**
   * The chain of packets that were received before, in any order, and repeated. A packet that does not
   * hold is kept out: a relay may have been sent it, a reader handed it, by anyone.
   */
  static async replay(did: string, events: Iterable<ReceivedPacket>, options: ChainOptions = {}): Promise<KeyChain> {
    return (await KeyChain.genesis(did, options).replayed(readEntries(did, events)))[0];
  }

  /** Whose chain it is. */
  get did(): string {
    return this.beginning.did;
  }

  /** The rules by which it judges. */
  get rules(): KeyRules {
    return this.beginning.rules;
  }

  /** The packets that hold, in the order in which they count. */
  get events(): readonly ReceivedPacket[] {
    return this.held.map(({ packet, receivedAt }) => ({ packet, receivedAt }));
  }

  /** The documents known, each the successor of the one before; rivals last. */
  get documents(): readonly DidDocument[] {
    return this.ledger.documents;
  }

  /** The current document; undefined if none is known or several claim to be it. */
  get head(): DidDocument | undefined {
    return this.ledger.head;
  }

  /** Why no key resolves any more, for people. */
  get conflict(): string | undefined {
    return this.ledger.conflict;
  }

  /** Whether any key is known at all. */
  get isResolvable(): boolean {
    return this.ledger.keys.size > 0;
  }

  /**
   * The chain with one more identity packet, which may be older than the last one. One with the id of a packet
   * in the chain changes nothing.
   *
   * Rejects with `InvalidPacket` if it does not hold, or with `policy_rejected` if there is no room for it.
   */
  async apply(packet: Packet, receivedAt: number): Promise<KeyChain> {
    this.requireAuthor(packet);
    if (this.held.some((entry) => entry.packetId === packet.packetId)) return this;
    const entry = new Entry(packet, receivedAt);
    if (receivedAt > this.last) {
      const next = await this.admit(entry);
      return new KeyChain(this.beginning, this.ledger, next, [...this.held, entry], [entry]);
    }
    // What holds must hold in either order: by that of arrival, a revoked key signs nothing more.
    if (receivedAt === this.last) await this.admit(entry);
    const all = new Set([...this.held, ...this.second, entry]);
    const [chain, refusals] = await this.replayed(all, receivedAt);
    const refusal = refusals.get(packet.packetId);
    if (refusal !== undefined) throw refusal;
    return chain;
  }

  /** The public keys, in hex, that may sign at `at`, newest first; none in a conflict. */
  candidates(at: number, use: Use = "packet"): Promise<readonly KeyHex[]> {
    return this.keysAt(at, use, true);
  }

  /**
   * Check that the packet's signature counts, if a relay received it at `at`.
   *
   * With `ingest: false` a reader asks it of a packet received in the past: only what was known then counts.
   * For an identity packet this is the whole of what `apply` would check.
   *
   * Rejects with `InvalidPacket`: `invalid_signature` (details `unresolved_key`, `document_conflict`,
   * `recovery_key_not_allowed`, `key_use_not_allowed`, …), `key_expired`, `key_revoked`, `key_not_yet_valid`,
   * and `invalid_schema` for the members of an identity packet.
   */
  async verify(packet: Packet, at: number, options: { ingest?: boolean } = {}): Promise<void> {
    const ingest = options.ingest ?? true;
    this.requireAuthor(packet);
    if (isIdentityType(packet.contentType)) return this.verifyIdentityPacket(packet, at, ingest);
    const signedBy: SignedBy = (key) => packet.isSignedBy(fromHex(key) as Uint8Array);
    await this.judge(signedBy, at, "packet", ingest);
  }

  /**
   * Check an AUTH signature over `message`, made at `at`.
   *
   * Rejects with `InvalidPacket`, always with `invalid_signature`; the detail says more.
   */
  async verifyAuth(message: Uint8Array, signature: Uint8Array, at: number): Promise<void> {
    const signedBy: SignedBy = (key) => ed25519.verify(fromHex(key) as Uint8Array, message, signature);
    await this.judge(signedBy, at, "auth", true);
  }

  /** Whether this event, or where none is named any, waits for approvals or for its delay to pass (R-084…R-088). */
  async isPending(packetId: string | undefined, at: number): Promise<boolean> {
    return (await this.stateAt(at, true)).isPending(packetId);
  }

  /** Every key of the chain as it stands at `at`, in order of introduction; for people. */
  async keys(at: number): Promise<readonly KeyState[]> {
    return [...(await this.stateAt(at, true)).keys.values()];
  }

  // Replaying

  private get last(): number {
    return this.second.at(-1)?.receivedAt ?? -1;
  }

  private requireAuthor(packet: Packet): void {
    if (packet.authorId !== this.did) {
      throw new TypeError(`the chain is that of ${this.did}, not of ${packet.authorId}`);
    }
  }

  private async admit(entry: Entry): Promise<KeyLedger> {
    const ledger = this.ledger.copy();
    await ledger.receive(entry);
    return ledger;
  }

  /**
   * A chain with the same beginning and these packets, and why some of them do not hold.
   *
   * Those received before `since` are known to hold; if that is all but the last second, they are not looked
   * at again.
   */
  private async replayed(entries: Iterable<Entry>, since = 0): Promise<[KeyChain, Refusals]> {
    let before = this.beginning;
    let ledger = this.beginning;
    let held: Entry[] = [];
    let waiting = [...entries];
    if (since === this.last) {
      before = ledger = this.before;
      held = this.held.filter((entry) => entry.receivedAt < since);
      waiting = waiting.filter((entry) => entry.receivedAt >= since);
    }
    const ids = new Set(held.map((entry) => entry.packetId));
    let second: Entry[] = [];
    const refusals: Refusals = new Map();
    for (const arrived of inSeconds(waiting)) {
      before = ledger;
      second = arrived.filter((entry) => !ids.has(entry.packetId));
      const [after, holding, refusedHere] = await receiveSecond(before, second);
      ledger = after;
      held.push(...holding);
      for (const entry of holding) ids.add(entry.packetId);
      for (const [id, refusal] of refusedHere) refusals.set(id, refusal);
    }
    return [new KeyChain(this.beginning, before, ledger, held, second), refusals];
  }

  /** The state that counts at `at`. A reader does not know later packets yet. */
  private async stateAt(at: number, ingest: boolean): Promise<KeyLedger> {
    const moment = Math.max(at, ingest ? this.last : at); // what has been applied counts, even if a clock went back
    let ledger = moment < this.last ? await this.pastState(at) : this.ledger;
    if (ledger.nextDueAt <= moment) {
      ledger = ledger.copy();
      ledger.settle(moment);
    }
    return ledger;
  }

  /**
   * The state after the packets that were received by `at`.
   *
   * It goes on from the latest one that is known: whoever reads a history asks for one moment after the other,
   * and all of a long chain for each of them is too much.
   */
  private async pastState(at: number): Promise<KeyLedger> {
    const marks = this.past.slice(0, -1);
    let mark: Mark = [-1, this.beginning];
    for (const known of this.past) if (mark[0] < known[0] && known[0] <= at) mark = known;
    const lacking = this.held.filter(({ receivedAt }) => mark[0] < receivedAt && receivedAt <= at);
    let count = 0;
    for (const arrived of inSeconds(lacking)) {
      mark = [(arrived[0] as Entry).receivedAt, (await receiveSecond(mark[1], arrived))[0]];
      count += arrived.length;
      if (count >= REMEMBERED && mark[0] > (marks.at(-1)?.[0] ?? -1)) {
        marks.push(mark);
        count = 0;
      }
    }
    this.past = [...marks, mark];
    return mark[1];
  }

  // Judging

  private async keysAt(at: number, use: Use, ingest: boolean): Promise<readonly KeyHex[]> {
    const name = `${use} ${ingest} ${at}`;
    const known = this.cache.get(name);
    if (known !== undefined) return known;
    const keys = validKeys(await this.stateAt(at, ingest), at, use, this.rules);
    if (this.cache.size >= REMEMBERED) this.cache.clear();
    this.cache.set(name, keys);
    return keys;
  }

  private async judge(signedBy: SignedBy, at: number, use: Use, ingest: boolean): Promise<void> {
    for (const key of await this.keysAt(at, use, ingest)) if (await signedBy(key)) return;
    if (!ingest && (await this.signedWithin(signedBy, at, use))) return;
    const state = await this.stateAt(at, ingest);
    if (state.conflict !== undefined) throw conflictRefusal();
    if (state.keys.size === 0) throw refused("the author's key is not known here", "unresolved_key");
    throw await explain(state.keys.values(), at, this.rules.clockSkewSeconds, use, signedBy);
  }

  /**
   * Whether a key could sign at any moment of a second in which packets of the chain were received. Such a
   * second is not one moment: what a reader asks about may have come before, between or after them.
   */
  private async signedWithin(signedBy: SignedBy, at: number, use: Use): Promise<boolean> {
    const within = this.held.filter((entry) => entry.receivedAt === at);
    if (within.length === 0) return false;
    const ledger = (await this.pastState(at - 1)).copy();
    ledger.settle(at);
    for (const entry of within) {
      for (const key of validKeys(ledger, at, use, this.rules)) if (await signedBy(key)) return true;
      await ledger.receive(entry);
    }
    return false;
  }

  private async verifyIdentityPacket(packet: Packet, at: number, ingest: boolean): Promise<void> {
    if (this.held.some((entry) => entry.packet.canonical === packet.canonical)) return;
    if (ingest) {
      await this.admit(new Entry(packet, Math.max(at, this.last)));
      return;
    }
    const known = this.held.filter((entry) => entry.receivedAt <= at && entry.packetId !== packet.packetId);
    const [, refusals] = await this.replayed([...known, new Entry(packet, at)]);
    const refusal = refusals.get(packet.packetId);
    if (refusal !== undefined) throw refusal;
  }
}

/** So many answers are remembered, and a past state for every so many packets. */
const REMEMBERED = 64;

function validKeys(state: KeyLedger, at: number, use: Use, rules: KeyRules): readonly KeyHex[] {
  if (state.conflict !== undefined) return [];
  return newestFirst(state.keys.values())
    .filter((key) => may(key, use) && standing(key, at, rules.clockSkewSeconds) === "valid")
    .map((key) => key.publicKey);
}

/**
 * The state after the packets of one second, those that hold in their order, and why others do not.
 *
 * the smallest packet id that holds is next, but a document goes before events. One that does not hold
 * yet may hold after another, so each time all that wait are looked at again.
 */
async function receiveSecond(
  before: KeyLedger,
  entries: readonly Entry[],
): Promise<[KeyLedger, Entry[], Refusals]> {
  const ledger = before.copy();
  let waiting = [...entries].sort(byPrecedence);
  const held: Entry[] = [];
  const refusals: Refusals = new Map();
  for (let moved = true; moved && waiting.length > 0; ) {
    moved = false;
    for (const entry of waiting) {
      try {
        await ledger.receive(entry);
      } catch (error) {
        if (!(error instanceof InvalidPacket)) throw error;
        refusals.set(entry.packetId, error);
        continue;
      }
      held.push(entry);
      waiting = waiting.filter((other) => other.packetId !== entry.packetId);
      refusals.delete(entry.packetId);
      moved = true;
      break;
    }
  }
  return [ledger, held, refusals];
}

function byPrecedence(one: Entry, other: Entry): number {
  const key = (entry: Entry) =>
    `${entry.statement.kind === "document" ? 0 : 1}${entry.packetId}${hex(entry.packet.signatureBytes)}`;
  const [first, second] = [key(one), key(other)];
  return first < second ? -1 : first > second ? 1 : 0;
}
