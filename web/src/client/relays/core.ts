/**
 * The client's side of one relay, across any number of connections.
 *
 * The shell reports events (`connectionMade`, `receiveMessage`, `connectionLost`, `handleTimer`) and passes on the
 * application's requests. Before every message and timer it calls `look`. After every step it does the same things: it
 * sends `dataToSend()`, acts on `changes()`, drops a connection that `liveness` calls gone, and arms one timer for
 * `timer`. Times are seconds on one monotonic clock.
 *
 * A bad message from a relay never throws out of the core: it is counted and dropped.
 */

// Core: no I/O, no clock, no randomness (held by tests/layout.test.ts).

import { ConnectionFailed, InvalidMessage, RequestRefused, type StrataError } from "../protocol/errors.js";
import { decodeRelayMessage, encode, type ErrorMessage, type Event, type Moderated } from "../protocol/wire.js";
import { Authenticating, type SignatureWanted } from "./authenticating.js";
import type { Random } from "./backoff.js";
import { Liveness } from "./liveness.js";
import type { Options } from "./options.js";
import { type Handle, Publishing, type PublishSettled } from "./publishing.js";
import { Stream } from "./stream.js";
import { type Announced, type Authenticated, type Query, Statistics } from "./values.js";

/** Authentication on this connection has been decided: the relay's confirmation, or the error. */
export interface AuthenticationSettled {
  readonly kind: "authenticated";
  readonly outcome: Authenticated | StrataError;
}

/** A subscription has something to take, or has ended. */
export interface StreamChanged {
  readonly kind: "stream";
  readonly stream: Stream;
}

/** Something that the application waits for, and that has happened. */
export type Change = PublishSettled | StreamChanged | AuthenticationSettled | SignatureWanted | Answered;

/** An operator's request has ended: with the answer, or with the error. */
export interface Answered {
  readonly kind: "answered";
  readonly request: string;
  readonly outcome: Moderated | StrataError;
}

/** The identity a core authenticates as, and what it knows of relays. */
export interface CoreOptions {
  readonly options: Options;
  readonly random: Random;
  /** The DID to authenticate as. */
  readonly did?: string | undefined;
  /** The relay's address, as `addressOf` gives it. */
  readonly address?: string;
  /** The DIDs of relays met before, each with its address. */
  readonly met?: Map<string, string>;
}

/** Every publish and subscription of one relay, and the state of each. */
export class Core {
  readonly statistics = new Statistics();
  /** What the connected relay says about itself; undefined between connections. */
  announced: Announced | undefined;
  /** By how many seconds, in all, deadlines were moved because the program did not look. */
  postponed = 0;
  /** Whether the relay is still there. */
  readonly liveness: Liveness;
  private readonly options: Options;
  private readonly random: Random;
  private readonly outbox: string[] = [];
  private readonly authenticating: Authenticating;
  private readonly publishing: Publishing;
  private readonly streams = new Set<Stream>();
  private readonly byWireId = new Map<string, Stream>();
  private readonly changed = new Set<Stream>();
  private readonly asked = new Set<string>();
  private news: (AuthenticationSettled | SignatureWanted | Answered)[] = [];
  private decisions = 0;
  private isOpen = false;
  private clockOffset = 0; // Unix time minus our monotonic time
  // No later than the earliest `wakeAt` of the subscriptions: kept so that a message needs no scan.
  private streamsWakeAt = Infinity;
  private names = 0;
  private probes = 0;
  private readonly probing = new Set<string>();

  constructor({ options, random, did, address, met }: CoreOptions) {
    this.options = options;
    this.liveness = new Liveness(options);
    this.random = random;
    this.authenticating = new Authenticating(
      {
        did: options.authenticate === "never" ? undefined : did,
        serverId: options.relayId,
        address: address ?? "",
        met: met ?? new Map<string, string>(),
      },
      options,
      this.statistics,
      random,
      this.outbox,
    );
    this.publishing = new Publishing(options, this.statistics, random, this.outbox);
  }

