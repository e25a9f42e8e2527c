import assert from "node:assert/strict";
import { type FileHandle, mkdtemp, open, readdir, readFile, rm, stat, utimes, writeFile } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { after, test, type TestContext } from "node:test";

import { addressOf, build, Closed, Identity, memoryOutbox, MissingCapability, type OutboxStore, RequestRefused } from "../src/client/index.js";
import { MAX_OUTBOX_PACKETS, Outbox, type OutboxNews, type Published, RequestTimeout, type Send } from "../src/client/index.js";
import { fileOutbox, filePins } from "../src/client/node.js";

const CLOSED = new Closed("the test is over");
const me = await Identity.generate();
const packets = await Promise.all(Array.from({ length: 20 }, (_, n) => build(me, { type: "POST", text: `${n}` })));
const entries = packets.map(({ packetId, canonical }) => ({ packetId, canonical }));

function published(packetId: string): Published {
  return { packetId, receivedAt: 1, duplicate: false, queued: false, downgradedTo: undefined };
}

async function within<T>(promise: Promise<T>, seconds: number): Promise<T> {
  let timer: NodeJS.Timeout | undefined;
  const late = new Promise<never>((_resolve, reject) => (timer = setTimeout(reject, 1000 * seconds, new Error("too late"))));
  return Promise.race([promise, late]).finally(() => clearTimeout(timer));
}

const folders: string[] = [];

async function folder(): Promise<string> {
  const made = await mkdtemp(join(tmpdir(), "outbox-"));
  folders.push(made);
  return made;
}

after(() => Promise.all(folders.map((made) => rm(made, { recursive: true }))));

const stores: [string, () => Promise<OutboxStore>][] = [
  ["memory", async () => memoryOutbox()],
  ["files", async () => fileOutbox(join(await folder(), "made", "here"))],
];

for (const [name, make] of stores) {
  test(`${name}: packets come back in their order, each once`, async () => {
    const store = await make();
    for (const entry of entries) await store.add(entry);
    await store.add(entries[3] as never);
    assert.equal(await store.count(), 20);
    await store.remove(entries[0]?.packetId as string);
    await store.remove("0xnone");
    await store.refuse(entries[1]?.packetId as string, { code: "blocked_author", reason: "no" });
    const left = await store.list();
    assert.deepEqual(
      left.map((entry) => entry.packetId),
      entries.slice(1).map((entry) => entry.packetId),
    );
    assert.deepEqual(left[0]?.refusal, { code: "blocked_author", reason: "no" });
    assert.equal(left[1]?.canonical, entries[2]?.canonical);
  });

  test(`${name}: what a relay takes is forgotten, what it refuses is kept`, async () => {
    const sent: string[] = [];
    const refused = packets[2]?.packetId;
    const send: Send = async ({ packetId }) => {
      sent.push(packetId);
      if (packetId === refused) throw new RequestRefused("timestamp_too_old", "too old");
      return published(packetId);
    };
    const store = await make();
    await store.add(entries[0] as never);
    const outbox = new Outbox(store, send);
    outbox.start();
    const queued = [];
    for (const packet of packets.slice(1, 4)) queued.push(await outbox.add(packet));
    assert.equal((await queued[0]?.sent)?.packetId, packets[1]?.packetId);
    await assert.rejects(queued[1]?.sent as Promise<Published>, { code: "timestamp_too_old" });
    await queued[2]?.sent;
    assert.deepEqual(
      [...new Set(sent)],
      packets.slice(0, 4).map(({ packetId }) => packetId),
    );
    const [kept, ...more] = await outbox.list();
    assert.deepEqual([kept?.packet.packetId, kept?.state, kept?.isStale, more.length], [refused, "refused", false, 0]);
    await outbox.remove(refused as string);
    assert.deepEqual(await outbox.list(), []);
    await outbox.stop(CLOSED);
  });
}

