import assert from "node:assert/strict";
import { test } from "node:test";
import { setTimeout as sleep } from "node:timers/promises";

import { type ContentMessage, MessageChannel, MessageChannelEvent, Message } from "@waku/sds";

import { lossy } from "../examples/chat/lossy.js";
import {
  type ChannelMessage,
  type ChannelOptions,
  type ChannelRelay,
  memoryChannelStore,
  openChannel,
  type Reading,
  type ReliableChannel,
} from "../src/client/channels/index.js";
import { beyond, type Entry, makeEntry } from "../src/client/channels/entry.js";
import { decodeMessage, messageContent, readEnvelope, repairContent } from "../src/client/channels/envelope.js";
import { Forgotten, MAX_FORGOTTEN } from "../src/client/channels/forgotten.js";
import { decodeSegment, encodeSegment, Reassembly } from "../src/client/channels/segments.js";
import {
  build,
  Closed,
  type Delivery,
  type FetchOptions,
  Identity,
  InvalidPacket,
  KeyChain,
  MissingCapability,
  type Packet,
  RequestRefused,
  RequestTimeout,
} from "../src/client/index.js";

const TOPIC = "/test/1/room/proto";
const QUICK = { resendAfter: 0.2, acknowledgeWithin: 0.04, syncEvery: 0.3 };
const utf8 = (text: string) => new TextEncoder().encode(text);
const text = ({ payload }: ChannelMessage) => new TextDecoder().decode(payload);
const hex = (bytes: Uint8Array) => Buffer.from(bytes).toString("hex");

/** A relay in this process: a log, whose places are the cursors, and those who follow it. */
class World {
  readonly log: Packet[] = [];
  /** The queries of fetches. */
  readonly fetches: FetchOptions[] = [];
  /** Packets that nobody is shown. */
  hides: (packet: Packet) => boolean = () => false;
  private readonly bells = new Set<() => void>();

  add(packet: Packet): void {
    this.log.push(packet);
    for (const ring of this.bells) ring();
  }

  relay(extensions: string[] = ["packet_ids"]): ChannelRelay {
    const world = this;
    return {
      announced: { extensions: new Set(extensions) },
      keyChain: () => Promise.reject(new Error("not here")),
      publish(packet) {
        world.add(packet);
        const at = { receivedAt: packet.timestamp, duplicate: false, queued: false, downgradedTo: undefined };
        return Promise.resolve({ packetId: packet.packetId, ...at });
      },
      subscribe: (options) => world.read(options, true),
      fetch(options) {
        world.fetches.push(options);
        return world.read(options, false);
      },
    };
  }

  private read(options: FetchOptions, live: boolean): Reading {
    const [log, bells] = [this.log, this.bells];
    let isClosed = false;
    let ring = () => undefined as void;
    const bell = () => ring();
    const wanted = options.packetIds;
    const show = (packet: Packet) => !this.hides(packet) && (wanted === undefined || wanted.includes(packet.packetId));
    return {
      close() {
        isClosed = true;
        ring();
      },
      async *[Symbol.asyncIterator](): AsyncGenerator<Delivery> {
        bells.add(bell);
        try {
          const stored = log.length;
          for (let at = Number(options.cursor ?? 0); !isClosed; ) {
            const packet = log[at];
            if (packet !== undefined) {
              at++;
              const delivery = { packet, receivedAt: packet.timestamp, live: at > stored, originType: undefined };
              if (show(packet)) yield { ...delivery, cursor: String(at) };
            } else if (live) {
              await new Promise<void>((resolve) => (ring = resolve));
            } else {
              return;
            }
          }
        } finally {
          bells.delete(bell);
        }
      },
    };
  }
}

/** A channel that is closed after the test, and what it has handed over. */
async function participant(
  context: { after: (close: () => Promise<void>) => void },
  relay: ChannelRelay,
  options: Partial<ChannelOptions> = {},
): Promise<{ channel: ReliableChannel; handed: string[]; identity: Identity }> {
  const handed: string[] = [];
  const identity = await Identity.generate();
  const onMessage = (message: ChannelMessage) => handed.push(text(message));
  const channel = await openChannel(relay, { id: "room", topic: TOPIC, identity, onMessage, ...QUICK, ...options });
  context.after(() => channel.close());
  return { channel, handed, identity: (options.identity as Identity | undefined) ?? identity };
}

async function until(holds: () => boolean, what: string): Promise<void> {
  for (const end = Date.now() + 20_000; !holds(); await sleep(5)) assert.ok(Date.now() < end, what);
}

