/** An outbox in the browser's IndexedDB: it survives reloads and restarts, and the tabs of an origin share it. */

import { Database } from "../indexeddb.js";
import { OutboxError } from "../protocol/errors.js";
import type { OutboxNews, OutboxStore, StoredEntry } from "./store.js";

const STORE = "packets";

/**
 * Keep packets in the IndexedDB database `strata-outbox-<name>`.
 *
 * All tabs of an origin that use the same name share it. One of them sends at a time (`navigator.locks`). If a page has
 * no locks, as on plain http, each tab sends, which is harmless: a relay stores a packet once. Use one name for each
 * relay.
 */
export function indexedDbOutbox(name: string): OutboxStore {
  const full = `strata-outbox-${name}`;
  const database = new Database(full, (made) => {
    made.createObjectStore(STORE, { autoIncrement: true }).createIndex("packetId", "packetId", { unique: true });
  });
  const failed = (reason: string) => new OutboxError(`the outbox cannot be used: ${reason}`);
  let watching: BroadcastChannel | undefined;

  /** Notify the other tabs, but not the watcher in this tab, which would learn late of what it did itself. */
  function announce(news: OutboxNews): void {
    if (typeof BroadcastChannel === "undefined") return;
    const channel = watching ?? new BroadcastChannel(full);
    channel.postMessage(news);
    if (channel !== watching) channel.close();
  }

  function within<T>(mode: IDBTransactionMode, act: (store: IDBObjectStore) => T): Promise<T> {
    return database.within([STORE], { mode, durability: "strict", failed }, (store) => act(store(STORE)));
  }

  return {
    async add(entry) {
      await within("readwrite", (store) => {
        const known = store.index("packetId").getKey(entry.packetId);
        known.onsuccess = () => {
          if (known.result === undefined) store.add(entry);
        };
      });
      announce({ kind: "added" });
    },
    async count() {
      return (await within("readonly", (store) => store.count())).result;
    },
    async list() {
      return (await within("readonly", (store) => store.getAll() as IDBRequest<StoredEntry[]>)).result;
    },
    async refuse(packetId, refusal) {
      await within("readwrite", (store) => {
        const found = store.index("packetId").openCursor(packetId);
        found.onsuccess = () => found.result?.update({ ...(found.result.value as StoredEntry), refusal });
      });
      announce({ kind: "refused", packetId, refusal });
    },
    async remove(packetId, published) {
      await within("readwrite", (store) => {
        const found = store.index("packetId").openCursor(packetId);
        found.onsuccess = () => found.result?.delete();
      });
      announce(published === undefined ? { kind: "removed", packetId } : { kind: "sent", published });
    },
    async exclusively(drain, signal) {
      if (globalThis.navigator?.locks === undefined) return drain();
      await navigator.locks.request(full, { signal }, drain);
    },
    watch(heard) {
      if (typeof BroadcastChannel === "undefined") return () => undefined;
      const channel = (watching = new BroadcastChannel(full));
      channel.onmessage = ({ data }: MessageEvent<OutboxNews>) => heard(data);
      return () => {
        channel.close();
        if (watching === channel) watching = undefined;
      };
    },
  };
}
