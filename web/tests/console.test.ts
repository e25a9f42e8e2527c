import assert from "node:assert/strict";
import { beforeEach, test } from "node:test";

import { build, Identity } from "../src/client/index.js";
import { encode } from "../src/client/protocol/canonical.js";
import { methodId } from "../src/client/protocol/documents.js";
import { revokeContent } from "../src/client/protocol/keys/statements.js";
import type { Packet } from "../src/client/protocol/packets.js";
import * as checking from "../src/console/state/checking.js";
import { chosen } from "../src/console/state/keys.js";
import * as link from "../src/console/state/link.js";
import { openingUrl, readMessage } from "../src/console/state/messages.js";
import * as metrics from "../src/console/state/metrics.js";
import * as outbox from "../src/console/state/outbox.js";
import { type Book, turn } from "../src/console/state/paging.js";
import { manifest } from "../src/console/state/relay.js";
import { preview, rowOf } from "../src/console/state/rows.js";
import { quotedType, understand } from "../src/console/state/searching.js";
import * as session from "../src/console/state/session.js";
import * as tail from "../src/console/state/tail.js";
import { line, shown, start } from "../src/console/text.js";

type Frame = Record<string, unknown> & { type: string; subscription_id: string; filters: Record<string, unknown>; gapless?: boolean };

/** What the page speaks through: the relay is the test. */
class Socket {
  static readonly OPEN = 1;
  static readonly made: Socket[] = [];
  readyState = 0;
  readonly seen: Frame[] = [];
  onopen = (): void => undefined;
  onmessage = (_: { data: string }): void => undefined;
  onclose = (_: { code: number }): void => undefined;

  constructor() {
    Socket.made.push(this);
  }

  static get last(): Socket {
    return Socket.made.at(-1) as Socket;
  }

  open(): Socket {
    this.readyState = 1;
    this.onopen();
    return this;
  }

  send(text: string): void {
    this.seen.push(JSON.parse(text) as Frame);
  }

  /** The subscriptions that were asked for, without those of the tail's unless it is meant. */
  asked(isGapless = false): Frame[] {
    return this.seen.filter(({ type, gapless }) => type === "SUBSCRIBE" && (gapless ?? false) === isGapless);
  }

  says(message: object): void {
    this.onmessage({ data: JSON.stringify(message) });
  }

  close(): void {
    this.readyState = 2; // and no more, as where nobody is there
  }
}

/** Tells the worker's own script something, once that is loaded. */
let tellWorker: (event: { data: object }) => void = () => undefined;

/** What checks packets, and finds them all valid unless it is told otherwise. */
class Checker {
  static made = 0;
  static last: Checker | undefined;
  /** Its script is not there, as where the relay was renewed. */
  static isMissing = false;
  /** What it says of the next packets. */
  static readonly answers: object[] = [];
  onmessage = (_: { data: object }): void => undefined;
  onerror = (): void => undefined;

  constructor() {
    Checker.made++;
    Checker.last = this;
    if (Checker.isMissing) queueMicrotask(() => this.onerror());
  }

  postMessage({ kind, number }: { kind: string; number: number }): void {
    const answer = kind === "packet" ? (Checker.answers.shift() ?? { verdict: "valid" }) : {};
    if (!Checker.isMissing) queueMicrotask(() => this.onmessage({ data: { ...answer, number } }));
  }

  terminate(): void {}
}

Object.assign(globalThis, {
  WebSocket: Socket,
  Worker: Checker,
  addEventListener: (name: string, act: (event: { data: object }) => void) => void (name === "message" && (tellWorker = act)),
  document: { addEventListener: () => undefined, removeEventListener: () => undefined, querySelector: () => null, hidden: false },
  location: new URL("http://127.0.0.1:7447/"),
  localStorage: { getItem: () => null, setItem: () => undefined, removeItem: () => undefined },
});

const settle = () => new Promise((done) => setImmediate(done));
const id = (number: number) => `0x${String(number).padStart(64, "0")}`;
let begun = false;

/** A page that is connected, whose tail is not begun, on a clock of the test's. */
function connected(mock: { timers: { enable(options: { apis: ("setTimeout" | "setInterval" | "Date")[]; now: number }): void } }): Socket {
  mock.timers.enable({ apis: ["setTimeout", "setInterval", "Date"], now: 1_760_000_000_000 });
  link.reconnect();
  if (!begun) link.begin();
  begun = true;
  return Socket.last.open();
}

/** Time goes by, second by second: a mock's clock jumps to the end of what it is told. */
function pass(timers: { tick(milliseconds: number): void }, seconds: number): void {
  for (let each = 0; each < seconds; each++) timers.tick(1000);
}

beforeEach(() => Socket.made.splice(0));

