import assert from "node:assert/strict";
import { test } from "node:test";

import { build, connect, type Delivery, Identity, memoryOutbox, type Packet, Relay, RequestRefused } from "../src/client/index.js";
import type { ConnectOptions } from "../src/client/index.js";
import { bytes } from "./vectors.js";

const URL = "ws://127.0.0.1:9/strata"; // nothing listens there: no manifest comes
const CHALLENGE = {
  type: "AUTH_CHALLENGE",
  challenge: "AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=",
  server_id: "did:strata:relay_1",
  expires_at: Math.floor(Date.now() / 1000) + 120,
  extensions: ["history_marker", "gapless", "packet_ids"],
};

type Frame = Record<string, unknown> & { type: string; subscription_id: string; client_msg_id: string };

/** A relay of the test's own, behind the WebSocket interface. */
class World {
  readonly sockets: FakeSocket[] = [];
  readonly seen: Frame[] = [];
  greet = [CHALLENGE as object];
  isDown = false;
  /** It takes connections and says nothing. */
  isMute = false;
  /** Called with each frame of the client's. */
  answer: (frame: Frame, socket: FakeSocket) => void = () => undefined;

  get last(): FakeSocket {
    return this.sockets.at(-1) as FakeSocket;
  }

  options(more: ConnectOptions = {}): ConnectOptions {
    const world = this;
    class Socket extends FakeSocket {
      constructor() {
        super(world);
      }
    }
    return { webSocket: Socket as never, backoffBase: 0.01, backoffCap: 0.02, ...more };
  }

  sent(type: string): Frame[] {
    return this.seen.filter((frame) => frame.type === type);
  }
}

class FakeSocket {
  onopen: ((event: never) => void) | null = null;
  onmessage: ((event: never) => void) | null = null;
  onclose: ((event: never) => void) | null = null;
  onerror: ((event: never) => void) | null = null;
  isDeaf = false;

  constructor(private readonly world: World) {
    world.sockets.push(this);
    setTimeout(() => {
      if (world.isMute) return;
      if (world.isDown) {
        this.onerror?.({} as never); // and, as in Node, nothing else
        return;
      }
      this.onopen?.({} as never);
      for (const message of world.greet) this.push(message);
    });
  }

  push(message: unknown): void {
    const data = typeof message === "string" || message instanceof Uint8Array ? message : JSON.stringify(message);
    this.onmessage?.({ data } as never);
  }

  event(packet: Packet, number: number, cursor?: string, subscription?: string): void {
    const id = subscription ?? (this.world.sent("SUBSCRIBE").at(-1) as Frame).subscription_id;
    const place = cursor === undefined ? "" : `,"cursor":"${cursor}"`;
    this.push(
      `{"type":"EVENT","subscription_id":"${id}","packet":${packet.canonical},"received_at":${packet.timestamp + number}${place}}`,
    );
  }

  drop(code: number): void {
    this.onclose?.({ code, reason: "" } as never);
  }

  send(data: string): void {
    const frame = JSON.parse(data) as Frame;
    this.world.seen.push(frame);
    if (!this.isDeaf) queueMicrotask(() => this.world.answer(frame, this));
  }

  close(): void {}
}

async function until(condition: () => boolean): Promise<void> {
  for (const end = Date.now() + 20_000; !condition(); ) {
    assert.ok(Date.now() < end, "it does not come to pass");
    await new Promise((done) => setTimeout(done, 5));
  }
}

const me = await Identity.fromSeed(bytes("05".repeat(32)));
const packets = await Promise.all(Array.from({ length: 12 }, (_, n) => build(me, { type: "POST", text: `${n}` })));

function endHistory(frame: Frame, socket: FakeSocket): void {
  if (frame["history_marker"] !== true) return;
  socket.push({ type: "END_OF_HISTORY", subscription_id: frame.subscription_id, complete: true, cursor: null });
}

test("without a manifest the first challenge tells what the relay can", async () => {
  const world = new World();
  const relay = await connect(URL, world.options());
  assert.deepEqual([...(relay.announced?.extensions ?? [])], CHALLENGE.extensions);
  relay.subscribe();
  assert.equal(world.seen[0]?.["history_marker"], true);
  await relay.close();
  await assert.rejects(relay.publish(packets[0] as Packet), { name: "Closed" });
});

