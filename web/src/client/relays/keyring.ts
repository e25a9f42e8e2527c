/**
 * What a relay connection knows of its authors' keys (R-075, R-336).
 *
 * An author is *known* once the relay has been asked for its identity packets. Most authors have none: their key is in
 * their DID, and remembering that costs one entry. For the others a `KeyChain` says which key could sign in the second
 * in which a relay received a packet.
 *
 * The ring need not learn of every change at once. A packet that does not verify may be signed by a key that is newer
 * than what is known here. So a packet is rejected only if the relay was asked after that packet had arrived. A reader
 * cannot notice a revocation by itself, so the client asks again from time to time (`Options.keyRefreshInterval`).
 */

// Core: no I/O, no clock, no randomness (held by tests/layout.test.ts).

import type { DidDocument } from "../protocol/documents.js";
import { InvalidPacket } from "../protocol/errors.js";
import { KeyChain } from "../protocol/keys/chain.js";
import type { ReceivedPacket } from "../protocol/keys/entries.js";
import { isIdentityType } from "../protocol/keys/statements.js";
import { DEFAULT_RULES, type KeyRules } from "../protocol/keys/states.js";
import { checkExpiry, type Packet } from "../protocol/packets.js";

/** Documents and keys trusted before any packet is read: from configuration or a bootstrap file. */
export interface Anchors {
  readonly documents?: Readonly<Record<string, readonly DidDocument[]>>;
  /** Public keys by DID. */
  readonly keys?: Readonly<Record<string, Uint8Array>>;
  readonly rules?: KeyRules;
}

interface Author {
  /** Undefined if there is only the key in the DID itself. */
  chain: KeyChain | undefined;
  /** Whether the relay sent more than a chain may hold: then every packet of this author is rejected. */
  readonly isOvergrown: boolean;
  /** When the relay was asked; the chain includes everything it had then. */
  readonly askedAt: number;
  refreshAt: number;
  /** The packets that have changed the chain since the relay was asked. */
  readonly heard: Heard[];
}

/** An identity packet that arrived on a subscription. */
interface Heard {
  readonly packet: Packet;
  readonly receivedAt: number;
  readonly arrivedAt: number;
}

/** The key chains of the authors met on one relay; those met least recently are forgotten first. */
export class KeyRing {
  /** Authors to ask for again, in the background; the caller that does so removes them. */
  readonly stale = new Set<string>();
  private readonly authors = new Map<string, Author>();
  /** Known authors of whom a packet has failed: the next one may fail too, and need another request. */
  private readonly doubtful = new Set<string>();

  constructor(
    private readonly anchors: Anchors,
    private readonly maxAuthors: number,
    private readonly refreshInterval: number,
  ) {}

  /** Whether to ask for this author along with others, before a packet of it is judged. */
  wants(did: string): boolean {
    return !this.authors.has(did) || this.doubtful.has(did);
  }

  /**
   * Store the chain of the relay's answer to a request made at `askedAt`. `isOvergrown` means that the answer was too
   * large.
   *
   * The answer may have been on its way when identity packets arrived: their changes are applied again.
   */
  async learn(
    did: string,
    chain: KeyChain | undefined,
    askedAt: number,
    how: { isOvergrown?: boolean } = {},
  ): Promise<void> {
    const heard: Heard[] = [];
    for (let whole = chain; ; ) {
      const since = this.authors.get(did)?.heard.filter((one) => one.arrivedAt >= askedAt && !heard.includes(one)) ?? [];
      if (since.length === 0) {
        this.set(did, whole, heard, askedAt, how);
        return;
      }
      for (const one of since) whole = await this.withOne(did, whole, one);
      heard.push(...since);
    }
  }

  private set(
    did: string,
    chain: KeyChain | undefined,
    heard: Heard[],
    askedAt: number,
    how: { isOvergrown?: boolean },
  ): void {
    this.authors.delete(did);
    this.authors.set(did, {
      chain,
      heard,
      isOvergrown: how.isOvergrown ?? false,
      askedAt,
      refreshAt: askedAt + this.refreshInterval,
    });
    this.stale.delete(did);
    if (this.authors.size > this.maxAuthors) {
      const oldest = this.authors.keys().next().value as string;
      this.authors.delete(oldest);
      this.doubtful.delete(oldest);
    }
  }

