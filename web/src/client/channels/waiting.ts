/** Waiting that ends when a channel is closed. */

import type { Delivery } from "../relays/values.js";
import { after } from "../timers.js";
import type { Reading } from "./values.js";

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