test("onChange tells of connections and sessions, and harms nothing where it fails", async (context) => {
  const world = new World();
  const said = context.mock.method(console, "error", () => undefined);
  const identity = await Identity.generate();
  world.answer = (frame, socket) => {
    if (frame.type === "AUTH") setTimeout(() => socket.push({ type: "AUTH_OK", author_id: identity.did, capabilities: [] }));
  };
  const seen: (string | undefined)[] = [];
  const onChange = () => void seen.push(relay.session?.authorId);
  const relay = await connect(URL, world.options({ identity, onChange })); // which is called before there is a `relay`
  await relay.authenticate();
  assert.deepEqual(seen, [identity.did]);
  assert.equal(said.mock.callCount(), 1);
  world.last.drop(1006);
  await until(() => world.sockets.length === 2 && relay.isConnected);
  await relay.close();
});

test("a relay that will not have us is not asked again", async () => {
  const world = new World();
  const relay = await connect(URL, world.options());
  const waiting = relay.publish(packets[0] as Packet);
  world.last.drop(1008);
  await assert.rejects(waiting, { name: "ConnectionFailed" });
  assert.equal(relay.failure?.name, "ConnectionFailed");
  assert.equal(world.sockets.length, 1);
  assert.throws(() => relay.subscribe(), { name: "ConnectionFailed" });
});

test("a relay that will not have us leaves the outbox to other tabs, and says so to whoever waits for it", async () => {
  const world = new World();
  const { exclusively, ...store } = memoryOutbox();
  let isOver = false;
  const outbox = { ...store, exclusively: (drain: () => Promise<void>, signal: AbortSignal) => exclusively(drain, signal).finally(() => (isOver = true)) };
  const relay = await connect(URL, world.options({ outbox }));
  const { sent } = await relay.outbox.add(packets[0] as Packet);
  await until(() => world.sent("PUBLISH").length === 1);
  world.last.drop(1008);
  await assert.rejects(sent, { name: "ConnectionFailed" });
  await until(() => isOver);
  await assert.rejects(relay.outbox.add(packets[1] as Packet), { name: "ConnectionFailed" });
  assert.equal(await store.count(), 1, "it waits for the next connection");
  await relay.close();
});

test("what is removed from the outbox while there is no connection is not sent when there is one", async (context) => {
  const world = new World();
  const relay = await connect(URL, world.options());
  context.after(() => relay.close());
  world.isDown = true;
  world.last.drop(1006);
  await until(() => !relay.isConnected);
  const [removed, kept] = [await relay.outbox.add(packets[0] as Packet), await relay.outbox.add(packets[1] as Packet)];
  await until(() => relay.statistics.publishes === 1);
  await relay.outbox.remove(removed.packetId);
  await assert.rejects(removed.sent, { name: "OutboxError" });
  world.isDown = false;
  await until(() => world.sent("PUBLISH").length > 0);
  assert.deepEqual(world.sent("PUBLISH").map(({ packet }) => (packet as { packet_id: string }).packet_id), [kept.packetId]);
});

test("the pauses between attempts grow, however long an attempt has taken", async (context) => {
  const world = new World();
  world.isMute = true;
  const waits: number[] = [];
  const inner = globalThis.setTimeout;
  context.mock.method(globalThis, "setTimeout", (act: () => void, ms: number) => (waits.push(ms), inner(act, ms)));
  context.mock.method(Math, "random", () => 0.999);
  const relay = new Relay(URL, world.options({ handshakeTimeout: 0.05, stableAfter: 0.05, backoffBase: 0.05, backoffCap: 10, connectTimeout: Infinity }));
  const opening = assert.rejects(relay.open(), { name: "Closed" });
  await until(() => world.sockets.length === 4);
  assert.ok(waits.includes(100) && waits.includes(200), `waited ${waits.join(", ")} ms`);
  assert.equal(relay.statistics.connectionsFailed, 3);
  await relay.close();
  await opening;
});

test("an address that is none, and one where nobody answers", async () => {
  for (const url of ["", "http://x", "ws://x/#y", "wss://"]) {
    await assert.rejects(connect(url), { name: "ConnectionFailed" });
  }
  const world = new World();
  world.isDown = true;
  const failing = connect(URL, world.options({ connectTimeout: 0.3 }));
  await assert.rejects(failing, { name: "ConnectionFailed", message: /nothing answers there/ });
  assert.ok(world.sockets.length > 2, "it is tried again meanwhile");
});

