// The identities of this browser. Their private keys are WebCrypto's: kept in IndexedDB, and never readable.
//
// Whoever serves this page can still use a key that is here, for what the page signs is up to the page.

import { signal } from "@preact/signals";

import { fromHex } from "../../client/protocol/bytes.js";
import { importSeed, publicKeyOf } from "../../client/protocol/ed25519.js";
import { Identity } from "../../client/protocol/ids.js";
import { all, drop, keep } from "./cellar.js";

interface Kept {
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

const named = (identity: Identity, did: string): Identity => (identity.did === did ? identity : identity.speakingFor(did));

export function choose(identity: Identity | null): void {
  chosen.value = identity;
  if (!keepsKeys) return;
  if (identity === null) localStorage.removeItem(CHOSEN);
  else localStorage.setItem(CHOSEN, identity.did);
}

async function add(identity: Identity): Promise<void> {
  if (keepsKeys && identity.keyPair !== undefined) {
    await keep<Kept>("identities", { did: identity.did, pair: identity.keyPair, madeAt: Date.now() });
  }
  identities.value = [...identities.value.filter(({ did }) => did !== identity.did), identity];
  choose(identity);
}

export async function make(): Promise<void> {
  await add(await Identity.generate());
}

/** Take over the key in a key file. Rejects with `IdentityError` for other text. */
export async function take(text: string): Promise<void> {
  const identity = await Identity.fromKeyFile(text);
  if (!keepsKeys) return add(identity);
  const seed = fromHex(String((JSON.parse(text) as { seed: unknown }).seed).slice(2)) ?? new Uint8Array();
  const publicKey = await crypto.subtle.importKey("raw", await publicKeyOf(seed), "Ed25519", true, ["verify"]);
  const pair = { privateKey: await importSeed(seed), publicKey };
  seed.fill(0);
  await add(named(await Identity.fromKeyPair(pair), identity.did));
}

/** Delete a key. It cannot be brought back. */
export async function forget(identity: Identity): Promise<void> {
  if (keepsKeys) await drop("identities", identity.did);
  identities.value = identities.value.filter(({ did }) => did !== identity.did);
  if (chosen.value?.did === identity.did) choose(null);
}

