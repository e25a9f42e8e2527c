/**
 * The client's side of authenticating one relay session (RFC-0004 §3.7).
 *
 *     unauthenticated ──AUTH──▶ authenticating ──AUTH_OK──▶ authenticated
 *            ▲                        │                          │
 *            ├─── ERROR, silence ─────┘                          │
 *            └─────────────────────── connection lost ───────────┘
 *
 * Only AUTH_OK leads to authenticated: neither the absence of an ERROR nor an answer that comes too
 * late is a success. A challenge is answered once, and only after `checkChallenge`. Authentication is *wanted* from the
 * first request for it on, over all further connections. While it is wanted and undecided, the machine is *pending*.
 *
 * Signing is asynchronous, because WebCrypto or a device does it: the machine hands out the bytes (`SignatureWanted`)
 * and continues when the shell passes in the signature (`signed`).
 */

// Core: no I/O, no clock, no randomness (held by tests/layout.test.ts).

import * as auth from "../protocol/auth.js";
import { hex } from "../protocol/bytes.js";
import {
  IdentityError,
  InvalidMessage,
  MissingCapability,
  RequestRefused,
  RequestTimeout,
  type StrataError,
} from "../protocol/errors.js";
import { type AuthChallenge, type AuthOk, encode, type ErrorMessage } from "../protocol/wire.js";
import { MAX_RETRY_AFTER_SECONDS, type Random, retryDelay } from "./backoff.js";
import type { Options } from "./options.js";
import type { Authenticated, Statistics } from "./values.js";

/** The state of authentication, as confirmed by the relay. */
export type AuthState = "unauthenticated" | "authenticating" | "authenticated";

/** The shell must sign these bytes and call `signed` with the same `request`. */
export interface SignatureWanted {
  readonly kind: "signature";
  readonly request: string;
  readonly message: Uint8Array;
}

const MAX_ATTEMPTS = 3; // AUTHs sent on one connection; after five failures a relay closes, which is final
const CLOCK_ERROR_SECONDS = 5;

interface Challenge {
  readonly message: AuthChallenge;
  /** Until when, on our clock, it is worth answering. */
  readonly usableUntil: number;
}

/** The identity to authenticate as, and the relay to authenticate to. */
export interface AuthenticatingOptions {
  /** The DID to authenticate as; undefined if there is no identity. */
  readonly did: string | undefined;
  /** The DID the relay must show; undefined holds it to the first one shown. */
  readonly serverId: string | undefined;
  readonly address: string;
  /** The DIDs of relays met before, each with its address. */
  readonly met: Map<string, string>;
}

/** Answers challenges of one relay, across connections; appends frames to `outbox`. */
export class Authenticating {
  state: AuthState = "unauthenticated";
  /** The identity and capabilities the relay has confirmed; undefined unless authenticated. */
  session: Authenticated | undefined;
  /** Why authentication failed on this connection; undefined if it has not failed. */
  error: StrataError | undefined;
  /** The DID the relay is held to; undefined until one is known. */
  serverId: string | undefined;
  /** When `handleTimer` has work to do. */
  wakeAt = Infinity;
  /** Whether authentication is under way: wanted, possible, and neither granted nor failed. */
  isPending = false;
  /** How often it has been granted or has failed; the owner compares this to notice a decision. */
  decisions = 0;
  /** Bytes to sign, for the shell. */
  wanted: SignatureWanted | undefined;
  private isWanted: boolean;
  private connected = false;
  private claimed: string | undefined; // the manifest's relay_id
  private clockOffset = 0; // Unix time minus our monotonic time
  private challenge: Challenge | undefined;
  private answered: Challenge | undefined;
  private signing: Challenge | undefined;
  private request: string | undefined;
  private requests = 0;
  private attempts = 0;
  private retryAt = -Infinity;
  private patienceEndsAt = Infinity;

  constructor(
    private readonly who: AuthenticatingOptions,
    private readonly options: Options,
    private readonly statistics: Statistics,
    private readonly random: Random,
    private readonly outbox: string[],
  ) {
    this.serverId = who.serverId;
    this.isWanted = options.authenticate === "always";
  }

  /**
   * Request an authenticated session. Returns whether a decision is still to come. False means that the request changes
   * nothing: there is no identity, the session is already authenticated, or authentication has failed and there is no
   * new challenge or no attempt left.
   */
  want(now: number): boolean {
    if (this.who.did === undefined || this.state === "authenticated") return false;
    this.isWanted = true;
    if (!this.connected || this.isPending) return true;
    if (this.error !== undefined && (this.challenge === undefined || this.attempts >= MAX_ATTEMPTS)) return false;
    this.begin(now);
    return this.isPending;
  }