test("a relay that has fallen silent is probed, left, and found again", async () => {
  const world = new World();
  const open = new Set<string>();
  world.answer = (frame, socket) => {
    if (frame.type === "UNSUBSCRIBE") open.delete(frame.subscription_id);
    if (frame.type !== "SUBSCRIBE") return;
    open.add(frame.subscription_id);
    setTimeout(() => open.has(frame.subscription_id) && endHistory(frame, socket), 5); // what is taken back gets no answer
  };
  const relay = await connect(URL, world.options({ pingInterval: 0.05, pingTimeout: 0.1 }));
  relay.subscribe();
  await until(() => world.sent("SUBSCRIBE").some((frame) => frame.subscription_id === "k3"));
  assert.equal(world.sockets.length, 1, "it answers the probes");
  assert.deepEqual([...open].filter((id) => id.startsWith("k")).length, 1, "and holds none that is answered");
  world.last.isDeaf = true;
  await until(() => world.sockets.length === 2 && relay.isConnected);
  assert.equal(relay.statistics.connectionsLost, 1);
  await relay.close();
});

test("what was waited for while nobody looked is waited for still", async (context) => {
  const world = new World();
  const quick = { publishTimeout: 1, historyTimeout: 1, keyTimeout: 1 };
  const relay = await connect(URL, world.options({ ...quick, resolveKeys: false, maxInFlight: 1 }));
  context.after(() => relay.close());
  const waiting = Promise.all([
    relay.publish(packets[0] as Packet),
    relay.publish(packets[1] as Packet), // it waits for its turn
    relay.get(packets[2]?.packetId as string, { timeout: 1 }),
    relay.ask({ type: "MODERATE", action: "list" }, { timeout: 1 }),
    relay.keyChain(me.did),
  ]);
  waiting.catch(() => undefined);
  await until(() => world.sent("SUBSCRIBE").length === 2);
  world.answer = (frame, socket) => {
    const { type, client_msg_id } = frame;
    if (type === "SUBSCRIBE") endHistory(frame, socket);
    if (type === "MODERATE") socket.push({ type: "MODERATED", action: "list", client_msg_id, entries: [] });
    if (type !== "PUBLISH") return;
    const { packet_id } = frame["packet"] as { packet_id: string };
    socket.push({ type: "OK", packet_id, status: "ACCEPTED", client_msg_id });
  };
  setImmediate(() => {
    // The answers come meanwhile, and are heard after the timers that are due.
    setImmediate(() => [...world.seen].forEach((frame) => world.answer(frame, world.last)));
    Atomics.wait(new Int32Array(new SharedArrayBuffer(4)), 0, 0, 4000);
  });
  await waiting;
  assert.equal(world.sockets.length, 1);
});

test("after a sleep a connection that is gone is replaced within seconds, and what waited goes out on it", async (context) => {
  const world = new World();
  world.answer = endHistory;
  const relay = await connect(URL, world.options({ backoffCap: 3600 }));
  context.after(() => relay.close());
  (relay as unknown as { driver: { backoff: { attempt: number } } }).driver.backoff.attempt = 20; // much had failed before
  relay.subscribe();
  await until(() => world.sent("SUBSCRIBE").length === 2);
  world.last.isDeaf = true;
  const waiting = relay.publish(packets[0] as Packet);
  const now = Date.now.bind(Date);
  context.mock.method(Date, "now", () => now() + 3_600_000); // as after a suspend, in which performance.now() stands still
  world.answer = (frame, socket) => {
    endHistory(frame, socket);
    if (frame.type !== "PUBLISH") return;
    socket.push({ type: "OK", packet_id: packets[0]?.packetId, status: "ACCEPTED", client_msg_id: frame.client_msg_id });
  };
  assert.equal((await waiting).duplicate, false);
  assert.equal(world.sockets.length, 2);
  assert.equal(relay.statistics.publishesRepeated, 1);
});

test("what is no message, or too large a one, is counted and dropped", async () => {
  const world = new World();
  const relay = await connect(URL, world.options({ maxMessageLength: 400 }));
  for (const data of [new Uint8Array(3), "x".repeat(401), "nonsense", '{"type":"NOPE"}']) world.last.push(data);
  assert.equal(relay.statistics.messagesInvalid, 4);
  await relay.close();
});

