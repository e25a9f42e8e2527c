/**
 * Which keys may sign for a DID, and when: a function of its identity packets and of time (RFC-0001 §5).
 *
 * The state of a DID at a moment depends only on that moment and on its identity packets, each with the second in which
 * a relay received it. It does not depend on the order in which the packets were passed in, nor on when the state was
 * queried. `strata.protocol.keys` in Python states the rules in full. A packet that they accept is valid, or *holds*.
 * Shared test vectors ensure that both libraries give the same verdicts.
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

/** What is known of a DID in advance, and the rules by which its keys are judged. */
export interface ChainOptions {
  /** Trusted documents, from configuration or bootstrap. */
  readonly documents?: readonly DidDocument[];
  /** A trusted key, used if there is no trusted document. */
  readonly staticKey?: Uint8Array | undefined;
  readonly rules?: KeyRules;
}

/** Why packets are not valid, by packet id. */
type Refusals = Map<string, InvalidPacket>;

/** A second, and the state after the packets that were received by then. */
type Mark = readonly [second: number, ledger: KeyLedger];

/**
 * Everything known about the keys of one DID, as an immutable value. `genesis` and `replay` make a chain; `apply` makes
 * the next one.
 */
export class KeyChain {
  private readonly cache = new Map<string, readonly KeyHex[]>();
  /** Past states: one for every 64 packets, and at the end the last one requested. */
  private past: readonly Mark[] = [];

  private constructor(
    private readonly beginning: KeyLedger,
    private readonly before: KeyLedger, // the state before the last second
    private readonly ledger: KeyLedger, // the state after it
    private readonly held: readonly Entry[],
    private readonly second: readonly Entry[], // all packets of the last second, valid or not
  ) {}

  /**
   * The chain of a DID before any packet of its own.
   *
   * With neither documents nor a key, a self-certifying DID has its own key; any other DID has none, and none of its
   * signatures count. Throws `InvalidPacket` for another DID's document and `IdentityError` if `did` is not a DID.
   */
  static genesis(did: string, options: ChainOptions = {}): KeyChain {
    const ledger = KeyLedger.begin(did, options.documents ?? [], options.staticKey, options.rules ?? DEFAULT_RULES);
    return new KeyChain(ledger, ledger, ledger, [], []);
  }

  /**
   * The chain of packets that were received earlier. They may be in any order, and repeated. A packet that is
   * not valid is left out, since anyone may have sent it to the relay or reader.
   */
  static async replay(did: string, events: Iterable<ReceivedPacket>, options: ChainOptions = {}): Promise<KeyChain> {
    return (await KeyChain.genesis(did, options).replayed(readEntries(did, events)))[0];
  }

  /** The DID that the chain belongs to. */
  get did(): string {
    return this.beginning.did;
  }

  /** The rules by which keys are judged. */
  get rules(): KeyRules {
    return this.beginning.rules;
  }

  /** The valid packets, in the order in which they count. */
  get events(): readonly ReceivedPacket[] {
    return this.held.map(({ packet, receivedAt }) => ({ packet, receivedAt }));
  }

  /** The known documents, each the successor of the previous one; rivals come last. */
  get documents(): readonly DidDocument[] {
    return this.ledger.documents;
  }

  /** The current document; undefined if none is known or several claim to be it. */
  get head(): DidDocument | undefined {
    return this.ledger.head;
  }

  /** Why no key resolves any more, as text for people; undefined without a conflict. */
  get conflict(): string | undefined {
    return this.ledger.conflict;
  }

  /** Whether any key is known at all. */
  get isResolvable(): boolean {
    return this.ledger.keys.size > 0;
  }

  /**
   * The chain with one more identity packet, which may be older than the last one. A packet with the id of one in the
   * chain changes nothing.
   *
   * Rejects with `InvalidPacket` if the packet is not valid, or with `policy_rejected` if there is no room for it.
   */
  async apply(packet: Packet, receivedAt: number): Promise<KeyChain> {
    this.requireAuthor(packet);
    if (this.held.some((entry) => entry.packetId === packet.packetId)) return this;
    const entry = new Entry(packet, receivedAt);
    if (receivedAt > this.last) {
      const next = await this.admit(entry);
      return new KeyChain(this.beginning, this.ledger, next, [...this.held, entry], [entry]);
    }
    // The packet must be valid in both orders. By the order of arrival, a key that was revoked can sign nothing more.
    if (receivedAt === this.last) await this.admit(entry);
    const all = new Set([...this.held, ...this.second, entry]);
    const [chain, refusals] = await this.replayed(all, receivedAt);
    const refusal = refusals.get(packet.packetId);
    if (refusal !== undefined) throw refusal;
    return chain;
  }

  /** The public keys, in hex, that may sign at `at`, newest first; empty in a conflict. */
  candidates(at: number, use: Use = "packet"): Promise<readonly KeyHex[]> {
    return this.keysAt(at, use, true);
  }

  /**
   * Check that the packet's signature counts, if a relay received it at `at`.
   *
   * `ingest: false` is for a reader of a packet received in the past: only what was known then counts. For an identity
   * packet, this makes all the checks of `apply`.
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
   * Rejects with `InvalidPacket`, always with `invalid_signature`; the detail gives the reason.
   */
  async verifyAuth(message: Uint8Array, signature: Uint8Array, at: number): Promise<void> {
    const signedBy: SignedBy = (key) => ed25519.verify(fromHex(key) as Uint8Array, message, signature);
    await this.judge(signedBy, at, "auth", true);
  }

  /** Whether this event (without an id: any event) is waiting for approvals or for its delay to pass (R-084…R-088). */
  async isPending(packetId: string | undefined, at: number): Promise<boolean> {
    return (await this.stateAt(at, true)).isPending(packetId);
  }

  /** The state of every key of the chain at `at`, in order of introduction; for people. */
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
   * A chain with the same beginning and these packets, and why some of them are not valid.
   *
   * Those received before `since` are known to be valid; if `since` is the last second, they are not checked again.
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

  /** The state that counts at `at`. For a reader, later packets are not known yet. */
  private async stateAt(at: number, ingest: boolean): Promise<KeyLedger> {
    const moment = Math.max(at, ingest ? this.last : at); // applied packets count, even if a clock was set back
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
   * It is computed from the latest state in the cache: a reader of history asks for one moment after another, and
   * replaying a long chain for each of them would be too expensive.
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
   * Whether the signature is by a key that could sign at any moment of a second in which packets of the chain were
   * received. Such a second is not one moment: the packet in question may have come before, between or after them.
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

/** The number of cached answers, and of packets between two past states that are kept. */
const REMEMBERED = 64;

function validKeys(state: KeyLedger, at: number, use: Use, rules: KeyRules): readonly KeyHex[] {
  if (state.conflict !== undefined) return [];
  return newestFirst(state.keys.values())
    .filter((key) => may(key, use) && standing(key, at, rules.clockSkewSeconds) === "valid")
    .map((key) => key.publicKey);
}

/**
 * The state after the packets of one second, the valid ones in their order, and why others are not valid.
 *
 * the next is the valid packet with the smallest id, but documents come before events. A packet that is not
 * valid yet may be valid after another, so after each packet all the waiting ones are tried again.
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