test("what gets no answer is sent again, and a stopped outbox keeps it", async () => {
  let attempts = 0;
  const store = memoryOutbox();
  const outbox = new Outbox(store, async ({ packetId }) => {
    attempts++;
    if (attempts < 3) throw new RequestTimeout("PUBLISH", 1);
    return published(packetId);
  });
  outbox.start();
  const [first, second] = packets;
  const queued = await outbox.add(first as never);
  const ringing = setInterval(() => outbox.wake(), 5);
  assert.equal((await queued.sent).packetId, first?.packetId);
  clearInterval(ringing);
  assert.equal(attempts, 3);
  const never = new Outbox(store, (_, { signal }) => {
    return new Promise((_resolve, reject) => signal?.addEventListener("abort", () => reject(signal.reason)));
  });
  await outbox.stop(CLOSED);
  never.start();
  const waiting = await never.add(second as never);
  await never.stop(CLOSED);
  await assert.rejects(waiting.sent, { name: "Closed" });
  await assert.rejects(never.add(first as never), { name: "Closed" });
  assert.equal((await store.list())[0]?.packetId, second?.packetId);
});

test("packets that get no answer hold up none that come later, and are sent again after them", async (context) => {
  const sent: string[] = [];
  const silent = packets.slice(0, 15).map(({ packetId }) => packetId);
  const store = memoryOutbox();
  const lists = context.mock.method(store, "list");
  let isAway = true;
  const outbox = new Outbox(store, ({ packetId }, { signal }) => {
    sent.push(packetId);
    if (!silent.includes(packetId) || !isAway) return Promise.resolve(published(packetId));
    return new Promise((_resolve, reject) => {
      signal?.addEventListener("abort", () => reject(signal.reason));
      ends.push(() => reject(new RequestTimeout("PUBLISH", 60)));
    });
  });
  const ends: (() => void)[] = [];
  for (const entry of entries.slice(0, 19)) await store.add(entry);
  outbox.start();
  const later = await outbox.add(packets[19] as never);
  await within(later.sent, 5);
  assert.deepEqual(sent, packets.map(({ packetId }) => packetId), "in their order, each once");
  assert.ok(lists.mock.callCount() < 10, `the store is read ${lists.mock.callCount()} times`);
  isAway = false;
  for (const end of ends) end();
  const again = await outbox.add(packets[0] as never);
  await within(again.sent, 5);
  assert.equal(sent.filter((id) => id === silent[0]).length, 2);
  await outbox.stop(CLOSED);
});

test("a window full of packets that get no answer is waited for once, and each of them has its turn", async (context) => {
  const now = performance.now.bind(performance);
  let seconds = 0;
  context.mock.method(performance, "now", () => now() + 1000 * seconds);
  const ids = packets.map(({ packetId }) => packetId);
  const silent = ids.slice(0, 16);
  const sent: string[] = [];
  const ends = new Map<string, () => void>();
  const outbox = new Outbox(memoryOutbox(), ({ packetId }, { signal }) => {
    sent.push(packetId);
    if (!silent.includes(packetId)) return Promise.resolve(published(packetId));
    return new Promise((_resolve, reject) => {
      signal?.addEventListener("abort", () => reject(signal.reason));
      ends.set(packetId, () => reject(new RequestTimeout("PUBLISH", 60)));
    });
  });
  for (const packet of packets.slice(0, 16)) await outbox.add(packet);
  outbox.start();
  for (const [number, again] of [[16, []], [17, silent.slice(0, 8)], [18, silent.slice(8)], [19, silent.slice(0, 8)]] as const) {
    for (let waits = 0; ends.size < (number === 16 ? 16 : 8) && waits < 500; waits++) await new Promise((done) => setImmediate(done));
    for (const end of ends.values()) end();
    ends.clear();
    seconds += 60;
    const later = await outbox.add(packets[number] as never);
    await within(later.sent, 5);
    assert.deepEqual(sent.splice(0), number === 16 ? ids.slice(0, 17) : [ids[number], ...again]);
  }
  await outbox.stop(CLOSED);
});

