/** How long to wait before trying again: full jitter. */

// Core: no I/O, no clock, no randomness (held by tests/layout.test.ts).

/** The longest wait for requests that have no deadline; a relay that asks for a longer one has refused. */
export const MAX_RETRY_AFTER_SECONDS = 3600;

const MAX_DOUBLINGS = 32;
const SPREAD = 0.2;
const FOREVER_SECONDS = 2 ** 31;
const REFUSED_BASE = 2;
const REFUSED_CAP = 60;

/** Gives values in [0, 1). */
export type Random = () => number;

/** Seconds to wait before attempt number `attempt` (from 0), uniform over [0, min(cap, base·2^attempt)). */
export function fullJitter(attempt: number, base: number, cap: number, random: Random): number {
  return random() * Math.min(cap, base * 2 ** Math.min(attempt, MAX_DOUBLINGS));
}

/** Seconds to wait if the peer said how long: never less, and up to a fifth more. */
export function afterRetryAfter(retryAfter: number, random: Random): number {
  return Math.min(Math.max(retryAfter, 0), FOREVER_SECONDS) * (1 + SPREAD * random());
}

/** Seconds to wait before a request is sent again: at least what the relay asked for, if it did, with jitter. */
export function retryDelay(
  attempt: number,
  { backoffBase, backoffCap }: { readonly backoffBase: number; readonly backoffCap: number },
  retryAfter: number | undefined,
  random: Random,
): number {
  const delay = fullJitter(attempt, backoffBase, backoffCap, random);
  return retryAfter === undefined ? delay : Math.max(delay, afterRetryAfter(retryAfter, random));
}

/**
 * How often in a row a relay has refused a request, for example for lack of a session, and how long to wait before it
 * is asked again: twice as long each time, up to a minute, and no shorter than it asks for. A relay closes connections
 * that it must refuse all the time.
 */
export class Refusals {
  private count = 0;

  constructor(private readonly random: Random) {}

  /** Seconds to wait after another refusal; `retryAfter` is what the relay asked for, counted up to an hour. */
  another(retryAfter = 0): number {
    const grown = Math.min(REFUSED_CAP, REFUSED_BASE * 2 ** Math.min(this.count++, MAX_DOUBLINGS));
    return afterRetryAfter(Math.max(grown, Math.min(retryAfter, MAX_RETRY_AFTER_SECONDS)), this.random);
  }

  /** Start again from the shortest wait: the relay has granted the request, or there is a new session. */
  over(): void {
    this.count = 0;
  }
}

/** Successive waits between attempts to connect. */
export class Backoff {
  private attempt = 0;

  constructor(
    private readonly base: number,
    private readonly cap: number,
    private readonly random: Random,
  ) {}

  /** The next wait in seconds; its upper bound doubles each time. */
  nextDelay(): number {
    return fullJitter(this.attempt++, this.base, this.cap, this.random);
  }

  /** Start again from the shortest wait, after a successful connection. */
  reset(): void {
    this.attempt = 0;
  }
}