  // What the application asks for.

  /** Hold the relay to this DID, unless the options name one. */
  expect(serverId: string | undefined): void {
    if (this.options.relayId === undefined) this.authenticating.serverId = serverId;
  }

  /**
   * Authenticate the session, now or on the next connection; ends in `AuthenticationSettled`. False if there is nothing
   * to decide: `session` and `authenticationError` have the outcome.
   */
  authenticate(now: number): boolean {
    const undecided = this.authenticating.want(now);
    this.followAuthentication(now);
    return undecided;
  }

  /** Note that the shell has signed what a `SignatureWanted` asked for, or could not. */
  signed(request: string, outcome: Uint8Array | Error, now: number): void {
    this.authenticating.signed(request, outcome, now);
    this.followAuthentication(now);
  }

  /**
   * Begin to publish a packet given by its canonical text; it ends with one `PublishSettled`. `timeout` is the time
   * left; `given` is the caller's timeout, if part of it has already passed.
   */
  publish(packetId: string, canonical: string, timeout: number, now: number, given = timeout): Handle {
    return this.publishing.add(packetId, canonical, timeout, now, given);
  }

  /** Forget a publish. If it was sent, the relay may still store the packet. */
  cancelPublish(handle: Handle): void {
    this.publishing.cancel(handle);
  }

  /** Open a subscription; SUBSCRIBE goes out now, or when there is a connection. */
  subscribe(query: Query, now: number): Stream {
    const name = `s${++this.names}`;
    const stream = new Stream(name, query, this.options, this.statistics, this.random, this.outbox);
    this.streams.add(stream);
    if (this.announced !== undefined && this.isOpen) {
      stream.connectionMade(
        this.announced,
        now,
        this.clockOffset,
        this.authenticating.obstacle("subscribe"),
      );
      this.follow(stream, undefined);
    }
    return stream;
  }

  /** Close a subscription: nothing more is queued, and UNSUBSCRIBE goes out. Idempotent. */
  unsubscribe(stream: Stream): void {
    const before = stream.wireId;
    stream.close();
    this.follow(stream, before);
  }

  /** Note that the consumer has dealt with the event it took (`Stream.taken`). */
  taken(stream: Stream, delivered: boolean, now: number): void {
    const before = stream.wireId;
    stream.taken(delivered, now);
    this.follow(stream, before);
  }

  /**
   * Send a request of another kind (an operator's MODERATE) with a `client_msg_id`. It ends with one `Answered`, whose
   * outcome is an error if the connection is lost first. Returns that id; undefined while not connected.
   */
  ask(message: { readonly type: string } & Readonly<Record<string, unknown>>): string | undefined {
    if (!this.isOpen) return undefined;
    const request = `m${++this.names}`;
    this.asked.add(request);
    this.outbox.push(encode({ ...message, client_msg_id: request }));
    return request;
  }

  /** Stop waiting for this answer. */
  cancelAsk(request: string): void {
    this.asked.delete(request);
  }

  /** Whether anything waits for the relay, so that its silence is worth a probe. */
  get isWaiting(): boolean {
    return this.isOpen && (this.streams.size > 0 || this.publishing.size > 0 || this.asked.size > 0);
  }

  // What the network brings.

  /**
   * Note, before each message and timer, that the program looks. If it did not for a while, every deadline that judges
   * the relay moves by that time: its answers may be waiting to be heard. Returns whether the program was away for so
   * long that the connection is in doubt; then the relay is probed at once.
   */
  look(now: number, unixNow: number): boolean {
    const { by, isAway } = this.liveness.look(now, unixNow);
    if (by > 0) {
      this.postponed += by;
      for (const each of [this.authenticating, this.publishing, ...this.streams]) each.postpone(by);
    }
    this.probeIfWanted(now);
    return isAway;
  }

