/** An outbox in the browser's IndexedDB: durable over reloads and restarts, shared by the tabs of an origin. */

import { OutboxError } from "../protocol/errors.js";
import type { OutboxNews, OutboxStore, StoredEntry } from "./store.js";

const STORE = "packets";

/**
 * Keep packets in the IndexedDB database `strata-outbox-<name>`.
 *
 * All tabs of an origin that use the name share it. One of them sends at a time (`navigator.locks`); where a page has
 * no locks, as on plain http, each sends, which is harmless: a relay keeps a packet once. Use one name for each
 * relay.
 */
export function indexedDbOutbox(name: string): OutboxStore {
  const full = `strata-outbox-${name}`;
  let opened: Promise<IDBDatabase> | undefined;

  async function within<T>(mode: IDBTransactionMode, act: (store: IDBObjectStore) => IDBRequest<T> | undefined) {
    opened ??= openDatabase(full, () => (opened = undefined));
    const database = await opened;
    return new Promise<T | undefined>((resolve, reject) => {
      const transaction = database.transaction(STORE, mode, { durability: "strict" });
      let result: IDBRequest<T> | undefined;
      transaction.oncomplete = () => resolve(result?.result);
      transaction.onabort = () => reject(new OutboxError(`the outbox cannot be written: ${transaction.error?.message}`));
      result = act(transaction.objectStore(STORE));
    });
  }

  return {
    async add(entry) {
      await within("readwrite", (store) => {
        const known = store.index("packetId").getKey(entry.packetId);
        known.onsuccess = () => {
          if (known.result === undefined) store.add(entry);
        };
        return undefined;
      });
      announce(full, { kind: "added" });
    },
    async count() {
      return (await within<number>("readonly", (store) => store.count())) ?? 0;
    },
    async list() {
      return (await within<StoredEntry[]>("readonly", (store) => store.getAll() as IDBRequest<StoredEntry[]>)) ?? [];
    },
    async refuse(packetId, refusal) {
      await within("readwrite", (store) => {
        const found = store.index("packetId").openCursor(packetId);
        found.onsuccess = () => found.result?.update({ ...(found.result.value as StoredEntry), refusal });
        return undefined;
      });
      announce(full, { kind: "refused", packetId, refusal });
    },
    async remove(packetId, published) {
      await within("readwrite", (store) => {
        const found = store.index("packetId").openCursor(packetId);
        found.onsuccess = () => found.result?.delete();
        return undefined;
      });
      announce(full, published === undefined ? { kind: "removed", packetId } : { kind: "sent", published });
    },
    async exclusively(drain, signal) {
      if (globalThis.navigator?.locks === undefined) return drain();
      await navigator.locks.request(full, { signal }, drain);
    },
    watch(heard) {
      if (typeof BroadcastChannel === "undefined") return () => undefined;
      const channel = new BroadcastChannel(full);
      channel.onmessage = ({ data }: MessageEvent<OutboxNews>) => heard(data);
      return () => channel.close();
    },
  };
}

function openDatabase(name: string, gone: () => void): Promise<IDBDatabase> {
  return new Promise((resolve, reject) => {
    const request = indexedDB.open(name, 1);
    request.onupgradeneeded = () => {
      const store = request.result.createObjectStore(STORE, { autoIncrement: true });
      store.createIndex("packetId", "packetId", { unique: true });
    };
    request.onerror = () => reject(new OutboxError(`the outbox cannot be opened: ${request.error?.message}`));
    request.onsuccess = () => {
      const database = request.result;
      database.onclose = gone;
      database.onversionchange = () => {
        database.close(); // somebody deletes the site's data
        gone();
      };
      resolve(database);
    };
  });
}

function announce(name: string, news: OutboxNews): void {
  if (typeof BroadcastChannel === "undefined") return;
  const channel = new BroadcastChannel(name);
  channel.postMessage(news);
  channel.close();
}
