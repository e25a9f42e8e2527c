// The page's IndexedDB database: one small store for each kind of object.

import { Database } from "../../client/indexeddb.js";

export type Shelf = "identities";

const NAMES: Readonly<Record<Shelf, string>> = { identities: "did" };

const database = new Database("strata-console", (made) => {
  for (const [shelf, keyPath] of Object.entries(NAMES)) made.createObjectStore(shelf, { keyPath });
});

async function run<T>(shelf: Shelf, mode: IDBTransactionMode, act: (store: IDBObjectStore) => IDBRequest<T>): Promise<T> {
  const failed = (reason: string) => new Error(`this browser keeps nothing for the page: ${reason}`);
  const asked = await database.within([shelf], { mode, durability: "strict", failed }, (store) => act(store(shelf)));
  return asked.result;
}

/** All objects of one kind. */
export function all<T>(shelf: Shelf): Promise<T[]> {
  return run(shelf, "readonly", (store) => store.getAll() as IDBRequest<T[]>);
}

/** Store an object; resolves when it is on the disk. */
export async function keep<T>(shelf: Shelf, thing: T): Promise<void> {
  await run(shelf, "readwrite", (store) => store.put(thing));
}

export async function drop(shelf: Shelf, key: string): Promise<void> {
  await run(shelf, "readwrite", (store) => store.delete(key));
}
