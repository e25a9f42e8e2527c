/** The options of a relay connection. */

// Core: no I/O, no clock, no randomness (held by tests/layout.test.ts).

/** How a relay connection behaves. All times are seconds, all sizes bytes. */
export interface Options {
  /** How long opening may take in all, over several attempts, before it rejects with `ConnectionFailed`. */
  readonly connectTimeout: number;
  /** How long one attempt to connect may take. */
  readonly handshakeTimeout: number;
  /**
   * How long to wait for the relay's manifest. Without it, the relay's first challenge shows which extensions it has;
   * otherwise it counts as plain.
   */
  readonly manifestTimeout: number;
  /** The relay is probed after this much silence while something is awaited. */
  readonly pingInterval: number;
  /** How long a probe may go unanswered before the connection counts as dead; 3 s after a sleep. */
  readonly pingTimeout: number;

  /** The longest wait before the first attempt to reconnect; it doubles with each attempt. */
  readonly backoffBase: number;
  /** The longest wait between attempts. */
  readonly backoffCap: number;
  /** A connection that lasted this long resets the backoff. */
  readonly stableAfter: number;

  /**
   * When to prove the identity: never, once the relay refuses a request because the session is not authenticated, or on
   * each connection before any request.
   */
  readonly authenticate: "never" | "when_needed" | "always";
  /** The capabilities to request in AUTH; undefined requests all that the relay grants. */
  readonly capabilities: readonly string[] | undefined;
  /** How long to wait for a challenge, and for the answer to AUTH, before the attempt fails. */
  readonly authTimeout: number;
  /**
   * The DID the relay must show before a challenge is signed. If undefined, the relay is held to the DID in `pins`, or
   * else to the DID it showed first.
   */
  readonly relayId: string | undefined;

  /** How long a publish may take in all, unless the call gives a timeout. */
  readonly publishTimeout: number;
  /** How long to wait for an answer before the identical packet is sent again. */
  readonly ackTimeout: number;
  /** The most publishes in progress; the next one waits for its turn. */
  readonly maxInFlight: number;

  /** The most events one subscription holds for its consumer; when full, it leaves the relay's feed for a while. */
  readonly queueEvents: number;
  /** The most bytes one subscription holds for its consumer. */
  readonly queueBytes: number;
  /** The most packets requested in one page of history. */
  readonly pageEvents: number;
  /** After this much silence a plain relay, which does not mark the end of history, counts as having sent all of it. */
  readonly idleTimeout: number;
  /** After this much silence a relay that does mark the end of history counts as having failed to. */
  readonly historyTimeout: number;
  /** How many of the latest packet ids a subscription remembers in order to drop repeats. */
  readonly dedupPackets: number;

  /**
   * Whether to ask the relay for authors' key events before their packets are judged. If false, only the key in an
   * author's own DID counts: rotated keys are refused, revoked ones are not.
   */
  readonly resolveKeys: boolean;
  /** How long until the relay is asked again for an author's key events, so that revocations are noticed. */
  readonly keyRefreshInterval: number;
  /** How long the relay may take to answer a request for authors' keys. */
  readonly keyTimeout: number;
  /** How many authors' keys are remembered; those met least recently are forgotten first. */
  readonly keyAuthors: number;

  /** The largest message accepted from a relay, in UTF-16 code units of its text. */
  readonly maxMessageLength: number;
}

/** The defaults; the same as in Python. */
export const DEFAULT_OPTIONS: Options = {
  connectTimeout: 10,
  handshakeTimeout: 10,
  manifestTimeout: 5,
  pingInterval: 30,
  pingTimeout: 60,
  backoffBase: 0.5,
  backoffCap: 30,
  stableAfter: 10,
  authenticate: "when_needed",
  capabilities: undefined,
  authTimeout: 5,
  relayId: undefined,
  publishTimeout: 30,
  ackTimeout: 15,
  maxInFlight: 256,
  queueEvents: 1024,
  queueBytes: 8 * 2 ** 20,
  pageEvents: 500,
  idleTimeout: 3,
  historyTimeout: 30,
  dedupPackets: 16_384,
  resolveKeys: true,
  keyRefreshInterval: 300,
  keyTimeout: 30,
  keyAuthors: 16_384,
  maxMessageLength: 3 * 1_048_576 + 65_536,
};

/** The defaults, overridden by the given options. Throws `TypeError` for a value that cannot work. */
export function withDefaults(given: Partial<Options>): Options {
  const set = Object.fromEntries(Object.entries(given).filter(([, value]) => value !== undefined));
  const options: Options = { ...DEFAULT_OPTIONS, ...set };
  for (const [name, value] of Object.entries(options)) {
    if (!Object.hasOwn(DEFAULT_OPTIONS, name)) throw new TypeError(`there is no option ${name}`);
    if (typeof value === "number" && !(value > 0)) throw new TypeError(`${name} must be positive, not ${value}`);
  }
  if (!["never", "when_needed", "always"].includes(options.authenticate)) {
    throw new TypeError("authenticate must be never, when_needed or always");
  }
  if (options.backoffCap < options.backoffBase) throw new TypeError("backoffCap must not be below backoffBase");
  if (options.pageEvents > options.queueEvents) throw new TypeError("pageEvents must not exceed queueEvents");
  if (options.keyAuthors < 1024) throw new TypeError("keyAuthors must be at least 1024");
  if (options.dedupPackets < 2) throw new TypeError("dedupPackets must be at least 2");
  return options;
}