  /** The chain that identity packets form; undefined if there is nothing but the DID itself. */
  async build(did: string, events: readonly ReceivedPacket[]): Promise<KeyChain | undefined> {
    if (events.length === 0 && !this.names(did)) return undefined;
    return KeyChain.replay(did, events, this.options(did));
  }

  /** What is known of an author's keys, for display; undefined if the relay was not asked. */
  chain(did: string): KeyChain | undefined {
    const author = this.authors.get(did);
    return author && (author.chain ?? KeyChain.genesis(did, this.options(did)));
  }

  /**
   * Check signature, key window and expiry of a packet that the relay received at `receivedAt`.
   *
   * False means that the relay must be asked first: the author is unknown, or the packet did not verify but arrived
   * after the relay was asked, so a newer key may have signed it. An identity packet that passes takes effect from here
   * on. Rejects with `InvalidPacket`.
   */
  async verify(packet: Packet, receivedAt: number, arrivedAt: number): Promise<boolean> {
    const author = this.authors.get(packet.authorId);
    if (author === undefined) return false;
    this.authors.delete(packet.authorId);
    this.authors.set(packet.authorId, author);
    if (arrivedAt > author.refreshAt) {
      // The answer sets this anew. If the request fails, this is when it is due again.
      author.refreshAt = arrivedAt + this.refreshInterval;
      this.stale.add(packet.authorId);
    }
    try {
      await this.verifyBy(author, packet, receivedAt, arrivedAt);
    } catch (error) {
      if (!(error instanceof InvalidPacket) || error.code === "packet_expired") throw error;
      if (author.isOvergrown) throw error; // to ask again would take as long; that is done in the background
      if (author.askedAt < arrivedAt) return false;
      this.doubtful.add(packet.authorId);
      throw error;
    }
    return true;
  }

  private async verifyBy(author: Author, packet: Packet, receivedAt: number, arrivedAt: number): Promise<void> {
    if (author.isOvergrown) {
      throw new InvalidPacket("invalid_signature", "the author has too many identity packets", "too_many_key_events");
    }
    if (isIdentityType(packet.contentType)) {
      const chain = author.chain ?? KeyChain.genesis(packet.authorId, this.options(packet.authorId));
      await chain.verify(packet, receivedAt, { ingest: false });
      await this.apply({ packet, receivedAt, arrivedAt });
    } else if (author.chain === undefined) {
      await packet.verify(receivedAt);
      return;
    } else {
      await author.chain.verify(packet, receivedAt, { ingest: false });
    }
    checkExpiry(packet, receivedAt);
  }

  /** Apply a packet to the author's chain. If another one was applied meanwhile, apply it again to the new chain. */
  private async apply(one: Heard): Promise<void> {
    const did = one.packet.authorId;
    for (let author = this.authors.get(did); author !== undefined; author = this.authors.get(did)) {
      const { chain } = author;
      const next = await this.withOne(did, chain, one);
      if (this.authors.get(did) !== author || author.chain !== chain) continue;
      if (next !== chain) author.heard.push(one);
      author.chain = next;
      return;
    }
  }

  /** The chain with one more packet, or unchanged if the packet does not fit. */
  private async withOne(did: string, chain: KeyChain | undefined, one: Heard): Promise<KeyChain | undefined> {
    try {
      return await (chain ?? KeyChain.genesis(did, this.options(did))).apply(one.packet, one.receivedAt);
    } catch (error) {
      // It was valid when received, and does not fit what is known since, as after a conflict.
      if (!(error instanceof InvalidPacket)) throw error;
      return chain;
    }
  }

  private names(did: string): boolean {
    const { documents, keys } = this.anchors;
    return Object.hasOwn(documents ?? {}, did) || Object.hasOwn(keys ?? {}, did);
  }

  private options(did: string) {
    const { documents, keys, rules } = this.anchors;
    return {
      documents: (Object.hasOwn(documents ?? {}, did) ? documents?.[did] : undefined) ?? [],
      staticKey: Object.hasOwn(keys ?? {}, did) ? keys?.[did] : undefined,
      rules: rules ?? DEFAULT_RULES,
    };
  }
}
