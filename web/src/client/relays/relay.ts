/** A relay as a program sees it: publish, subscribe, look packets up. */

import { build } from "../building.js";
import { memoryOutbox } from "../outbox/memory.js";
import { Outbox } from "../outbox/outbox.js";
import type { OutboxStore } from "../outbox/store.js";
import { Closed, ConnectionFailed, InvalidPacket, RequestTimeout } from "../protocol/errors.js";
import type { Signer } from "../protocol/ids.js";
import type { KeyChain } from "../protocol/keys/chain.js";
import type { ReceivedPacket } from "../protocol/keys/entries.js";
import { IDENTITY_TYPES } from "../protocol/keys/statements.js";
import { Packet } from "../protocol/packets.js";
import { restore } from "../protocol/provenance.js";
import type { Moderated } from "../protocol/wire.js";
import { after } from "../timers.js";
import { checkPacket, checkPacketId, checkTimeout } from "./arguments.js";
import { Driver, type WebSocketConstructor } from "./driver.js";
import { KeyFetcher } from "./keyfetch.js";
import { type Anchors, KeyRing } from "./keyring.js";
import { type Options, withDefaults } from "./options.js";
import type { Pins } from "./pins.js";
import { Subscription } from "./subscription.js";
import {
  type Announced,
  type Authenticated,
  type Delivery,
  type FetchOptions,
  type Published,
  type PublishOptions,
  Query,
  type Statistics,
  type SubscribeOptions,
} from "./values.js";

/** How to connect: every `Options` value by name, and these. */
export interface ConnectOptions extends Partial<Options> {
  /** Whom to sign and to authenticate as. */
  readonly identity?: Signer | undefined;
  /** Where the DIDs of relays met are kept; without it each relay is held to its first DID while connected. */
  readonly pins?: Pins | undefined;
  /** Documents and keys trusted beforehand. */
  readonly anchors?: Anchors;
  /** Where packets wait until a relay has them; in memory unless given. */
  readonly outbox?: OutboxStore;
  /** The WebSocket to use where the program has none of its own. */
  readonly webSocket?: WebSocketConstructor;
  /** Called when a connection came or went, or a session was authenticated or not. What it throws is logged. */
  readonly onChange?: () => void;
}

/**
 * One relay, kept connected until `close`.
 *
 * After a cut it connects again: packets without an answer are published again, and subscriptions go on where they
 * stood. Once the relay refuses for good (an absence is no refusal), every call rejects with `ConnectionFailed`.
 */
export class Relay {
  /** Packets that wait until the relay has them, over restarts of the program where its store lasts as long. */
  readonly outbox: Outbox;
  private readonly driver: Driver;
  private readonly options: Options;
  private readonly identity: Signer | undefined;
  private readonly keys: KeyFetcher;
  private inFlight = 0;
  /** How many sessions there have been, anonymous ones among them, when the outbox was last woken. */
  private sessions = 0;
  private readonly turns: (() => void)[] = [];

  /**
   * Does nothing yet: `open` connects. Throws `ConnectionFailed` for what is no ws or wss URL, and `TypeError` for
   * options that cannot work.
   */
  constructor(
    /** The relay's address. */
    readonly url: string,
    options: ConnectOptions = {},
  ) {
    const { identity, pins, anchors, outbox, webSocket, onChange, ...rest } = options;
    this.options = withDefaults(rest);
    if (identity === undefined && this.options.authenticate === "always") {
      throw new TypeError("authenticate: 'always' needs an identity");
    }
    this.identity = identity;
    const changed = () => {
      const { connections, authentications } = this.driver.core.statistics;
      if (this.isConnected && this.sessions !== connections + authentications) {
        this.sessions = connections + authentications; // one that could not be authenticated is no other session
        this.outbox.wake();
      }
      if (this.failure !== undefined) void this.outbox.stop(this.failure); // another tab may have a connection
      try {
        onChange?.();
      } catch (error) {
        console.error("a handler of the relay connection failed", error); // and harms none of the connection
      }
    };
    this.driver = new Driver(url, this.options, { signer: identity, pins, webSocket, changed });
    const ring = new KeyRing(anchors ?? {}, this.options.keyAuthors, this.options.keyRefreshInterval);
    const source = {
      read: (authors: readonly string[], signal: AbortSignal) => this.identityPackets(authors, signal),
      announced: () => this.announced,
      now: () => this.driver.now(),
    };
    this.keys = new KeyFetcher(ring, source, this.options.keyTimeout);
    this.outbox = new Outbox(outbox ?? memoryOutbox(), (packet, how) => this.publish(packet, how));
  }