test("a relay that is gone without a word is asked, and left where it does not answer", async (context) => {
  const socket = connected(context.mock);
  const { timers } = context.mock;
  pass(timers, 40);
  const [question] = socket.asked();
  assert.ok(question !== undefined);
  socket.says({ type: "END_OF_HISTORY", subscription_id: question.subscription_id, complete: true, cursor: null });
  await settle();
  assert.equal(socket.seen.at(-1)?.type, "UNSUBSCRIBE");
  pass(timers, 16);
  assert.equal(Socket.last, socket, "it has answered");
  pass(timers, 60);
  assert.equal(link.phase.value, "offline");
  assert.notEqual(Socket.last, socket, "it has not");
  for (let each = 0; each < 5; each++) {
    Socket.last.open();
    pass(timers, 60);
  }
  assert.equal(Socket.last.open().asked().length, 0, "and nobody waits for those answers any more");
});

test("a relay that takes a connection and says nothing is given up, and tried anew", (context) => {
  connected(context.mock).onclose({ code: 1006 });
  const { timers } = context.mock;
  pass(timers, 2);
  const silent = Socket.last;
  const before = Socket.made.length;
  pass(timers, 12);
  assert.deepEqual([silent.readyState, Socket.made.length], [2, before + 1]);
  silent.onopen(); // too late: it is not the page's any more
  silent.onclose({ code: 1006 });
  assert.equal(link.phase.value, "offline");
  Socket.last.open();
  pass(timers, 12);
  assert.deepEqual([link.phase.value, Socket.made.length], ["online", before + 1], "one that is open has time");
});

test("a relay that closes each connection at once is come back to less and less often", async (context) => {
  connected(context.mock);
  context.mock.method(Math, "random", () => 0.5);
  let livedFor = 0;
  const now = performance.now.bind(performance);
  context.mock.method(performance, "now", () => now() + livedFor);
  const waited = (code: number) => {
    const before = Socket.made.length;
    Socket.last.onclose({ code });
    let seconds = 0;
    for (; Socket.made.length === before; seconds += 0.5) context.mock.timers.tick(500);
    Socket.last.open();
    return seconds;
  };
  assert.deepEqual([1008, 1008, 1001, 1006, 1008, 1008].map(waited), [0.5, 1, 2, 4, 8, 15]);
  livedFor += 1000;
  assert.equal(waited(1001), 0.5, "it said goodbye");
  assert.equal(waited(1008), 1);
  livedFor += 10_000;
  assert.equal(waited(1006), 0.5, "it was worth having");
});

test("what is shown of a packet is what is checked, whatever a relay's frame looks like", () => {
  const signed = '{"packet_id":"0x1","content":{"text":"signed"}}';
  const other = '{"packet_id":"0x1","content":{"text":"another"}}';
  for (const frame of [
    `{"type":"EVENT","x":{"y":1,"packet":${signed},"received_at":1},"packet":${other}, "received_at":2}`,
    `{"type":"EVENT","text":${JSON.stringify(signed)},"packet": ${other}}`,
    `{"type":"EVENT","packet":${signed},"received_at":1,"packet" :${other}}`,
    `{"type":"EVENT","packet":${signed},"packet":${other},"received_at":1}`,
  ]) {
    const { packet, text } = readMessage(frame) as { packet: object; text: string };
    assert.deepEqual(JSON.parse(text), packet, frame);
  }
  const whole = readMessage('{"type":"EVENT","subscription_id":"s","packet":{"a": 1.0},"received_at":3,"cursor":"c"}');
  assert.deepEqual(whole, { type: "EVENT", subscription_id: "s", packet: { a: 1 }, text: '{"a": 1.0}', received_at: 3, cursor: "c" });
  for (const frame of ["", "null", "[]", '"EVENT"', '{"type":5}', '{"type":"EVENT"}', '{"type":"EVENT","packet":5,"received_at":1}']) {
    assert.equal(readMessage(frame), null, frame);
  }
});

test("a page that came over https opens no ws URL, which browsers do not allow", (context) => {
  const before = globalThis.location;
  context.after(() => Object.assign(globalThis, { location: before }));
  const found = (place: string, publicUrl: string) => {
    Object.assign(globalThis, { location: new URL(place) });
    context.mock.method(document, "querySelector", (name: string) => ({ content: name.includes("public") ? publicUrl : "strata" }));
    return openingUrl();
  };
  assert.equal(found("https://relay.example/", "ws://relay.example/other"), "wss://relay.example/strata");
  assert.equal(found("https://relay.example/", "wss://relay.example/other"), "wss://relay.example/other");
  assert.equal(found("http://relay.example/", "ws://relay.example/other"), "ws://relay.example/other");
  assert.equal(found("http://127.0.0.1:7447/", "wss://relay.example/other"), "ws://127.0.0.1:7447/strata");
  assert.equal(found("https://relay.example/a/", ""), "wss://relay.example/a/strata");
});

