/** What a participant keeps over a reload: its name, its messages in order of arrival, and its places in the log. */

import { Database, type Stores } from "../indexeddb.js";
import { OutboxError } from "../protocol/errors.js";
import { type Horizon, MAX_FORGOTTEN } from "./forgotten.js";

/**
 * The state of a message. An own message is `sending` until a relay has it, and `acknowledged` once another participant
 * has it.
 */
export type MessageState = "received" | "sending" | "sent" | "acknowledged" | "failed";

/** A message as it is stored. */
export interface StoredMessage {
  readonly id: string;
  /** The SDS message as it travels. */
  readonly wire: Uint8Array;
  readonly isOwn: boolean;
  readonly author: string | undefined;
  readonly sentAt: number | undefined;
  /** The bytes of the packet's id, by which other participants find it. */
  readonly hint: Uint8Array | undefined;
  state: MessageState;
}

/** Everything that is stored of a channel. */
export interface Kept {
  /** The name of the device, which follows the `#` of the sender id; made when the store is first opened. */
  readonly device: string;
  /** Cursors that reading has reached in the relay's log, the newest last. */
  readonly places: readonly string[];
  readonly messages: readonly StoredMessage[];
  /** The ids of messages that are no longer stored, and must not be handed over again. */
  readonly forgotten: readonly string[];
  /** The horizon that `forget` was last given. */
  readonly horizon?: Horizon | undefined;
  /** The ids of messages that nothing waits for any more; one that arrives later is still handed over. */
  readonly givenUp: readonly string[];
}

/** Stores one participant's part in one channel. Every promise resolves when its change is durable. */
export interface ChannelStore {
  /** Wait until nothing else uses the store, and read it. */
  open(signal: AbortSignal): Promise<Kept>;
  /** Append a message, unless it is stored already, and replace the places, if given. Stores both or neither. */
  add(message: StoredMessage, places?: readonly string[]): Promise<void>;
  setState(id: string, state: MessageState): Promise<void>;
  setPlaces(places: readonly string[]): Promise<void>;
  /** Remove these messages; keep only their ids, and the horizon. */
  forget(ids: readonly string[], horizon: Horizon): Promise<void>;
  /** Note that nothing waits for these messages any more. */
  giveUp(ids: readonly string[]): Promise<void>;
  /** Release the store, so that another page can open it. */
  close(): void;
}

/** Make a name for a device: 16 random hex digits. */
function makeDevice(): string {
  return Array.from(crypto.getRandomValues(new Uint8Array(8)), (byte) => byte.toString(16).padStart(2, "0")).join("");
}

/** Make a store in memory, which lasts as long as the program; it can be opened again after it was closed. */
export function memoryChannelStore(): ChannelStore {
  const device = makeDevice();
  const messages = new Map<string, StoredMessage>();
  const forgotten: string[] = [];
  let givenUp: readonly string[] = [];
  let places: readonly string[] = [];
  let horizon: Horizon | undefined;
  return {
    open() {
      const copies = [...messages.values()].map((each) => ({ ...each }));
      return Promise.resolve({ device, places, messages: copies, forgotten, horizon, givenUp });
    },
    add(message, newPlaces = places) {
      if (!messages.has(message.id)) messages.set(message.id, { ...message });
      places = newPlaces;
      return Promise.resolve();
    },
    setState(id, state) {
      const found = messages.get(id);
      if (found !== undefined) found.state = state;
      return Promise.resolve();
    },
    setPlaces(newPlaces) {
      places = newPlaces;
      return Promise.resolve();
    },
    forget(ids, newHorizon) {
      horizon = newHorizon;
      for (const id of ids) if (messages.delete(id)) forgotten.push(id);
      forgotten.splice(0, Math.max(0, forgotten.length - MAX_FORGOTTEN));
      return Promise.resolve();
    },
    giveUp(ids) {
      givenUp = [...givenUp, ...ids].slice(-MAX_FORGOTTEN);
      return Promise.resolve();
    },
    close: () => undefined,
  };
}

const MESSAGES = "messages";
const FORGOTTEN = "forgotten";
const REST = "rest";

/**
 * Store a channel in the IndexedDB database `strata-channel-<name>`: it survives reloads and restarts of the browser.
 *
 * One page at a time uses it (`navigator.locks`): `open` waits until the others have closed it. Use one name for each
 * channel of each identity.
 */
