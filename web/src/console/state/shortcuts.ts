// Whether single keys do something. Who speaks to the browser, or slips, types them unawares (WCAG 2.1.4).

import { signal } from "@preact/signals";

import { keepText, kept } from "./drawer.js";

const OFF = "strata-single-keys-off";

export const singleKeys = signal(kept(OFF) === null);

/** Switch them on or off, here and at the next visit. */
export function switchSingleKeys(): void {
  singleKeys.value = !singleKeys.value;
  keepText(OFF, singleKeys.value ? null : "");
}
