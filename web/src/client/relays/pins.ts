/**
 * The relays a client has met before: address and DID, nothing secret.
 *
 * Trust on first use: the DID that a relay shows at the first authentication is kept. From then on the client signs
 * neither a challenge of another relay at that address, nor a challenge of that relay at another address. A pin is
 * never replaced here.
 */

import { isDid } from "../protocol/ids.js";
import { IdentityError } from "../protocol/errors.js";

/** A store of pins. If `load` rejects, opening the relay does; if `add` rejects, a warning is logged. */
export interface Pins {
  /** All pins: DIDs by address. */
  load(): Promise<ReadonlyMap<string, string>>;
  /** Pin a relay, unless its address is pinned already. */
  add(address: string, relayId: string): Promise<void>;
}

/** Pins that last as long as the program. */
export function memoryPins(): Pins {
  const pins = new Map<string, string>();
  return {
    load: () => Promise.resolve(new Map(pins)),
    add: (address, relayId) => {
      if (!pins.has(address)) pins.set(address, relayId);
      return Promise.resolve();
    },
  };
}

/** Pins in the browser's `localStorage`, under this name. */
export function localStoragePins(name = "strata-pins"): Pins {
  const load = () => parsePins(localStorage.getItem(name) ?? "{}", `localStorage's ${name}`);
  return {
    load: async () => load(),
    add: async (address, relayId) => {
      const pins = load();
      if (pins.has(address)) return;
      localStorage.setItem(name, JSON.stringify(Object.fromEntries(pins.set(address, relayId))));
    },
  };
}

/** The pins in a JSON object from address to DID. Throws `IdentityError` for anything else. */
export function parsePins(text: string, place: string): Map<string, string> {
  let value: unknown;
  try {
    value = JSON.parse(text);
  } catch {
    value = undefined;
  }
  const entries = typeof value === "object" && value !== null && !Array.isArray(value) ? Object.entries(value) : [5];
  if (!entries.every((entry) => Array.isArray(entry) && typeof entry[1] === "string" && isDid(entry[1]))) {
    throw new IdentityError(`${place} does not hold pinned relays`); // guessing would defeat its purpose
  }
  return new Map(entries as [string, string][]);
}

/** What identifies a relay's address: scheme, host, port and path. */
export function addressOf(url: string): string {
  const { protocol, hostname, port, pathname } = new URL(url);
  return `${protocol}//${hostname}:${port || (protocol === "wss:" ? "443" : "80")}${pathname}`;
}
