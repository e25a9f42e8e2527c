import assert from "node:assert/strict";
import { test } from "node:test";

import { forceCloseDatabase, IDBFactory } from "fake-indexeddb";

import { indexedDbChannelStore, memoryChannelStore, type StoredMessage } from "../src/client/channels/index.js";
import { indexedDbOutbox } from "../src/client/index.js";
import { Database } from "../src/client/indexeddb.js";

/** A browser whose databases can be closed, and fail to open. */
class Browser {
  isBroken = false;
  readonly connections: IDBDatabase[] = [];
  private readonly factory = new IDBFactory();

  constructor() {
    const open = this.factory.open.bind(this.factory);
    this.factory.open = (name, version) => {
      if (this.isBroken) throw new DOMException("connection to the server lost", "UnknownError");
      const request = open(name, version);
      request.addEventListener("success", () => this.connections.push(request.result));
      return request;
    };
    Object.assign(globalThis, { indexedDB: this.factory });
  }

  closeAll(isSaid: boolean): void {
    for (const each of this.connections.splice(0)) {
      if (isSaid) forceCloseDatabase(each as never);
      else each.close(); // no event tells of this
    }
  }

  deleteDatabase(name: string): Promise<void> {
    return new Promise((resolve, reject) => {
      const request = this.factory.deleteDatabase(name);
      request.onsuccess = () => resolve();
      request.onerror = () => reject(request.error);
    });
  }
}

const entry = (number: number) => ({ packetId: `0x${number}`, canonical: `${number}` });
const message = (id: string): StoredMessage => {
  return { id, wire: new Uint8Array([1]), isOwn: true, author: undefined, sentAt: 1, hint: undefined, state: "sending" };
};
const never = new AbortController().signal;

for (const isSaid of [true, false]) {
  test(`an outbox goes on when the browser has closed its database, ${isSaid ? "by an event" : "in silence"}`, async () => {
    const browser = new Browser();
    const outbox = indexedDbOutbox("test");
    await outbox.add(entry(1));
    browser.closeAll(isSaid);
    if (!isSaid) await assert.rejects(outbox.list(), { name: "OutboxError" });
    await outbox.add(entry(2));
    assert.deepEqual(await outbox.list(), [entry(1), entry(2)]);
    assert.equal(browser.connections.length, 1, "one connection is enough");
    browser.closeAll(false);
  });
}

test("what a tab does with its outbox is told to the others, and not to itself", async () => {
  const browser = new Browser();
  const [mine, other] = [indexedDbOutbox("test"), indexedDbOutbox("test")];
  const heard: Record<"mine" | "other", string[]> = { mine: [], other: [] };
  const stops = [mine.watch(({ kind }) => heard.mine.push(kind)), other.watch(({ kind }) => heard.other.push(kind))];
  await mine.add(entry(1));
  await mine.refuse(entry(1).packetId, { code: "policy_rejected", reason: "no" });
  await mine.remove(entry(1).packetId);
  await mine.add(entry(1)); // once more: word of its removal would be taken for that of this one
  await other.add(entry(2));
  while (heard.other.length < 4 || heard.mine.length < 1) await new Promise((done) => setImmediate(done));
  assert.deepEqual(heard, { mine: ["added"], other: ["added", "refused", "removed", "added"] });
  for (const stop of stops) stop();
  browser.closeAll(false);
});

test("a failure to open is not remembered", async () => {
  const browser = new Browser();
  browser.isBroken = true;
  const outbox = indexedDbOutbox("test");
  await assert.rejects(outbox.count(), { name: "OutboxError", message: /connection to the server lost/ });
  const store = indexedDbChannelStore("test");
  await assert.rejects(store.open(never), { name: "OutboxError" });
  browser.isBroken = false;
  assert.equal(await outbox.count(), 0);
  assert.deepEqual((await store.open(never)).messages, []);
  browser.closeAll(false);
});

