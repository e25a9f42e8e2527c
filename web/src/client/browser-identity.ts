/** An identity that the browser keeps: its key is in IndexedDB and cannot be read out. */

import { Database } from "./indexeddb.js";
import { IdentityError } from "./protocol/errors.js";
import { Identity } from "./protocol/ids.js";

const STORE = "keys";

/**
 * The identity that this browser keeps under this name for the page's origin; made by the first call.
 *
 * The private key is one of WebCrypto's that gives nothing out: pages of this origin can sign with it, and nobody can
 * copy it, nor move it to another browser. Whoever serves the page can use it. Rejects with `IdentityError` where the
 * browser has no WebCrypto, as on plain http, or keeps nothing.
 */
export async function browserIdentity(name = "default"): Promise<Identity> {
  if (globalThis.crypto?.subtle === undefined) {
    throw new IdentityError("this page has no WebCrypto, so no key is kept: serve it by https");
  }
  const made = await Identity.generate();
  if (made.keyPair === undefined) throw new IdentityError("this browser's WebCrypto has no Ed25519, so no key is kept");
  const database = new Database("strata-identities", (created) => created.createObjectStore(STORE));
  const failed = (reason: string) => new IdentityError(`this browser keeps no key: ${reason}`);
  try {
    const kept = await database.within([STORE], { mode: "readwrite", durability: "strict", failed }, (store) => {
      const found = store(STORE).get(name) as IDBRequest<CryptoKeyPair | undefined>;
      // Looked up and made in one transaction: two tabs get one key.
      found.onsuccess = () => {
        if (found.result === undefined) store(STORE).add(made.keyPair, name);
      };
      return found;
    });
    return await Identity.fromKeyPair(kept.result ?? made.keyPair);
  } finally {
    database.close();
  }
}
