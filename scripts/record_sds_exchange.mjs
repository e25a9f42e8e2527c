// Records an exchange between two participants of @waku/sds 0.0.8, for tests/strata/channels/sds/vectors/exchange.json.
// Usage, in a folder where `npm install @waku/sds@0.0.8` was run, with this file copied there:
//   node record_sds_exchange.mjs > exchange.json
// With the argument `live` it is a participant instead: one JSON command per line on stdin, one answer on stdout.
import { createInterface } from "node:readline";
import { deflateSync } from "node:zlib";
import { MessageChannel, MessageChannelEvent, Message } from "@waku/sds";

const base64 = (bytes) => Buffer.from(bytes).toString("base64");
const bytes = (text) => new Uint8Array(Buffer.from(text, "base64"));

class Peer {
  constructor(channel, sender, options) {
    this.channel = new MessageChannel(channel, sender, options);
    this.events = [];
    const note = (name, id) =>
      this.channel.addEventListener(name, (event) => this.events.push([name, id(event.detail)]));
    note(MessageChannelEvent.InMessageDelivered, (detail) => detail);
    note(MessageChannelEvent.OutMessageAcknowledged, (detail) => detail);
    note(MessageChannelEvent.OutMessagePossiblyAcknowledged, (detail) => detail.messageId);
    note(MessageChannelEvent.InMessageMissing, (detail) => detail.map((entry) => entry.messageId));
  }

  async send(content) {
    let wire;
    this.channel.pushOutgoingMessage(content, async (message) => {
      wire = message.encode();
      return { success: true, retrievalHint: new Uint8Array(32).fill(wire.length & 255) };
    });
    await this.channel.processTasks();
    return wire;
  }

  async sync() {
    let wire;
    await this.channel.pushOutgoingSyncMessage(async (message) => {
      wire = message.encode();
      return true;
    });
    return wire;
  }

  async receive(wire) {
    const message = Message.decode(wire);
    if (message === undefined) return false;
    this.channel.pushIncomingMessage(message, undefined);
    await this.channel.processTasks();
    this.channel.sweepIncomingBuffer();
    return true;
  }

  take() {
    const events = this.events.filter(([, detail]) => detail.length > 0);
    this.events = [];
    return events;
  }

  log() {
    return this.channel.localHistory.slice(0).map((message) => message.messageId);
  }
}

async function record() {
  const alice = new Peer("room", "alice", { causalHistorySize: 2 });
  const bob = new Peer("room", "bob", { causalHistorySize: 2 });
  const steps = [];
  const peers = { alice, bob };
  const say = async (from, to, text) => {
    const wire = text === null ? await peers[from].sync() : await peers[from].send(Buffer.from(text));
    if (to !== null) await peers[to].receive(wire);
    const step = { from, lost: to === null, zlib: base64(deflateSync(wire)) };
    steps.push(step);
    return wire;
  };
  await say("alice", "bob", "one");
  await say("alice", "bob", "two");
  await say("bob", "alice", "three");
  const lost = await say("alice", null, "four, lost");
  await say("alice", "bob", "five, which waits for four");
  await say("bob", "alice", null);
  await say("alice", "bob", "six, also waiting");
  await bob.receive(lost);
  bob.channel.sweepIncomingBuffer();
  steps.push({ from: "alice", lost: false, zlib: base64(deflateSync(lost)) });
  await say("bob", "alice", "seven");
  await say("alice", "bob", null);
  const about = "Written by scripts/record_sds_exchange.mjs; zlib: the message, deflated, in base64.";
  console.log(JSON.stringify({ about, steps, alice: alice.log(), bob: bob.log() }, null, 1));
}

async function live() {
  let peer;
  for await (const line of createInterface({ input: process.stdin })) {
    const [command, ...rest] = JSON.parse(line);
    let answer = null;
    if (command === "open") peer = new Peer(rest[0], rest[1], rest[2]);
    else if (command === "send") answer = base64(await peer.send(bytes(rest[0])));
    else if (command === "sync") answer = base64((await peer.sync()) ?? new Uint8Array());
    else if (command === "receive") answer = await peer.receive(bytes(rest[0]));
    else if (command === "events") answer = peer.take();
    else if (command === "log") answer = peer.log();
    process.stdout.write(JSON.stringify(answer) + "\n");
  }
}

await (process.argv[2] === "live" ? live() : record());
process.exit(0);