test("a relay that is silent about many packets holds up the others for seconds, and these have their time afterwards", async (context) => {
  const { timers } = context.mock;
  timers.enable({ apis: ["setTimeout"] });
  let seconds = 0;
  context.mock.method(performance, "now", () => 1000 * seconds);
  const pass = async (time: number) => {
    for (let each = 0; each < time; each++, seconds++) {
      timers.tick(1000);
      for (let turn = 0; turn < 50; turn++) await new Promise((done) => setImmediate(done));
    }
  };
  const ids = packets.map(({ packetId }) => packetId);
  const sent: string[] = [];
  let isOnline = false;
  let isSlow = true;
  const send: Send = ({ packetId }, { signal }) => {
    sent.push(packetId);
    return new Promise((resolve, reject) => {
      signal?.addEventListener("abort", () => reject(signal.reason));
      setTimeout(() => reject(new RequestTimeout("PUBLISH", 60)), 60_000);
      if (ids.indexOf(packetId) >= 18) resolve(published(packetId));
      else if (!isSlow) setTimeout(() => resolve(published(packetId)), 20_000);
    });
  };
  const outbox = new Outbox(memoryOutbox(), send, () => isOnline);
  const queued = await Promise.all(packets.map((packet) => outbox.add(packet)));
  outbox.start();
  await pass(30);
  assert.deepEqual(sent, ids.slice(0, 16), "a relay that is away is not silent");
  isOnline = true;
  outbox.wake();
  await pass(8);
  assert.deepEqual(await Promise.all(queued.slice(18).map(({ sent }) => sent.then(({ packetId }) => packetId))), ids.slice(18));
  isSlow = false;
  const all = Promise.all(queued.map(({ sent }) => sent));
  await pass(240);
  await all;
  await outbox.stop(CLOSED);
});

test("a packet that a store lists twice is sent once", async () => {
  const inner = memoryOutbox();
  const store: OutboxStore = {
    ...inner,
    async list() {
      const found = await inner.list();
      return [...found, ...found.slice(0, 1)];
    },
  };
  const sent: string[] = [];
  const outbox = new Outbox(store, async ({ packetId }) => {
    sent.push(packetId);
    return published(packetId);
  });
  for (const entry of entries.slice(0, 18)) await inner.add(entry);
  outbox.start();
  const last = await outbox.add(packets[18] as never);
  await within(last.sent, 5);
  await outbox.stop(CLOSED);
  assert.deepEqual(sent, packets.slice(0, 19).map(({ packetId }) => packetId));
});

test("a packet that is removed, or settled, while the store is read is not sent after that", async () => {
  const inner = memoryOutbox();
  let answer = () => undefined as void;
  let readings = 0;
  const store: OutboxStore = {
    ...inner,
    async list() {
      const found = await inner.list();
      if (++readings === 2) await new Promise<void>((resolve) => (answer = resolve));
      return found;
    },
  };
  const sent: string[] = [];
  let settle = () => undefined as void;
  const outbox = new Outbox(store, async ({ packetId }) => {
    sent.push(packetId);
    if (sent.length === 1) await new Promise<void>((resolve) => (settle = resolve));
    return published(packetId);
  });
  const [first, second, third] = packets.map(({ packetId }) => packetId);
  await inner.add(entries[0] as never);
  outbox.start();
  while (sent.length === 0) await new Promise((resolve) => setTimeout(resolve));
  await inner.add(entries[1] as never);
  const last = await outbox.add(packets[2] as never);
  while (readings < 2) await new Promise((resolve) => setTimeout(resolve));
  await outbox.remove(second as string);
  settle();
  while ((await inner.count()) > 1) await new Promise((resolve) => setTimeout(resolve));
  answer();
  await within(last.sent, 5);
  assert.deepEqual(sent, [first, third]);
  await outbox.stop(CLOSED);
});

test("a packet that is sent before its store has said so is settled all the same", async () => {
  const inner = memoryOutbox();
  const store: OutboxStore = {
    ...inner,
    add: async (entry) => {
      await inner.add(entry);
      outbox.wake();
      await new Promise((done) => setTimeout(done, 20)); // sent meanwhile
    },
  };
  const outbox = new Outbox(store, async ({ packetId }) => published(packetId));
  outbox.start();
  const queued = await outbox.add(packets[0] as never);
  assert.equal((await queued.sent).packetId, packets[0]?.packetId);
  await outbox.stop(CLOSED);
});

