/**
 * The errors of the library, named as in Python's tree, and the table of wire codes.
 *
 *     StrataError
 *     ├── IdentityError        a DID, key or seed is not what it claims to be
 *     ├── InvalidInput         this side's own checks refused something:
 *     │   ├── InvalidPacket    a packet: schema, canonical form, id, signature, time
 *     │   └── InvalidMessage   a wire message: not JSON, wrong shape, unknown type
 *     ├── RequestRefused       the relay answered ERROR
 *     ├── RequestTimeout       the relay did not answer in time; the outcome is unknown
 *     ├── MissingCapability    not attempted: the relay has not granted the capability
 *     ├── ConnectionFailed     no connection, or the peer broke the protocol
 *     ├── Closed               this side closed it; nothing further will happen
 *     └── OutboxError          the outbox cannot be used, or has no room left
 */

// Core: no I/O, no clock, no randomness (held by tests/layout.test.ts).

/** What a client may do after a request has failed. */
export type Retry = "never" | "again" | "later" | "authenticate";

/** Every code that an ERROR may carry, and the advice to a client (RFC-0004 §3.5 and later additions). */
export const ERROR_CODES = {
  invalid_signature: "never",
  invalid_schema: "never",
  packet_too_large: "never",
  rate_limited: "later",
  blocked_author: "never",
  unauthenticated: "authenticate",
  internal_error: "again",
  invalid_provenance: "never",
  missing_proof: "never",
  invalid_issuer_chain: "never",
  invalid_attestation: "never",
  invalid_cursor: "never",
  unsupported_profile: "never",
  key_expired: "never",
  key_revoked: "never",
  key_not_yet_valid: "never",
  timestamp_in_future: "never",
  timestamp_too_old: "never",
  packet_expired: "never",
  policy_rejected: "never",
} as const satisfies Record<string, Retry>;

/** A code that RFC-0004 or its additions define. */
export type ErrorCode = keyof typeof ERROR_CODES;

/**
 * What to do after an ERROR with this code.
 *
 * An unknown code means that the request has failed permanently, unless the relay sent `retry_after`.
 */
export function retryAdvice(code: string, retryAfter?: number): Retry {
  if (retryAfter !== undefined) return "later";
  return Object.hasOwn(ERROR_CODES, code) ? ERROR_CODES[code as ErrorCode] : "never";
}

/** The root of every error that this library throws on purpose. */
export class StrataError extends Error {
  override get name(): string {
    return "StrataError"; // a literal in every class, because bundlers shorten the names of classes
  }
}

/** A DID, public key or seed that is not what it claims to be. */
export class IdentityError extends StrataError {
  override get name(): string {
    return "IdentityError";
  }
}

/**
 * Input that the checks on this side refused.
 *
 * `code` is the wire code that a relay answers with, `detail` the machine-readable sub-code and `reason` a sentence for
 * people. None of them quotes the input.
 */
export class InvalidInput extends StrataError {
  constructor(
    readonly code: ErrorCode,
    readonly reason: string,
    readonly detail?: string,
  ) {
    super(`${reason} (${code}${detail === undefined ? "" : `: ${detail}`})`);
  }

  override get name(): string {
    return "InvalidInput";
  }
}

/** A packet that is not valid: its schema, canonical form, id, signature or time. */
export class InvalidPacket extends InvalidInput {
  /** The limit in bytes, if the packet was too large. */
  readonly maxBytes: number | undefined;

  constructor(code: ErrorCode, reason: string, detail?: string, maxBytes?: number) {
    super(code, reason, detail);
    this.maxBytes = maxBytes;
  }

  override get name(): string {
    return "InvalidPacket";
  }
}

/** A wire message that is not valid. */
export class InvalidMessage extends InvalidInput {
  constructor(reason: string, options: { code?: ErrorCode; detail?: string } = {}) {
    super(options.code ?? "invalid_schema", reason, options.detail);
  }

  override get name(): string {
    return "InvalidMessage";
  }
}

/**
 * The relay answered a request with ERROR.
 *
 * `code` is text, because the list of codes is open; `retry` says what the client may do next. `cursor` comes with
 * `invalid_cursor` if the relay knows the last place that is still good. `cause` says why authentication did not help,
 * if it was tried.
 */
export class RequestRefused extends StrataError {
  readonly detail: string | undefined;
  /** The seconds after which the request may be sent again. */
  readonly retryAfter: number | undefined;
  readonly maxBytes: number | undefined;
  readonly cursor: string | undefined;

  constructor(
    readonly code: string,
    readonly reason: string,
    more: {
      detail?: string | undefined;
      retryAfter?: number | undefined;
      maxBytes?: number | undefined;
      cursor?: string | undefined;
    } = {},
  ) {
    const detail = more.detail === undefined ? "" : `, ${more.detail}`;
    super(`the relay refused the request: ${reason} (${code}${detail})`);
    this.detail = more.detail;
    this.retryAfter = more.retryAfter;
    this.maxBytes = more.maxBytes;
    this.cursor = more.cursor;
  }

  /** Whether the request may be tried again, and when. */
  get retry(): Retry {
    return retryAdvice(this.code, this.retryAfter);
  }

  override get name(): string {
    return "RequestRefused";
  }
}

/** No answer arrived in time. The request may or may not have taken effect; publishing again is safe. */
export class RequestTimeout extends StrataError {
  constructor(
    readonly request: string,
    /** How long the caller waited, in seconds. */
    readonly timeout: number,
  ) {
    super(`no answer to ${request} within ${timeout} s; its outcome is unknown`);
  }

  override get name(): string {
    return "RequestTimeout";
  }
}

/** The session was authenticated without a capability that the request needs, so it was not sent. */
export class MissingCapability extends StrataError {
  constructor(
    readonly capability: string,
    /** The capabilities that the relay granted. */
    readonly granted: ReadonlySet<string>,
  ) {
    const list = [...granted].sort().join(", ") || "nothing";
    super(`the relay grants this session ${list}, and not '${capability}'`);
  }

  override get name(): string {
    return "MissingCapability";
  }
}

/** No connection to the relay could be made, or it ended in a way that a retry cannot fix. */
export class ConnectionFailed extends StrataError {
  override get name(): string {
    return "ConnectionFailed";
  }
}

/** The connection or subscription was closed on this side. */
export class Closed extends StrataError {
  override get name(): string {
    return "Closed";
  }
}

/** The outbox cannot be used, or has no room left. */
export class OutboxError extends StrataError {
  override get name(): string {
    return "OutboxError";
  }
}
