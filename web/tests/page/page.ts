/** A page for the tests in a real browser: it does what its fragment says, and tells the server how it went. */

import { browserIdentity, build, connect, Identity, indexedDbOutbox, localStoragePins, Relay, verify } from "../../src/client/index.js";
import * as ed25519 from "../../src/client/protocol/ed25519.js";
import cases from "../../vectors/ed25519.json" with { type: "json" };

const options = Object.fromEntries(new URLSearchParams(location.hash.slice(1))) as Record<string, string>;
const url = options["url"] ?? "";

async function say(event: object): Promise<void> {
  await fetch("/said", { method: "POST", body: JSON.stringify(event) });
}

function bytes(hex: string): Uint8Array {
  return new Uint8Array(hex.match(/../g)?.map((digits) => Number.parseInt(digits, 16)) ?? []);
}

/** The DID of the identity that the browser keeps, or the class of the error. */
async function kept(): Promise<string> {
  try {
    const identity = await browserIdentity();
    await verify(await build(identity, { type: "POST" }));
    const key = identity.keyPair?.privateKey as CryptoKey;
    const secret = await crypto.subtle.exportKey("pkcs8", key).catch(() => undefined);
    return secret === undefined ? identity.did : "the key can be read";
  } catch (error) {
    return error instanceof Error ? error.name : "";
  }
}

const acts: Record<string, () => Promise<void>> = {
  /** All verdicts of Ed25519, and a packet signed and verified. */
  async verdicts() {
    const wrong: string[] = [];
    for (const { name, public_key, message, signature, valid } of cases) {
      const said = await ed25519.verify(bytes(public_key), bytes(message), bytes(signature));
      if (said !== valid) wrong.push(name);
    }
    await verify(await build(await Identity.generate(), { type: "POST", text: "x" }));
    const [one, other] = await Promise.all([kept(), kept()]);
    const said = { wrong, checked: cases.length, source: await ed25519.sourceHere(), isSecure: isSecureContext };
    await say({ ...said, kept: one, isSame: one === other });
  },

  /** Add packets to the outbox while no relay answers. */
  async add() {
    const relay = new Relay(url, { outbox: indexedDbOutbox("test"), connectTimeout: Infinity });
    void relay.open();
    const me = await Identity.generate();
    for (let n = 0; n < Number(options["count"]); n++) {
      const packet = await build(me, { type: "POST", text: `from a page ${n}` });
      await relay.outbox.add(packet);
      await say({ durable: packet.packetId });
    }
  },

  /** Send what waits in the outbox. */
  async drain() {
    const relay = await connect(url, { outbox: indexedDbOutbox("test"), connectTimeout: 60 });
    while ((await relay.outbox.list()).length > 0) await new Promise((done) => setTimeout(done, 20));
    await say({ acknowledged: relay.statistics.publishesAcknowledged, duplicate: relay.statistics.publishesDuplicate });
  },

  /** The same in two documents at once, as two tabs would. */
  async drainTwice() {
    for (let n = 0; n < 2; n++) {
      const frame = document.createElement("iframe");
      frame.src = `/?${n}${location.hash.replace("drainTwice", "drain")}`;
      document.body.append(frame);
    }
  },

  /** Post, authenticate with pins, and read it back. */
  async talk() {
    const identity = await Identity.generate();
    const relay = await connect(url, { identity, pins: localStoragePins(), connectTimeout: 60 });
    const { packetId } = await relay.post({ type: "POST", text: "from a page" });
    await relay.authenticate();
    for await (const { packet } of relay.subscribe({ authors: identity.did })) {
      await say({ posted: packetId, read: packet.packetId, pinned: Object.values(localStorage) });
      break;
    }
    await relay.close();
  },
};

await acts[options["act"] ?? ""]?.().catch((error: unknown) => say({ error: String(error) }));
