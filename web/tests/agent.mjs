// A program for the tests that drive the package from outside: `node agent.mjs ACT OPTIONS`, one JSON line per event.

import { readFileSync } from "node:fs";

import { build, connect, Identity, RequestRefused, verify } from "strata-client";
import { fileOutbox, filePins } from "strata-client/node";

const [act, text] = process.argv.slice(2);
const options = JSON.parse(text);
const say = (event) => process.stdout.write(`${JSON.stringify(event)}\n`);
const seed = (number) => new Uint8Array(32).fill(number);
const FAST = { backoffCap: 0.5, ackTimeout: 5, publishTimeout: 120, connectTimeout: 60 };

const acts = {
  /** Subscribe, and say each delivery; after `stop` of them, leave. */
  async read({ url, query = {}, stop = Infinity, more = {} }) {
    const relay = await connect(url, { ...FAST, ...more });
    let count = 0;
    for await (const { packet, receivedAt, cursor, live } of relay.subscribe(query)) {
      await verify(packet, { keys: await relay.keyChain(packet.authorId), receivedAt });
      say({ id: packet.packetId, text: packet.content.text, cursor, live });
      if (++count >= stop) break;
    }
    say({ statistics: relay.statistics });
    await relay.close();
  },

  /** Post, one after the other, and say each OK. */
  async post({ url, number, count, more = {}, text = "from node" }) {
    const identity = await Identity.fromSeed(seed(number));
    const relay = await connect(url, { ...FAST, identity, ...more });
    for (let n = 0; n < count; n++) {
      const { packetId, duplicate } = await relay.post({ type: "POST", text: `${text} ${n} 🦀`, __n: n });
      say({ id: packetId, duplicate });
    }
    say({ session: relay.session?.authorId ?? null, relayId: relay.relayId ?? null });
    await relay.close();
  },

  /** Publish packets with these contents, and say each as it was signed. */
  async contents({ url, number, file }) {
    const identity = await Identity.fromSeed(seed(number));
    const relay = await connect(url, { ...FAST, identity });
    for (const content of JSON.parse(readFileSync(file, "utf8"))) {
      const packet = await build(identity, content);
      await relay.publish(packet);
      say({ id: packet.packetId, canonical: packet.canonical });
    }
    await relay.close();
  },

  /** Put packets into a durable outbox; say each that is durable, then each that the relay has. */
  async outbox({ url, number, count, folder, timeout = 1 }) {
    const identity = await Identity.fromSeed(seed(number));
    const outbox = fileOutbox(folder);
    const relay = await connect(url, { ...FAST, identity, outbox, connectTimeout: timeout }).catch((error) => {
      say({ error: error.name });
      return undefined;
    });
    if (relay === undefined) {
      // No relay: durable all the same, for whoever opens the folder next.
      for (let n = 0; n < count; n++) {
        const packet = await build(identity, { type: "POST", text: `boxed ${n}` });
        await outbox.add({ packetId: packet.packetId, canonical: packet.canonical });
        say({ durable: packet.packetId });
      }
      await new Promise(() => setInterval(() => {}, 1000));
    }
    const sent = [];
    for (let n = 0; n < count; n++) {
      const packet = await build(identity, { type: "POST", text: `boxed later ${n}` });
      sent.push((await relay.outbox.add(packet)).sent.then(({ packetId }) => say({ id: packetId })));
      say({ durable: packet.packetId });
    }
    await Promise.all(sent);
    while ((await relay.outbox.list()).length > 0) await new Promise((done) => setTimeout(done, 20));
    say({ empty: true });
    await relay.close();
  },

  /** Authenticate, and say how that went. */
  async authenticate({ url, number, relayId, pins }) {
    const identity = await Identity.fromSeed(seed(number));
    const relay = await connect(url, { ...FAST, identity, relayId, pins: pins && filePins(pins) });
    try {
      const { authorId, capabilities } = await relay.authenticate();
      say({ authorId, capabilities: [...capabilities].sort(), relayId: relay.relayId });
    } catch (error) {
      say({ error: error.name, code: error.code, detail: error.detail ?? null, statistics: relay.statistics });
    }
    await relay.close();
  },

  /** Publish what a relay refuses, and say why it did. */
  async refused({ url, number }) {
    const identity = await Identity.fromSeed(seed(number));
    const relay = await connect(url, { ...FAST, identity });
    const old = await build(identity, { type: "POST", text: "old" }, { timestamp: 1_700_000_000 });
    try {
      await relay.publish(old);
    } catch (error) {
      say({ error: error.name, code: error.code, retry: error.retry, known: error instanceof RequestRefused });
    }
    const queued = await relay.outbox.add(old);
    await queued.sent.catch(() => undefined);
    const [{ state, isStale, refusal }] = await relay.outbox.list();
    say({ state, isStale, code: refusal.code });
    await relay.close();
  },
};

await acts[act](options);