test("what others do with a packet is said to whoever waits for it", async () => {
  const inner = memoryOutbox();
  let tell: (news: OutboxNews) => void = () => undefined;
  const store: OutboxStore = {
    ...inner,
    exclusively: (_, signal) => new Promise((resolve) => signal.addEventListener("abort", () => resolve())),
    watch: (heard) => ((tell = heard), () => undefined),
  };
  const outbox = new Outbox(store, () => Promise.reject(new Error("another tab sends")));
  outbox.start();
  const [sent, refused, removed, mine] = await Promise.all(packets.slice(0, 4).map((packet) => outbox.add(packet)));
  tell({ kind: "sent", published: published(sent?.packetId as string) });
  tell({ kind: "refused", packetId: refused?.packetId as string, refusal: { code: "blocked_author", reason: "no" } });
  tell({ kind: "removed", packetId: removed?.packetId as string });
  assert.equal((await sent?.sent)?.packetId, sent?.packetId);
  await assert.rejects(refused?.sent as Promise<Published>, { code: "blocked_author" });
  await assert.rejects(removed?.sent as Promise<Published>, { name: "OutboxError" });
  await outbox.remove(mine?.packetId as string);
  await assert.rejects(mine?.sent as Promise<Published>, { name: "OutboxError" });
  await outbox.stop(CLOSED);
});

test("what is removed is not sent any more, whether it waits for a connection or for its turn", async () => {
  const inner = memoryOutbox();
  let tell: (news: OutboxNews) => void = () => undefined;
  const store: OutboxStore = { ...inner, watch: (heard) => ((tell = heard), () => undefined) };
  let connect!: () => void;
  const connected = new Promise<void>((resolve) => (connect = resolve));
  const sent: string[] = [];
  const outbox = new Outbox(store, async ({ packetId }, { signal }) => {
    await connected;
    signal?.throwIfAborted();
    sent.push(packetId);
    return published(packetId);
  });
  const queued = await Promise.all(packets.map((packet) => outbox.add(packet)));
  outbox.start();
  await new Promise((done) => setImmediate(done));
  const [waiting, elsewhere, later, ...others] = [0, 1, 18, 2, 19].map((at) => packets[at]?.packetId as string) as [string, string, string, ...string[]];
  await outbox.remove(waiting);
  await inner.remove(elsewhere); // in another tab
  tell({ kind: "removed", packetId: elsewhere });
  await outbox.remove(later);
  connect();
  await Promise.all(queued.filter(({ packetId }) => others.includes(packetId)).map((each) => each.sent));
  assert.deepEqual([waiting, elsewhere, later].filter((packetId) => sent.includes(packetId)), []);
  assert.equal(sent.length, packets.length - 3);
  await outbox.stop(CLOSED);
});

test("a store that fails for a while stops nothing", async (context) => {
  context.mock.method(console, "warn", () => undefined);
  const inner = memoryOutbox();
  const failures = new Map([["list", 1], ["remove", 1], ["refuse", 1]]);
  const failing = <T>(name: string, act: () => Promise<T>): Promise<T> => {
    const left = failures.get(name) ?? 0;
    failures.set(name, left - 1);
    return left > 0 ? Promise.reject(new Error(`${name} fails`)) : act();
  };
  const store: OutboxStore = {
    ...inner,
    list: () => failing("list", inner.list),
    remove: (id) => failing("remove", () => inner.remove(id)),
    refuse: (id, refusal) => failing("refuse", () => inner.refuse(id, refusal)),
  };
  const asked: string[] = [];
  const outbox = new Outbox(store, async ({ packetId }) => {
    asked.push(packetId);
    if (packetId === packets[1]?.packetId) throw new RequestRefused("timestamp_too_old", "too old");
    return published(packetId);
  });
  outbox.start();
  const ringing = setInterval(() => outbox.wake(), 5);
  const [taken, refused] = [await outbox.add(packets[0] as never), await outbox.add(packets[1] as never)];
  assert.equal((await taken.sent).packetId, packets[0]?.packetId);
  await assert.rejects(refused.sent, { code: "timestamp_too_old" });
  clearInterval(ringing);
  assert.deepEqual([...failures.values()].map((left) => left < 1), [true, true, true]);
  assert.deepEqual(asked, packets.slice(0, 2).map(({ packetId }) => packetId), "the relay has answered, and is not asked again");
  assert.deepEqual((await outbox.list()).map(({ state }) => state), ["refused"]);
  await outbox.stop(CLOSED);
});

