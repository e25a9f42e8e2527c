/** Notifying the program of what happens in a channel. */

// Core: no I/O, no clock, no randomness (held by tests/layout.test.ts).

import type { ChannelMessage, ChannelOptions } from "./values.js";

/** Calls the program's handlers. What a handler throws is logged, and changes nothing in the channel. */
export class Telling {
  /** Whether the program has the channel. Until then no handler is called, because it may need the channel. */
  isOn = false;

  constructor(private readonly handlers: Pick<ChannelOptions, "onMessage" | "onChange">) {}

  /** Report a released message. */
  message(message: ChannelMessage): void {
    this.call(() => this.handlers.onMessage?.(message));
  }

  /** Report that messages, a state or the status may have changed. */
  changed(): void {
    this.call(() => this.handlers.onChange?.());
  }

  private call(handler: () => void): void {
    if (!this.isOn) return;
    try {
      handler();
    } catch (error) {
      console.error("a handler of the channel failed", error);
    }
  }
}
