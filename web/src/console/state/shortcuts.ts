// Whether single keys are shortcuts. People who use speech input, or who slip, type them by accident (WCAG 2.1.4).

import { signal } from "@preact/signals";

import { keepText, kept } from "./drawer.js";

const OFF = "strata-single-keys-off";

export const singleKeys = signal(kept(OFF) === null);

/** Switch the shortcuts on or off, for this visit and later ones. */
export function switchSingleKeys(): void {
  singleKeys.value = !singleKeys.value;
  keepText(OFF, singleKeys.value ? null : "");
}