  /**
   * Note a new connection: send what has no answer, and resume each subscription at its position. `unixNow` is the same
   * moment as `now`, in Unix seconds.
   */
  connectionMade(announced: Announced, now: number, unixNow = 0): void {
    this.announced = announced;
    this.clockOffset = unixNow - now;
    this.statistics.connections++;
    this.authenticating.connectionMade(announced.relayId, now, unixNow);
    this.takeWanted();
    if (!this.authenticating.isPending) this.open(announced, now);
  }

  /**
   * Note the end of the connection. Publishes in flight and subscriptions wait for the next one; operators' requests
   * end with `error`.
   */
  connectionLost(error?: StrataError): void {
    if (this.announced === undefined) return;
    this.announced = undefined;
    this.isOpen = false;
    this.statistics.connectionsLost++;
    this.authenticating.connectionLost();
    this.liveness.connectionLost();
    this.outbox.length = 0;
    this.probing.clear();
    this.byWireId.clear();
    for (const stream of this.streams) stream.connectionLost();
    this.publishing.connectionLost();
    const outcome = error ?? new ConnectionFailed("the connection was lost before the answer");
    for (const request of this.asked) this.news.push({ kind: "answered", request, outcome });
    this.asked.clear();
  }

  /** Process one frame from the relay. */
  receiveMessage(frame: string, now: number): void {
    this.liveness.heard(now);
    let message: ReturnType<typeof decodeRelayMessage>;
    try {
      message = decodeRelayMessage(frame);
    } catch (error) {
      if (!(error instanceof InvalidMessage)) throw error;
      this.statistics.messagesInvalid++;
      return;
    }
    switch (message.type) {
      case "EVENT":
        this.receiveEvent(message, now, frame.length);
        break;
      case "OK":
        if (!this.publishing.receiveOk(message)) this.blameUnlessOurs(message.client_msg_id);
        break;
      case "ERROR":
        this.receiveError(message, now);
        break;
      case "END_OF_HISTORY": {
        const stream = this.byWireId.get(message.subscription_id);
        if (stream === undefined) {
          // Only now: an UNSUBSCRIBE sent right after the SUBSCRIBE would cancel it, and the relay would not answer.
          const { subscription_id } = message;
          if (this.isProbe(subscription_id)) this.outbox.push(encode({ type: "UNSUBSCRIBE", subscription_id }));
          break;
        }
        const before = stream.wireId;
        stream.receiveEndOfHistory(message, now);
        this.follow(stream, before);
        break;
      }
      case "AUTH_CHALLENGE":
        this.learn(message.extensions);
        this.authenticating.receiveChallenge(message, now);
        this.followAuthentication(now);
        break;
      case "AUTH_OK":
        this.learn(message.extensions);
        if (!this.authenticating.receiveOk(message)) this.statistics.messagesInvalid++;
        this.followAuthentication(now);
        break;
      case "MODERATED":
        this.answered(message.client_msg_id, message);
    }
  }

  /** Do what is due at `now`. Early calls are harmless, and late ones after a `look`. */
  handleTimer(now: number): void {
    this.liveness.handleTimer(now, this.isWaiting, this.publishing.sizesInFlight.length > 0);
    this.probeIfWanted(now);
    if (now >= this.authenticating.wakeAt) {
      this.authenticating.handleTimer(now);
      this.followAuthentication(now);
    }
    if (now >= this.publishing.wakeAt) this.publishing.handleTimer(now);
    if (now < this.streamsWakeAt) return;
    this.streamsWakeAt = Infinity;
    for (const stream of [...this.streams]) {
      const before = stream.wireId;
      stream.handleTimer(now);
      this.follow(stream, before);
    }
  }

  /** End every request, publish and subscription with this error, permanently. */
  fail(error: StrataError): void {
    this.connectionLost(error);
    this.liveness.end();
    this.news.push({ kind: "authenticated", outcome: error });
    this.publishing.fail(error);
    for (const stream of [...this.streams]) {
      stream.close(error);
      this.follow(stream, undefined);
    }
    this.streamsWakeAt = Infinity;
  }

