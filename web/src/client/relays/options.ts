/** Everything that a relay connection can be tuned by. */

// Core: no I/O, no clock, no randomness (held by tests/layout.test.ts).

/** How a relay connection behaves. All times are seconds, all sizes bytes. */
export interface Options {
  /** How long opening may take in all, attempts included, before `ConnectionFailed`. */
  readonly connectTimeout: number;
  /** How long one attempt may take. */
  readonly handshakeTimeout: number;
  /** How long to wait for what the relay announces; without it the relay counts as a plain one. */
  readonly manifestTimeout: number;
  /** After this much silence, while something is awaited, the relay is probed. */
  readonly pingInterval: number;
  /** How long a probe may go unanswered before the connection counts as dead. */
  readonly pingTimeout: number;

  /** The first attempt to reconnect follows within this time; each further bound doubles. */
  readonly backoffBase: number;
  /** No wait between attempts is longer than this. */
  readonly backoffCap: number;
  /** A connection that lived this long has earned a fresh start of the backoff. */
  readonly stableAfter: number;

  /** When to prove the identity: never, once the relay refuses for want of it, or before anything is asked. */
  readonly authenticate: "never" | "when_needed" | "always";
  /** What to ask for in AUTH; undefined asks for all that the relay grants. */
  readonly capabilities: readonly string[] | undefined;
  /** How long to wait for a challenge, and for the answer to AUTH. */
  readonly authTimeout: number;
  /** The DID that the relay must show before a challenge is signed; undefined: the one in `pins`, or the first. */
  readonly relayId: string | undefined;

  /** How long a publish may take in all, unless the call says otherwise. */
  readonly publishTimeout: number;
  /** How long to wait for an answer before the identical packet is sent again. */
  readonly ackTimeout: number;
  /** Most publishes in progress; the next one waits for its turn. */
  readonly maxInFlight: number;

  /** Most events that one subscription holds for its consumer; then it leaves the relay's feed for a while. */
  readonly queueEvents: number;
  /** Most bytes that it holds. */
  readonly queueBytes: number;
  /** Most packets asked for in one page of history. */
  readonly pageEvents: number;
  /** After this much silence a plain relay, which marks no end, has sent all its history. */
  readonly idleTimeout: number;
  /** After this much silence a relay that does mark the end of history has failed to. */
  readonly historyTimeout: number;
  /** How many of the latest packet ids a subscription remembers in order to drop repeats. */
  readonly dedupPackets: number;

  /** Whether to ask the relay for authors' key events before their packets are judged. */
  readonly resolveKeys: boolean;
  /** After this long an author's key events are asked for again, so that revocations are noticed. */
  readonly keyRefreshInterval: number;
  /** How long the relay may take to tell the keys of authors. */
  readonly keyTimeout: number;
  /** How many authors' keys are remembered, the least recently met forgotten first. */
  readonly keyAuthors: number;

  /** Largest message taken from a relay, in UTF-16 units of its text. */
  readonly maxMessageLength: number;
}

/** What counts where a program says nothing; as in Python. */
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
  maxMessageLength: 2 * 1_048_576 + 65_536,
};

/** The defaults with these in their place. Throws `TypeError` for a value that cannot work. */
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
