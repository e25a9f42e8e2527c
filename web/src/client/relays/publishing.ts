/**
 * The publishes in progress on one relay connection.
 *
 * A publish ends in exactly one of three ways: the relay acknowledged it, the relay refused it for good, or its
 * time ran out. Silence is never success. In between it is in one of these places:
 *
 *     waiting ──sent──▶ in flight ──OK / final ERROR──▶ settled
 *        ▲                  │
 *        └── passing ERROR, connection lost, no answer within ackTimeout
 *
 * A publish refused for lack of authentication waits, *parked*, until authentication has been decided. Every
 * sending is the same text, `client_msg_id` included, so an answer to any of them settles it, and a
 * relay that had stored the first says `duplicate`, which is success. When the relay names a time to come back,
 * every publish waits for it, in the order they were made: the budget belongs to the session.
 */

// Core: no I/O, no clock, no randomness (held by tests/layout.test.ts).

import { RequestRefused, RequestTimeout, type StrataError } from "../protocol/errors.js";
import type { JsonObject } from "../protocol/json.js";
import { isObject, member } from "../protocol/json.js";
import { type ErrorMessage, type Ok, publishFrame } from "../protocol/wire.js";
import { MAX_RETRY_AFTER_SECONDS, type Random, retryDelay } from "./backoff.js";
import type { Options } from "./options.js";
import type { Published, Statistics } from "./values.js";

/** Names one publish in progress: its `client_msg_id`. */
export type Handle = string;

/** A publish has ended: with the relay's word, or with the error to throw. */
export interface PublishSettled {
  readonly kind: "published";
  readonly handle: Handle;
  readonly outcome: Published | StrataError;
}

interface Pending {
  readonly packetId: string;
  readonly frame: string;
  readonly timeout: number;
  readonly deadline: number;
  /** In flight: when to stop waiting for the answer. Waiting: not to be sent before this. */
  dueAt: number;
  inFlight: boolean;
  sent: boolean;
  /** Refusals that may pass, so far. */
  attempts: number;
  /** Waiting: until authentication is decided, whatever `dueAt` says. */
  parked: boolean;
  /** In flight: sent before the session was authenticated, so a refusal may be about that. */
  anonymous: boolean;
  /** The answer to the latest sending, if it was a passing refusal. */
  refusal: RequestRefused | undefined;
}

/** Owns every publish in progress; appends frames to `outbox` and endings to `settled`. */
export class Publishing {
  settled: PublishSettled[] = [];
  /** No later than the next moment at which `handleTimer` has work; it may be earlier. */
  wakeAt = Infinity;
  // In the order they were made, which is the order of sending and sending again.
  private readonly pending = new Map<Handle, Pending>();
  private last = 0;
  private connected = false;
  private forbidden: StrataError | undefined;
  private holdUntil = -Infinity;
  private heldBy: RequestRefused | undefined; // the refusal that named this time

  constructor(
    private readonly options: Options,
    private readonly statistics: Statistics,
    private readonly random: Random,
    private readonly outbox: string[],
  ) {}

  /** How many are in progress. */
  get size(): number {
    return this.pending.size;
  }

  /** Begin to publish a packet given by its canonical text; it is sent once a connection is there. */
  add(packetId: string, canonical: string, timeout: number, now: number, given = timeout): Handle {
    const handle = `p${++this.last}`;
    const pending: Pending = {
      packetId,
      frame: publishFrame(canonical, handle),
      timeout: given,
      deadline: now + timeout,
      dueAt: -Infinity,
      inFlight: false,
      sent: false,
      attempts: 0,
      parked: false,
      anonymous: false,
      refusal: undefined,
    };
    this.pending.set(handle, pending);
    this.statistics.publishes++;
    this.wakeBy(pending.deadline);
    if (this.connected) this.sendIfDue(handle, pending, now);
    return handle;
  }

  /** Forget a publish that nobody waits for. The relay may have stored the packet, or may yet. */
  cancel(handle: Handle): void {
    this.pending.delete(handle);
  }

  /** Send, or send again, everything that has no answer. `forbidden`: why this session must not publish. */
  connectionMade(now: number, forbidden: StrataError | undefined): void {
    this.connected = true;
    this.forbidden = forbidden;
    this.sendAll(now);
  }

