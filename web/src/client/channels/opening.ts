/** Opening a channel. */

import { ReliableChannel } from "./channel.js";
import { memoryChannelStore } from "./store.js";
import type { ChannelOptions, ChannelRelay } from "./values.js";

/**
 * Open a channel over a relay, and begin to read it.
 *
 * Resolves once the stored messages are back in `messages`. If another page uses the store, waits for that page until
 * `signal` aborts. Rejects with what the store rejects with, and `RangeError` for options that cannot work.
 */
export async function openChannel(
  relay: ChannelRelay,
  options: ChannelOptions,
  signal?: AbortSignal,
): Promise<ReliableChannel> {
  const whole = {
    store: memoryChannelStore(),
    resendAfter: 10,
    acknowledgeWithin: 2,
    syncEvery: 30,
    giveUpAfter: 600,
    maxMessages: 2_000,
    ...options,
  };
  for (const name of ["resendAfter", "acknowledgeWithin", "syncEvery", "giveUpAfter", "maxMessages"] as const) {
    if (!(whole[name] > 0)) throw new RangeError(`${name} must be above 0`);
  }
  const kept = await whole.store.open(signal ?? new AbortController().signal);
  try {
    const channel = new ReliableChannel(relay, whole, kept);
    await channel.start(kept.messages);
    return channel;
  } catch (error) {
    whole.store.close();
    throw error;
  }
}
