// Whether single keys do something. Who speaks to the browser, or slips, types them unawares (WCAG 2.1.4).

import { signal } from "@preact/signals";

const OFF = "strata-single-keys-off";

function isKeptOff(): boolean {
  try {
    return localStorage.getItem(OFF) !== null;
  } catch {
    return false; // this browser keeps nothing for the page
  }
}

export const singleKeys = signal(!isKeptOff());

/** Switch them on or off, here and at the next visit. */
export function switchSingleKeys(): void {
  singleKeys.value = !singleKeys.value;
  try {
    if (singleKeys.value) localStorage.removeItem(OFF);
    else localStorage.setItem(OFF, "");
  } catch {
    // For this visit, then.
  }
}
