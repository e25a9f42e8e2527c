import assert from "node:assert/strict";
import { test } from "node:test";

import { build, DEFAULT_OPTIONS, Identity, RequestRefused } from "../src/client/index.js";
import { DidDocument } from "../src/client/protocol/documents.js";
import { KeyChain } from "../src/client/protocol/keys/chain.js";
import { KeyLedger } from "../src/client/protocol/keys/ledger.js";
import { Packet } from "../src/client/protocol/packets.js";
import { type Candidate, Inspector } from "../src/client/relays/inspection.js";
import { KeyFetcher, type KeySource } from "../src/client/relays/keyfetch.js";
import { KeyRing } from "../src/client/relays/keyring.js";
import { Query, Statistics } from "../src/client/relays/values.js";
import { vectors, verdict } from "./vectors.js";

interface World {
  documents: string[];
  events: [number, number][];
  held: string[];
  conflict: boolean;
  edges: [number, string[]][];
  keys: { at: number; packet: string[]; auth: string[]; states: unknown[][] }[];
  verdicts: { packet: number; at: number; ingest: boolean; code: string | null; detail: string | null }[];
}

const { did, clock_skew_seconds, recovery_delay_seconds, packets, worlds } = vectors<{
  did: string;
  clock_skew_seconds: number;
  recovery_delay_seconds: number;
  packets: string[];
  worlds: World[];
}>("keychains");
const parsed = packets.map((text) => Packet.read(text));
const rules = { clockSkewSeconds: clock_skew_seconds, recoveryDelaySeconds: recovery_delay_seconds };

function patience(seconds: number, act: () => void): () => void {
  const timer = setTimeout(act, 1000 * seconds);
  return () => clearTimeout(timer);
}

for (const [number, world] of worlds.entries()) {
  test(`key chain ${number} says what Python says, at every moment`, async () => {
    const documents = world.documents.map((text) => DidDocument.parse(text));
    const events = world.events.map(([at, receivedAt]) => ({ packet: parsed[at] as Packet, receivedAt }));
    const chain = await KeyChain.replay(did, events, { documents, rules });
    assert.deepEqual(
      chain.events.map(({ packet }) => packet.packetId),
      world.held,
    );
    assert.equal(chain.conflict !== undefined, world.conflict);
    for (const { at, packet, auth, states } of world.keys) {
      assert.deepEqual(await chain.candidates(at), packet, `keys for packets at ${at}`);
      assert.deepEqual(await chain.candidates(at, "auth"), auth, `keys for AUTH at ${at}`);
      const found = (await chain.keys(at)).map((key) => [
        key.keyId,
        key.validFrom,
        key.validUntil ?? null,
        key.revokedAt ?? null,
        key.recovery,
      ]);
      assert.deepEqual(found, states, `states at ${at}`);
    }
    for (const [at, keys] of world.edges) assert.deepEqual(await chain.candidates(at), keys, `keys at ${at}`);
    for (const { packet, at, ingest, code, detail } of world.verdicts) {
      const said = await verdict(() => chain.verify(parsed[packet] as Packet, at, { ingest }));
      assert.deepEqual(said, { code, detail }, `packet ${packet} at ${at}, ingest ${ingest}`);
    }
    // One at a time they come to the same, in whatever order.
    let applied = KeyChain.genesis(did, { documents, rules });
    const held = new Set(world.held);
    for (const { packet, receivedAt } of chain.events.toReversed()) {
      applied = await applied.apply(packet, receivedAt).catch(() => applied);
    }
    assert.ok(applied.events.every(({ packet }) => held.has(packet.packetId)));
  });
}

test("identity packets that two subscriptions bring at once both count", async () => {
  let pairs = 0;
  for (const world of worlds) {
    const documents = { [did]: world.documents.map((text) => DidDocument.parse(text)) };
    const events = world.events
      .map(([at, receivedAt]) => [parsed[at] as Packet, receivedAt] as const)
      .filter(([packet]) => world.held.includes(packet.packetId));
    /** What a reader has of both, heard one after the other or at once. */
    const known = async (pair: typeof events, isAtOnce: boolean): Promise<string[]> => {
      const ring = new KeyRing({ documents, rules }, 1024, 1e9);
      await ring.learn(did, await ring.build(did, []), 1);
      const hear = ([packet, receivedAt]: (typeof pair)[number]) => ring.verify(packet, receivedAt, 0).catch(() => false);
      if (isAtOnce) await Promise.all(pair.map(hear));
      else for (const each of pair) await hear(each);
      return (ring.chain(did)?.events ?? []).map(({ packet }) => packet.packetId);
    };
    for (let at = 1; at < Math.min(events.length, 6); at++) {
      const pair = events.slice(at - 1, at + 1);
      const [forth, back] = [await known(pair, false), await known(pair.toReversed(), false)];
      if (forth.length !== 2 || back.length !== 2) continue; // one needs the other
      assert.deepEqual(await known(pair, true), forth);
      pairs++;
    }
  }
  assert.ok(pairs >= 5, `${pairs} pairs`);
});

