/** An identity that the browser keeps: its key is in IndexedDB and cannot be exported. */

import { Database } from "./indexeddb.js";
import { IdentityError } from "./protocol/errors.js";
import { Identity } from "./protocol/ids.js";

const STORE = "keys";

/**
 * The identity that this browser keeps under this name for the page's origin; the first call makes it.
 *
 * The private key is a WebCrypto key that cannot be exported: pages of this origin can sign with it, but nobody can
 * copy it or move it to another browser. Anyone who serves the page can use it. Rejects with `IdentityError` if the
 * browser has no WebCrypto (as on plain http), has no Ed25519, or cannot store the key.
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
      // Looked up and stored in one transaction, so that two tabs get the same key.
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