  // What comes out.

  /** The text frames to send now, in order. Each is returned once. */
  dataToSend(): string[] {
    return this.outbox.splice(0);
  }

  /** What has happened since the last call that the application is waiting for. */
  changes(): Change[] {
    const changes: Change[] = [
      ...this.news,
      ...this.publishing.settled,
      ...[...this.changed].map((stream) => ({ kind: "stream", stream }) as const),
    ];
    this.news = [];
    this.publishing.settled = [];
    this.changed.clear();
    return changes;
  }

  /** When to call `handleTimer`; infinity while there is nothing to wait for. */
  get timer(): number {
    return Math.min(this.streamsWakeAt, this.publishing.wakeAt, this.authenticating.wakeAt, this.liveness.wakeAt);
  }

  /** The identity the relay has confirmed for this session; undefined while it is anonymous. */
  get session(): Authenticated | undefined {
    return this.authenticating.session;
  }

  /** Why authentication has failed on this connection; undefined if it has not. */
  get authenticationError(): StrataError | undefined {
    return this.authenticating.error;
  }

  /** The DID the relay is held to; undefined until one is known. */
  get serverId(): string | undefined {
    return this.authenticating.serverId;
  }

  // Dispatch.

  private receiveEvent(message: Event, now: number, length: number): void {
    this.statistics.eventsReceived++;
    const wireId = message.subscription_id;
    // unsolicited events, and events of a subscription that was left, are dropped.
    const stream = wireId === undefined ? undefined : this.byWireId.get(wireId);
    if (stream === undefined) {
      this.statistics.eventsUnclaimed++;
      return;
    }
    stream.receiveEvent(message, now, length);
    this.changed.add(stream);
    this.follow(stream, wireId);
  }

  private receiveError(message: ErrorMessage, now: number): void {
    this.countRefusal(message.code);
    const refusal = new RequestRefused(message.code, message.reason, {
      detail: message.detail,
      retryAfter: message.retry_after,
      maxBytes: message.max_bytes,
      cursor: message.cursor,
    });
    if (this.authenticating.receiveError(message, refusal, now)) {
      this.followAuthentication(now);
      return;
    }
    if (this.answered(message.client_msg_id, refusal)) return;
    const wireId = message.subscription_id || message.client_msg_id;
    const stream = wireId === undefined ? undefined : this.byWireId.get(wireId);
    let park = false;
    if (refusal.retry === "authenticate" && (stream !== undefined || this.publishing.awaits(message))) {
      // Only for a request of ours: an unrelated ERROR must not make us authenticate.
      park = this.authenticating.want(now);
      refusal.cause = this.authenticating.error;
      this.takeWanted();
    }
    if (this.publishing.receiveError(message, refusal, now, park)) return;
    if (stream === undefined) {
      if (wireId === undefined || !this.isProbe(wireId)) this.blameUnlessOurs(wireId);
      return;
    }
    stream.receiveError(refusal, now, park);
    this.changed.add(stream); // it may have a `LogReset` to take
    this.follow(stream, wireId);
  }

  /** Send a small request, if that is due and the relay marks the end of history: any answer shows that it is there. */
  private probeIfWanted(now: number): void {
    if (!this.liveness.wantsProbe) return;
    const canProbe = this.announced?.extensions.has("history_marker") === true;
    this.liveness.probed(now, canProbe ? this.publishing.sizesInFlight : undefined);
    if (!canProbe) return;
    const id = `k${++this.probes}`;
    this.probing.add(id);
    const filters = { packet_ids: [`0x${"0".repeat(64)}`], limit: 1, until: 0 };
    this.outbox.push(encode({ type: "SUBSCRIBE", subscription_id: id, filters, history_marker: true, client_msg_id: id }));
  }

  /** Whether this is a probe without an answer so far. */
  private isProbe(id: string): boolean {
    const isOurs = this.probing.delete(id);
    if (isOurs && this.probing.size === 0) this.liveness.answered();
    return isOurs;
  }

