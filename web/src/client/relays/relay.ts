/** A relay as a program sees it: publish, subscribe, look up packets. */

import { build } from "../building.js";
import { memoryOutbox } from "../outbox/memory.js";
import { Outbox, type Send } from "../outbox/outbox.js";
import type { OutboxStore } from "../outbox/store.js";
import { repeats, stated } from "../protocol/equivalence.js";
import { Closed, ConnectionFailed, InvalidPacket, MissingCapability, RequestRefused, RequestTimeout } from "../protocol/errors.js";
import type { Signer } from "../protocol/ids.js";
import type { KeyChain } from "../protocol/keys/chain.js";
import type { ReceivedPacket } from "../protocol/keys/entries.js";
import { IDENTITY_TYPES } from "../protocol/keys/statements.js";
import { isContentId, Packet } from "../protocol/packets.js";
import { restore } from "../protocol/provenance.js";
import type { Moderated } from "../protocol/wire.js";
import { checkPacket, checkPacketId, checkSignal, checkTimeout } from "./arguments.js";
import { Driver, type WebSocketConstructor } from "./driver.js";
import { KeyFetcher } from "./keyfetch.js";
import { type Anchors, KeyRing } from "./keyring.js";
import { type Options, withDefaults } from "./options.js";
import type { Pins } from "./pins.js";
import { notRepeated } from "./publishing.js";
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

/** The options of `connect`: every member of `Options`, and these. */
export interface ConnectOptions extends Partial<Options> {
  /** The identity to sign and authenticate as. */
  readonly identity?: Signer | undefined;
  /** Where the DIDs of relays met are kept. Without it, a `Relay` holds its relay to the first DID it shows. */
  readonly pins?: Pins | undefined;
  /** Documents and keys trusted in advance. */
  readonly anchors?: Anchors;
  /** Where packets wait until a relay has them; by default in memory. */
  readonly outbox?: OutboxStore;
  /** The WebSocket class to use; by default the global one. */
  readonly webSocket?: WebSocketConstructor;
  /** Called when a connection is made or lost, and when authentication has been decided. What it throws is logged. */
  readonly onChange?: () => void;
}

/**
 * One relay, kept connected until `close`.
 *
 * After a lost connection it reconnects: packets without an answer are published again, and subscriptions resume where
 * they stopped. Once the relay refuses permanently (being unreachable is not a refusal), every call rejects with
 * `ConnectionFailed`.
 */
export class Relay {
  /** Packets that wait until the relay has them; they survive restarts of the program if the outbox's store does. */
  readonly outbox: Outbox;
  private readonly driver: Driver;
  private readonly options: Options;
  private readonly identity: Signer | undefined;
  private readonly keys: KeyFetcher;
  private inFlight = 0;
  /** How many sessions there had been, including anonymous ones, when the outbox was last woken. */
  private sessions = 0;
  private readonly turns: (() => void)[] = [];

  /**
   * Does not connect; `open` does. Throws `ConnectionFailed` if `url` is not a ws or wss URL, and `TypeError` for
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
        this.sessions = connections + authentications; // a failed authentication does not make a new session
        this.outbox.wake();
      }
      if (this.failure !== undefined) void this.outbox.stop(this.failure); // so that another tab can send
      try {
        onChange?.();
      } catch (error) {
        console.error("a handler of the relay connection failed", error); // the connection is not affected
      }
    };
    this.driver = new Driver(url, this.options, { signer: identity, pins, webSocket, changed });
    const ring = new KeyRing(anchors ?? {}, this.options.keyAuthors, this.options.keyRefreshInterval);
    const source = {
      read: (authors: readonly string[], signal: AbortSignal) => this.identityPackets(authors, signal),
      now: () => this.driver.now(),
      patience: (seconds: number, act: () => void) => this.driver.patience(seconds, act),
    };
    this.keys = new KeyFetcher(ring, source, this.options.keyTimeout);
    const send: Send = (packet, how) => this.publish(packet, how);
    const watched = () => this.driver.watched();
    this.outbox = new Outbox(outbox ?? memoryOutbox(), send, () => this.isConnected, watched);
  }

  /**
   * Connect, and authenticate if `authenticate: "always"`.
   *
   * Requests made meanwhile are sent once there is a connection. Rejects with `ConnectionFailed` (at once if retrying
   * cannot help, else after `connectTimeout`, which may be `Infinity`), and with whatever `authenticate` rejects with;
   * the relay is then closed.
   */
  async open(): Promise<this> {
    try {
      const opened = this.driver.open();
      opened.catch(() => undefined); // nothing awaits it if starting the outbox throws
      this.outbox.start();
      await opened;
      if (this.options.authenticate === "always") await this.authenticate();
    } catch (error) {
      await this.close();
      throw error;
    }
    return this;
  }

