import assert from "node:assert/strict";
import { test } from "node:test";

import { Identity } from "../src/client/protocol/ids.js";
import { Core } from "../src/client/relays/core.js";
import { type Options, withDefaults } from "../src/client/relays/options.js";
import { Query } from "../src/client/relays/values.js";

const OURS = ["history_marker", "gapless", "packet_ids"];
const me = await Identity.generate();

type Frame = Record<string, unknown> & { type: string; subscription_id: string; client_msg_id: string };

/** A core, a shell that calls it as the driver does, and a relay that answers if it is not silent. */
class Talk {
  now = 100;
  readonly core: Core;
  readonly settled: [string, unknown][] = [];
  readonly probes: number[] = [];
  isSilent = false;
  asleep = 0; // how far the wall clock is ahead of the other one, which stood still
  lost = 0;

  constructor(options: Partial<Options> = {}, did?: string, private readonly extensions = OURS) {
    this.core = new Core({ options: withDefaults(options), random: () => 0.5, did });
    this.event(() => undefined);
    this.connect();
  }

  connect(): void {
    this.event(() => this.core.connectionMade({ extensions: new Set(this.extensions) }, this.now, this.now));
  }

  /** A message or a timer. */
  event(act: () => void): void {
    this.core.look(this.now, this.now + this.asleep);
    this.act(act);
  }

  receive(message: object): void {
    this.event(() => this.core.receiveMessage(JSON.stringify(message), this.now));
  }

  act(act: () => void): void {
    act();
    const frames = this.core.dataToSend().map((frame) => JSON.parse(frame) as Frame);
    for (const change of this.core.changes()) {
      if (change.kind === "published") this.settled.push([change.handle, change.outcome]);
      if (change.kind === "authenticated") this.settled.push(["auth", change.outcome]);
      if (change.kind === "signature") this.act(() => this.core.signed(change.request, new Uint8Array(64), this.now));
    }
    for (const { type, subscription_id } of frames) {
      if (type !== "SUBSCRIBE" || !subscription_id.startsWith("k")) continue;
      this.probes.push(this.now);
      if (!this.isSilent) this.receive({ type: "END_OF_HISTORY", subscription_id, complete: true });
    }
    if (!this.core.liveness.isGone) return;
    this.lost++;
    this.act(() => this.core.connectionLost());
  }

  /** Let time pass. Timers come when they are due, or this much later. */
  pass(seconds: number, lateBy = 0): void {
    for (const end = this.now + seconds; this.now < end; ) {
      this.now = Math.min(end, Math.max(this.core.timer, this.now + 0.001) + lateBy);
      this.event(() => this.core.handleTimer(this.now));
    }
  }

  publish(timeout = 30, size = 2): void {
    this.act(() => this.core.publish(`0x${"a".repeat(64)}`, `{${" ".repeat(size - 2)}}`, timeout, this.now));
  }

  ok(): void {
    this.receive({ type: "OK", packet_id: `0x${"a".repeat(64)}`, status: "ACCEPTED", client_msg_id: "p1" });
  }
}

test("what came while nobody looked is heard before silence is judged", () => {
  const talk = new Talk();
  const stream = talk.core.subscribe(new Query({ live: false }), talk.now);
  talk.publish();
  talk.pass(0.9);
  talk.pass(60, 60);
  assert.equal(talk.settled.length, 0);
  assert.equal(stream.phase, "history");
  talk.ok();
  talk.receive({ type: "END_OF_HISTORY", subscription_id: stream.wireId, complete: true });
  assert.deepEqual(talk.settled.map(([handle, outcome]) => [handle, outcome instanceof Error]), [["p1", false]]);
  assert.deepEqual([stream.phase, stream.error], ["ended", undefined]);
});

test("while the program looks, silence is judged as before", () => {
  const talk = new Talk();
  const stream = talk.core.subscribe(new Query({ live: false }), talk.now);
  talk.pass(29);
  assert.equal(stream.phase, "history");
  talk.pass(2);
  assert.equal(stream.error?.name, "RequestTimeout");
  talk.publish(10);
  talk.pass(11);
  assert.equal((talk.settled[0]?.[1] as Error).name, "RequestTimeout");
  assert.equal(talk.lost, 0, "it answers the probes");
});

test("a plain relay's history is not over because nobody looked", () => {
  const talk = new Talk({}, undefined, []);
  const stream = talk.core.subscribe(new Query({ live: false }), talk.now);
  talk.pass(60, 60);
  assert.equal(stream.phase, "history");
  talk.pass(5);
  assert.equal(stream.phase, "ended");
});