test("a segment is what the Python library writes, and its parts come together in any order", () => {
  const written =
    "0a20f135b0e79f2d33b4e350758e698d04b4e94182367370eb82a0786c0797c37ec0180122076772c3bcc39f65ca3e05312d322d33";
  assert.equal(hex(encodeSegment(utf8("grüße"), "1-2-3")), written);
  const segment = decodeSegment(Buffer.from(written, "hex"));
  assert.equal(segment?.requestId, "1-2-3");
  const reassembly = new Reassembly();
  assert.equal(hex(reassembly.take("a", Buffer.from(written, "hex")) ?? utf8("")), hex(utf8("grüße")));
  assert.equal(hex(reassembly.take("a", utf8("as it is")) ?? utf8("")), hex(utf8("as it is")));
  // Of a payload in two: tags 1, 2 (index 1), 3 (count 2), 4.
  const hash = Buffer.from(segment?.hash ?? []);
  const second = Buffer.concat([Buffer.from([0x0a, 32]), hash, Buffer.from([16, 1, 24, 2, 34, 4]), utf8("üße").subarray(0, 4)]);
  const head = utf8("grüße").subarray(0, 3);
  const tail = utf8("grüße").subarray(3);
  const parts = [
    Buffer.concat([Buffer.from([0x0a, 32]), hash, Buffer.from([16, 1, 24, 2, 34, tail.length]), tail]),
    Buffer.concat([Buffer.from([0x0a, 32]), hash, Buffer.from([24, 2, 34, head.length]), head]),
  ] as const;
  assert.equal(reassembly.take("a", parts[0]), undefined);
  assert.equal(reassembly.take("b", parts[1]), undefined, "another sender's");
  assert.equal(hex(reassembly.take("a", parts[1]) ?? utf8("")), hex(utf8("grüße")));
  for (let cut = 0; cut < second.length; cut++) decodeSegment(second.subarray(0, cut)); // never throws
});

test("two hear each other, the same words twice too, and acknowledge", async (context) => {
  const world = new World();
  const one = await participant(context, world.relay());
  const other = await participant(context, world.relay());
  for (const words of ["yes", "yes", "no"]) await one.channel.send(utf8(words));
  await until(() => other.handed.length === 3, "three come");
  await other.channel.send(utf8("well"));
  await until(() => one.handed.length === 4, "and one goes back");
  await until(() => one.channel.status.unacknowledged + other.channel.status.unacknowledged === 0, "all acknowledged");
  assert.deepEqual(other.handed, ["yes", "yes", "no", "well"]);
  assert.deepEqual(one.channel.messages.map((each) => each.state), ["acknowledged", "acknowledged", "acknowledged", "received"]);
  assert.deepEqual(one.channel.messages.map((each) => each.id), other.channel.messages.map((each) => each.id));
  assert.equal(one.channel.messages.at(-1)?.author, other.identity.did);
  await assert.rejects(one.channel.send(new Uint8Array()), RangeError);
});

test("the package hands on what follows a message that waits; the channel keeps the order", async (context) => {
  const world = new World();
  const one = await participant(context, world.relay());
  for (const words of ["first", "second", "third"]) await one.channel.send(utf8(words));
  await until(() => world.log.length === 3, "all are published");
  const [first, second, third] = world.log.slice(0, 3) as [Packet, Packet, Packet];
  const read = (packet: Packet) => Message.decode(readEnvelope(packet, TOPIC)?.wire as Uint8Array) as Message;

  // As participants send that name one message each.
  const short = [first, second, third].map(read);
  for (const message of short) message.causalHistory = message.causalHistory.slice(-1);
  const [early, ...rest] = short as [Message, Message, Message];

  const bare = new MessageChannel("room", "somebody");
  const order: string[] = [];
  bare.addEventListener(MessageChannelEvent.InMessageDelivered, ({ detail }) => order.push(detail));
  for (const message of rest) bare.pushIncomingMessage(message, undefined);
  await bare.processTasks();
  assert.deepEqual(order, [rest[1]?.messageId], "the third, and neither of those before it");

  const late = new World();
  const other = await participant(context, late.relay([]));
  const bring = async (message: Message) => late.add(await build(one.identity, messageContent(TOPIC, message.encode())));
  for (const message of rest) await bring(message);
  await until(() => other.channel.status.heldBack === 2, "both wait");
  assert.deepEqual(other.handed, []);
  await bring(early);
  await until(() => other.handed.length === 3, "all come");
  assert.deepEqual(other.handed, ["first", "second", "third"]);
});

