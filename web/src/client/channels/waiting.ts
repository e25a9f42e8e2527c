/** Waiting that ends when a channel is closed. */

import { InvalidPacket, MissingCapability, RequestRefused, RequestTimeout } from "../protocol/errors.js";
import { Refusals } from "../relays/backoff.js";
import type { Delivery } from "../relays/values.js";
import { after } from "../timers.js";
import type { Reading } from "./values.js";

const RETRY_SECONDS = 2;

/** The steady clock by which waits are measured, in milliseconds: the wall clock may be set back. */
export const clock = (): number => performance.now();

/** The pauses between attempts at one request: they grow while relay or store refuse, but not while nothing answers. */
export class Attempts {
  private readonly refusals = new Refusals(Math.random);

  /** Seconds to wait after this error: no fewer than the relay asked for, within reason. */
  retryIn(error: unknown): number {
    if (error === undefined || error instanceof RequestTimeout) return RETRY_SECONDS;
    return this.refusals.another(error instanceof RequestRefused ? error.retryAfter : undefined);
  }

  /** Note that the request has been granted, and its answer stored. */
  granted(): void {
    this.refusals.over();
  }
}

/** Whether the relay refused a packet for its timestamp: a clock is wrong, here or there, or the packet waited long. */
export function isOfWrongTime(error: unknown): boolean {
  return error instanceof RequestRefused && ["timestamp_in_future", "timestamp_too_old"].includes(error.code);
}

/** Whether the relay refuses a message permanently, even in a new packet with a new timestamp (C-292). */
export function isIrrecoverable(error: unknown): boolean {
  if (error instanceof InvalidPacket || error instanceof MissingCapability) return true;
  return error instanceof RequestRefused && ["never", "authenticate"].includes(error.retry) && !isOfWrongTime(error);
}

/** Wait for `seconds`, or until `signal` aborts. */
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

/** Yield what a subscription delivers until `signal` aborts. */
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