test("a packet that its author did not sign is dropped, and the next one is handed on", async () => {
  const world = new World();
  world.answer = endHistory;
  const relay = await connect(URL, world.options({ resolveKeys: false }));
  const subscription = relay.subscribe();
  await until(() => world.sent("SUBSCRIBE").length === 2);
  const [first, second, third] = packets as [Packet, Packet, Packet];
  const other = `0x${"0".repeat(126)}01`;
  world.last.event({ ...first, canonical: first.canonical.replace(first.signature, other) } as Packet, 1, "a");
  world.last.event({ ...second, canonical: second.canonical.replace('"text":"1"', '"text":"9"') } as Packet, 1, "b");
  world.last.event(third, 1, "c");
  world.last.event(third, 1, "d");
  world.last.event(first, 1, "e");
  assert.equal((await subscription.next()).value?.packet.packetId, third.packetId);
  assert.equal((await subscription.next()).value?.packet.packetId, first.packetId);
  const { eventsTampered, eventsForged, eventsRepeated } = relay.statistics;
  assert.deepEqual([eventsTampered, eventsForged, eventsRepeated], [2, 1, 1]);
  await relay.close();
  await assert.rejects(subscription.next(), { name: "Closed" });
});

test("a relay whose pages lead back is not asked for ever", async (context) => {
  const world = new World();
  let pages = 0;
  world.answer = ({ type, subscription_id }, socket) => {
    if (type === "SUBSCRIBE") socket.push({ type: "END_OF_HISTORY", subscription_id, complete: false, cursor: "abc"[pages++ % 3] });
  };
  const relay = await connect(URL, world.options());
  context.after(() => relay.close());
  assert.equal((await relay.fetch().next()).done, true);
  assert.ok(pages < 12, `${pages} pages`);
});

test("a slow reader leaves the feed, and goes on where it stood", async () => {
  const world = new World();
  world.answer = (frame, socket) => {
    if (frame.type !== "SUBSCRIBE") return;
    const filters = frame["filters"] as { cursor?: string; limit?: number };
    const from = filters.cursor === undefined ? 0 : Number(filters.cursor) + 1;
    const page = packets.slice(from, from + (filters.limit ?? 100));
    page.forEach((packet, at) => socket.event(packet, 0, `${from + at}`, frame.subscription_id));
    if (frame["history_marker"] !== true) return;
    const complete = from + page.length >= packets.length;
    const cursor = page.length > 0 ? `${from + page.length - 1}` : filters.cursor;
    socket.push({ type: "END_OF_HISTORY", subscription_id: frame.subscription_id, complete, cursor });
  };
  const relay = await connect(URL, world.options({ resolveKeys: false, queueEvents: 4, pageEvents: 2 }));
  const got: string[] = [];
  for await (const { packet } of relay.subscribe()) {
    got.push(packet.packetId);
    if (got.length === 3) world.last.drop(1001);
    if (got.length === packets.length) break;
  }
  assert.deepEqual(
    got,
    packets.map((packet) => packet.packetId),
  );
  await until(() => world.sent("UNSUBSCRIBE").length > 0);
  await relay.close();
});

test("a relay without cursors cannot fill the memory", async () => {
  const world = new World();
  world.greet = [];
  const relay = await connect(URL, world.options({ resolveKeys: false, queueEvents: 2, pageEvents: 2, idleTimeout: 0.01 }));
  const subscription = relay.subscribe();
  await until(() => world.sent("SUBSCRIBE").length === 1);
  for (const packet of packets) world.last.event(packet, 0);
  const got: Delivery[] = [];
  await assert.rejects(
    (async () => {
      for await (const delivery of subscription) got.push(delivery);
    })(),
    { name: "ConnectionFailed" },
  );
  assert.equal(got.length, 8, "what had arrived is handed on first");
  await relay.close();
});

test("two receivers of one subscription are told so, and closing wakes the first", async () => {
  const world = new World();
  const relay = await connect(URL, world.options());
  const subscription = relay.subscribe();
  const first = subscription.next();
  await assert.rejects(subscription.next(), TypeError);
  subscription.close();
  assert.deepEqual(await first, { done: true, value: undefined });
  await relay.close();
});

