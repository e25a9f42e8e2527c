/** Waiting that ends when a channel is closed. */

import { InvalidPacket, MissingCapability, RequestRefused } from "../protocol/errors.js";
import { Refusals } from "../relays/backoff.js";
import type { Delivery } from "../relays/values.js";
import { after } from "../timers.js";
import type { Reading } from "./values.js";

const RETRY_SECONDS = 2;

/** Milliseconds by which waits are measured: the clock on the wall may be put back. */
export const clock = (): number => performance.now();

/** The pauses between attempts at one thing: they grow for as long as the relay refuses it, and not while it is away. */
export class Attempts {
  private readonly refusals = new Refusals(Math.random);

  /** After how many seconds to try again what came to this error: no sooner than the relay has asked for, within reason. */
  retryIn(error: unknown): number {
    if (error instanceof RequestRefused) return this.refusals.another(error.retryAfter);
    return error instanceof MissingCapability ? this.refusals.another() : RETRY_SECONDS;
  }

  /** The relay has granted it. */
  granted(): void {
    this.refusals.over();
  }
}

/** Whether the relay refuses a packet for its time: our clock is wrong, or the relay's, or the packet has waited long. */
export function isOfWrongTime(error: unknown): boolean {
  return error instanceof RequestRefused && ["timestamp_in_future", "timestamp_too_old"].includes(error.code);
}

/** Whether the relay will not have a message, however often it is asked, and though each packet has its own time (C-292). */
export function isIrrecoverable(error: unknown): boolean {
  if (error instanceof InvalidPacket || error instanceof MissingCapability) return true;
  return error instanceof RequestRefused && ["never", "authenticate"].includes(error.retry) && !isOfWrongTime(error);
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