test("a second adding that fails leaves the first one's promise", async (context) => {
  let isFull = false;
  const inner = memoryOutbox();
  const store: OutboxStore = {
    ...inner,
    add: (entry) => (isFull ? Promise.reject(new Error("full")) : inner.add(entry)),
  };
  const outbox = new Outbox(store, async ({ packetId }) => published(packetId));
  const first = await outbox.add(packets[0] as never);
  isFull = true;
  await assert.rejects(outbox.add(packets[0] as never), { message: "full" });
  outbox.start();
  context.after(() => outbox.stop(CLOSED));
  assert.equal((await first.sent).packetId, packets[0]?.packetId);
});

test("of two additions of a packet at once, one that fails leaves the other's promise", async (context) => {
  const inner = memoryOutbox();
  let calls = 0;
  let fail!: () => void;
  const failing = new Promise<void>((_, reject) => (fail = () => reject(new Error("EIO"))));
  const store: OutboxStore = {
    ...inner,
    add: async (entry) => {
      if (calls++ === 0) return failing;
      fail(); // and the second is stored once the first has failed
      await failing.catch(() => undefined);
      await new Promise((resolve) => setImmediate(resolve));
      return inner.add(entry);
    },
  };
  const outbox = new Outbox(store, async ({ packetId }) => published(packetId));
  const first = assert.rejects(outbox.add(packets[0] as never), { message: "EIO" });
  const second = await outbox.add(packets[0] as never);
  await first;
  outbox.start();
  context.after(() => outbox.stop(CLOSED));
  assert.equal((await second.sent).packetId, packets[0]?.packetId);
});

test("a full outbox takes a packet that it has", async () => {
  const inner = memoryOutbox();
  await inner.add(entries[0] as never);
  const outbox = new Outbox({ ...inner, count: async () => MAX_OUTBOX_PACKETS }, async ({ packetId }) => published(packetId));
  await assert.rejects(outbox.add(packets[1] as never), { name: "OutboxError" });
  assert.equal((await outbox.add(packets[0] as never)).packetId, packets[0]?.packetId);
  await outbox.stop(CLOSED);
});

test("of two programs that share a folder, the other one's work is noticed", async (context) => {
  const place = await folder();
  let isUp = false;
  const other = fileOutbox(place);
  const outbox = new Outbox(fileOutbox(place), async ({ packetId }) => {
    if (!isUp) throw new RequestTimeout("PUBLISH", 1);
    return published(packetId);
  });
  outbox.start();
  const queued = await outbox.add(packets[0] as never);
  await other.remove(packets[0]?.packetId as string);
  isUp = true;
  const now = performance.now.bind(performance);
  let seconds = 0;
  context.mock.method(performance, "now", () => now() + 1000 * seconds);
  const ringing = setInterval(() => (seconds++, outbox.wake()), 5); // word of it may be on its way for a moment
  await assert.rejects(queued.sent, { name: "OutboxError" });
  clearInterval(ringing);
  await outbox.stop(CLOSED);
});

test("what another tab has sent is told by its word, though the store tells sooner that the packet is gone", async (context) => {
  const inner = memoryOutbox();
  let tell: (news: OutboxNews) => void = () => undefined;
  let looks = 0;
  const store: OutboxStore = {
    ...inner, // and no locks, as on plain http: both tabs send
    list: () => (looks++, inner.list()),
    watch: (heard) => ((tell = heard), () => undefined),
  };
  const outbox = new Outbox(store, () => Promise.reject(new RequestTimeout("PUBLISH", 1)));
  outbox.start();
  context.after(() => outbox.stop(CLOSED));
  const { packetId, sent } = await outbox.add(packets[0] as never);
  await inner.remove(packetId);
  for (const before = looks; looks < before + 3; ) {
    outbox.wake();
    await new Promise((done) => setImmediate(done));
  }
  tell({ kind: "sent", published: published(packetId) });
  assert.equal((await sent).packetId, packetId);
});

test("a tab that was frozen hears what another tab has sent before it gives a packet up", async (context) => {
  const inner = memoryOutbox();
  let tell: (news: OutboxNews) => void = () => undefined;
  let looks = 0;
  const store: OutboxStore = {
    ...inner,
    list: () => (looks++, inner.list()),
    watch: (heard) => ((tell = heard), () => undefined),
  };
  const watched = () => 0; // it has not looked for long enough
  const outbox = new Outbox(store, () => Promise.reject(new RequestTimeout("PUBLISH", 1)), () => true, watched);
  outbox.start();
  context.after(() => outbox.stop(CLOSED));
  const { packetId, sent } = await outbox.add(packets[0] as never);
  await inner.remove(packetId);
  const look = async () => {
    for (const before = looks; looks < before + 3; await new Promise((done) => setImmediate(done))) outbox.wake();
  };
  await look();
  const now = performance.now.bind(performance);
  context.mock.method(performance, "now", () => now() + 60_000);
  await look();
  tell({ kind: "sent", published: published(packetId) });
  assert.equal((await sent).packetId, packetId);
});