test("a character that looks like none is shown for what it is, and a text is cut between characters", () => {
  const seen = { "POST\u3164": "POST⟨U+3164⟩", "KEY_EVENT\ufe0f": "KEY_EVENT⟨U+FE0F⟩", "a\u{e0101}b": "a⟨U+E0101⟩b", "\u2800": "⟨U+2800⟩", "\u034f": "⟨U+034F⟩" };
  for (const [text, words] of Object.entries(seen)) assert.equal(shown(text), words);
  for (const plain of ["a\tb\nc", "❤\ufe0f", "Å é ñ 漢字 مرحبا 🇩🇪", "e\u0301"]) assert.equal(shown(plain), plain);
  assert.deepEqual([shown("\u202e\r\ud800x\udc00"), shown("\u{e0041}")], ["⟨U+202E⟩⟨U+000D⟩⟨U+D800⟩x⟨U+DC00⟩", "⟨U+E0041⟩"]);
  assert.deepEqual([line("aa😀", 3), start("aa😀", 4), start("aa😀b", 3)], ["aa…", "aa😀", "aa"]);
  const event = { text: "{}", packet: { content: { text: `${"a".repeat(199)}😀` } }, received_at: 1 };
  assert.equal(preview(event), "a".repeat(199));
});

test("another packet than the one that was asked for is none", async (context) => {
  const socket = connected(context.mock);
  for (const number of [1, 2]) {
    const found = link.packetById(id(1));
    const { subscription_id } = socket.asked().at(-1) as Frame;
    socket.says({ type: "EVENT", subscription_id, packet: { packet_id: id(number) }, received_at: 1 });
    socket.says({ type: "END_OF_HISTORY", subscription_id, complete: true, cursor: null });
    assert.equal((await found)?.packet["packet_id"], number === 1 ? id(1) : undefined);
  }
});

test("pages that lead back, or nowhere, are turned no further", async (context) => {
  const socket = connected(context.mock);
  const pages: Record<string, [entries: number, next: string | undefined]> = { "": [2, "a"], a: [2, "b"], b: [1, "a"], n: [0, "o"], e: [0, undefined] };
  const next = async (before?: Book<object>) => {
    const turned = turn<object>({ action: "log" }, before);
    const { after = "", client_msg_id } = socket.seen.at(-1) as Frame & { after?: string };
    const [entries, following] = pages[after] as [number, string | undefined];
    socket.says({ type: "MODERATED", action: "log", client_msg_id, entries: Array.from({ length: entries }, () => ({})), next: following });
    return (await turned).book;
  };
  const third = next(await next(await next()));
  await assert.rejects(third, { code: "circle" });
  const at = (place: string) => ({ entries: [], next: place, places: [] });
  await assert.rejects(next(at("n")), { code: "circle" });
  assert.equal((await next(at("e"))).next, undefined);

  for (const cursors of [["a", "b", "a"], ["a", null]]) {
    const found = assert.rejects(checking.identityPackets(["did:x:y"]), { message: /no end/ });
    for (const cursor of cursors) {
      const { subscription_id } = socket.asked().at(-1) as Frame;
      socket.says({ type: "END_OF_HISTORY", subscription_id, complete: false, cursor });
      await settle();
    }
    await found;
  }
});

test("pages that nobody waits for any more are not asked for", async (context) => {
  const socket = connected(context.mock);
  const over = new AbortController();
  const found = assert.rejects(checking.identityPackets(["did:x:left"], over.signal), { name: "AbortError" });
  const { subscription_id } = socket.asked().at(-1) as Frame;
  socket.says({ type: "END_OF_HISTORY", subscription_id, complete: false, cursor: "a" });
  over.abort(); // between two pages
  await found;
  assert.equal(socket.asked().length, 1);
  assert.equal(socket.seen.at(-1)?.type, "UNSUBSCRIBE");
});

test("a day that no calendar has is not understood", () => {
  const days = (text: string) => understand(text).parts;
  assert.deepEqual(days("2026-02-28 ..2026-03-01"), ["on 2026-02-28", "to 2026-03-01"]);
  for (const text of ["2026-02-29", "2026-13-01", "2026-01-01..2026-01-32", "0000-00-00", "0099-01-01"]) {
    assert.deepEqual([days(text), understand(text).unknown], [[], [text]]);
  }
  const { since = 0, until = 0 } = understand("2026-11-01").filters;
  assert.deepEqual([new Date(1000 * since), new Date(1000 * until + 1000)], [new Date(2026, 10, 1), new Date(2026, 10, 2)]);
});

test("the packets of a type are found, whatever its name is", () => {
  for (const type of ["POST", "/app/1/chat/proto", "a b c", "50% off: now", "%20", "", "did:x:y", "0x1", "2026-11-01", "\u00a0é\n\t"]) {
    const { filters, parts, unknown, packet } = understand(quotedType(type));
    assert.deepEqual([filters, parts.length, unknown, packet], [{ types: [type] }, 1, [], null], type);
  }
  assert.deepEqual(understand("type:100%").filters, { types: ["100%"] }, "as somebody types it");
});

test("what a page has read of a history before a cut is read again and not doubled, behind a cursor too", async (context) => {
  const socket = connected(context.mock);
  const found = link.page({ cursor: "c" });
  const event = { type: "EVENT", packet: { packet_id: id(1) }, received_at: 1, cursor: "d" };
  const { subscription_id } = socket.asked().at(-1) as Frame;
  socket.says({ ...event, subscription_id });
  link.reconnect();
  Socket.last.open();
  Socket.last.says({ ...event, subscription_id });
  Socket.last.says({ type: "END_OF_HISTORY", subscription_id, complete: true, cursor: "d" });
  assert.equal((await found).events.length, 1);
});