  /** Why an action that needs `capability` must not be attempted on this session, or undefined. */
  obstacle(capability: string): StrataError | undefined {
    if (this.session !== undefined) {
      const granted = this.session.capabilities;
      return granted === undefined || granted.has(capability) ? undefined : new MissingCapability(capability, granted);
    }
    return this.options.authenticate === "always" ? this.error : undefined;
  }

  /**
   * Note a new connection, anonymous at first; if authentication is wanted, begin it at once.
   *
   * `claimed` is the DID in the relay's manifest. It can contradict a pin but never creates one.
   */
  connectionMade(claimed: string | undefined, now: number, unixNow: number): void {
    this.connected = true;
    this.claimed = claimed;
    this.clockOffset = unixNow - now;
    if (this.isWanted && this.who.did !== undefined) this.begin(now);
  }

  /** Note the end of the connection, and with it of the session. */
  connectionLost(): void {
    this.state = "unauthenticated";
    this.connected = this.isPending = false;
    this.session = this.error = this.wanted = undefined;
    this.challenge = this.answered = this.signing = this.request = undefined;
    this.attempts = 0;
    this.retryAt = -Infinity;
    this.wakeAt = Infinity;
  }

  /** Keep a challenge, and answer it if authentication is waiting for one. */
  receiveChallenge(message: AuthChallenge, now: number): void {
    const expires = Math.min(Math.max(message.expires_at, 0), 2 ** 53);
    const left = expires - (now + this.clockOffset);
    if (left < auth.MIN_LIFETIME_SECONDS - CLOCK_ERROR_SECONDS) this.statistics.challengesShort++;
    // If less than the minimum lifetime seems left, our clock may be wrong. Trying costs one attempt.
    const lifetime = Math.min(Math.max(left, auth.MIN_LIFETIME_SECONDS), auth.MAX_LIFETIME_SECONDS);
    this.challenge = { message, usableUntil: now + lifetime };
    if (this.isPending && this.state === "unauthenticated" && this.signing === undefined) this.proceed(now);
  }

  /** Accept AUTH_OK; false if it does not answer an AUTH of ours. */
  receiveOk(message: AuthOk): boolean {
    if (this.state !== "authenticating" || !this.answers(message.client_msg_id)) return false;
    if (message.author_id !== this.who.did) return false; // another identity's session is not ours
    this.state = "authenticated";
    this.request = undefined;
    this.isPending = false;
    this.wakeAt = Infinity;
    const granted = message.capabilities;
    this.session = { authorId: message.author_id, capabilities: granted && new Set(granted) };
    this.statistics.authentications++;
    this.decisions++;
    return true;
  }

  /**
   * Handle a refusal of AUTH; false if the ERROR is about something else. A plain relay need not echo
   * `client_msg_id`. Without it, either of the two codes that can answer AUTH counts as the answer while one is
   * awaited.
   */
  receiveError(message: ErrorMessage, refusal: RequestRefused, now: number): boolean {
    if (this.state !== "authenticating") {
      return this.request !== undefined && message.client_msg_id === this.request;
    }
    if (message.client_msg_id === undefined) {
      const codes = ["unauthenticated", "invalid_signature"];
      if (!codes.includes(message.code) || message.subscription_id !== undefined) return false;
    } else if (message.client_msg_id !== this.request) {
      return false;
    }
    this.statistics.authenticationsRefused++;
    this.attemptFailed(refusal, now);
    return true;
  }

  /** Note that the shell has signed what `request` wanted, or could not; a late answer is ignored. */
  signed(request: string, outcome: Uint8Array | Error, now: number): void {
    const taken = this.signing;
    if (taken === undefined || request !== this.request) return;
    this.signing = undefined;
    if (outcome instanceof Error) {
      const failure = new IdentityError("the signer could not sign the relay's challenge");
      failure.cause = outcome;
      this.fail(failure);
      return;
    }
    const { challenge, server_id: serverId } = taken.message;
    this.serverId = serverId; // the first use pins the DID
    if (!this.who.met.has(serverId)) this.who.met.set(serverId, this.who.address);
    this.outbox.push(
      encode({
        type: "AUTH",
        author_id: this.who.did,
        challenge,
        signature: `0x${hex(outcome)}`,
        capabilities: this.options.capabilities,
        client_msg_id: request,
      }),
    );
    this.attempts++;
    this.state = "authenticating";
    this.wakeAt = now + this.options.authTimeout;
  }

