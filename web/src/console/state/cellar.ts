// What this browser keeps: IndexedDB, one small store for each kind of thing.

export type Shelf = "identities";

const NAMES: Readonly<Record<Shelf, string>> = { identities: "did" };

let opened: Promise<IDBDatabase> | undefined;

function open(): Promise<IDBDatabase> {
  opened ??= new Promise((resolve, reject) => {
    const asked = indexedDB.open("strata-console", 1);
    asked.onupgradeneeded = () => {
      for (const [shelf, keyPath] of Object.entries(NAMES)) asked.result.createObjectStore(shelf, { keyPath });
    };
    asked.onsuccess = () => resolve(asked.result);
    asked.onerror = () => reject(asked.error ?? new Error("this browser keeps nothing for the page"));
  });
  return opened;
}

async function run<T>(shelf: Shelf, mode: IDBTransactionMode, act: (store: IDBObjectStore) => IDBRequest<T>): Promise<T> {
  const database = await open();
  return new Promise((resolve, reject) => {
    const transaction = database.transaction(shelf, mode, { durability: "strict" });
    const asked = act(transaction.objectStore(shelf));
    transaction.oncomplete = () => resolve(asked.result);
    transaction.onabort = () => reject(transaction.error ?? new Error("this browser could not keep it"));
  });
}

/** Everything of one kind. */
export function all<T>(shelf: Shelf): Promise<T[]> {
  return run(shelf, "readonly", (store) => store.getAll() as IDBRequest<T[]>);
}

/** Keep a thing; resolves when it is on the disk. */
export async function keep<T>(shelf: Shelf, thing: T): Promise<void> {
  await run(shelf, "readwrite", (store) => store.put(thing));
}

export async function drop(shelf: Shelf, key: string): Promise<void> {
  await run(shelf, "readwrite", (store) => store.delete(key));
}