test("what checks packets and cannot be fetched is told, and fetched again with the next connection", async (context) => {
  const [first, second] = [1, 2].map((number) =>
    rowOf({ text: "{}", packet: { packet_id: id(number), author_id: `did:x:late:${number}`, content: { type: "POST" } }, received_at: 1 }),
  ) as [ReturnType<typeof rowOf>, ReturnType<typeof rowOf>];
  const socket = connected(context.mock);
  const answer = async (from: Socket) => {
    pass(context.mock.timers, 2);
    const { subscription_id } = from.asked().at(-1) as Frame;
    from.says({ type: "END_OF_HISTORY", subscription_id, complete: true, cursor: null });
    for (let turns = 0; turns < 5; turns++) await settle();
  };
  Checker.isMissing = true;
  link.reconnect();
  const anew = Socket.last.open();
  checking.check([first]);
  await answer(anew);
  assert.deepEqual([checking.unable.value, first.verdict.value], [true, "unchecked"]);
  await assert.rejects(checking.examine(rowOf({ text: "{}", packet: { author_id: "did:x:another" }, received_at: 1 })));
  const asked = Socket.last.asked().length;
  checking.check([first, second]);
  pass(context.mock.timers, 10);
  assert.equal(Socket.last.asked().length, asked, "a relay is not asked for keys that nobody can use");
  assert.notEqual(Socket.last, socket);
  Checker.isMissing = false;
  link.reconnect();
  Socket.last.open();
  assert.equal(checking.unable.value, false);
  const before = Checker.made;
  checking.check([first, second]);
  await answer(Socket.last);
  assert.deepEqual([Checker.made - before, first.verdict.value, second.verdict.value], [1, "valid", "valid"]);
});

const RULES = { clockSkewSeconds: 300, recoveryDelaySeconds: 1 };
let asked = 0;

/** The worker's own script, answering questions here. */
async function realWorker(): Promise<(question: object) => Promise<checking.Answer>> {
  await import("../src/console/verify.worker.js");
  const said = new Map<number, checking.Answer>();
  Object.assign(globalThis, { postMessage: (answer: checking.Answer) => said.set(answer.number, answer) });
  return async (question) => {
    const number = ++asked;
    tellWorker({ data: { ...question, number } });
    while (!said.has(number)) await settle();
    return said.get(number) as checking.Answer;
  };
}

/** A packet as relays serve it whose origin they have found unproven. */
function downgraded(packet: Packet): checking.Given {
  const { provenance_header: claimed, ...rest } = JSON.parse(packet.canonical) as { provenance_header: object };
  const text = encode({ ...rest, provenance_header: { ...claimed, origin_type: "UNKNOWN" } });
  const relay_annotations = { provenance: { original_provenance_header: claimed, effective_origin_type: "UNKNOWN", reason: "unattested" } };
  return { text, received_at: packet.timestamp, relay_annotations };
}

test("a worker that has forgotten an author's keys judges by none, and is told them again", async (context) => {
  const worker = await realWorker();
  const tell = (did: string) => worker({ kind: "keys", did, events: [], at: 1, rules: RULES });
  const author = await Identity.generate();
  const packet = await build(author, { type: "POST" });
  const judge = () => worker({ kind: "packet", given: { text: packet.canonical, received_at: packet.timestamp } });
  assert.equal((await judge())?.verdict, undefined);
  await tell(author.did);
  assert.equal((await judge())?.verdict, "valid");
  for (let other = 1; other < 2000; other++) await tell(`did:x:${other}`);
  assert.equal((await judge())?.verdict, "valid");
  await tell("did:x:one-more-than-it-keeps");
  assert.equal((await judge())?.verdict, undefined);

  const socket = connected(context.mock);
  Checker.answers.push({}, { verdict: "valid" });
  const found = checking.examine(rowOf({ text: packet.canonical, packet: { author_id: author.did }, received_at: 1 }));
  for (let questions = 0; questions < 2; questions++) {
    pass(context.mock.timers, 2);
    const { subscription_id } = socket.asked().at(-1) as Frame;
    socket.says({ type: "END_OF_HISTORY", subscription_id, complete: true, cursor: null });
    for (let turns = 0; turns < 5; turns++) await settle();
  }
  assert.equal((await found).verdict, "valid");
});