  /** Close the connection. Publishes and subscriptions still waiting reject with `Closed`. Idempotent. */
  async close(): Promise<void> {
    const closed = new Closed("the relay connection was closed");
    this.driver.stop(closed);
    await this.outbox.stop(closed);
  }

  /** Close, at the end of an `await using` block. */
  [Symbol.asyncDispose](): Promise<void> {
    return this.close();
  }

  /**
   * Prove the identity to the relay; resolves once the relay has said AUTH_OK.
   *
   * Seldom needed: by default (`Options.authenticate`) the client authenticates when a relay requires it. After this
   * call, every new connection authenticates before it sends anything else. Rejects with `RequestRefused`,
   * `RequestTimeout`, `InvalidMessage` if it is not the expected relay or its challenge must not be signed,
   * `IdentityError` if the identity cannot sign, `TypeError` without an identity or with `authenticate: "never"`.
   */
  async authenticate(options: { timeout?: number } = {}): Promise<Authenticated> {
    this.driver.checkOpen();
    if (this.identity === undefined || this.options.authenticate === "never") {
      throw new TypeError("authenticating needs an identity, and options that allow it");
    }
    return this.driver.authenticate(options.timeout ?? this.options.connectTimeout);
  }

  /**
   * Publish a packet; resolves only once the relay has stored it durably.
   *
   * The packet is sent as many times, and over as many connections, as necessary within the timeout. Rejects with
   * `RequestRefused` if the relay refuses permanently or cannot take the packet in time, `MissingCapability`,
   * `RequestTimeout`, `InvalidPacket` if the packet is larger than the relay says it accepts, `Closed`,
   * `ConnectionFailed`. After a timeout the packet may or may not be stored. Publishing the same packet again is safe,
   * because a relay stores it once.
   */
  async publish(packet: Packet, options: PublishOptions = {}): Promise<Published> {
    this.driver.checkOpen();
    checkPacket(packet);
    checkTimeout(options.timeout);
    checkSignal(options.signal);
    const timeout = options.timeout ?? this.options.publishTimeout;
    const deadline = this.driver.watched() + timeout;
    await this.takeTurn(timeout, packet.packetId, options.signal);
    try {
      this.driver.checkOpen();
      const limit = this.announced?.maxPacketBytes;
      if (limit !== undefined && packet.sizeBytes > limit) {
        const reason = `the packet has ${packet.sizeBytes} bytes, the relay takes ${limit}`;
        throw new InvalidPacket("packet_too_large", reason, undefined, limit);
      }
      const left = deadline - this.driver.watched();
      const published = await this.driver.publish(packet, { timeout, left, signal: options.signal });
      if (published.duplicateOf !== undefined) {
        await this.checkRepeated(packet, published.duplicateOf, deadline, options.signal);
      }
      return published;
    } finally {
      this.inFlight--;
      this.turns.shift()?.();
    }
  }

  /**
   * Reject with `RequestRefused` unless the relay shows the packet `of`, and `packet` repeats it. The relay has
   * said that it does not store `packet`, so its word alone confirms nothing.
   */
  private async checkRepeated(packet: Packet, of: string, deadline: number, signal?: AbortSignal): Promise<void> {
    if (stated(packet) === undefined || !isContentId(of)) throw notRepeated(packet.packetId, false);
    // The same author's, a document too: in another's packet it counts for nothing.
    const authors = packet.authorId;
    const timeout = Math.max(deadline - this.driver.watched(), 0.001);
    const found = await this.get(of, { authors, timeout, ...(signal && { signal }) }).catch((error: unknown) => {
      const isRefused = error instanceof RequestRefused && error.retryAfter === undefined;
      if (isRefused || error instanceof MissingCapability) return undefined;
      throw error;
    });
    if (found === undefined || !repeats(found.packet, packet)) {
      throw notRepeated(packet.packetId, found !== undefined);
    }
  }

