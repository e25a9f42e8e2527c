import assert from "node:assert/strict";
import { test } from "node:test";

import { DidDocument } from "../src/client/protocol/documents.js";
import { KeyChain } from "../src/client/protocol/keys/chain.js";
import { Packet } from "../src/client/protocol/packets.js";
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