test("a packet that a relay serves with another origin is checked as its author signed it", async () => {
  const worker = await realWorker();
  const author = await Identity.generate();
  const provenanceHeader = { origin_type: "SOFTWARE", genesis_media_hash: id(1), edit_history: [] };
  const options = { provenanceHeader, allowUnattested: true };
  const packet = await build(author, { type: "POST", text: "claimed" }, options);
  const keys = (events: readonly checking.Given[]) => worker({ kind: "keys", did: author.did, events, at: packet.timestamp + 2, rules: RULES });
  await keys([]);

  const given = downgraded(packet);
  assert.notEqual(given.text, packet.canonical);
  const { verdict, signed, steps } = await worker({ kind: "packet", given });
  assert.deepEqual([verdict, signed, steps?.map(({ holds }) => holds)], ["valid", packet.canonical, [true, true, true, true]]);
  const asItWas = { text: packet.canonical, received_at: packet.timestamp, relay_annotations: given.relay_annotations };
  assert.deepEqual([(await worker({ kind: "packet", given: asItWas })).signed], [undefined], "annotated alone");
  const forged = { ...given, text: given.text.replace("claimed", "another") };
  assert.equal((await worker({ kind: "packet", given: forged })).verdict, "packet_id_mismatch");

  // Else the origin that an event claims would decide whether it counts, and a revoked key would sign on.
  const revocation = revokeContent({ keyId: methodId(author.did), revokedAt: packet.timestamp });
  const revoked = await build(author, revocation, options);
  const { history } = await keys([downgraded(revoked)]);
  assert.deepEqual([history?.refused, history?.keys.map(({ standing }) => standing)], [0, ["revoked"]]);
});

test("no key counts of an author who has published more about keys than anybody judges by", async (context) => {
  const socket = connected(context.mock);
  const [little, much] = ["did:x:little", "did:x:much"];
  const found = checking.identityPackets([little, much]);
  const { subscription_id } = socket.asked().at(-1) as Frame;
  const tell = (author_id: string, text: string) => socket.says({ type: "EVENT", subscription_id, packet: { author_id, text }, received_at: 1 });
  tell(little, "x".repeat(2 ** 20));
  for (let each = 0; each < 9; each++) tell(much, "é".repeat(2 ** 19));
  socket.says({ type: "END_OF_HISTORY", subscription_id, complete: true, cursor: null });
  const events = await found;
  assert.deepEqual([events.get(little)?.length, events.get(much)], [1, null]);

  const worker = await realWorker();
  const author = await Identity.generate();
  const packet = await build(author, { type: "POST" });
  const { history } = await worker({ kind: "keys", did: author.did, events: null, at: 1, rules: RULES });
  assert.match(history?.conflict ?? "", /more about keys/);
  const given = { text: packet.canonical, received_at: packet.timestamp };
  assert.equal((await worker({ kind: "packet", given })).verdict, "too_many_key_events");
});

test("keys are known when the relay was asked after what their author last published about them", async (context) => {
  const socket = connected(context.mock);
  const did = "did:x:author";
  let isKnown = false;
  void checking.keysOf(did).then(() => (isKnown = true));
  for (const known of [false, true]) {
    pass(context.mock.timers, 2);
    const { subscription_id } = socket.asked().at(-1) as Frame;
    if (!known) checking.forgetKeys(did); // as the tail does, with a key event that the answer may lack
    socket.says({ type: "END_OF_HISTORY", subscription_id, complete: true, cursor: null });
    await settle();
    assert.equal(isKnown, known);
  }
});

test("the relay is asked one question about keys at a time, so that no answer is older than the one before", async (context) => {
  const socket = connected(context.mock);
  const known: string[] = [];
  for (const did of ["did:x:first", "did:x:second"]) {
    void checking.keysOf(did).then(() => known.push(did));
    pass(context.mock.timers, 3);
  }
  for (let number = 0; number < 2; number++) {
    assert.equal(socket.asked().length, number + 1);
    const { subscription_id } = socket.asked().at(-1) as Frame;
    socket.says({ type: "END_OF_HISTORY", subscription_id, complete: true, cursor: null });
    for (let turns = 0; turns < 3; turns++) await settle();
    pass(context.mock.timers, 3);
  }
  assert.deepEqual(known, ["did:x:first", "did:x:second"]);
  // A page that shows an author's keys asks beside that, and its answer may be the older one.
  const shown = checking.historyOf("did:x:first");
  const { subscription_id } = socket.asked().at(-1) as Frame;
  socket.says({ type: "END_OF_HISTORY", subscription_id, complete: true, cursor: null });
  await shown;
  void checking.keysOf("did:x:first");
  pass(context.mock.timers, 3);
  assert.equal(socket.asked().length, 4);
});

test("lines in view are all checked in the end, however many authors are asked for at once", async (context) => {
  const socket = connected(context.mock);
  const made = (number: number) => ({ packet_id: id(number), author_id: `did:x:${number}`, content: { type: "POST" } });
  const lines = Array.from({ length: 300 }, (_, at) => rowOf({ text: "{}", packet: made(at), received_at: 1 }));
  for (let at = 0; at < lines.length; at += 48) checking.check(lines.slice(at, at + 48)); // a flood, and then nothing more comes
  const unchecked = () => lines.slice(-12).filter(({ verdict }) => verdict.peek() === "unchecked").length;
  assert.equal(unchecked(), 12, "more wait already than are kept waiting");
  const answered = new Set<string>();
  const isOver = () => lines.every(({ verdict }) => verdict.peek() !== "checking") && unchecked() === 0;
  for (let seconds = 0; !isOver(); seconds++) {
    assert.ok(seconds < 60, "they have their turn");
    pass(context.mock.timers, 1);
    for (const { subscription_id } of socket.asked()) {
      if (answered.has(subscription_id)) continue;
      answered.add(subscription_id);
      socket.says({ type: "END_OF_HISTORY", subscription_id, complete: true, cursor: null });
    }
    await settle();
  }
});

