/** Timers for waits that a program chooses, in seconds. */

/** Most milliseconds that `setTimeout` waits: it calls at once what is due later. */
const MAX_TIMER_MS = 2 ** 31 - 1;

/** What `clearTimeout` stops. */
export type Timer = ReturnType<typeof setTimeout> | undefined;

/** Call `act` after so many seconds, and no sooner; after more than 24 days, which `setTimeout` cannot wait, never. */
export function after(seconds: number, act: () => void): Timer {
  const milliseconds = Math.ceil(seconds * 1000);
  return milliseconds > MAX_TIMER_MS ? undefined : setTimeout(act, milliseconds);
}
