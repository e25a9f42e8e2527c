// The ReliableChannel of @waku/sdk 0.0.36 on a fake node: one JSON command per line on stdin, one answer on stdout.
// Usage, in a folder where `npm install @waku/sdk@0.0.36` was run, with this file copied there:
//   node waku_channel_peer.mjs
// Time advances only with the command `tick`, so that a test with a virtual clock decides what happens when.
import { mock } from "node:test";
import { createInterface } from "node:readline";
import { createDecoder, createEncoder, ReliableChannel } from "@waku/sdk";
import { messageHash } from "@waku/core";
import { createRoutingInfo } from "@waku/utils";

const base64 = (bytes) => Buffer.from(bytes).toString("base64");
const bytes = (text) => new Uint8Array(Buffer.from(text, "base64"));
const settled = setImmediate; // before the timers are replaced
const settle = async () => {
  for (let i = 0; i < 5; i++) await new Promise((resolve) => settled(resolve));
};

// A stopped channel may still set its sync timer, and the class then raises an error that nothing catches.
process.on("unhandledRejection", (error) => {
  if (!String(error?.message).includes("must be started")) throw error;
});

let topic, routingInfo, channel, hear;
let [out, events] = [[], []];

const node = {
  lightPush: {
    async send(encoder, message) {
      const proto = await encoder.toProtoObj(message);
      out.push([base64(proto.payload), base64(messageHash(encoder.pubsubTopic, proto))]);
      return { successes: ["stand-in"], failures: [] };
    },
  },
  filter: {
    async subscribe(_decoder, callback) {
      hear = callback;
      return true;
    },
  },
};

const NAMES = [
  "sending-message",
  "message-sent",
  "message-acknowledged",
  "message-possibly-acknowledged",
  "message-received",
  "sending-message-irrecoverable-error",
];

const commands = {
  // Opens a channel, or restarts it: what the previous one knew is lost, because the package keeps it in memory.
  async open(contentTopic, channelId, senderId, options, now) {
    if (channel === undefined) mock.timers.enable({ apis: ["setTimeout", "setInterval", "Date"], now });
    else channel.stop();
    topic = contentTopic;
    [out, events] = [[], []];
    const network = { clusterId: 1, numShardsInCluster: 8 };
    routingInfo = createRoutingInfo(network, { contentTopic });
    const encoder = createEncoder({ contentTopic, routingInfo });
    const decoder = createDecoder(contentTopic, routingInfo);
    channel = await ReliableChannel.create(node, channelId, senderId, encoder, decoder, options);
    const [mine, told] = [channel, events];
    for (const name of NAMES)
      channel.addEventListener(name, ({ detail }) => {
        if (channel !== mine) return;
        const what = name === "message-received" ? base64(detail.payload) : (detail.messageId ?? detail);
        told.push([name, what]);
      });
    return true;
  },
  async send(payload) {
    return channel.send(bytes(payload));
  },
  async receive(payload, hash) {
    const message = { payload: bytes(payload), hash: bytes(hash), hashStr: hash, contentTopic: topic };
    await hear({ ...message, pubsubTopic: routingInfo.pubsubTopic, timestamp: new Date(), ephemeral: false });
    return true;
  },
  async tick(milliseconds) {
    for (let passed = 0; passed < milliseconds; passed += 50) {
      mock.timers.tick(Math.min(50, milliseconds - passed));
      await settle();
    }
    return true;
  },
};

for await (const line of createInterface({ input: process.stdin })) {
  const [command, ...parameters] = JSON.parse(line);
  let answer, error;
  try {
    answer = await commands[command](...parameters);
    await settle();
  } catch (raised) {
    error = String(raised?.stack ?? raised);
  }
  process.stdout.write(JSON.stringify({ answer, error, out: out.splice(0), events: events.splice(0) }) + "\n");
}
process.exit(0);