test("what comes meanwhile takes no line in view its turn to be checked", async (context) => {
  const socket = connected(context.mock);
  const made = (number: number) => ({ packet_id: id(number), author_id: "did:x:both", content: { type: "POST" } });
  const [view, fresh] = [60, 20].map((count) => Array.from({ length: count }, (_, at) => rowOf({ text: "{}", packet: made(at), received_at: 1 })));
  checking.check(view ?? []);
  for (const row of fresh ?? []) {
    checking.checkSome([row]);
    pass(context.mock.timers, 1);
    const { subscription_id } = (socket.asked().at(-1) ?? {}) as Frame;
    socket.says({ type: "END_OF_HISTORY", subscription_id, complete: true, cursor: null });
    for (let turns = 0; turns < 3; turns++) await settle();
  }
  assert.deepEqual(view?.filter(({ verdict }) => verdict.peek() !== "valid"), []);
});

test("what is read on and on and is refused, whatever for, is told and asked for again", async (context) => {
  const socket = connected(context.mock);
  const { timers } = context.mock;
  context.mock.method(Math, "random", () => 0);
  const close = link.subscribe({ types: ["X"] }, { event: () => undefined }, { gapless: true });
  const mine = (socket.asked(true).at(-1) as Frame).subscription_id;
  const times = () => socket.asked(true).filter(({ subscription_id }) => subscription_id === mine).length;
  const refuse = (code: string, more = {}) => socket.says({ type: "ERROR", code, reason: "no", subscription_id: mine, ...more });
  for (const [code, seconds] of [["policy_rejected", 2], ["of_another_time", 4], ["internal_error", 8]] as const) {
    const before = times();
    refuse(code);
    assert.equal(link.refused.value?.code, code);
    pass(timers, seconds - 1);
    assert.equal(times(), before, "not at once");
    pass(timers, 1);
    assert.equal(times(), before + 1);
  }
  socket.says({ type: "END_OF_HISTORY", subscription_id: mine, complete: true, cursor: "c" });
  assert.equal(link.refused.value, null);
  refuse("policy_rejected", { retry_after: 30 });
  const before = times();
  pass(timers, 29);
  assert.equal(times(), before, "no sooner than it asks for");
  pass(timers, 1);
  assert.equal(times(), before + 1);
  close();
  assert.equal(link.refused.value, null);
});

test("a limit is told for as long as something waits for its end", (context) => {
  let socket = connected(context.mock);
  const live = link.subscribe({ types: ["L"] }, { event: () => undefined }, { gapless: true });
  const event = { type: "EVENT", subscription_id: (socket.asked(true).at(-1) as Frame).subscription_id, packet: {}, received_at: 1, cursor: "c" };
  const close = link.subscribe({ types: ["X"] }, { event: () => undefined });
  const { subscription_id } = socket.asked().at(-1) as Frame;
  const limit = { type: "ERROR", code: "rate_limited", reason: "slow", retry_after: 60, subscription_id };
  socket.says(limit);
  socket.says(event);
  assert.ok(link.limitedUntil.value > Date.now() + 59_000, "what is live already says nothing about limits");
  link.reconnect(); // the budget belonged to the session
  socket = Socket.last.open();
  socket.says({ type: "END_OF_HISTORY", subscription_id, complete: true, cursor: null });
  assert.equal(link.limitedUntil.value, 0);
  socket.says(limit);
  assert.ok(link.limitedUntil.value > 0);
  close();
  assert.equal(link.limitedUntil.value, 0, "nobody waits");
  live();
});

test("a relay's figures are asked for one after the other, and for no longer than they are worth", async (context) => {
  connected(context.mock);
  const signals: AbortSignal[] = [];
  context.mock.method(AbortSignal, "timeout", () => new AbortController().signal);
  const never = new Promise<Response>(() => undefined);
  context.mock.method(globalThis, "fetch", (_: string, { signal }: { signal: AbortSignal }) => (signals.push(signal), never));
  const stop = metrics.watch();
  pass(context.mock.timers, 20);
  stop();
  assert.equal(signals.length, 1);
  assert.ok(signals[0] instanceof AbortSignal);
});

