/** An identity that the browser keeps: its key is in IndexedDB and cannot be read out. */

import { IdentityError } from "./protocol/errors.js";
import { Identity } from "./protocol/ids.js";

const DATABASE = "strata-identities";
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
  const database = await opened();
  try {
    const pair = await new Promise<CryptoKeyPair>((resolve, reject) => {
      const transaction = database.transaction(STORE, "readwrite", { durability: "strict" });
      const keys = transaction.objectStore(STORE);
      const kept = keys.get(name) as IDBRequest<CryptoKeyPair | undefined>;
      let result: CryptoKeyPair | undefined;
      // Looked up and made in one transaction: two tabs get one key.
      kept.onsuccess = () => {
        result = kept.result ?? made.keyPair;
        if (kept.result === undefined) keys.add(made.keyPair, name);
      };
      transaction.oncomplete = () => resolve(result as CryptoKeyPair);
      transaction.onabort = () => reject(new IdentityError(`the key cannot be kept: ${transaction.error?.message}`));
    });
    return await Identity.fromKeyPair(pair);
  } finally {
    database.close();
  }
}

function opened(): Promise<IDBDatabase> {
  return new Promise((resolve, reject) => {
    const request = indexedDB.open(DATABASE, 1);
    request.onupgradeneeded = () => request.result.createObjectStore(STORE);
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(new IdentityError(`this browser keeps no keys: ${request.error?.message}`));
  });
}