test("what another program puts into a folder is heard of, where as much has gone meanwhile too", async (context) => {
  context.mock.timers.enable({ apis: ["setInterval"] });
  const place = await folder();
  const [mine, other] = [fileOutbox(place), fileOutbox(place)];
  let heard = 0;
  const stop = mine.watch(() => heard++);
  for (const [number, entry] of entries.slice(0, 3).entries()) {
    await other.add(entry);
    context.mock.timers.tick(1000);
    for (let waits = 0; heard === number && waits < 500; waits++) await new Promise((done) => setTimeout(done, 1));
    assert.equal(heard, number + 1);
    await mine.remove(entry.packetId);
  }
  stop();
});

test("an outbox is bounded", async () => {
  const store = memoryOutbox();
  for (let n = 0; n < MAX_OUTBOX_PACKETS; n++) await store.add({ packetId: `${n}`, canonical: "" });
  const outbox = new Outbox(store, () => Promise.reject(new Error("not asked")));
  await assert.rejects(outbox.add(packets[0] as never), { name: "OutboxError" });
});

test("whoever adds a packet that was refused is told so again", async () => {
  const outbox = new Outbox(memoryOutbox(), () => Promise.reject(new RequestRefused("timestamp_too_old", "too old")));
  outbox.start();
  for (let time = 0; time < 2; time++) {
    await assert.rejects((await outbox.add(packets[0] as never)).sent, { code: "timestamp_too_old" });
  }
  await outbox.stop(CLOSED);
});

test("whoever adds a packet that was refused is told so where another tab sends", async (context) => {
  context.mock.method(console, "warn", () => undefined);
  context.mock.timers.enable({ apis: ["setTimeout"] });
  const inner = memoryOutbox();
  let failures = 0; // as when a browser has closed a database
  const store: OutboxStore = {
    ...inner,
    list: () => (failures++ === 0 ? Promise.reject(new Error("list fails")) : inner.list()),
    exclusively: (_, signal) => new Promise((resolve) => signal.addEventListener("abort", () => resolve())),
  };
  await store.add(entries[0] as never);
  await store.refuse(entries[0]?.packetId as string, { code: "blocked_author", reason: "no" });
  const outbox = new Outbox(store, () => Promise.reject(new Error("another tab sends")));
  outbox.start();
  const [refused, waiting] = [await outbox.add(packets[0] as never), await outbox.add(packets[1] as never)];
  await new Promise((done) => setImmediate(done));
  context.mock.timers.tick(2000);
  await assert.rejects(refused.sent, { code: "blocked_author" });
  await outbox.stop(CLOSED);
  await assert.rejects(waiting.sent, { name: "Closed" });
});

test("a packet that a relay wants to hear of later is sent no sooner, and holds up no other", async (context) => {
  const sent: string[] = [];
  const [budgeted, ...others] = packets;
  const isOver = (packetId: string) => packetId === budgeted?.packetId && sent.filter((each) => each === packetId).length < 3;
  const outbox = new Outbox(memoryOutbox(), async ({ packetId }) => {
    sent.push(packetId);
    if (isOver(packetId)) throw new RequestRefused("rate_limited", "later", { detail: "trust_budget", retryAfter: 3600 });
    return published(packetId);
  });
  const times = () => sent.filter((each) => each === budgeted?.packetId).length;
  outbox.start();
  const first = await outbox.add(budgeted as never);
  for (const packet of others) await (await outbox.add(packet)).sent;
  assert.equal(times(), 1);
  outbox.wake(); // another connection, or another session with a budget of its own
  await (await outbox.add(await build(me, { type: "POST" }))).sent;
  assert.equal(times(), 2);
  const now = performance.now.bind(performance);
  context.mock.method(performance, "now", () => now() + 1.2 * 3_600_000);
  await outbox.add(await build(me, { type: "POST" }));
  assert.equal((await first.sent).packetId, budgeted?.packetId);
  await outbox.stop(CLOSED);
});