for (const extensions of [["packet_ids"], []]) {
  const how = extensions.length > 0 ? "by packet ids" : "by cursor";
  test(`what is lost both ways is found in the relay's history ${how}, or sent again`, async (context) => {
    const world = new World();
    const losses = { in: 0, out: 0 };
    const sides: Awaited<ReturnType<typeof participant>>[] = [];
    for (const seed of [1, 2]) {
      sides.push(await participant(context, lossy(world.relay(extensions), 0.3, seed, losses)));
    }
    const said: string[] = [];
    for (let number = 0; number < 15; number++) {
      for (const [at, { channel }] of sides.entries()) {
        said.push(`${at} ${number}`);
        await channel.send(utf8(said.at(-1) as string));
      }
      await sleep(10);
    }
    await until(() => sides.every(({ channel }) => channel.status.unacknowledged === 0), "all acknowledged");
    await until(() => sides.every(({ handed }) => handed.length === said.length), "all handed over");
    for (const { handed, channel } of sides) {
      assert.deepEqual([...handed].sort(), [...said].sort());
      const place = new Map(channel.messages.map(({ id }, at) => [id, at]));
      for (const { id, follows } of channel.messages) {
        for (const before of follows) assert.ok((place.get(before) ?? -1) < (place.get(id) as number));
      }
    }
    const [mine, theirs] = sides.map(({ channel }) => channel.messages.map(({ id }) => id));
    assert.deepEqual(mine, theirs);
    assert.ok(losses.in > 0 && losses.out > 0);
    assert.ok(world.fetches.some(({ packetIds }) => (packetIds === undefined) === (extensions.length === 0)));
  });
}

test("after a reload the messages are there, the unacknowledged go out as they were, and none is handed over again", async (context) => {
  const world = new World();
  const store = memoryChannelStore();
  const before = await participant(context, world.relay(), { store });
  const other = await participant(context, world.relay());
  await other.channel.send(utf8("hello"));
  await until(() => before.handed.length === 1, "it comes");
  await other.channel.close();
  await before.channel.send(utf8("are you there?"));
  await until(() => before.channel.status.sending === 0, "it is sent");
  const sent = before.channel.messages.at(-1) as ChannelMessage;
  const wires = () =>
    world.log.map((packet) => readEnvelope(packet, TOPIC)?.wire as Uint8Array).filter((each) => Message.decode(each)?.messageId === sent.id);
  await before.channel.close();

  const after = await participant(context, world.relay(), { store, identity: before.identity });
  assert.equal(after.channel.sender, before.channel.sender);
  assert.deepEqual(after.channel.messages.map(text), ["hello", "are you there?"]);
  assert.deepEqual(after.channel.messages.at(-1), sent);
  await until(() => wires().length > 1, "it is sent again");
  assert.equal(new Set(wires().map(hex)).size, 1, "the same bytes");
  const third = await participant(context, world.relay());
  await until(() => after.channel.status.unacknowledged === 0, "somebody acknowledges");
  assert.deepEqual(third.handed, ["hello", "are you there?"]);
  assert.deepEqual(after.handed, []);
});

test("what nobody has any more is given up once, and what follows it is handed over, after a reload too", async (context) => {
  const world = new World();
  const one = await participant(context, world.relay());
  await one.channel.send(utf8("lost"));
  await until(() => world.log.length > 0, "it is published");
  const lost = world.log[0] as Packet;
  await one.channel.send(utf8("kept"));
  await until(() => world.log.length > 1, "it is published");
  await one.channel.close();
  const rest = new World();
  rest.add(world.log.find((packet) => packet !== lost) as Packet);
  const store = memoryChannelStore();
  const other = await participant(context, rest.relay(), { store, giveUpAfter: 0.2 });
  await until(() => other.handed.length === 1, "it is handed over");
  assert.equal(other.channel.status.lost, 1);
  await other.channel.close();
  const later = await participant(context, rest.relay(), { store, identity: other.identity });
  assert.deepEqual(later.channel.messages.map(text), ["kept"]);
});

test("a clock that is put back by an hour delays nothing", async (context) => {
  const world = new World();
  const one = await participant(context, world.relay());
  let isLost = true;
  world.hides = () => isLost;
  await one.channel.send(utf8("lost at first"));
  await until(() => one.channel.status.sending === 0, "it is published");
  const now = Date.now;
  context.mock.method(Date, "now", () => now() - 3_600_000);
  isLost = false;
  world.log.length = 0; // no relay has it any more
  const other = await participant(context, world.relay());
  const end = performance.now() + 20_000;
  while (one.channel.status.unacknowledged > 0 && performance.now() < end) await sleep(5);
  assert.equal(one.channel.status.unacknowledged, 0);
  assert.deepEqual(other.handed, ["lost at first"]);
  assert.ok(one.channel.status.resent > 0);
});

test("a page that was frozen hears the acknowledgements that wait before it says a message again", async (context) => {
  const world = new World();
  const { channel } = await participant(context, world.relay(), { resendAfter: 10, syncEvery: 30 });
  await channel.send(utf8("said once"));
  await until(() => world.log.length === 1, "it is published");
  const now = performance.now.bind(performance);
  context.mock.method(performance, "now", () => now() + 60_000);
  await until(() => world.log.length > 1, "a sync is due");
  assert.equal(channel.status.resent, 0);
});

