/** An outbox that lasts as long as the program. */

import type { OutboxStore, StoredEntry } from "./store.js";

/** Keep packets in memory: they survive a lost connection, but not a restart. */
export function memoryOutbox(): OutboxStore {
  const entries = new Map<string, StoredEntry>();
  return {
    add: async (entry) => {
      if (!entries.has(entry.packetId)) entries.set(entry.packetId, entry);
    },
    count: async () => entries.size,
    list: async () => [...entries.values()],
    refuse: async (packetId, refusal) => {
      const entry = entries.get(packetId);
      if (entry !== undefined) entries.set(packetId, { ...entry, refusal });
    },
    remove: async (packetId) => {
      entries.delete(packetId);
    },
    exclusively: (drain) => drain(),
    watch: () => () => undefined,
  };
}