  /** Give up an attempt that has taken too long; continue after a backoff. */
  handleTimer(now: number): void {
    if (now < this.wakeAt) return;
    this.wakeAt = Infinity;
    if (this.state === "authenticating") {
      // silence is a failure.
      this.statistics.authenticationsTimedOut++;
      this.attemptFailed(new RequestTimeout("AUTH", this.options.authTimeout), now);
    } else if (this.isPending && this.signing === undefined) {
      this.proceed(now);
    }
  }

  /** Nobody looked for `by` seconds: the relay has that much more time. */
  postpone(by: number): void {
    if (this.state === "authenticating" || this.wakeAt === this.patienceEndsAt) this.wakeAt += by;
    this.patienceEndsAt += by;
  }

  private begin(now: number): void {
    this.isPending = true;
    this.error = undefined;
    this.patienceEndsAt = now + this.options.authTimeout;
    this.proceed(now);
  }

  /** Answer the challenge if that is due and there is one; otherwise wait. */
  private proceed(now: number): void {
    if (now < this.retryAt) this.wakeAt = this.retryAt;
    else if (this.challenge !== undefined && now <= this.challenge.usableUntil) this.answer(this.challenge);
    else if (now < this.patienceEndsAt) this.wakeAt = this.patienceEndsAt;
    else this.fail(this.error ?? new RequestTimeout("the wait for AUTH_CHALLENGE", this.options.authTimeout));
  }

  private answer(taken: Challenge): void {
    this.challenge = undefined; // a challenge is used once
    this.answered = taken;
    try {
      auth.checkChallenge(taken.message, this.serverId);
      this.checkAcquaintance(taken.message.server_id);
    } catch (error) {
      if (!(error instanceof InvalidMessage)) throw error;
      this.statistics.challengesRefused++;
      this.fail(error);
      return;
    }
    this.signing = taken;
    this.request = `a${++this.requests}`;
    const message = auth.signingInput(taken.message.challenge, taken.message.server_id);
    this.wanted = { kind: "signature", request: this.request, message };
    this.wakeAt = Infinity; // a signer may be a device that asks its user; if that takes too long, the relay refuses
  }

  /** Throw `InvalidMessage` if the DID that this relay shows contradicts what is known of relays. */
  private checkAcquaintance(shown: string): void {
    if (this.serverId === undefined) {
      const other = this.who.met.get(shown) ?? this.who.address;
      if (other !== this.who.address) {
        throw auth.unfit(
          `this is the DID of the relay at ${other}; where both are one relay, say so by relayId`,
          "server_id_elsewhere",
        );
      }
    } else if (this.claimed !== undefined && this.claimed !== this.serverId) {
      throw auth.unfit("the relay's manifest names another relay than the one expected", "server_id_unexpected");
    }
  }

  /** Return to unauthenticated; if that can help, retry after a backoff, with a fresh challenge (R-294…R-296). */
  private attemptFailed(error: RequestRefused | RequestTimeout, now: number): void {
    this.state = "unauthenticated";
    this.error = error;
    if (this.attempts >= MAX_ATTEMPTS || !mayPass(error)) {
      this.fail(error);
      return;
    }
    const refusal = error instanceof RequestRefused ? error : undefined;
    if (refusal?.retry === "later") this.challenge ??= this.answered; // the relay has not examined it yet
    this.retryAt = now + retryDelay(this.attempts, this.options, refusal?.retryAfter, this.random);
    this.patienceEndsAt = this.retryAt + this.options.authTimeout;
    this.proceed(now);
  }

  private fail(error: StrataError): void {
    this.error = error;
    this.isPending = false;
    this.wakeAt = Infinity;
    this.decisions++;
  }

  private answers(clientMsgId: string | undefined): boolean {
    return clientMsgId === undefined || clientMsgId === this.request;
  }
}

/** Whether another AUTH with the same key, over a fresh challenge, may succeed. */
function mayPass(error: RequestRefused | RequestTimeout): boolean {
  if (!(error instanceof RequestRefused)) return true;
  if (error.retryAfter !== undefined) return error.retryAfter <= MAX_RETRY_AFTER_SECONDS;
  if (error.code === "unauthenticated") {
    return [undefined, "challenge_expired", "challenge_unknown"].includes(error.detail);
  }
  return error.retry === "again" || error.retry === "later";
}