test("who aborts a reading is told why, and the relay that it is over", async (context) => {
  const world = new World();
  world.answer = endHistory;
  const relay = await connect(URL, world.options({ resolveKeys: false }));
  context.after(() => relay.close());
  const leaving = new AbortController();
  const subscription = relay.subscribe({ signal: leaving.signal });
  await until(() => world.sent("SUBSCRIBE").some((frame) => frame["gapless"] === true));
  for (const [at, packet] of packets.slice(0, 3).entries()) world.last.event(packet, 0, `${at}`);
  assert.equal((await subscription.next()).value?.packet.packetId, packets[0]?.packetId);
  leaving.abort(new Error("enough")); // in a loop's body
  await assert.rejects(subscription.next(), { message: "enough" });
  assert.equal((await subscription.next()).done, true);
  const { subscription_id } = world.sent("SUBSCRIBE").at(-1) as Frame;
  assert.equal(world.sent("UNSUBSCRIBE").at(-1)?.subscription_id, subscription_id);

  const stopping = new AbortController();
  const loop = assert.rejects(async () => {
    for await (const _ of relay.subscribe({ signal: stopping.signal }));
  }, { name: "AbortError" });
  const { signal } = new AbortController();
  const leave = context.mock.method(signal, "removeEventListener");
  for await (const _ of relay.fetch({ signal }));
  assert.equal(leave.mock.callCount(), 1, "a signal that lives on is not held");
  stopping.abort();
  await loop;
  const asked = world.sent("SUBSCRIBE").length;
  assert.throws(() => relay.subscribe({ signal: stopping.signal }), { name: "AbortError" });
  world.answer = () => undefined;
  await assert.rejects(relay.get(packets[0]?.packetId as string, { signal: stopping.signal }), { name: "AbortError" });
  assert.equal(world.sent("SUBSCRIBE").length, asked);
  const searching = new AbortController();
  const found = assert.rejects(relay.get(packets[0]?.packetId as string, { signal: searching.signal }), { name: "AbortError" });
  await until(() => world.sent("SUBSCRIBE").length > asked);
  searching.abort();
  await found;
});

test("a search and a loop end in time, though the keys do not come", async (context) => {
  const world = new World();
  world.answer = (frame, socket) => {
    const filters = frame["filters"] as { authors?: string[] } | undefined;
    if (filters === undefined || filters.authors !== undefined) return; // it says nothing of keys
    socket.event(packets[0] as Packet, 0, "c", frame.subscription_id);
    endHistory(frame, socket);
  };
  const relay = await connect(URL, world.options({ keyTimeout: 2 }));
  context.after(() => relay.close());
  const startedAt = performance.now();
  await assert.rejects(relay.get(packets[0]?.packetId as string, { timeout: 0.05 }), { name: "RequestTimeout", timeout: 0.05 });
  const subscription = relay.subscribe();
  const next = subscription.next();
  await until(() => world.sent("SUBSCRIBE").length >= 3);
  setTimeout(() => subscription.close(), 20);
  assert.deepEqual(await next, { done: true, value: undefined });
  assert.ok(performance.now() - startedAt < 1500);
});

test("whoever still reads when a connection is closed hears so, and waits for no keys", async () => {
  const world = new World();
  world.answer = (frame, socket) => {
    if (frame["gapless"] === true || frame.type !== "SUBSCRIBE") return;
    if ((frame["filters"] as { authors?: string[] }).authors === undefined) {
      socket.event(packets[0] as Packet, 0, "c", frame.subscription_id);
    }
    endHistory(frame, socket);
  };
  const relay = await connect(URL, world.options());
  const subscription = relay.subscribe();
  await until(() => relay.statistics.eventsReceived === 1);
  await relay.close();
  const startedAt = performance.now();
  await assert.rejects(subscription.next(), { name: "Closed" });
  assert.ok(performance.now() - startedAt < 5_000);
});

test("a signer that fails is said, and nothing hangs", async () => {
  const world = new World();
  const identity = { did: me.did, sign: () => Promise.reject(new Error("the device is gone")) };
  const relay = await connect(URL, world.options({ identity }));
  await assert.rejects(relay.authenticate(), { name: "IdentityError" });
  assert.equal(world.sent("AUTH").length, 0);
  await relay.close();
});

test("publishes wait for their turn, can be given up, and know the relay's limit", async () => {
  const world = new World();
  const relay = await connect(URL, world.options({ maxInFlight: 1, identity: me }));
  const stop = new AbortController();
  const given = relay.publish(packets[0] as Packet, { signal: stop.signal });
  const next = relay.publish(packets[1] as Packet);
  await assert.rejects(relay.publish(packets[2] as Packet, { timeout: 0.01 }), { name: "RequestTimeout" });
  const waiting = new AbortController();
  const abandoned = relay.publish(packets[3] as Packet, { signal: waiting.signal, timeout: Infinity });
  waiting.abort();
  await assert.rejects(abandoned, { name: "AbortError" });
  assert.equal(world.sent("PUBLISH").length, 1);
  stop.abort();
  await assert.rejects(given, { name: "AbortError" });
  await until(() => world.sent("PUBLISH").length === 2);
  const { client_msg_id } = world.sent("PUBLISH").at(-1) as Frame;
  world.last.push({ type: "OK", packet_id: packets[1]?.packetId, status: "ACCEPTED", client_msg_id, duplicate: true });
  assert.equal((await next).duplicate, true);
  await relay.close();
});