test("what raises amid a transaction changes nothing", async () => {
  const browser = new Browser();
  const database = new Database("test", (made) => made.createObjectStore("all"));
  const failed = (reason: string) => new Error(`failed: ${reason}`);
  const change = database.within(["all"], { mode: "readwrite", failed }, (store) => {
    store("all").put("half", "key");
    throw new Error("no more");
  });
  await assert.rejects(change, { message: "failed: no more" });
  const found = await database.within(["all"], { mode: "readonly", failed }, (store) => store("all").count());
  assert.equal(found.result, 0);
  browser.closeAll(false);
});

test("a message that a channel's store has already is kept once, and the place beside it moves", async () => {
  const browser = new Browser();
  for (const store of [indexedDbChannelStore("test"), memoryChannelStore()]) {
    await store.open(never);
    await store.add(message("a"), ["1"]);
    await store.setState("a", "sent");
    await store.add(message("a"), ["2"]); // as where a second page without locks uses the store
    store.close();
    const { messages, places } = await store.open(never);
    assert.deepEqual([places, messages.map(({ id, state }) => `${id} ${state}`)], [["2"], ["a sent"]]);
    store.close();
  }
  browser.closeAll(false);
});

test("a channel's store that is opened again before it is closed is released by each closing", async (context) => {
  const browser = new Browser();
  let last: Promise<unknown> = Promise.resolve();
  const locks = { request: (_: string, __: object, act: () => Promise<void>) => (last = last.then(act)) };
  const before = Object.getOwnPropertyDescriptor(globalThis, "navigator");
  Object.defineProperty(globalThis, "navigator", { value: { locks }, configurable: true });
  context.after(() => Object.defineProperty(globalThis, "navigator", before ?? { value: undefined, configurable: true }));
  const store = indexedDbChannelStore("test");
  await store.open(never);
  const again = store.open(never); // as when a part of a page is made anew before the old one has gone
  await new Promise((done) => setImmediate(done));
  store.close();
  const late = new Promise<never>((_, reject) => setTimeout(reject, 1000, new Error("it waits for ever")));
  await Promise.race([again, late]);
  await store.add(message("a"));
  store.close();
  const other = await Promise.race([indexedDbChannelStore("test").open(never), late]);
  assert.deepEqual(other.messages.map(({ id }) => id), ["a"]);
  browser.closeAll(false);
});

test("a channel's store keeps the horizon of what it has forgotten", async () => {
  const browser = new Browser();
  for (const store of [indexedDbChannelStore("test"), memoryChannelStore()]) {
    const { horizon: before } = await store.open(never);
    await store.add(message("a"));
    await store.forget(["a"], { past: 7, runs: [[1, 9]] });
    store.close();
    const { forgotten, horizon, messages } = await store.open(never);
    assert.deepEqual([before, forgotten, horizon, messages], [undefined, ["a"], { past: 7, runs: [[1, 9]] }, []]);
    store.close();
  }
  browser.closeAll(false);
});

test("a channel's store goes on in the same database, and not in another one", async () => {
  const browser = new Browser();
  const store = indexedDbChannelStore("test");
  const { device } = await store.open(never);
  await store.add(message("a"), ["1"]);
  browser.closeAll(true);
  await store.add(message("b"), ["2"]);
  store.close();
  const again = await store.open(never);
  assert.deepEqual([again.device, again.places, again.messages.map(({ id }) => id)], [device, ["2"], ["a", "b"]]);
  await browser.deleteDatabase("strata-channel-test"); // as when a person deletes the site's data
  await assert.rejects(store.add(message("c")), { name: "OutboxError", message: /deleted/ });
  store.close();
  await assert.rejects(store.setPlaces([]), { name: "OutboxError", message: /not open/ });
  const anew = await store.open(never);
  assert.deepEqual([anew.device === device, anew.places, anew.messages], [false, [], []]);
  store.close();
  browser.closeAll(false);
});