test("after a reload with a clock that was put back, what is said comes behind what was said", async (context) => {
  const world = new World();
  const store = memoryChannelStore();
  const before = await participant(context, world.relay(), { store });
  await before.channel.send(utf8("first"));
  await until(() => before.channel.status.sending === 0, "it is published");
  await before.channel.close();
  const now = Date.now;
  context.mock.method(Date, "now", () => now() - 3_600_000);
  const after = await participant(context, world.relay(), { store, identity: before.identity });
  await after.channel.send(utf8("second"));
  await after.channel.send(utf8("third"));
  assert.deepEqual(after.channel.messages.map(text), ["first", "second", "third"]);
  const other = await participant(context, world.relay());
  await until(() => other.handed.length === 3, "all come");
  assert.deepEqual(other.channel.messages.map(text), ["first", "second", "third"]);
});

test("a device whose clock was two days ahead for one message is heard, then and later, and puts no other clock ahead", async (context) => {
  const world = new World();
  const store = memoryChannelStore();
  const now = Date.now;
  const ahead = context.mock.method(Date, "now", () => now() + 172_800_000);
  const before = await participant(context, world.relay(), { store });
  for (let number = 0; number < 11; number++) await before.channel.send(utf8(`ahead ${number}`));
  await until(() => before.channel.status.sending === 0, "all are published");
  ahead.mock.restore();
  const other = await participant(context, world.relay());
  await until(() => other.handed.length === 11, "they come");
  await other.channel.send(utf8("question"));
  const question = other.channel.messages.find((each) => text(each) === "question") as ChannelMessage;
  assert.ok(question.lamport < BigInt(now() + 60_000), "in the present");
  assert.ok(question.follows.length > 0, "it follows what was heard");
  await until(() => before.handed.includes("question"), "it comes back");
  await before.channel.close();
  const after = await participant(context, world.relay(), { store, identity: before.identity });
  await after.channel.send(utf8("answer"));
  await until(() => other.handed.includes("answer"), "it comes");
  assert.ok(other.channel.messages.find((each) => text(each) === "answer")?.follows.includes(question.id), "behind the question");
  await until(() => after.channel.status.unacknowledged + other.channel.status.unacknowledged === 0, "all are acknowledged");
  assert.deepEqual(other.channel.messages.map(({ id }) => id), after.channel.messages.map(({ id }) => id));
});

test("a relay that knows the place no more is read from the beginning, and nothing is handed over again", async (context) => {
  const world = new World();
  const one = await participant(context, world.relay());
  const store = memoryChannelStore();
  const before = await participant(context, world.relay(), { store });
  await one.channel.send(utf8("old"));
  await until(() => before.handed.length === 1, "it comes");
  await before.channel.close();
  const relay = world.relay();
  const anew: ChannelRelay = {
    ...relay,
    subscribe(options) {
      if (options.cursor === undefined) return relay.subscribe(options);
      const refused = new RequestRefused("invalid_cursor", "of another log");
      return { close: () => undefined, [Symbol.asyncIterator]: () => ({ next: () => Promise.reject(refused) }) };
    },
  };
  context.mock.method(console, "warn", () => undefined);
  const later = await participant(context, anew, { store, identity: before.identity });
  await one.channel.send(utf8("new"));
  await until(() => later.handed.length === 1, "it is read");
  assert.deepEqual(later.handed, ["new"]);
  assert.deepEqual(later.channel.messages.map(text), ["old", "new"]);
});

test("a message with a filter of another size is a message like any other, from the store too", async (context) => {
  const world = new World();
  const store = memoryChannelStore();
  const { channel, handed, identity } = await participant(context, world.relay(), { store });
  const now = BigInt(Date.now());
  for (const [at, size] of [0, 2_000, 40_000].entries()) {
    const follows = at === 0 ? [] : [{ messageId: `m${at - 1}` }];
    const filter = new Uint8Array(size).fill(255);
    const message = new Message(`m${at}`, "room", "x", follows, now + BigInt(at), filter, utf8(`${size}`));
    world.add(await build(identity, messageContent(TOPIC, message.encode())));
  }
  await channel.send(utf8("mine"));
  await until(() => handed.length === 4, "all come");
  assert.deepEqual([...handed].sort(), ["0", "2000", "40000", "mine"]);
  assert.equal(channel.status.heldBack, 0);
  await channel.close();
  const later = await participant(context, world.relay(), { store, identity });
  assert.equal(later.channel.messages.length, 4);
  const wires = world.log.map((packet) => readEnvelope(packet, TOPIC)?.wire as Uint8Array);
  assert.ok(wires.some((wire) => decodeMessage(wire)?.bloomFilter !== undefined), "the package's own filters are read");
});