  /**
   * Connect, and authenticate with `authenticate: "always"`.
   *
   * Requests made before are answered once there is a connection. Rejects with `ConnectionFailed`, at once if trying
   * again cannot help, else after `connectTimeout` (which may be `Infinity`), and with what `authenticate` rejects
   * with; the relay is closed then.
   */
  async open(): Promise<this> {
    try {
      const opened = this.driver.open();
      opened.catch(() => undefined); // nobody waits for it where the outbox cannot be used
      this.outbox.start();
      await opened;
      if (this.options.authenticate === "always") await this.authenticate();
    } catch (error) {
      await this.close();
      throw error;
    }
    return this;
  }

  /** Close the connection: publishes and subscriptions still waiting reject with `Closed`. Idempotent. */
  async close(): Promise<void> {
    const closed = new Closed("the relay connection was closed");
    this.driver.stop(closed);
    await this.outbox.stop(closed);
  }

  /** Closes, at the end of an `await using` block. */
  [Symbol.asyncDispose](): Promise<void> {
    return this.close();
  }

  /**
   * Prove the identity to the relay; resolves once the relay has said AUTH_OK.
   *
   * Seldom needed: `authenticate: "when_needed"` does it where a relay demands it. From now on it is done on every
   * new connection before anything else is sent. Rejects with `RequestRefused`, `RequestTimeout`, `InvalidMessage` if
   * it is not the relay expected or its challenge must not be signed, `TypeError` without an identity.
   */
  async authenticate(options: { timeout?: number } = {}): Promise<Authenticated> {
    this.driver.checkOpen();
    if (this.identity === undefined || this.options.authenticate === "never") {
      throw new TypeError("authenticating needs an identity, and options that allow it");
    }
    return this.driver.authenticate(options.timeout ?? this.options.connectTimeout);
  }

  /**
   * Hand a packet to the relay; resolves once the relay has stored it durably, and only then.
   *
   * It is sent as often as it takes, over as many connections as it takes, within the timeout. Rejects with
   * `RequestRefused` if the relay refuses it for good or cannot take it in time, `MissingCapability`,
   * `RequestTimeout`, `InvalidPacket` if it is larger than the relay says it takes, `Closed`, `ConnectionFailed`.
   * After a timeout the packet may be stored or not; publishing it again is safe, for a relay keeps it once.
   */
  async publish(packet: Packet, options: PublishOptions = {}): Promise<Published> {
    this.driver.checkOpen();
    checkPacket(packet);
    checkTimeout(options.timeout);
    const timeout = options.timeout ?? this.options.publishTimeout;
    const deadline = this.driver.now() + timeout;
    await this.takeTurn(timeout, packet.packetId, options.signal);
    try {
      this.driver.checkOpen();
      const limit = this.announced?.maxPacketBytes;
      if (limit !== undefined && packet.sizeBytes > limit) {
        const reason = `the packet has ${packet.sizeBytes} bytes, the relay takes ${limit}`;
        throw new InvalidPacket("packet_too_large", reason, undefined, limit);
      }
      const left = deadline - this.driver.now();
      return await this.driver.publish(packet, { timeout, left, signal: options.signal });
    } finally {
      this.inFlight--;
      this.turns.shift()?.();
    }
  }

  /**
   * Sign `content` as of now, and `publish` it; resolves on OK only.
   *
   * Rejects with what `publish` and `build` reject with, and `TypeError` without an identity. A retry after a timeout
   * makes another packet; to repeat the same one, build it, or add it to the outbox.
   */
  async post(
    content: Readonly<Record<string, unknown>>,
    options: PublishOptions & { readonly expiresAt?: number } = {},
  ): Promise<Published> {
    if (this.identity === undefined) throw new TypeError("posting needs an identity");
    return this.publish(await build(this.identity, content, { expiresAt: options.expiresAt }), options);
  }

  /**
   * Stored packets that match, and with `live` (the default) the new ones after them.
   *
   * The request goes out at once. Throws `TypeError` for options that no relay could serve, `Closed`,
   * `ConnectionFailed`.
   */
  subscribe(options: SubscribeOptions = {}): Subscription {
    this.driver.checkOpen();
    return new Subscription(this.driver, new Query(options), this.options, this.keys, options.onLogReset);
  }

  /** Stored packets that match, at most `limit`, read page by page; ends when there are no more. */
  fetch(options: FetchOptions = {}): Subscription {
    return this.subscribe({ ...options, live: false });
  }

  /**
   * The packet with this id, or undefined if the relay does not have it.
   *
   * A relay without the `packet_ids` addition is read through until the packet turns up: narrow that by `authors`,
   * `since` and `until`. Rejects with `RequestTimeout`, and what iterating a subscription rejects with.
   */
  async get(
    packetId: string,
    options: { authors?: readonly string[] | string; since?: number; until?: number; timeout?: number } = {},
  ): Promise<Delivery | undefined> {
    checkPacketId(packetId);
    checkTimeout(options.timeout);
    const { timeout = this.options.historyTimeout, ...narrow } = options;
    const found = this.fetch({ ...narrow, packetIds: packetId, limit: 1 });
    let isLate = false;
    const late = after(timeout, () => {
      isLate = true;
      found.close();
    });
    try {
      for await (const delivery of found) return delivery;
    } finally {
      clearTimeout(late);
    }
    if (isLate) throw new RequestTimeout(`the search for ${packetId}`, timeout);
    return undefined;
  }