for (const [why, refusal] of [
  ["its relay says so", new RequestRefused("unauthenticated", "who?", { detail: "missing_capability" })],
  ["its relay has said so before", new MissingCapability("publish", new Set())],
] as const) {
  test(`a session that may not publish asks less and less often, and the next one at once: ${why}`, async (context) => {
    const { timers } = context.mock;
    timers.enable({ apis: ["setTimeout"] });
    let seconds = 0;
    context.mock.method(performance, "now", () => 1000 * seconds);
    const pass = async (time: number) => {
      for (let each = 0; each < time; each++, seconds++) {
        timers.tick(1000);
        await new Promise((done) => setImmediate(done));
      }
    };
    let attempts = 0;
    let isGranted = false;
    const outbox = new Outbox(memoryOutbox(), async ({ packetId }) => {
      attempts++;
      if (!isGranted) throw refusal;
      return published(packetId);
    });
    outbox.start();
    const queued = await Promise.all(packets.map((packet) => outbox.add(packet)));
    await pass(60); // in which a relay closes a connection for good that it has refused 1 200 times
    assert.ok(attempts >= 32 && attempts <= 6 * 16, `${attempts} in the first minute`);
    attempts = 0;
    await pass(600);
    assert.ok(attempts >= 5 * 16 && attempts <= 11 * 16, `${attempts} in ten more minutes`);
    isGranted = true;
    outbox.wake();
    await Promise.all(queued.map(({ sent }) => sent));
    await outbox.stop(CLOSED);
  });
}

test("a tab whose session may not publish leaves its turn to another one", async (context) => {
  const inner = memoryOutbox();
  let last: Promise<void> = Promise.resolve();
  const store: OutboxStore = {
    ...inner,
    exclusively: (drain) => (last = last.then(drain)), // in the order of asking, as the browser's locks
  };
  const anonymous = new Outbox(store, () => Promise.reject(new RequestRefused("unauthenticated", "who?")));
  const member = new Outbox(store, async ({ packetId }) => published(packetId));
  for (const each of [anonymous, member]) {
    each.start();
    context.after(() => each.stop(CLOSED));
  }
  const { packetId, sent } = await member.add(packets[0] as never);
  anonymous.wake(); // it is its turn
  const late = new Promise<Published>((_, reject) => setTimeout(reject, 1000, new Error("nobody sends it")));
  assert.equal((await Promise.race([sent, late])).packetId, packetId);
});

test("files of a killed program are whole or none, and private", async () => {
  const place = await folder();
  const store = fileOutbox(place);
  await store.add(entries[0] as never);
  const [name] = (await readdir(place)) as [string];
  assert.equal((await stat(join(place, name))).mode & 0o077, 0);
  const [left, busy] = [".0123456789abcdef.part", ".fedcba9876543210.part"];
  for (const draft of [left, busy]) await writeFile(join(place, draft), '{"packetId":"0x');
  await utimes(join(place, left), 0, 0);
  await writeFile(join(place, "notes.txt"), "x");
  const again = fileOutbox(place);
  assert.deepEqual(
    (await again.list()).map((entry) => entry.packetId),
    [entries[0]?.packetId],
  );
  assert.deepEqual((await readdir(place)).sort(), [name, "notes.txt", busy].sort(), "what may be at work stays");
  await again.add(entries[1] as never);
  assert.deepEqual((await store.list()).length, 2, "two programs share a folder");
  await writeFile(join(place, name), "{}");
  await assert.rejects(fileOutbox(place).list(), { name: "OutboxError" });
});