test("a handler that fails disturbs no message, and the program has the channel before one is called", async (context) => {
  const world = new World();
  const said = context.mock.method(console, "error", () => undefined);
  const identity = await Identity.generate();
  const other = await participant(context, world.relay());
  const options: ChannelOptions = { id: "room", topic: TOPIC, identity, ...QUICK, onChange: () => void channel.messages };
  const onMessage = () => {
    throw new Error("a fault of the page's");
  };
  const channel = await openChannel(world.relay(), { ...options, onMessage });
  context.after(() => channel.close());
  await channel.send(utf8("mine"));
  await other.channel.send(utf8("theirs"));
  await until(() => channel.messages.length === 2 && other.handed.length === 2, "both are there");
  assert.equal(said.mock.callCount(), 2);
});

test("a channel that cannot be opened gives its store back", async () => {
  const world = new World();
  let closed = 0;
  const store = { ...memoryChannelStore(), close: () => void closed++ };
  const identity = undefined as never; // a mistake that the compiler would find
  await assert.rejects(openChannel(world.relay(), { id: "room", topic: TOPIC, identity, store }), TypeError);
  assert.equal(closed, 1);
});

test("hostile messages are refused, one from the end of time is not, and none moves a clock", async (context) => {
  const world = new World();
  const { channel, handed, identity } = await participant(context, world.relay());
  const mallory = await Identity.generate();
  const message = (sender: string, lamport: bigint, content: Uint8Array | undefined, entries = 0) =>
    new Message(`m${lamport}`, "room", sender, Array.from({ length: entries }, (_, at) => ({ messageId: `${at}` })), lamport, undefined, content);
  const now = BigInt(Date.now());
  world.add(await build(mallory, messageContent(TOPIC, message("x", 2n ** 64n - 1n, utf8("the end of time")).encode())));
  const hostile = [
    message("x", now, utf8("all names"), 1001).encode(),
    message(channel.sender, now, utf8("I am you")).encode(),
    utf8("nothing"),
  ];
  for (const wire of hostile) world.add(await build(mallory, messageContent(TOPIC, wire)));
  world.add(await build(mallory, { type: TOPIC, profile: "reliable-channel/1", original: { type: TOPIC } }));
  await until(() => channel.status.refused === 4, "all are refused");
  world.add(await build(mallory, messageContent(TOPIC, message("x", now, utf8("harmless")).encode())));
  await until(() => handed.length === 2, "the next one comes");
  await channel.send(utf8("mine"));
  assert.deepEqual(channel.messages.map(text), ["harmless", "mine", "the end of time"]);
  assert.ok((channel.messages[1]?.lamport ?? 0n) < now + 60_000n);
  assert.deepEqual(channel.messages.map(({ author }) => author), [mallory.did, identity.did, mallory.did]);
});

test("an author's packet that somebody embeds says when it was sent, within reason", async (context) => {
  const world = new World();
  const mallory = await Identity.generate();
  const keyChain = () => Promise.resolve(KeyChain.genesis(mallory.did));
  const { channel, handed } = await participant(context, { ...world.relay(), keyChain });
  const now = Math.floor(Date.now() / 1000);
  for (const [at, timestamp] of [now - 60, Number.MAX_SAFE_INTEGER].entries()) {
    const message = new Message(`m${at}`, "room", "x", [], BigInt(1000 * now + at), undefined, utf8(`${at}`));
    const original = await build(mallory, messageContent(TOPIC, message.encode()), { timestamp });
    world.add(await build(mallory, repairContent(original)));
  }
  await until(() => handed.length === 2, "both come");
  assert.deepEqual(channel.messages.map(({ author, sentAt }) => [author, sentAt]), [[mallory.did, now - 60], [mallory.did, undefined]]);
});

test("a message that a relay wants to hear of later is sent no sooner", async (context) => {
  const waits: number[] = [];
  const inner = globalThis.setTimeout;
  context.mock.method(globalThis, "setTimeout", (act: () => void, ms: number) => (waits.push(ms), inner(act, Math.min(ms, 20))));
  const world = new World();
  let refusals = 0;
  const publish: ChannelRelay["publish"] = (packet, options) => {
    const isOver = readEnvelope(packet, TOPIC) !== undefined && refusals++ === 0;
    if (!isOver) return world.relay().publish(packet, options);
    return Promise.reject(new RequestRefused("rate_limited", "later", { detail: "trust_budget", retryAfter: 600 }));
  };
  const { channel } = await participant(context, { ...world.relay(), publish }, { syncEvery: 1000, resendAfter: 1000 });
  await channel.send(utf8("budgeted"));
  await until(() => world.log.length === 1, "it is sent again");
  assert.ok(Math.max(...waits) >= 600_000, `after ${Math.max(...waits)} ms`);
});