export function indexedDbChannelStore(name: string): ChannelStore {
  const full = `strata-channel-${name}`;
  const database = new Database(full, (made) => {
    made.createObjectStore(MESSAGES, { autoIncrement: true }).createIndex("id", "id", { unique: true });
    made.createObjectStore(FORGOTTEN, { autoIncrement: true });
    made.createObjectStore(REST);
  });
  let device: string | undefined;
  let release: () => void = () => undefined;

  function transact<T>(act: (store: Stores, transaction: IDBTransaction) => T, isOwn: boolean): Promise<T> {
    const failed = (reason: string) => new OutboxError(`the channel's store cannot be used: ${reason}`);
    // What a relay has can be read again, because the places are written in the same transaction.
    const durability = isOwn ? "strict" : "relaxed";
    return database.within([MESSAGES, FORGOTTEN, REST], { mode: "readwrite", durability, failed }, act);
  }

  /** Change an open store, unless the browser has deleted the site's data, so that it is now another store. */
  async function within(act: (store: Stores) => void, isOwn = false): Promise<void> {
    if (device === undefined) throw new OutboxError("the channel's store is not open");
    let isOther = false;
    await transact((store, transaction) => {
      const found = store(REST).get("device") as IDBRequest<string | undefined>;
      found.onsuccess = () => {
        isOther = found.result !== device;
        if (isOther) transaction.abort();
      };
      act(store);
    }, isOwn).catch((error: unknown) => {
      throw isOther ? new OutboxError("the channel's store was deleted: open the channel anew") : error;
    });
  }

  return {
    async open(signal) {
      await new Promise<void>((resolve, reject) => {
        if (globalThis.navigator?.locks === undefined) return resolve();
        navigator.locks
          .request(full, { signal }, () => {
            resolve();
            // Only now: until then `close` releases what an earlier `open` holds.
            return new Promise<void>((done) => (release = done));
          })
          .catch(reject);
      });
      const made = makeDevice();
      const found = await transact((store) => {
        const known = store(REST).get("device") as IDBRequest<string | undefined>;
        known.onsuccess = () => {
          if (known.result === undefined) store(REST).put(made, "device");
        };
        return {
          device: known,
          places: store(REST).get("places") as IDBRequest<string[] | undefined>,
          horizon: store(REST).get("horizon") as IDBRequest<Horizon | undefined>,
          givenUp: store(REST).get("givenUp") as IDBRequest<string[] | undefined>,
          messages: store(MESSAGES).getAll() as IDBRequest<StoredMessage[]>,
          forgotten: store(FORGOTTEN).getAll() as IDBRequest<string[]>,
        };
      }, true).catch((error: unknown) => {
        release();
        throw error;
      });
      device = found.device.result ?? made;
      return {
        device,
        places: found.places.result ?? [],
        messages: found.messages.result,
        forgotten: found.forgotten.result,
        horizon: found.horizon.result,
        givenUp: found.givenUp.result ?? [],
      };
    },
    async add(message, places) {
      await within((store) => {
        const known = store(MESSAGES).index("id").getKey(message.id);
        known.onsuccess = () => {
          if (known.result === undefined) store(MESSAGES).add(message);
        };
        if (places !== undefined) store(REST).put(places, "places");
      }, message.isOwn);
    },
    async setState(id, state) {
      await within((store) => {
        const found = store(MESSAGES).index("id").openCursor(id);
        found.onsuccess = () => found.result?.update({ ...(found.result.value as StoredMessage), state });
      });
    },
    async setPlaces(places) {
      await within((store) => void store(REST).put(places, "places"));
    },
    async forget(ids, horizon) {
      await within((store) => {
        store(REST).put(horizon, "horizon");
        for (const id of ids) {
          const found = store(MESSAGES).index("id").openCursor(id);
          found.onsuccess = () => found.result?.delete();
          store(FORGOTTEN).add(id);
        }
        const numbers = store(FORGOTTEN).getAllKeys() as IDBRequest<number[]>;
        numbers.onsuccess = () => {
          const newest = numbers.result.at(-1 - MAX_FORGOTTEN);
          if (newest !== undefined) store(FORGOTTEN).delete(IDBKeyRange.upperBound(newest));
        };
      });
    },
    async giveUp(ids) {
      await within((store) => {
        const found = store(REST).get("givenUp") as IDBRequest<string[] | undefined>;
        found.onsuccess = () => store(REST).put([...(found.result ?? []), ...ids].slice(-MAX_FORGOTTEN), "givenUp");
      });
    },
    close() {
      database.close();
      device = undefined;
      release();
    },
  };
}