  /**
   * What the relay tells of an author's keys, as a chain that says which key could sign when.
   *
   * Rejects with `RequestTimeout` and what the relay's refusal is.
   */
  async keyChain(did: string): Promise<KeyChain> {
    this.driver.checkOpen();
    await this.keys.fetch(did, [], this.driver.now());
    const chain = this.keys.ring.chain(did);
    if (chain === undefined) throw new RequestTimeout(`the keys of ${did}`, this.options.keyTimeout);
    return chain;
  }

  /**
   * Send an operator's request, such as MODERATE (an extension of this project's relay), and wait for its answer.
   *
   * Rejects with `RequestRefused`, `RequestTimeout`, and `ConnectionFailed` if the connection is lost before the
   * answer: whether it took effect is unknown then.
   */
  async ask(
    message: { readonly type: string } & Readonly<Record<string, unknown>>,
    options: { timeout?: number } = {},
  ): Promise<Moderated> {
    this.driver.checkOpen();
    return this.driver.ask(message, options.timeout ?? this.options.ackTimeout);
  }

  /** What has happened since opening, as a copy that stays as it is. */
  get statistics(): Statistics {
    const current = this.driver.core.statistics;
    return { ...current, refusals: { ...current.refusals } };
  }

  /** Whether there is a connection at this moment. */
  get isConnected(): boolean {
    return this.announced !== undefined;
  }

  /** Why nothing further will happen, once that is so. */
  get failure(): Closed | ConnectionFailed | undefined {
    return this.driver.failure;
  }

  /** What the relay now connected says about itself; undefined between connections. */
  get announced(): Announced | undefined {
    return this.driver.core.announced;
  }

  /** Whom the relay takes this connection for; undefined while it is anonymous. */
  get session(): Authenticated | undefined {
    return this.driver.core.session;
  }

  /** The relay's DID, as it is expected or was first shown; undefined while neither is so. */
  get relayId(): string | undefined {
    return this.driver.core.serverId;
  }

  private async takeTurn(timeout: number, packetId: string, signal?: AbortSignal): Promise<void> {
    signal?.throwIfAborted();
    if (this.inFlight < this.options.maxInFlight) {
      this.inFlight++;
      return;
    }
    await new Promise<void>((resolve, reject) => {
      const stopWaiting = () => {
        clearTimeout(late);
        signal?.removeEventListener("abort", leave);
      };
      const turn = () => {
        stopWaiting();
        this.inFlight++;
        resolve();
      };
      const leave = () => {
        stopWaiting();
        this.turns.splice(this.turns.indexOf(turn), 1);
        reject(signal?.aborted ? signal.reason : new RequestTimeout(`PUBLISH ${packetId}`, timeout));
      };
      const late = after(timeout, leave);
      signal?.addEventListener("abort", leave, { once: true });
      this.turns.push(turn);
    });
  }

  /** Every identity packet that the relay has of these authors, whoever signed it. */
  private async *identityPackets(authors: readonly string[], signal: AbortSignal): AsyncGenerator<ReceivedPacket> {
    this.driver.checkOpen(); // it may have been closed since the keys were wanted
    this.driver.core.statistics.keyFetches++;
    const query = new Query({ authors, types: IDENTITY_TYPES, live: false });
    let arrived = () => {};
    const stream = this.driver.subscribe(query, () => arrived());
    signal.addEventListener("abort", () => arrived(), { once: true });
    try {
      while (!signal.aborted) {
        const item = stream.take();
        if (item !== undefined) {
          this.driver.step((core) => core.taken(stream, item.kind === "event", this.driver.now()));
          if (item.kind !== "event") continue;
          try {
            const { packet } = restore(item.packet, item.annotations);
            if (query.matches(packet, item.receivedAt)) yield { packet, receivedAt: item.receivedAt };
          } catch (error) {
            if (!(error instanceof InvalidPacket)) throw error; // a packet that is none proves nothing about keys
          }
        } else if (stream.phase === "ended") {
          if (stream.error !== undefined) throw stream.error;
          return;
        } else {
          await new Promise<void>((resolve) => (arrived = resolve));
        }
      }
    } finally {
      this.driver.step((core) => core.unsubscribe(stream));
    }
  }
}

/**
 * Connect to a relay.
 *
 * Rejects with `ConnectionFailed`: at once if trying again cannot help, else after `connectTimeout` seconds; with
 * `TypeError` for options that cannot work.
 */
export async function connect(url: string, options: ConnectOptions = {}): Promise<Relay> {
  return new Relay(url, options).open();
}