test("what was heard while a relay's answer about keys was on its way outlasts that answer", async () => {
  let heard = 0;
  for (const world of worlds) {
    const documents = { [did]: world.documents.map((text) => DidDocument.parse(text)) };
    for (const [at, receivedAt] of world.events.slice(0, 6)) {
      const ring = new KeyRing({ documents, rules }, 1024, 300);
      const before = await ring.build(did, []);
      await ring.learn(did, before, 1);
      const packet = parsed[at] as Packet;
      const isNew = await ring.verify(packet, receivedAt, 5).catch(() => false);
      if (!isNew || ring.chain(did)?.events.length !== 1) continue;
      await ring.learn(did, before, 4); // asked before it came
      assert.deepEqual(ring.chain(did)?.events.map((each) => each.packet.packetId), [packet.packetId]);
      await ring.learn(did, before, 6); // and after: the relay has it no more
      assert.deepEqual(ring.chain(did)?.events ?? [], []);
      heard++;
    }
  }
  assert.ok(heard >= 5, `${heard} packets`);
});

test("a signature that fits no key makes no forger of the relay", async () => {
  const packet = await build((await Identity.generate()).speakingFor(did), { type: "POST" });
  const ring = new KeyRing({}, 1024, 300);
  await ring.learn(did, undefined, 10); // the relay may have had a key that has expired since
  const statistics = new Statistics();
  const inspector = new Inspector(new Query({}), DEFAULT_OPTIONS, statistics, ring);
  const event = { receivedAt: 1_760_000_000, arrivedAt: 5 } as Candidate["event"];
  await inspector.judge({ packet, event, originType: undefined });
  assert.deepEqual([statistics.eventsTampered, statistics.eventsForged], [1, 0]);
});

test("authors whose keys take too long together are asked for apart", async () => {
  const asked: number[] = [];
  const source: KeySource = {
    async *read(authors, signal): AsyncIterable<never> {
      asked.push(authors.length);
      if (authors.length > 10) await new Promise((end) => signal.addEventListener("abort", end));
    },
    now: () => 0,
    patience,
  };
  const fetcher = new KeyFetcher(new KeyRing({}, 1024, 300), source, 0.01);
  const others = Array.from({ length: 400 }, (_, n) => `other ${n}`);
  for (let n = 0; n < 2; n++) await assert.rejects(fetcher.fetch(did, others, 0), { name: "RequestTimeout" });
  await fetcher.fetch(did, others, 0);
  assert.deepEqual(asked.slice(0, 3), [401, 50, 6]);
});

test("keys whose refresh came to nothing are asked for again after the next interval", async () => {
  const ring = new KeyRing({}, 1024, 300);
  const author = await Identity.generate();
  await ring.learn(author.did, undefined, 0);
  const packet = await build(author, { type: "POST" });
  const asked: number[] = [];
  for (const now of [100, 301, 302, 600, 602, 1000]) {
    await ring.verify(packet, packet.timestamp, now);
    if (ring.stale.delete(author.did)) asked.push(now); // and nobody answers
  }
  assert.deepEqual(asked, [301, 602, 1000]);
});

test("a past state of an author's keys goes on from what is known, whatever order it is asked for in", async () => {
  const longest = worlds.reduce((one, other) => (other.held.length > one.held.length ? other : one));
  const documents = longest.documents.map((text) => DidDocument.parse(text));
  const events = longest.events.map(([at, receivedAt]) => ({ packet: parsed[at] as Packet, receivedAt }));
  const moments = [...new Set(events.map(({ receivedAt }) => receivedAt))].sort((one, other) => one - other);
  const alone = new Map<number, string>();
  for (const at of moments) {
    const known = await KeyChain.replay(did, events.filter(({ receivedAt }) => receivedAt <= at), { documents, rules });
    alone.set(at, JSON.stringify(await known.keys(at)));
  }
  const chain = await KeyChain.replay(did, events, { documents, rules });
  const pastOf = chain as unknown as { pastState(at: number): Promise<{ copy(): KeyLedger }> };
  const received = KeyLedger.prototype.receive;
  let count = 0;
  KeyLedger.prototype.receive = function (entry) {
    count++;
    return received.call(this, entry);
  };
  try {
    for (const order of [moments, moments.toReversed()]) {
      for (const at of order) {
        const ledger = (await pastOf.pastState(at)).copy();
        ledger.settle(at);
        assert.equal(JSON.stringify([...ledger.keys.values()]), alone.get(at), `at ${at}`);
      }
      if (order === moments) assert.ok(count <= chain.events.length * 2, `${count} for ${chain.events.length} packets`);
    }
  } finally {
    KeyLedger.prototype.receive = received;
  }
});

