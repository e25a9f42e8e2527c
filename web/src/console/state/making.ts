// Making, importing and deleting identities, which few visits do.

import { fromHex } from "../../client/protocol/bytes.js";
import { importSeed, publicKeyOf, sourceHere } from "../../client/protocol/ed25519.js";
import { Identity } from "../../client/protocol/ids.js";
import { drop, keep } from "./cellar.js";
import { choose, chosen, identities, type Kept, keepsKeys, named, tellTabs } from "./keys.js";

async function add(identity: Identity): Promise<void> {
  if (keepsKeys && identity.keyPair !== undefined) {
    await keep<Kept>("identities", { did: identity.did, pair: identity.keyPair, madeAt: Date.now() });
    tellTabs();
  }
  identities.value = [...identities.value.filter(({ did }) => did !== identity.did), identity];
  choose(identity);
}

export async function make(): Promise<void> {
  await add(await Identity.generate());
}

/** Import the key in a key file. Rejects with `IdentityError` for other text. */
export async function take(text: string): Promise<void> {
  const identity = await Identity.fromKeyFile(text);
  if (!keepsKeys || (await sourceHere()) === "javascript") return add(identity);
  const seed = fromHex(String((JSON.parse(text) as { seed: unknown }).seed).slice(2)) ?? new Uint8Array();
  const publicKey = await crypto.subtle.importKey("raw", await publicKeyOf(seed), "Ed25519", true, ["verify"]);
  const pair = { privateKey: await importSeed(seed), publicKey };
  seed.fill(0);
  await add(named(await Identity.fromKeyPair(pair), identity.did));
}

/** Delete a key. It cannot be restored. */
export async function forget(identity: Identity): Promise<void> {
  if (keepsKeys) {
    await drop("identities", identity.did);
    tellTabs();
  }
  identities.value = identities.value.filter(({ did }) => did !== identity.did);
  if (chosen.value?.did === identity.did) choose(null);
}