  /**
   * The session has been authenticated: packets refused for lack of that go out again. It has another budget from now
   * on.
   */
  authorize(now: number, forbidden: StrataError | undefined): void {
    this.forbidden = forbidden;
    this.holdUntil = -Infinity;
    this.heldBy = undefined;
    for (const pending of this.pending.values()) {
      pending.anonymous = pending.inFlight;
      if (pending.parked) {
        pending.parked = false;
        pending.dueAt = -Infinity;
      }
    }
    this.sendAll(now);
  }

  /** Authentication has failed: the relay's refusals stand, and `error` is their cause. */
  giveUp(error: StrataError): void {
    for (const [handle, { parked, refusal }] of [...this.pending]) {
      if (!parked || refusal === undefined) continue;
      refusal.cause = error;
      this.refuse(handle, refusal);
    }
  }

  /** No answer will come to the packets in flight: they wait for the next connection. */
  connectionLost(): void {
    this.connected = false;
    this.forbidden = undefined;
    for (const pending of this.pending.values()) {
      if (!pending.inFlight && !pending.parked) continue;
      pending.inFlight = pending.parked = false;
      pending.dueAt = -Infinity;
    }
  }

  /**
   * Settle what the OK answers; false if it answers nothing in progress here. An OK for another packet than the
   * one sent is no answer: to believe it would be to take silence for success.
   */
  receiveOk(message: Ok): boolean {
    const handle = this.find(message.client_msg_id, message.packet_id);
    if (handle === undefined || this.pending.get(handle)?.packetId !== message.packet_id) return false;
    this.pending.delete(handle);
    this.statistics.publishesAcknowledged++;
    if (message.duplicate === true) this.statistics.publishesDuplicate++;
    const outcome: Published = {
      packetId: message.packet_id,
      receivedAt: message.received_at,
      duplicate: message.duplicate ?? false,
      queued: message.status === "QUEUED",
      downgradedTo: downgrade(message.relay_annotations),
    };
    this.settled.push({ kind: "published", handle, outcome });
    return true;
  }

  /** Whether the ERROR answers something in progress here. */
  awaits(message: ErrorMessage): boolean {
    return this.find(message.client_msg_id, undefined) !== undefined;
  }

  /**
   * Settle, or put off, what the ERROR answers; false if it answers nothing in progress here. `park` says that
   * authentication is under way: a packet refused for lack of it waits for the outcome.
   */
  receiveError(message: ErrorMessage, refusal: RequestRefused, now: number, park: boolean): boolean {
    const handle = this.find(message.client_msg_id, undefined);
    const pending = handle === undefined ? undefined : this.pending.get(handle);
    if (handle === undefined || pending === undefined) return false;
    // A second answer, to a packet sent twice: only the first one counts while the next is awaited.
    if (!pending.inFlight) return true;
    const retry = refusal.retry;
    if (retry === "authenticate" && park) {
      this.putOff(pending, refusal, Infinity);
      pending.parked = true;
    } else if (retry === "authenticate" && pending.anonymous) {
      // The relay judged it before it knew us; the answers may overtake each other.
      this.putOff(pending, refusal, now);
      this.sendIfDue(handle, pending, now);
    } else if (retry === "never" || retry === "authenticate") {
      this.refuse(handle, refusal);
    } else {
      const delay = retryDelay(pending.attempts, this.options, refusal.retryAfter, this.random);
      const isInTime = now + delay < pending.deadline;
      // A relay that asks for a longer wait than anybody has time for has refused this packet alone.
      const isBearable = isInTime || (refusal.retryAfter ?? 0) <= MAX_RETRY_AFTER_SECONDS;
      const isForAll = retry === "later" && isBearable && isAboutTheSession(refusal);
      if (isForAll && now + delay > this.holdUntil) {
        this.holdUntil = now + delay;
        this.heldBy = refusal;
      }
      if (!isInTime) {
        this.refuse(handle, refusal); // it could not be sent again in time: say why, not merely when
        return true;
      }
      pending.attempts++;
      this.putOff(pending, refusal, now + delay);
    }
    return true;
  }