test("the live page outlasts what a relay refuses for a while, and each loss of its log", async (context) => {
  const socket = connected(context.mock);
  const { timers } = context.mock;
  tail.follow();
  await settle();
  const first = socket.asked().at(-1) as Frame;
  socket.says({ type: "ERROR", code: "internal_error", reason: "not now", subscription_id: first.subscription_id });
  await settle();
  pass(timers, 5);
  const again = socket.asked().at(-1) as Frame;
  assert.notEqual(again, first);
  const packet = (number: number) => ({ packet_id: id(number), author_id: "did:x:y", content: { type: "POST" } });
  // The newest packet was first received by another relay, an hour before it came here.
  socket.says({ type: "EVENT", subscription_id: again.subscription_id, packet: packet(1), received_at: 1_759_996_400, cursor: "d1" });
  socket.says({ type: "EVENT", subscription_id: again.subscription_id, packet: packet(2), received_at: 1_760_000_000, cursor: "d2" });
  socket.says({ type: "END_OF_HISTORY", subscription_id: again.subscription_id, complete: false, cursor: "d2" });
  await settle();
  const place = socket.asked().at(-1) as Frame;
  assert.deepEqual(place.filters, { packet_ids: [id(1)], order: "asc", limit: 1 });
  socket.says({ type: "EVENT", subscription_id: place.subscription_id, packet: packet(1), received_at: 1_759_996_400, cursor: "c1" });
  socket.says({ type: "END_OF_HISTORY", subscription_id: place.subscription_id, complete: true, cursor: "c1" });
  await settle();
  assert.deepEqual((socket.asked(true).at(-1) as Frame).filters, { cursor: "c1" }, "no packet is read twice, and none is left out");
  const live = () => (socket.asked(true).at(-1) as Frame).subscription_id;
  const say = (number: number) =>
    socket.says({ type: "EVENT", subscription_id: live(), packet: packet(number), received_at: 1_760_000_000, cursor: `c${number}` });
  say(3);
  socket.says({ type: "ERROR", code: "internal_error", reason: "too slow", detail: "read_timeout", subscription_id: live() });
  pass(timers, 3);
  assert.deepEqual((socket.asked(true).at(-1) as Frame).filters, { cursor: "c3" });
  for (const cursor of ["r1", "r2"]) {
    socket.says({ type: "ERROR", code: "invalid_cursor", reason: "lost", detail: "log_reset", cursor, subscription_id: live() });
    assert.deepEqual((socket.asked(true).at(-1) as Frame).filters, { cursor });
  }
  say(4);
  pass(timers, 1);
  const shown = tail.rows.value.filter((row) => row.kind === "packet").map((row) => row.id);
  assert.deepEqual(shown, [id(4), id(3), id(1), id(2)]);

  // As in a page in the background, whose timers wait.
  for (let number = 10; number < 6000; number++) say(number);
  assert.equal(tail.rows.value.length, 5000, "no more is kept than the list has room for");
  pass(timers, 3);
  assert.equal(tail.rows.value.at(0)?.id, id(5999));
});

test("the live page is not behind because of packets that another relay had long ago", (context) => {
  const socket = connected(context.mock);
  const { timers } = context.mock;
  const { subscription_id } = socket.asked(true).at(-1) as Frame;
  let number = 20_000;
  const isBehindAfter = (received_at: number): boolean => {
    const packet = { packet_id: id(++number), author_id: "did:x:y", content: { type: "POST" } };
    socket.says({ type: "EVENT", subscription_id, packet, received_at, cursor: `c${number}` });
    pass(timers, 1);
    return tail.isBehind.value;
  };
  assert.equal(isBehindAfter(1_760_000_000), false);
  assert.equal(isBehindAfter(1_759_990_000), false);
  assert.equal(isBehindAfter(1_760_009_000), false, "a clock that is ahead hides nothing");
  pass(timers, 10);
  assert.equal(isBehindAfter(1_760_000_004), true);
  assert.equal(isBehindAfter(1_759_990_000), true);
  assert.equal(isBehindAfter(1_760_000_014), false);
});

test("who jumps to now begins there by the relay's clock, and judges by no keys that were asked for before", async (context) => {
  const socket = connected(context.mock);
  const { timers } = context.mock;
  context.after(() => (manifest.value = null));
  manifest.value = { auth: { challenge_lifetime_seconds: 300 } } as never;
  socket.says({ type: "AUTH_CHALLENGE", challenge: "", server_id: "", expires_at: 1_770_000_300 });
  const did = "did:x:jumped";
  const about = () => socket.asked().filter(({ filters }) => (filters["authors"] as string[] | undefined)?.includes(did));
  const known = async () => {
    let isKnown = false;
    void checking.keysOf(did).then(() => (isKnown = true));
    for (await settle(); !isKnown; await settle()) {
      pass(timers, 1);
      for (const { subscription_id } of socket.asked()) socket.says({ type: "END_OF_HISTORY", subscription_id, complete: true, cursor: null });
      await settle();
    }
  };
  await known();
  await known();
  assert.equal(about().length, 1);
  timers.tick(3_600_000); // somebody has set the clock on the wall
  tail.jump();
  const since = Number((socket.asked(true).at(-1) as Frame).filters["received_since"]);
  assert.ok(since >= 1_770_000_000 && since < 1_770_000_060, `${since}`);
  const [newest] = tail.rows.value.filter((row) => row.kind === "packet");
  const { subscription_id } = socket.asked(true).at(-1) as Frame;
  const again = { packet: newest?.event.packet, received_at: newest?.receivedAt, cursor: "again" };
  socket.says({ type: "EVENT", subscription_id, ...again }); // it came here in this second, from another relay
  pass(timers, 1);
  assert.equal(tail.rows.value.filter((row) => row.id === newest?.id).length, 1);
  await known();
  assert.equal(about().length, 2, "what lies between may be a revocation");
});

