/** Telling the program what happens in a channel. */

// Core: no I/O, no clock, no randomness (held by tests/layout.test.ts).

import type { ChannelMessage, ChannelOptions } from "./values.js";

/** Calls the program's handlers. What one throws is said, and changes nothing in the channel. */
export class Telling {
  /** Whether the program has the channel: before that its handlers may need what is not there yet. */
  isOn = false;

  constructor(private readonly handlers: Pick<ChannelOptions, "onMessage" | "onChange">) {}

  /** A message was released. */
  message(message: ChannelMessage): void {
    this.call(() => this.handlers.onMessage?.(message));
  }

  /** Messages, a state or the status may have changed. */
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