  /** Count a refusal under its code. The codes are bounded, because a hostile relay may invent them. */
  private countRefusal(code: string): void {
    const refusals = this.statistics.refusals;
    const isKnown = Object.hasOwn(refusals, code);
    const isOther = !isKnown && (Object.keys(refusals).length >= MAX_CODES || code.length > LONGEST_NAME);
    const name = isOther ? "other" : code;
    refusals[name] = (Object.hasOwn(refusals, name) ? (refusals[name] ?? 0) : 0) + 1;
  }

  private answered(request: string | undefined, outcome: Moderated | StrataError): boolean {
    if (request === undefined || !this.asked.delete(request)) return false;
    this.news.push({ kind: "answered", request, outcome });
    return true;
  }

  /** Note extensions announced on the connection. Open streams use them from their next SUBSCRIBE on. */
  private learn(extensions: readonly string[] | undefined): void {
    if (extensions === undefined || extensions.length === 0 || this.announced === undefined) return;
    // Bounded: a relay may announce as often as it likes.
    const named = extensions.filter((name) => name.length <= LONGEST_NAME);
    const known = new Set([...this.announced.extensions, ...named].slice(0, MAX_EXTENSIONS));
    this.announced = { ...this.announced, extensions: known };
    for (const stream of this.streams) stream.learn(this.announced);
  }

  /** Send requests on a new connection, now that nothing must come before them. */
  private open(announced: Announced, now: number): void {
    this.isOpen = true;
    this.liveness.connectionMade(now);
    const forbidden = this.authenticating.obstacle("subscribe");
    // Subscriptions first, so that a program sees the packets it publishes next.
    for (const stream of [...this.streams]) {
      stream.connectionMade(announced, now, this.clockOffset, forbidden);
      this.follow(stream, undefined);
    }
    this.publishing.connectionMade(now, this.authenticating.obstacle("publish"));
  }

  private takeWanted(): void {
    const wanted = this.authenticating.wanted;
    if (wanted === undefined) return;
    this.authenticating.wanted = undefined;
    this.news.push(wanted);
  }

  /** If authentication has been decided, act on the outcome and report it. */
  private followAuthentication(now: number): void {
    this.takeWanted();
    const authenticating = this.authenticating;
    const outcome = authenticating.session ?? authenticating.error;
    if (outcome === undefined || authenticating.decisions === this.decisions) return;
    this.decisions = authenticating.decisions;
    this.news.push({ kind: "authenticated", outcome });
    if (!this.isOpen) {
      if (this.announced !== undefined) this.open(this.announced, now);
      return;
    }
    const forbidden = authenticating.obstacle("subscribe");
    for (const stream of [...this.streams]) {
      const before = stream.wireId;
      if (outcome instanceof Error) stream.giveUp(outcome);
      else stream.authorize(now, forbidden);
      this.follow(stream, before);
    }
    if (outcome instanceof Error) this.publishing.giveUp(outcome);
    else this.publishing.authorize(now, authenticating.obstacle("publish"));
  }

  /** Update routes and timer for a stream that may have changed. */
  private follow(stream: Stream, before: string | undefined): void {
    const wireId = stream.wireId;
    if (wireId !== before) {
      if (before !== undefined) this.byWireId.delete(before);
      if (wireId !== undefined) this.byWireId.set(wireId, stream);
    }
    this.streamsWakeAt = Math.min(this.streamsWakeAt, stream.wakeAt);
    if (stream.phase === "ended" && this.streams.delete(stream)) this.changed.add(stream);
  }

  /** Count an answer as invalid unless it names a request of ours: late answers are not the relay's fault. */
  private blameUnlessOurs(request: string | undefined): void {
    if (request === undefined || !/^[apskm]/.test(request)) this.statistics.messagesInvalid++;
  }
}

const MAX_CODES = 256;
const MAX_EXTENSIONS = 256;
const LONGEST_NAME = 128; // of an extension or a code; no real one is longer