test("a relay that says it has another packet instead is believed once it shows a packet that states the same", async () => {
  const metric = (author: Identity, at: number, score: number) =>
    build(author, { type: "CONSENSUS_METRIC", target_packet: `0x${"ab".repeat(32)}`, observed_at: at, score });
  const [first, again] = [await metric(me, 1, 0), await metric(me, 1, 0.5)];
  const [later, strange] = [await metric(me, 2, 0), await metric(await Identity.generate(), 1, 0)];
  const publish = async (packet: Packet, of: string, shown: Packet | undefined) => {
    const world = new World();
    world.answer = (frame, socket) => {
      const { type, client_msg_id, subscription_id } = frame;
      const ok = { type: "OK", packet_id: packet.packetId, status: "ACCEPTED", duplicate: true, duplicate_of: of };
      if (type === "PUBLISH") socket.push({ ...ok, client_msg_id });
      if (type === "SUBSCRIBE" && shown !== undefined) socket.event(shown, 1, undefined, subscription_id);
      if (type === "SUBSCRIBE") endHistory(frame, socket);
    };
    const relay = await connect(URL, world.options({ resolveKeys: false }));
    return relay.publish(packet, { timeout: 5 }).finally(() => void relay.close());
  };
  assert.equal((await publish(again, first.packetId, first)).duplicateOf, first.packetId);
  assert.equal((await publish(again, again.packetId, undefined)).duplicateOf, undefined, "it is a plain duplicate");
  const refusal = { name: "RequestRefused", detail: "duplicate_of" };
  await assert.rejects(publish(again, first.packetId, undefined), refusal);
  await assert.rejects(publish(again, later.packetId, later), refusal);
  await assert.rejects(publish(again, strange.packetId, strange), refusal);
  await assert.rejects(publish(again, "lies", first), refusal);
  await assert.rejects(publish(packets[0] as Packet, first.packetId, first), refusal);
  const document = (author: Identity, n: number) =>
    build(author, { type: "DID_DOCUMENT", document: { id: me.did } }, { timestamp: 1_790_000_000 + n });
  const [own, repeated] = [await document(me, 0), await document(me, 1)];
  const another = await document(await Identity.generate(), 0);
  assert.equal((await publish(repeated, own.packetId, own)).duplicateOf, own.packetId);
  await assert.rejects(publish(repeated, another.packetId, another), refusal);
});

test("a relay that wants quiet for longer than a publish has is left in quiet", async () => {
  const world = new World();
  world.answer = ({ type, client_msg_id }, socket) => {
    if (type === "PUBLISH") socket.push({ type: "ERROR", code: "rate_limited", reason: "slow", retry_after: 60, client_msg_id });
  };
  const relay = await connect(URL, world.options());
  await assert.rejects(relay.publish(packets[0] as Packet, { timeout: 5 }), { code: "rate_limited", retryAfter: 60 });
  const second = await relay.publish(packets[1] as Packet, { timeout: 5 }).catch((error: unknown) => error as RequestRefused);
  assert.ok(second instanceof RequestRefused && (second.retryAfter ?? 0) >= 59);
  assert.equal(world.sent("PUBLISH").length, 1, "nothing goes out before the relay takes it");
  await relay.close();

  world.answer = ({ type, client_msg_id }, socket) => {
    const refusal = { code: "rate_limited", reason: "slow", retry_after: 60, detail: "trust_budget" };
    if (type === "PUBLISH") socket.push({ type: "ERROR", ...refusal, client_msg_id });
  };
  const other = await connect(URL, world.options());
  for (const packet of packets.slice(0, 2)) await assert.rejects(other.publish(packet, { timeout: 5 }), { retryAfter: 60 });
  assert.equal(world.sent("PUBLISH").length, 3, "a budget of some packets alone holds up no others");
  await other.close();
});