test("a relay that wants to be asked later for the channel is asked no sooner", async (context) => {
  const waits: number[] = [];
  const inner = globalThis.setTimeout;
  context.mock.method(globalThis, "setTimeout", (act: () => void, ms: number) => (waits.push(ms), inner(act, Math.min(ms, 20))));
  context.mock.method(console, "warn", () => undefined);
  const world = new World();
  await (await participant(context, world.relay())).channel.send(utf8("said"));
  let refusals = 0;
  const refused = new RequestRefused("rate_limited", "later", { retryAfter: 600 });
  const refusing = { close: () => undefined, [Symbol.asyncIterator]: () => ({ next: () => Promise.reject(refused) }) };
  const subscribe: ChannelRelay["subscribe"] = (options) => (refusals++ === 0 ? refusing : world.relay().subscribe(options));
  const { handed } = await participant(context, { ...world.relay(), subscribe }, { syncEvery: 1000, resendAfter: 1000 });
  await until(() => handed.length === 1, "it is asked again");
  assert.ok(Math.max(...waits) >= 600_000, `after ${Math.max(...waits)} ms`);
});

test("a relay that refuses the channel for want of a session is asked for it less and less often", async (context) => {
  const inner = globalThis.setTimeout;
  const waits: number[] = [];
  context.mock.method(globalThis, "setTimeout", (act: () => void, ms: number) => (waits.push(ms), inner(act, Math.min(ms, 5))));
  context.mock.method(console, "warn", () => undefined);
  const refused = new RequestRefused("unauthenticated", "who?", { detail: "missing_capability" });
  const refusing = { close: () => undefined, [Symbol.asyncIterator]: () => ({ next: () => Promise.reject(refused) }) };
  let reads = 0;
  const relay: ChannelRelay = { ...new World().relay(), subscribe: () => (reads++, refusing) };
  await participant(context, relay, { syncEvery: 1000, resendAfter: 1000 });
  await until(() => reads >= 7, "it is asked again and again");
  for (const seconds of [2, 4, 8, 16, 32, 60]) {
    const found = waits.filter((wait) => wait >= 1000 * seconds && wait <= 1200 * seconds + 1).length;
    assert.ok(found >= 1, `no wait of ${seconds} s`);
  }
});

test("a relay is read less and less often while the browser has no room for what it sends", async (context) => {
  const inner = globalThis.setTimeout;
  const waits: number[] = [];
  context.mock.method(globalThis, "setTimeout", (act: () => void, ms: number) => (waits.push(ms), inner(act, Math.min(ms, 5))));
  context.mock.method(console, "warn", () => undefined);
  const world = new World();
  await (await participant(context, world.relay(), { syncEvery: 1000 })).channel.send(utf8("said"));
  let fulls = 0;
  const kept = memoryChannelStore();
  const store = { ...kept, add: (...all: Parameters<typeof kept.add>) => (fulls++ < 5 ? Promise.reject(new Error("no room")) : kept.add(...all)) };
  const { handed } = await participant(context, world.relay(), { store, syncEvery: 1000, resendAfter: 1000 });
  await until(() => handed.length === 1, "it comes once there is room");
  for (const seconds of [2, 4, 8, 16, 32]) {
    assert.ok(waits.some((wait) => wait >= 1000 * seconds && wait <= 1200 * seconds + 1), `no wait of ${seconds} s`);
  }
});

test("messages that the store has no room for leave nothing behind", async (context) => {
  const kept = memoryChannelStore();
  let isFull = true;
  const store = { ...kept, add: (...all: Parameters<typeof kept.add>) => (isFull ? Promise.reject(new Error("no room")) : kept.add(...all)) };
  const world = new World();
  const { channel } = await participant(context, world.relay(), { store, syncEvery: 1000, resendAfter: 1000 });
  for (let number = 0; number < 20; number++) await assert.rejects(channel.send(utf8("no")), /no room/);
  assert.equal(channel["sds"]["outgoingBuffer"].length, 0);
  isFull = false;
  await channel.send(utf8("yes"));
  const other = await participant(context, world.relay());
  await until(() => other.handed.length === 1, "what has room comes");
  assert.deepEqual([other.handed, other.channel.status.missing, channel.status.missing], [["yes"], 0, 0]);
  await until(() => channel.status.unacknowledged === 0, "it is acknowledged");
});