  /**
   * Sign `content` with the connection's identity and the current time, and `publish` it.
   *
   * Rejects with what `publish` and `build` reject with, and `TypeError` without an identity. Another call after a
   * timeout makes a new packet; to retry the same packet, build it and use `publish`, or add it to the outbox.
   */
  async post(
    content: Readonly<Record<string, unknown>>,
    options: PublishOptions & { readonly expiresAt?: number } = {},
  ): Promise<Published> {
    if (this.identity === undefined) throw new TypeError("posting needs an identity");
    return this.publish(await build(this.identity, content, { expiresAt: options.expiresAt }), options);
  }

  /**
   * Read stored packets that match and then, with `live` (the default), new ones.
   *
   * The request is sent at once. Throws `TypeError` for options that no relay could serve, `Closed`,
   * `ConnectionFailed`, and the reason of a signal that has aborted already.
   */
  subscribe(options: SubscribeOptions = {}): Subscription {
    this.driver.checkOpen();
    const query = new Query(options);
    options.signal?.throwIfAborted();
    return new Subscription(this.driver, query, this.options, this.keys, options);
  }

  /** Read stored packets that match, at most `limit`, page by page; ends when there are no more. */
  fetch(options: FetchOptions = {}): Subscription {
    return this.subscribe({ ...options, live: false });
  }

  /**
   * Return the packet with this id, or undefined if the relay does not have it.
   *
   * If the relay lacks the `packet_ids` extension, its history is read until the packet is found: pass `authors`,
   * `since` and `until` to narrow the search. Rejects with `RequestTimeout`, what iterating a subscription rejects with,
   * and the reason of `signal` once that aborts.
   */
  async get(
    packetId: string,
    options: { authors?: readonly string[] | string; since?: number; until?: number; timeout?: number; signal?: AbortSignal } = {},
  ): Promise<Delivery | undefined> {
    checkPacketId(packetId);
    checkTimeout(options.timeout);
    const { timeout = this.options.historyTimeout, ...narrow } = options;
    const found = this.fetch({ ...narrow, packetIds: packetId, limit: 1 });
    let isLate = false;
    const stopWaiting = this.driver.patience(timeout, () => {
      isLate = true;
      found.close();
    });
    try {
      for await (const delivery of found) return delivery;
    } finally {
      stopWaiting();
    }
    if (isLate) throw new RequestTimeout(`the search for ${packetId}`, timeout);
    return undefined;
  }

  /**
   * Ask the relay for an author's keys: a chain that says which key could sign when.
   *
   * Rejects with `RequestTimeout`, or the relay's refusal.
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
   * answer; whether the request took effect is then unknown.
   */
  async ask(
    message: { readonly type: string } & Readonly<Record<string, unknown>>,
    options: { timeout?: number } = {},
  ): Promise<Moderated> {
    this.driver.checkOpen();
    return this.driver.ask(message, options.timeout ?? this.options.ackTimeout);
  }

  /** Counts since opening, as a copy that does not change. */
  get statistics(): Statistics {
    const current = this.driver.core.statistics;
    return { ...current, refusals: { ...current.refusals } };
  }

  /** Whether there is a connection now. */
  get isConnected(): boolean {
    return this.announced !== undefined;
  }

  /** Why the connection has ended permanently; undefined while it has not. */
  get failure(): Closed | ConnectionFailed | undefined {
    return this.driver.failure;
  }

  /** What the connected relay says about itself; undefined between connections. */
  get announced(): Announced | undefined {
    return this.driver.core.announced;
  }

  /** The identity and capabilities the relay grants this connection; undefined while it is anonymous. */
  get session(): Authenticated | undefined {
    return this.driver.core.session;
  }

  /** The relay's DID, as expected or as first shown; undefined until either is known. */
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
        stopTimer();
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
      const stopTimer = this.driver.patience(timeout, leave);
      signal?.addEventListener("abort", leave, { once: true });
      this.turns.push(turn);
    });
  }

  /** Yield every identity packet the relay has of these authors, with signatures unchecked. */
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
            if (!(error instanceof InvalidPacket)) throw error; // an invalid packet proves nothing about keys
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
 * Rejects with `ConnectionFailed` (at once if retrying cannot help, else after `connectTimeout` seconds), and with
 * `TypeError` for options that cannot work.
 */
export async function connect(url: string, options: ConnectOptions = {}): Promise<Relay> {
  return new Relay(url, options).open();
}
