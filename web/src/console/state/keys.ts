// The identities of this browser. Their private keys are WebCrypto keys, stored in IndexedDB and never exportable.
//
// Anyone who serves this page can still use a key that is here, because the page decides what it signs.

import { signal } from "@preact/signals";

import { Identity } from "../../client/protocol/ids.js";
import { all } from "./cellar.js";
import { isOpen, keepText, kept } from "./drawer.js";

/** An identity in the browser's database. */
export interface Kept {
  readonly did: string;
  readonly pair: CryptoKeyPair;
  readonly madeAt: number;
}

const CHOSEN = "strata-identity";
let news: BroadcastChannel | undefined;

export const identities = signal<readonly Identity[]>([]);
export const chosen = signal<Identity | null>(null);
/** Whether keys outlive the page in this browser. */
export const keepsKeys = globalThis.isSecureContext && "indexedDB" in globalThis && isOpen();

/** Load the identities that this browser keeps, and follow what other tabs make or delete from now on. */
export async function loadKeys(): Promise<void> {
  if (!keepsKeys) return;
  news = new BroadcastChannel("strata-identities");
  news.onmessage = () => void read(chosen.peek()?.did);
  await read(kept(CHOSEN));
}

async function read(wanted: string | null | undefined): Promise<void> {
  const found = await all<Kept>("identities").catch(() => undefined);
  if (found === undefined) return; // making an identity will report why it cannot be kept
  found.sort((a, b) => a.madeAt - b.madeAt);
  const known = identities.peek();
  identities.value = await Promise.all(
    found.map(async ({ did, pair }) => known.find((each) => each.did === did) ?? named(await Identity.fromKeyPair(pair), did)),
  );
  chosen.value = identities.value.find(({ did }) => did === wanted) ?? null;
}

/** Notify other tabs that identities were made or deleted here: a deleted key must sign nowhere. */
export function tellTabs(): void {
  news?.postMessage(null);
}

export const named = (identity: Identity, did: string): Identity => (identity.did === did ? identity : identity.speakingFor(did));

export function choose(identity: Identity | null): void {
  chosen.value = identity;
  if (keepsKeys) keepText(CHOSEN, identity?.did ?? null);
}
