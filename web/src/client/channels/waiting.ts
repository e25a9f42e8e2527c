/** Waiting that ends when a channel is closed. */

import { MissingCapability, RequestRefused } from "../protocol/errors.js";
import { afterRefusals, afterRetryAfter, MAX_RETRY_AFTER_SECONDS } from "../relays/backoff.js";
import type { Delivery } from "../relays/values.js";
import { after } from "../timers.js";
import type { Reading } from "./values.js";

const RETRY_SECONDS = 2;

/** Milliseconds by which waits are measured: the clock on the wall may be put back. */
export const clock = (): number => performance.now();

/** After how many seconds to try again what came to this error: no sooner than the relay has asked for, within reason. */
export function retryIn(error: unknown): number {
  const asked = error instanceof RequestRefused ? (error.retryAfter ?? 0) : 0;
  return Math.max(RETRY_SECONDS, afterRetryAfter(Math.min(asked, MAX_RETRY_AFTER_SECONDS), Math.random));
}

/** The pauses between attempts at one thing: they grow for as long as the relay refuses it, and not while it is away. */
export class Attempts {
  private refusals = 0;

  /** After how many seconds to try again what came to this error. */
  retryIn(error: unknown): number {
    const isRefused = error instanceof RequestRefused || error instanceof MissingCapability;
    if (!isRefused) return retryIn(error);
    return Math.max(retryIn(error), afterRefusals(this.refusals++, Math.random));
  }

  /** The relay has granted it. */
  granted(): void {
    this.refusals = 0;
  }
}

/** Wait so many seconds, or until `signal` aborts. */
export function pause(seconds: number, signal: AbortSignal): Promise<void> {
  return new Promise((resolve) => {
    const done = () => {
      clearTimeout(timer);
      signal.removeEventListener("abort", done);
      resolve();
    };
    const timer = after(seconds, done);
    signal.addEventListener("abort", done, { once: true });
    if (signal.aborted) done();
  });
}

/** What a subscription brings until `signal` aborts. */
export async function* until(signal: AbortSignal, found: Reading): AsyncGenerator<Delivery> {
  const close = () => found.close();
  signal.addEventListener("abort", close, { once: true });
  try {
    if (!signal.aborted) yield* found;
  } finally {
    signal.removeEventListener("abort", close);
    close();
  }
}