for (const [error, isFinal] of [
  [new RequestRefused("unauthenticated", "who?"), true],
  [new MissingCapability("publish", new Set()), true],
  [new RequestRefused("policy_rejected", "no"), true],
  [new InvalidPacket("packet_too_large", "the relay takes less"), true],
  [new RequestRefused("timestamp_in_future", "whose clock?"), false],
  [new RequestRefused("rate_limited", "later", { retryAfter: 1 }), false],
  [new RequestRefused("policy_rejected", "not yet", { retryAfter: 1 }), false],
  [new RequestRefused("internal_error", "not now"), false],
  [new RequestTimeout("PUBLISH", 30), false],
] as const) {
  test(`as in Python, a message that comes to ${error.message} ${isFinal ? "has failed" : "is sent again"}`, async (context) => {
    const inner = globalThis.setTimeout;
    context.mock.method(globalThis, "setTimeout", (act: () => void, ms: number) => inner(act, Math.min(ms, 5)));
    const world = new World();
    const tried: string[] = [];
    const now = Date.now;
    context.mock.method(Date, "now", () => now() + 1000 * tried.length);
    const publish: ChannelRelay["publish"] = (packet, options) => {
      if (tried.push(packet.packetId) <= 6) return Promise.reject(error);
      return world.relay().publish(packet, options);
    };
    const { channel } = await participant(context, { ...world.relay(), publish }, { syncEvery: 1000, resendAfter: 1000 });
    await channel.send(utf8("mine"));
    await until(() => channel.messages[0]?.state === (isFinal ? "failed" : "sent"), "it has or has not");
    assert.equal(tried.length, isFinal ? 1 : 7);
    if ("code" in error && error.code === "timestamp_in_future") assert.notEqual(tried[6], tried[0], "each packet has a time of its own");
  });
}

test("nobody waits for a message that no relay would have, nor after a reload", async (context) => {
  const world = new World();
  const store = memoryChannelStore();
  let isWelcome = false;
  const publish: ChannelRelay["publish"] = async (packet, options) => {
    if (isWelcome) return world.relay().publish(packet, options);
    await sleep(20);
    throw new RequestRefused("unauthenticated", "who?");
  };
  const one = await participant(context, { ...world.relay(), publish }, { store });
  const other = await participant(context, world.relay());
  await one.channel.send(utf8("unheard"));
  await until(() => one.channel.messages[0]?.state === "failed", "it is refused");
  isWelcome = true;
  await one.channel.send(utf8("heard"));
  await until(() => other.handed.length > 0, "it comes");
  await one.channel.close();
  const again = await participant(context, { ...world.relay(), publish }, { store, identity: one.identity });
  await again.channel.send(utf8("heard too"));
  await until(() => other.handed.length > 1, "it comes");
  assert.deepEqual([other.handed, other.channel.status.missing], [["heard", "heard too"], 0]);
  assert.deepEqual(again.channel.messages.map(({ state }) => state === "failed"), [true, false, false]);
});

test("the oldest are forgotten, and are not handed over again", async (context) => {
  const world = new World();
  const one = await participant(context, world.relay());
  const store = memoryChannelStore();
  const other = await participant(context, world.relay(), { store, maxMessages: 20 });
  for (let number = 0; number < 40; number++) await one.channel.send(utf8(`${number}`));
  await until(() => other.handed.length === 40, "all come");
  assert.ok(other.channel.messages.length <= 22);
  await other.channel.close();
  await store.setPlaces([]);
  const later = await participant(context, world.relay(), { store, identity: other.identity, maxMessages: 20 });
  await later.channel.send(utf8("end"));
  await until(() => one.handed.includes("end"), "it goes on");
  assert.deepEqual(later.handed, ["end"], "though it reads the whole topic again");
  assert.equal(later.channel.status.missing, 0);
});

test("what was forgotten, its id too, is not handed over again, and nothing waits for it", async (context) => {
  const said = (number: number) => ({ messageId: `id-${number}`, lamportTimestamp: BigInt(number) }) as ContentMessage;
  let forgotten = new Forgotten({ forgotten: [] });
  for (let first = 0; first < MAX_FORGOTTEN + 1000; first += 200) {
    forgotten.add([...Array.from({ length: 199 }, (_, at) => said(first + at)), said(10 ** 9 + first)], 10 ** 6);
    if (first % 3000 === 0) {
      forgotten = new Forgotten({ forgotten: [...forgotten["ids"]].slice(-MAX_FORGOTTEN), horizon: forgotten.horizon });
    }
  }
  assert.ok(forgotten["ids"].size <= MAX_FORGOTTEN);
  const { past, runs } = forgotten.horizon;
  assert.ok(past >= 1000 && past < 1600 && runs.length < 200, `${past}, ${runs.length}`);
  for (const number of [0, 500, 1400, MAX_FORGOTTEN]) assert.ok(forgotten.has(said(number)), `${number}`);
  assert.ok(!forgotten.has(said(MAX_FORGOTTEN + 1300)), "what comes late is heard");

  const world = new World();
  const one = await participant(context, world.relay());
  const store = memoryChannelStore();
  const other = await participant(context, world.relay(), { store });
  for (const words of ["first", "second"]) await one.channel.send(utf8(words));
  await until(() => other.handed.length === 2, "both come");
  const lamports = other.channel.messages.map(({ lamport }) => Number(lamport));
  await other.channel.close();
  // As after twenty thousand others.
  const kept = await store.open(new AbortController().signal);
  await store.setPlaces([]);
  const without = { ...store, open: async () => ({ ...kept, places: [], messages: [], horizon: { past: Math.max(...lamports), runs: [] } }) };
  const later = await participant(context, world.relay(), { store: without, identity: other.identity });
  await one.channel.send(utf8("third"));
  await until(() => later.handed.length > 0, "it goes on");
  assert.deepEqual(later.handed, ["third"]);
  assert.equal(later.channel.status.refusedOld, 0, "the whole topic was read again");
});