test("a pause refuses no authentication: neither the wait for a challenge nor that for AUTH_OK", () => {
  const talk = new Talk({ authenticate: "always" }, me.did);
  talk.pass(60, 60);
  assert.equal(talk.settled.length, 0);
  const challenge = "AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=";
  talk.receive({ type: "AUTH_CHALLENGE", challenge, server_id: me.did, expires_at: talk.now + 120 });
  talk.pass(0.5);
  talk.pass(60, 60);
  assert.equal(talk.settled.length, 0);
  talk.receive({ type: "AUTH_OK", author_id: me.did, client_msg_id: "a1" });
  assert.equal(talk.settled.length, 1);
  assert.equal(talk.core.session?.authorId, me.did);
});

for (const [how, sleep] of [
  ["the process stood still", (talk: Talk) => talk.pass(3600, 3600)],
  ["its clock too", (talk: Talk) => void (talk.asleep += 3600)],
] as const) {
  test(`after a sleep the relay is probed at once, and left if it does not answer soon: ${how}`, () => {
    const talk = new Talk();
    talk.core.subscribe(new Query({}), talk.now);
    for (const times of [1, 2]) {
      talk.isSilent = true;
      talk.pass(20);
      sleep(talk);
      talk.pass(1);
      assert.equal(talk.probes.length, times);
      talk.receive({ type: "EVENT", subscription_id: "s1.1", packet: {}, received_at: 1 }); // it came before the sleep
      talk.pass(4);
      assert.equal(talk.lost, times);
      talk.connect();
    }
    talk.isSilent = false;
    talk.pass(60);
    assert.equal(talk.lost, 2);
  });
}

test("a line that takes long for one large packet is kept", () => {
  const talk = new Talk();
  talk.isSilent = true; // the probe is behind the packet
  talk.publish(30, 200_000);
  talk.pass(200_000 / 10_000);
  assert.ok(talk.probes.length > 0);
  assert.equal(talk.lost, 0);
  talk.ok();
  assert.equal(talk.settled.length, 1);
});

test("a publish without an answer is a reason to probe, and goes out again on the next connection", () => {
  const talk = new Talk();
  talk.core.subscribe(new Query({}), talk.now);
  talk.receive({ type: "END_OF_HISTORY", subscription_id: "s1.1", complete: true });
  talk.pass(10);
  talk.isSilent = true;
  const askedAt = talk.now;
  talk.publish();
  talk.pass(6);
  assert.equal(talk.lost, 1);
  assert.ok((talk.probes[0] as number) - askedAt < 3.1);
  talk.isSilent = false;
  talk.connect();
  talk.ok();
  assert.equal(talk.core.statistics.publishesRepeated, 1);
  assert.deepEqual(talk.settled.map(([handle, outcome]) => [handle, outcome instanceof Error]), [["p1", false]]);
  talk.pass(20);
  assert.equal(talk.lost, 1);
});

test("a relay that is too busy to answer is left less and less often", () => {
  const talk = new Talk();
  talk.isSilent = true;
  talk.publish(600);
  for (const end = talk.now + 300; talk.now < end; ) {
    const { lost } = talk;
    talk.pass(1);
    if (talk.lost > lost) talk.connect();
  }
  assert.ok(talk.lost >= 3 && talk.lost <= 8, `${talk.lost} connections in five minutes`);
});

test("late timers of a hidden tab cause neither a storm of probes nor a new connection", () => {
  const talk = new Talk();
  talk.core.subscribe(new Query({}), talk.now);
  talk.receive({ type: "END_OF_HISTORY", subscription_id: "s1.1", complete: true });
  talk.pass(3600, 60);
  assert.ok(talk.probes.length <= 61, `${talk.probes.length} probes in an hour`);
  assert.equal(talk.lost, 0);
  const before = talk.probes.length;
  talk.pass(600, 1); // rounded up to whole seconds
  assert.ok(talk.probes.length - before <= 21, `${talk.probes.length - before} probes in ten minutes`);
  talk.isSilent = true;
  talk.pass(600, 60);
  assert.equal(talk.lost, 1, "a relay that is gone is noticed there too");
});

test("a deadline passes though the program pauses again and again", () => {
  const talk = new Talk();
  talk.publish();
  talk.pass(3600, 60);
  assert.equal((talk.settled[0]?.[1] as Error).name, "RequestTimeout");
});