test("what a relay says beside a packet counts in the queue, and its times and codes are bounded", async () => {
  const world = new World();
  world.answer = endHistory;
  const relay = await connect(URL, world.options({ queueBytes: 40_000, resolveKeys: false }));
  const found = relay.subscribe({ types: "POST" });
  await until(() => world.sent("SUBSCRIBE").some((frame) => frame["gapless"] === true));
  for (const [at, packet] of packets.slice(0, 3).entries()) {
    const id = (world.sent("SUBSCRIBE").at(-1) as Frame).subscription_id;
    const more = `"cursor":"${at}","relay_annotations":{"x":"${"x".repeat(30_000)}"}`;
    const receivedAt = at === 0 ? "9999999999999999999999" : `${packet.timestamp}`;
    world.last.push(`{"type":"EVENT","subscription_id":"${id}","packet":${packet.canonical},"received_at":${receivedAt},${more}}`);
  }
  await until(() => world.sent("UNSUBSCRIBE").length > 1);
  assert.equal((await found.next()).value?.receivedAt, Number.MAX_SAFE_INTEGER);
  for (let n = 0; n < 300; n++) world.last.push({ type: "ERROR", code: `c${n}`, reason: "" });
  world.last.push({ type: "ERROR", code: "c".repeat(129), reason: "" });
  const { refusals } = relay.statistics;
  assert.equal(Object.keys(refusals).length, 257);
  assert.equal(refusals["other"], 45);
  await relay.close();
});

test("a session that could not be authenticated is no other one for what a relay wants to hear of later", async (context) => {
  const world = new World();
  let isMember = false;
  world.answer = ({ type, client_msg_id }, socket) => {
    const refusal = { type: "ERROR", reason: "no", client_msg_id };
    if (type === "PUBLISH") socket.push({ ...refusal, code: "rate_limited", detail: "trust_budget", retry_after: 3600 });
    if (type !== "AUTH") return;
    if (isMember) socket.push({ type: "AUTH_OK", author_id: me.did, client_msg_id });
    else socket.push({ ...refusal, code: "unauthenticated", detail: "not_a_member" });
  };
  const relay = await connect(URL, world.options({ identity: me }));
  context.after(() => relay.close());
  await relay.outbox.add(packets[0] as Packet);
  await until(() => world.sent("PUBLISH").length === 1);
  await assert.rejects(relay.authenticate(), { code: "unauthenticated" });
  await new Promise((done) => setTimeout(done, 20));
  assert.equal(world.sent("PUBLISH").length, 1);
  isMember = true;
  world.last.push(CHALLENGE);
  await relay.authenticate();
  await until(() => world.sent("PUBLISH").length === 2);
});

test("a question of another kind is answered, refused, or lost with the connection", async () => {
  const world = new World();
  world.answer = ({ type, action, client_msg_id }, socket) => {
    if (type !== "MODERATE") return;
    if (action === "list") socket.push({ type: "MODERATED", action, client_msg_id, entries: [{ kind: "author" }] });
    if (action === "ban") socket.push({ type: "ERROR", code: "unauthenticated", reason: "no", client_msg_id });
    if (action === "log") socket.drop(1006);
  };
  const relay = await connect(URL, world.options());
  assert.deepEqual((await relay.ask({ type: "MODERATE", action: "list" })).entries, [{ kind: "author" }]);
  await assert.rejects(relay.ask({ type: "MODERATE", action: "ban" }), { name: "RequestRefused" });
  await assert.rejects(relay.ask({ type: "MODERATE", action: "unban" }, { timeout: 0.01 }), { name: "RequestTimeout" });
  await assert.rejects(relay.ask({ type: "MODERATE", action: "log" }), { name: "ConnectionFailed" });
  await relay.close();
});

test("nothing is kept of a question that nobody waits for, nor of a probe that is refused", async () => {
  const world = new World();
  world.answer = ({ type, subscription_id }, socket) => {
    if (type === "SUBSCRIBE") socket.push({ type: "ERROR", code: "rate_limited", reason: "slow", retry_after: 60, subscription_id });
  };
  const relay = await connect(URL, world.options({ pingInterval: 0.02, pingTimeout: 5 }));
  const { core } = (relay as unknown as { driver: { core: { isWaiting: boolean; probing: Set<string> } } }).driver;
  await assert.rejects(relay.ask({ type: "MODERATE", action: "list" }, { timeout: 0.01 }), { name: "RequestTimeout" });
  assert.equal(core.isWaiting, false, "a silence is no reason to ask whether the relay is there");
  const found = relay.subscribe();
  await until(() => world.seen.filter(({ subscription_id }) => subscription_id?.startsWith("k")).length >= 3);
  assert.ok(core.probing.size <= 1, `${core.probing.size} probes`);
  found.close();
  await relay.close();
});