test("a challenge is answered once, whoever wants the session authenticated", async (context) => {
  const identity = await Identity.generate();
  chosen.value = identity;
  const socket = connected(context.mock);
  session.keepAuthenticated();
  const server_id = (await Identity.generate()).did;
  const challenge = Buffer.alloc(32, 7).toString("base64");
  link.subscribe({}, { event: () => undefined });
  socket.says({ type: "AUTH_CHALLENGE", challenge, server_id, expires_at: 1_760_000_300 });
  const mine = session.authenticate();
  socket.says({ type: "ERROR", code: "unauthenticated", reason: "who?", subscription_id: (socket.asked().at(-1) as Frame).subscription_id });
  const another = session.authenticate(); // a packet of the outbox was refused too
  const answers = () => socket.seen.filter(({ type }) => type === "AUTH");
  while (answers().length === 0) await settle();
  for (let turns = 0; turns < 20; turns++) await settle();
  const [first, ...more] = answers() as [Frame, ...Frame[]];
  socket.says({ type: "AUTH_OK", author_id: identity.did, client_msg_id: first["client_msg_id"] });
  for (const { client_msg_id } of more) {
    socket.says({ type: "ERROR", code: "unauthenticated", reason: "used", detail: "challenge_unknown", client_msg_id });
  }
  assert.deepEqual(await Promise.all([mine, another]), [true, true]);
  assert.equal(session.speaksFor.value, identity.did);
  // A packet that this identity may not publish is refused in the same words: its challenge proves nothing twice.
  assert.equal(await session.authenticate(), true);
  assert.equal(session.speaksFor.value, identity.did);
  assert.equal(answers().length, 1);
});

test("what waits for a session that may publish is sent as soon as somebody else is chosen", async (context) => {
  chosen.value = null;
  const socket = connected(context.mock);
  outbox.beginOutbox();
  const identity = await Identity.generate();
  void outbox.put(await build(identity, { type: "POST" }));
  const sent = () => socket.seen.filter(({ type }) => type === "PUBLISH");
  for (let turns = 0; turns < 20; turns++) await settle();
  const [first] = sent() as [Frame];
  socket.says({ type: "ERROR", code: "unauthenticated", reason: "who?", detail: "missing_capability", client_msg_id: first["client_msg_id"] });
  for (let turns = 0; turns < 20; turns++) await settle();
  assert.equal(sent().length, 1);
  chosen.value = identity;
  for (let turns = 0; turns < 20; turns++) await settle();
  const [, second] = sent() as [Frame, Frame];
  const { packet_id } = second["packet"] as { packet_id: string };
  socket.says({ type: "OK", packet_id: id(1), received_at: 1, client_msg_id: second["client_msg_id"] });
  for (let turns = 0; turns < 20; turns++) await settle();
  assert.deepEqual(outbox.items.value.map(({ state }) => state), ["waiting"], "another packet's OK");
  chosen.value = null;
  for (let turns = 0; turns < 20; turns++) await settle();
  const third = sent().at(-1) as Frame;
  assert.notEqual(third, second);
  socket.says({ type: "OK", packet_id, received_at: 1, client_msg_id: third["client_msg_id"] });
  for (let turns = 0; turns < 20; turns++) await settle();
  assert.deepEqual(outbox.items.value.map(({ state, note }) => [state, note]), [["stored", ""]]);

  // A key event by a recovery key is stored, and does nothing yet.
  void outbox.put(await build(identity, { type: "KEY_EVENT" }));
  for (let turns = 0; turns < 20; turns++) await settle();
  const fourth = sent().at(-1) as Frame & { packet: { packet_id: string } };
  socket.says({ type: "OK", packet_id: fourth.packet.packet_id, received_at: 1, status: "QUEUED", client_msg_id: fourth["client_msg_id"] });
  for (let turns = 0; turns < 20; turns++) await settle();
  assert.match(outbox.items.value[0]?.note ?? "", /takes effect after a delay/);
});

test("an identity that the relay does not take is tried three times on a connection, and then by hand alone", async (context) => {
  chosen.value = await Identity.generate();
  const server_id = (await Identity.generate()).did;
  const challenge = { type: "AUTH_CHALLENGE", challenge: Buffer.alloc(32, 7).toString("base64"), server_id, expires_at: 1_760_000_300 };
  const tries = () => Socket.last.seen.filter(({ type }) => type === "AUTH");
  const isTaken = async (trying: Promise<boolean>) => {
    let outcome: boolean | undefined;
    void trying.then((taken) => (outcome = taken));
    for (; outcome === undefined; await settle()) {
      const client_msg_id = tries().at(-1)?.["client_msg_id"];
      Socket.last.says({ type: "ERROR", code: "unauthenticated", reason: "no member", client_msg_id });
    }
    return outcome;
  };
  for (let connection = 0; connection < 2; connection++) {
    if (connection === 0) connected(context.mock);
    else link.reconnect();
    Socket.last.open().says(challenge);
    for (let times = 0; times < 5; times++) assert.equal(await isTaken(session.authenticate()), false); // as for each packet that waits
    assert.equal(tries().length, 3);
    assert.equal(await isTaken(session.authenticate(true)), false);
    assert.equal(tries().length, 4);
  }
});