test("what comes so late that it may have been handed over is counted once", async (context) => {
  const world = new World();
  const one = await participant(context, world.relay());
  await one.channel.send(utf8("late"));
  await until(() => world.log.length === 1, "it is published");
  const store = memoryChannelStore();
  const kept = await store.open(new AbortController().signal);
  const horizon = { past: Number(one.channel.messages[0]?.lamport), runs: [] };
  const other = await participant(context, world.relay(), {
    store: { ...store, open: () => Promise.resolve({ ...kept, places: ["0"], horizon }) },
  });
  await until(() => one.channel.status.resent > 0 && other.channel.status.repeated > 0, "it comes again");
  assert.deepEqual([other.handed, other.channel.status.refusedOld], [[], 1]);
});

test("what one says while it reads follows what it said before", async (context) => {
  const world = new World();
  const one = await participant(context, world.relay());
  for (let number = 0; number < 20; number++) await one.channel.send(utf8(`${number}`));
  const relay = world.relay();
  let open = () => undefined as void;
  const gate = new Promise<void>((resolve) => (open = resolve));
  const subscribe = (options: FetchOptions): Reading => {
    const found = relay.subscribe(options);
    const late = async function* () {
      await gate;
      yield* found;
    };
    return { close: () => found.close(), [Symbol.asyncIterator]: late };
  };
  const other = await participant(context, { ...relay, subscribe });
  const before = await other.channel.send(utf8("before"));
  open();
  await until(() => other.handed.includes("19"), "it has read the rest");
  const after = await other.channel.send(utf8("after"));
  assert.ok(other.channel.messages.find(({ id }) => id === after)?.follows.includes(before));
});

test("whoever speaks while it reads more than it remembers takes all the rest", () => {
  const now = 10 ** 9;
  const forgotten = new Forgotten({ forgotten: [] });
  const entries = new Map<string, Entry>();
  const take = (id: string, lamport: number, isOwn: boolean): void => {
    const message = { messageId: id, lamportTimestamp: BigInt(lamport) } as ContentMessage;
    assert.ok(!forgotten.has(message), `${id} counts as forgotten`);
    const kept = { id, wire: new Uint8Array(), isOwn, author: undefined, sentAt: undefined, hint: undefined, state: "sent" } as const;
    entries.set(id, { ...makeEntry(message, kept), isReleased: true });
    const oldest = beyond(entries.values(), 20, Infinity);
    forgotten.add(oldest.map((each) => each.message), now);
    for (const each of oldest) entries.delete(each.id);
  };
  for (let number = 0; number < MAX_FORGOTTEN + 2000; number++) {
    if (number % 5000 === 0) take(`own ${number}`, now + number - MAX_FORGOTTEN - 2000, true);
    take(`${number}`, number, false);
  }
  assert.ok(entries.has("own 0") && entries.size <= 22);
  for (let number = 0; number < 30; number++) take(`new ${number}`, now + number, number % 2 === 0);
  assert.ok(!entries.has("own 0") && entries.size <= 22);
});

test("what no relay has yet is not forgotten, however much it is", async (context) => {
  const world = new World();
  const store = memoryChannelStore();
  const publish: ChannelRelay["publish"] = (_packet, { signal } = {}) =>
    new Promise((_resolve, reject) => signal?.addEventListener("abort", () => reject(new Closed("the relay is away"))));
  const away = await participant(context, { ...world.relay(), announced: undefined, publish }, { store, maxMessages: 20 });
  const said = Array.from({ length: 40 }, (_, number) => `${number}`);
  for (const each of said) await away.channel.send(utf8(each));
  await away.channel.close();
  const other = await participant(context, world.relay());
  const back = await participant(context, world.relay(), { store, identity: away.identity, maxMessages: 20 });
  await until(() => other.handed.length === 40, "all are sent");
  assert.deepEqual(other.handed, said);
  await until(() => back.channel.status.unacknowledged === 0, "all are acknowledged");
  await back.channel.send(utf8("end"));
  assert.ok(back.channel.messages.length <= 22, "and then there are too many");
});