  /** Expire publishes out of time, send those that are due, and set `wakeAt` anew. */
  handleTimer(now: number): void {
    this.wakeAt = Infinity;
    for (const [handle, pending] of [...this.pending]) {
      if (now >= pending.deadline) {
        this.expire(handle, pending);
        continue;
      }
      this.wakeBy(pending.deadline);
      if (!this.connected) continue;
      if (pending.inFlight && now >= pending.dueAt) {
        pending.inFlight = false;
        pending.dueAt = -Infinity;
      }
      this.sendIfDue(handle, pending, now);
    }
  }

  /** End every publish with this error. */
  fail(error: StrataError): void {
    for (const handle of this.pending.keys()) this.settled.push({ kind: "published", handle, outcome: error });
    this.pending.clear();
    this.wakeAt = Infinity;
  }

  private sendAll(now: number): void {
    for (const [handle, pending] of [...this.pending]) this.sendIfDue(handle, pending, now);
  }

  private putOff(pending: Pending, refusal: RequestRefused, dueAt: number): void {
    pending.inFlight = false;
    pending.refusal = refusal;
    pending.dueAt = dueAt;
    this.wakeBy(dueAt);
  }

  private sendIfDue(handle: Handle, pending: Pending, now: number): void {
    if (!pending.inFlight) {
      if (this.forbidden !== undefined) {
        this.pending.delete(handle);
        this.settled.push({ kind: "published", handle, outcome: this.forbidden });
        return;
      }
      const dueAt = Math.max(pending.dueAt, this.holdUntil);
      if (this.heldBy !== undefined && now < this.holdUntil && this.holdUntil >= pending.deadline) {
        this.refuse(handle, saidAgain(this.heldBy, this.holdUntil - now));
        return;
      }
      if (now < dueAt) {
        this.wakeBy(dueAt);
        return;
      }
      this.outbox.push(pending.frame);
      if (pending.sent) this.statistics.publishesRepeated++;
      pending.sent = pending.inFlight = true;
      pending.anonymous = false;
      pending.refusal = undefined;
      pending.dueAt = now + this.options.ackTimeout;
    }
    this.wakeBy(pending.dueAt);
  }

  private expire(handle: Handle, pending: Pending): void {
    if (pending.refusal !== undefined) {
      this.refuse(handle, pending.refusal);
      return;
    }
    this.pending.delete(handle);
    this.statistics.publishesTimedOut++;
    const outcome = new RequestTimeout(`PUBLISH ${pending.packetId}`, pending.timeout);
    this.settled.push({ kind: "published", handle, outcome });
  }

  private refuse(handle: Handle, refusal: RequestRefused): void {
    this.pending.delete(handle);
    this.statistics.publishesRefused++;
    this.settled.push({ kind: "published", handle, outcome: refusal });
  }

  /** Which publish an answer is for. A plain relay may not echo `client_msg_id`. */
  private find(clientMsgId: string | undefined, packetId: string | undefined): Handle | undefined {
    if (clientMsgId !== undefined) return this.pending.has(clientMsgId) ? clientMsgId : undefined;
    if (packetId === undefined) return undefined;
    for (const [handle, pending] of this.pending) if (pending.packetId === packetId) return handle;
    return undefined;
  }

  private wakeBy(moment: number): void {
    this.wakeAt = Math.min(this.wakeAt, moment);
  }
}

/**
 * Whether the budget that is used up is that of all publishes, and not of an author or a type alone.
 *
 * RFC-0004 has no names for budgets. This project's relay names that of a session, as every limit of one, by a detail
 * that ends so (`publish_limit`), and others otherwise (`trust_budget`).
 */
function isAboutTheSession(refusal: RequestRefused): boolean {
  return refusal.detail === undefined || refusal.detail.endsWith("_limit");
}

/** What the relay has said of another packet, and what is left of the wait that it asked for. */
function saidAgain(refusal: RequestRefused, wait: number): RequestRefused {
  const retryAfter = Math.max(1, Math.ceil(wait));
  return new RequestRefused(refusal.code, refusal.reason, { detail: refusal.detail, retryAfter });
}

/** The origin that a relay says it credits a packet with. */
function downgrade(annotations: JsonObject | undefined): string | undefined {
  const finding = annotations === undefined ? undefined : member(annotations, "provenance");
  const effective = isObject(finding) ? member(finding, "effective_origin_type") : undefined;
  return typeof effective === "string" ? effective : undefined;
}
