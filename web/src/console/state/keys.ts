// The identities of this browser. Their private keys are WebCrypto's: kept in IndexedDB, and never readable.
//
// Whoever serves this page can still use a key that is here, for what the page signs is up to the page.

import { signal } from "@preact/signals";

import { Identity } from "../../client/protocol/ids.js";
import { all } from "./cellar.js";

/** An identity in the browser's database. */
export interface Kept {
  readonly did: string;
  readonly pair: CryptoKeyPair;
  readonly madeAt: number;
}

const CHOSEN = "strata-identity";

export const identities = signal<readonly Identity[]>([]);
export const chosen = signal<Identity | null>(null);
/** Whether keys outlive the page here. */
export const keepsKeys = globalThis.isSecureContext && "indexedDB" in globalThis;

export async function loadKeys(): Promise<void> {
  if (!keepsKeys) return;
  const kept = await all<Kept>("identities");
  kept.sort((a, b) => a.madeAt - b.madeAt);
  identities.value = await Promise.all(kept.map(async ({ did, pair }) => named(await Identity.fromKeyPair(pair), did)));
  const last = localStorage.getItem(CHOSEN);
  chosen.value = identities.value.find(({ did }) => did === last) ?? null;
}

export const named = (identity: Identity, did: string): Identity => (identity.did === did ? identity : identity.speakingFor(did));

export function choose(identity: Identity | null): void {
  chosen.value = identity;
  if (!keepsKeys) return;
  if (identity === null) localStorage.removeItem(CHOSEN);
  else localStorage.setItem(CHOSEN, identity.did);
}