test("what comes again after going back pushes nothing out that is remembered", async () => {
  const me = await Identity.generate();
  const made = await Promise.all(Array.from({ length: 8 }, (_, n) => build(me, { type: "POST", n })));
  const inspector = new Inspector(new Query(), { ...DEFAULT_OPTIONS, dedupPackets: 4 }, new Statistics(), undefined);
  const passed = async (some: typeof made, turn: number) => {
    const ids: string[] = [];
    for (const { canonical: packet, packetId, timestamp: receivedAt } of some) {
      const candidate = inspector.read({ packet, receivedAt, annotations: undefined, turn } as Candidate["event"]);
      if (candidate !== undefined && (await inspector.judge(candidate)) !== undefined) ids.push(packetId);
    }
    return ids;
  };
  const ids = made.map(({ packetId }) => packetId);
  assert.deepEqual(await passed(made.slice(0, 6), 0), ids.slice(0, 6));
  assert.deepEqual(await passed(made, 1), [...ids.slice(0, 2), ...ids.slice(6)], "the first two were forgotten");
  assert.deepEqual(await passed(made.slice(6), 1), []);
});

test("a packet that came late from a relay's peer was asked for", async () => {
  const packet = await build(await Identity.generate(), { type: "POST" });
  const event = { packet: packet.canonical, receivedAt: packet.timestamp - 5000, annotations: undefined };
  for (const byReceipt of [true, false]) {
    const statistics = new Statistics();
    const query = new Query({ receivedSince: packet.timestamp });
    const inspector = new Inspector(query, DEFAULT_OPTIONS, statistics, undefined);
    const read = inspector.read({ ...event, byReceipt } as Candidate["event"]);
    assert.equal(read !== undefined, byReceipt);
    assert.equal(statistics.eventsUnasked, byReceipt ? 0 : 1);
  }
});

test("an author of whom a packet has failed is asked for along with others", async () => {
  const ring = new KeyRing({}, 1, 300);
  assert.ok(ring.wants(did));
  await ring.learn(did, undefined, 10);
  assert.ok(!ring.wants(did));
  const packet = await build((await Identity.generate()).speakingFor(did), { type: "POST" });
  await assert.rejects(ring.verify(packet, 1_760_000_000, 5), { code: "invalid_signature" });
  assert.ok(ring.wants(did));
});

test("a relay that takes fewer authors at once is asked for fewer", async () => {
  const asked: number[] = [];
  let most = 10;
  const source: KeySource = {
    async *read(authors): AsyncIterable<never> {
      asked.push(authors.length);
      await Promise.resolve();
      if (authors.length > most) throw new RequestRefused("policy_rejected", "too many values");
    },
    now: () => 0,
    patience,
  };
  const fetcher = new KeyFetcher(new KeyRing({}, 1024, 300), source, 10);
  const others = Array.from({ length: 400 }, (_, n) => `other ${n}`);
  const first = fetcher.fetch(did, others, 0);
  while (asked.length === 0) await Promise.resolve();
  await Promise.all([first, fetcher.fetch(did, [], 1)]);
  assert.deepEqual(asked.slice(0, 3), [401, 50, 6]);
  most = 0;
  await assert.rejects(fetcher.fetch(did, [], 1), { name: "RequestRefused" });
});

test("a relay that sends very much is asked about fewer authors at once", async () => {
  const made = await Promise.all(Array.from({ length: 50 }, async () => build(await Identity.generate(), { type: "KEY_EVENT", reason: "x".repeat(200_000) })));
  const long = new Map(made.map((packet) => [packet.authorId, packet]));
  const asked: number[] = [];
  const taken: number[] = [];
  const source: KeySource = {
    async *read(authors) {
      const at = asked.push(authors.length) - 1;
      for (const author of authors) {
        const packet = long.get(author) as Packet;
        for (let n = 0; n < 8; n++) {
          taken[at] = (taken[at] ?? 0) + packet.sizeBytes;
          yield { packet, receivedAt: 1 };
        }
      }
    },
    now: () => 0,
    patience,
  };
  const ring = new KeyRing({}, 1024, 300);
  const [first, ...others] = long.keys();
  await new KeyFetcher(ring, source, 20).fetch(first as string, others, 0);
  assert.deepEqual(asked.slice(0, 2), [50, 6]);
  assert.ok(Math.max(...taken) <= 33 * 2 ** 20);
});

test("an author whose keys alone take too long holds up nobody", async () => {
  const author = await Identity.generate();
  const packet = await build(author, { type: "KEY_EVENT", reason: "x".repeat(40_000) });
  const arrived = [{ packet, receivedAt: 1 }];
  const source: KeySource = {
    async *read(_authors, signal) {
      yield* arrived;
      await new Promise((end) => signal.addEventListener("abort", end));
    },
    now: () => 10,
    patience,
  };
  const ring = new KeyRing({}, 8, 300);
  const fetcher = new KeyFetcher(ring, source, 0.01);
  await assert.rejects(fetcher.fetch(author.did, [], 20), { name: "RequestTimeout" });
  arrived.push({ packet, receivedAt: 1 });
  await fetcher.fetch(author.did, [], 20);
  const post = await build(author, { type: "POST" });
  await assert.rejects(ring.verify(post, 1_760_000_000, 50), { detail: "too_many_key_events" });
});