test("what has no end to wait for is waited for", async () => {
  const world = new World();
  world.answer = endHistory;
  const relay = await connect(URL, world.options({ maxInFlight: 1, publishTimeout: Infinity, keyTimeout: 30 * 86_400 }));
  const [first, second] = [relay.publish(packets[0] as Packet), relay.publish(packets[1] as Packet)];
  const found = relay.get(packets[2]?.packetId as string, { timeout: 30 * 86_400 });
  const keys = relay.keyChain(me.did);
  assert.equal(await found, undefined, "the relay said so, and no timer");
  await keys;
  for (const [at, published] of [first, second].entries()) {
    await until(() => world.sent("PUBLISH").length === at + 1);
    const { client_msg_id } = world.sent("PUBLISH").at(-1) as Frame;
    world.last.push({ type: "OK", packet_id: packets[at]?.packetId, status: "ACCEPTED", client_msg_id });
    assert.equal((await published).packetId, packets[at]?.packetId);
  }
  await relay.close();
});

test("options and queries that cannot work are refused", async () => {
  assert.throws(() => new Relay(URL, { ackTimeout: 0 }), TypeError);
  assert.throws(() => new Relay(URL, { authenticate: "always" }), TypeError);
  assert.throws(() => new Relay(URL, { odd: 1 } as never), TypeError);
  const world = new World();
  const relay = await connect(URL, world.options());
  for (const options of [{ limit: 5 }, { until: 5 }, { order: "desc" as const }, { packetIds: "0x00" }]) {
    assert.throws(() => relay.subscribe(options), TypeError);
  }
  await assert.rejects(relay.post({ type: "POST" }), TypeError);
  await assert.rejects(relay.authenticate(), TypeError);
  await relay.close();
});

test("what a program passes wrongly is refused at once, by its name", async () => {
  const world = new World();
  const me = await Identity.generate();
  const relay = await connect(URL, world.options({ identity: me }));
  const wrong: Record<string, unknown> = {
    authors: "alice",
    types: [5],
    packetIds: ["0x12"],
    since: Date.now() / 1000 + 0.5,
    until: "x",
    receivedSince: Number.NaN,
    receivedUntil: new Date(),
    cursor: 5,
    cursorFallbackSince: 1.5,
    limit: "3",
    order: "up",
    onLogReset: 5,
    signal: "now",
    cancel: AbortSignal.abort(),
  };
  for (const [name, value] of Object.entries(wrong)) {
    assert.throws(() => relay.fetch({ [name]: value }), { name: "TypeError", message: new RegExp(name) });
  }
  assert.throws(() => relay.subscribe({ live: "no" as never }), { name: "TypeError", message: /live/ });
  for (const id of [undefined, 5, ["0x12"], "0x12"]) await assert.rejects(relay.get(id as never), { name: "TypeError", message: /packetId/ });
  for (const packet of [undefined, 5, {}, "x"]) await assert.rejects(relay.publish(packet as never), { name: "TypeError", message: /packet/ });
  const packet = await build(me, { type: "POST" });
  for (const timeout of ["5", Number.NaN]) {
    await assert.rejects(relay.publish(packet, { timeout: timeout as never }), { name: "TypeError", message: /timeout/ });
  }
  await assert.rejects(relay.publish(packet, { signal: 5 as never }), { name: "TypeError", message: /signal/ });
  for (const timeout of [0, -1]) {
    await assert.rejects(relay.publish(packet, { timeout }), { name: "RequestTimeout", message: new RegExp(`within ${timeout} s`) });
  }
  assert.deepEqual(world.sent("SUBSCRIBE"), []);
  relay.fetch({ authors: me.did, since: null as never, cursor: null }).close(); // null says nothing, as undefined
  await relay.close();
});

test("an outbox that cannot be used fails the opening, and nothing else", async () => {
  const unhandled: unknown[] = [];
  const hear = (error: unknown) => unhandled.push(error);
  process.on("unhandledRejection", hear);
  const outbox = {
    ...memoryOutbox(),
    watch: () => {
      throw new Error("no channel");
    },
  };
  await assert.rejects(connect(URL, new World().options({ outbox })), { message: "no channel" });
  await new Promise((done) => setTimeout(done, 50));
  process.off("unhandledRejection", hear);
  assert.deepEqual(unhandled, []);
});
