/** Timers for waits that a program chooses, in seconds. */

/** The longest wait of `setTimeout`, in milliseconds; with a longer one, it calls at once. */
const MAX_TIMER_MS = 2 ** 31 - 1;

/** A timer for `clearTimeout`. */
export type Timer = ReturnType<typeof setTimeout> | undefined;

/** Call `act` after `seconds`, and no sooner; never, if that is more than 24 days, which `setTimeout` cannot wait. */
export function after(seconds: number, act: () => void): Timer {
  const milliseconds = Math.ceil(seconds * 1000);
  return milliseconds > MAX_TIMER_MS ? undefined : setTimeout(act, milliseconds);
}