for (const [what, text] of [
  ["half a file", '{"packetId":"0x'],
  ["no object", "null"],
  ["no packet", JSON.stringify({ ...entries[0], canonical: "{}" })],
  ["another packet", JSON.stringify({ ...entries[0], canonical: entries[1]?.canonical })],
]) {
  test(`a damaged file is put aside and holds up no other: ${what}`, async (context) => {
    const warned: unknown[] = [];
    context.mock.method(console, "warn", (_: string, error: Error) => warned.push(error.name));
    const place = await folder();
    const store = fileOutbox(place);
    await store.add(entries[0] as never);
    const [name] = (await readdir(place)) as [string];
    await writeFile(join(place, name), text as string);
    const outbox = new Outbox(fileOutbox(place), async ({ packetId }) => published(packetId));
    outbox.start();
    const ringing = setInterval(() => outbox.wake(), 5);
    const queued = await outbox.add(packets[2] as never);
    assert.equal((await queued.sent).packetId, packets[2]?.packetId);
    clearInterval(ringing);
    assert.deepEqual([await outbox.list(), warned], [[], ["OutboxError"]]);
    await outbox.stop(CLOSED);
    assert.deepEqual(await readdir(place), [`${name}.damaged`]);
    assert.equal(await readFile(join(place, `${name}.damaged`), "utf8"), text);
  });
}

/** Whatever flushes a folder fails from now on, once it has done what `before` does. */
async function failingFlushes(context: TestContext, before: () => Promise<void> = async () => undefined): Promise<void> {
  const some = await open(tmpdir(), "r");
  const handles = Object.getPrototypeOf(some) as FileHandle;
  await some.close();
  const sync = handles.sync;
  context.mock.method(handles, "sync", async function (this: FileHandle) {
    if (!(await this.stat()).isDirectory()) return sync.call(this);
    await before();
    throw new Error("EIO");
  });
}

test("a packet that is not added, for its name cannot be flushed, is not sent either", async (context) => {
  const place = await folder();
  const store = fileOutbox(place);
  const sent: string[] = [];
  const outbox = new Outbox(store, async ({ packetId }) => {
    sent.push(packetId);
    return published(packetId);
  });
  let again: Promise<unknown> | undefined;
  await failingFlushes(context, async () => {
    again ??= assert.rejects(store.add(entries[0] as never), { name: "OutboxError" });
    assert.deepEqual(await store.list(), [], "nobody is to send what may not stay");
  });
  outbox.start();
  await assert.rejects(outbox.add(packets[0] as never), { name: "OutboxError", message: /cannot be written/ });
  await again;
  assert.deepEqual([await readdir(place), await outbox.list(), sent], [[], [], []]);
  context.mock.restoreAll();
  await (await outbox.add(packets[0] as never)).sent;
  assert.deepEqual(sent, [packets[0]?.packetId]);
  await outbox.stop(CLOSED);
});

test("a refusal that is written counts, though its folder cannot be flushed", async (context) => {
  const store = fileOutbox(await folder());
  await store.add(entries[0] as never);
  await failingFlushes(context);
  const refusal = { code: "blocked_author", reason: "no" };
  await assert.rejects(store.refuse(entries[0]?.packetId as string, refusal), { name: "OutboxError" });
  assert.deepEqual((await store.list())[0]?.refusal, refusal);
});

test("a file of pins that cannot be written stays as it was, and no other file is left", async (context) => {
  const place = await folder();
  const pins = filePins(join(place, "pins.json"));
  await pins.add("ws://one/", "did:strata:a");
  const some = await open(tmpdir(), "r");
  context.mock.method(Object.getPrototypeOf(some) as FileHandle, "sync", () => Promise.reject(new Error("ENOSPC")));
  await some.close();
  await assert.rejects(pins.add("ws://two/", "did:strata:b"), { message: "ENOSPC" });
  assert.deepEqual([await readdir(place), (await pins.load()).size], [["pins.json"], 1]);
});

test("pins are kept in the form of Python's, and never replaced", async () => {
  const path = join(await folder(), "deep", "pins.json");
  const pins = filePins(path);
  assert.equal((await pins.load()).size, 0);
  await pins.add(addressOf("wss://Relay.example/strata"), "did:strata:b");
  await pins.add(addressOf("ws://127.0.0.1:7447"), "did:strata:a");
  await pins.add(addressOf("ws://127.0.0.1:7447"), "did:strata:c");
  assert.deepEqual(JSON.parse(await readFile(path, "utf8")), {
    "ws://127.0.0.1:7447/": "did:strata:a",
    "wss://relay.example:443/strata": "did:strata:b",
  });
  for (const text of ["", "[]", "5", '{"ws://x":5}', '{"ws://x":"y"}']) {
    await writeFile(path, text);
    await assert.rejects(pins.load(), { name: "IdentityError" });
  }
});
