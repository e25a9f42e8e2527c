import assert from "node:assert/strict";
import { test } from "node:test";

import canonicalize from "canonicalize";

import * as auth from "../src/client/protocol/auth.js";
import { hex } from "../src/client/protocol/bytes.js";
import * as canonical from "../src/client/protocol/canonical.js";
import * as ed25519 from "../src/client/protocol/ed25519.js";
import { InvalidMessage, retryAdvice } from "../src/client/protocol/errors.js";
import { base58Decode, base58Encode, Identity, isDid, publicKeyFromDid } from "../src/client/protocol/ids.js";
import type { JsonObject } from "../src/client/protocol/json.js";
import { buildAt, Packet } from "../src/client/protocol/packets.js";
import { restore } from "../src/client/protocol/provenance.js";
import { type AuthChallenge, decodeRelayMessage } from "../src/client/protocol/wire.js";
import { afterRetryAfter, fullJitter } from "../src/client/relays/backoff.js";
import { bytes, vectors, verdict } from "./vectors.js";

interface Text {
  text?: string;
  hex?: string;
  canonical?: string;
  code?: string;
  detail?: string;
}

const texts = vectors<{ texts: Text[]; numbers: { double: string; text: string | null; detail: string | null }[] }>(
  "canonical",
);

test("JSON text has the canonical form that Python finds, or is refused as there", async () => {
  for (const { text, hex: digits, canonical: expected, code, detail } of texts.texts) {
    const raw = digits === undefined ? (text as string) : bytes(digits);
    if (expected !== undefined) {
      assert.equal(canonical.canonicalize(raw), expected);
      assert.equal(canonical.canonicalize(expected), expected);
      assert.equal(canonical.encode(canonical.parse(raw).value), expected);
      assert.equal(canonicalize(JSON.parse(expected)), expected, "an independent implementation agrees");
    } else {
      assert.deepEqual(await verdict(() => canonical.canonicalize(raw)), { code, detail }, JSON.stringify(text));
    }
  }
});

test("numbers are those of RFC 8785 appendix B", async () => {
  for (const { double, text, detail } of texts.numbers) {
    const number = new DataView(bytes(double).buffer).getFloat64(0);
    if (detail === null) assert.equal(canonical.encode(number), text);
    else assert.equal((await verdict(() => canonical.encode(number))).detail, detail, double);
  }
});

test("what JSON cannot express is refused", async () => {
  class Own {
    a = 1;
  }
  const cycle: unknown[] = [];
  cycle.push(cycle);
  for (const value of [undefined, { a: undefined }, 1n, () => 1, new Date(0), new Map(), new Own(), Symbol("x")]) {
    assert.equal((await verdict(() => canonical.encode(value))).detail, "not_json");
  }
  assert.equal((await verdict(() => canonical.encode(cycle))).detail, "too_deep");
  assert.equal((await verdict(() => canonical.encode(["\ud800"]))).detail, "lone_surrogate");
  assert.equal((await verdict(() => canonical.canonicalize('["\ud800"]'))).detail, "lone_surrogate");
});

test("very deep text is refused and not recursed into", async () => {
  for (const open of ["[", '{"a":']) {
    assert.equal((await verdict(() => canonical.canonicalize(open.repeat(200_000)))).detail, "too_deep");
  }
});

const known = vectors<{
  dids: { did: string; is_did: boolean; public_key: string | null }[];
  keys: { seed: string; did: string }[];
  base58: { hex: string; text: string }[];
}>("identities");

test("DIDs carry the keys that Python finds in them", async () => {
  for (const { did, is_did, public_key } of known.dids) {
    assert.equal(isDid(did), is_did, JSON.stringify(did));
    const key = is_did ? publicKeyFromDid(did) : undefined;
    assert.equal(key === undefined ? null : hex(key), public_key, did);
  }
  for (const { hex: digits, text } of known.base58) {
    assert.equal(base58Encode(bytes(digits)), text);
    assert.equal(hex(base58Decode(text) as Uint8Array), digits);
  }
  for (const { seed, did } of known.keys) {
    assert.equal((await Identity.fromSeed(bytes(seed))).did, did);
  }
});

test("an identity is read from a key file, and no damaged one is", async () => {
  const { seed, did } = known.keys[0] as { seed: string; did: string };
  const file = { did, seed: `0x${seed}` };
  assert.equal((await Identity.fromKeyFile(JSON.stringify(file))).did, did);
  const rotated = { did: "did:strata:alice", key: did, seed: `0x${seed}` };
  assert.equal((await Identity.fromKeyFile(JSON.stringify(rotated))).did, "did:strata:alice");
  for (const text of ["", "5", "null", "{}", JSON.stringify({ ...file, did: "did:strata:other" })]) {
    await assert.rejects(Identity.fromKeyFile(text), { name: "IdentityError" });
  }
});

test("all 43 verdicts of Ed25519 hold, by WebCrypto and in JavaScript", async () => {
  const cases = vectors<{ name: string; public_key: string; message: string; signature: string; valid: boolean }[]>(
    "ed25519",
  );
  assert.equal(cases.length, 43);
  for (const { name, public_key, message, signature, valid } of cases) {
    for (const source of ["webcrypto", "javascript", undefined] as const) {
      const said = await ed25519.verify(bytes(public_key), bytes(message), bytes(signature), source);
      assert.equal(said, valid, `${name} (${source})`);
    }
  }
});

test("a signature made here is one", async () => {
  for (const identity of [await Identity.generate(), await Identity.fromSeed(bytes("07".repeat(32)))]) {
    const message = new TextEncoder().encode("strata");
    const signature = await identity.sign(message);
    assert.equal(await ed25519.verify(identity.publicKey, message, signature), true);
    assert.equal(await ed25519.verify(identity.publicKey, new Uint8Array(1), signature), false);
  }
});

const packets = vectors<{
  seed: string;
  timestamp: number;
  built: { content: string; options: string; canonical: string; packet_id: string; size_bytes: number }[];
  arriving: {
    raw: string;
    parse: { code: string | null; detail: string | null };
    read: { code: string | null; detail: string | null };
    packet_id?: string;
    verify?: { code: string | null; detail: string | null };
  }[];
}>("packets");

test("packets are built to the same bytes, names like __proto__ and numbers among them", async () => {
  const identity = await Identity.fromSeed(bytes(packets.seed));
  for (const { content, options, canonical: text, packet_id, size_bytes } of packets.built) {
    const { expires_at, nonce, extra } = JSON.parse(options) as Record<string, never>;
    const packet = await buildAt(identity, JSON.parse(content) as JsonObject, {
      timestamp: packets.timestamp,
      expiresAt: expires_at,
      nonce,
      extra,
    });
    assert.equal(packet.canonical, text);
    assert.equal(packet.packetId, packet_id);
    assert.equal(packet.sizeBytes, size_bytes);
    await packet.verify();
  }
  assert.equal(({} as Record<string, unknown>)["polluted"], undefined);
});

test("packets that arrive are taken and refused as Python does", async () => {
  for (const { raw, parse, read, packet_id, verify } of packets.arriving) {
    assert.deepEqual(await verdict(() => Packet.parse(raw)), parse, raw);
    assert.deepEqual(await verdict(() => Packet.read(raw)), read, raw);
    if (packet_id !== undefined) {
      const packet = Packet.read(new TextEncoder().encode(raw));
      assert.equal(packet.packetId, packet_id);
      assert.deepEqual(await verdict(() => packet.verify()), verify, raw);
    }
  }
});

test("a packet's size, expiry and freshness are checked", async () => {
  const identity = await Identity.generate();
  const packet = await buildAt(identity, { type: "POST", text: "x" }, { timestamp: 1000, expiresAt: 2000 });
  assert.throws(() => Packet.parse(packet.canonical, { maxBytes: packet.sizeBytes - 1 }), {
    code: "packet_too_large",
    maxBytes: packet.sizeBytes - 1,
  });
  Packet.parse(packet.canonical, { maxBytes: packet.sizeBytes });
  await packet.verify(2000);
  await assert.rejects(packet.verify(2001), { code: "packet_expired" });
  await assert.rejects(buildAt(identity, { type: "POST" }, { timestamp: 1, extra: { version: 2 } }), TypeError);
  await assert.rejects(
    buildAt(identity, { type: "POST" }, { timestamp: 1, provenanceHeader: { origin_type: "AI_MODEL" } }),
    TypeError,
  );
});

test("challenges are signed only where that is safe", async () => {
  const { checks, answer } = vectors<{
    checks: { challenge: string; server_id: string; expected: string | null; detail: string | null }[];
    answer: { seed: string; signing_input: string; challenge: AuthChallenge; auth: { signature: string } };
  }>("auth");
  for (const { challenge, server_id, expected, detail } of checks) {
    const message: AuthChallenge = { type: "AUTH_CHALLENGE", challenge, server_id, expires_at: 0 };
    const said = await verdict(() => auth.checkChallenge(message, expected ?? undefined));
    assert.equal(said.detail, detail, challenge);
  }
  const input = auth.signingInput(answer.challenge.challenge, answer.challenge.server_id);
  assert.equal(hex(input), answer.signing_input);
  const identity = await Identity.fromSeed(bytes(answer.seed));
  assert.equal(`0x${hex(await identity.sign(input))}`, answer.auth.signature);
});

test("retries follow the same advice and the same waits", () => {
  const { advice, after, jitter } = vectors<{
    advice: { code: string; retry_after: number | null; retry: string }[];
    after: { retry_after: number; draw: number; delay: number }[];
    jitter: { attempt: number; draw: number; delay: number }[];
  }>("retry");
  for (const { code, retry_after, retry } of advice) {
    assert.equal(retryAdvice(code, retry_after ?? undefined), retry, code);
  }
  for (const { retry_after, draw, delay } of after) assert.equal(afterRetryAfter(retry_after, () => draw), delay);
  for (const { attempt, draw, delay } of jitter) assert.equal(fullJitter(attempt, 0.5, 30, () => draw), delay);
});

test("downgraded packets are restored to what their authors signed", async () => {
  for (const { raw, annotations, packet_id, origin_type, canonical: text, code, detail } of vectors<
    {
      raw: string;
      annotations: JsonObject | null;
      packet_id?: string;
      origin_type?: string | null;
      canonical?: string;
      code?: string;
      detail?: string | null;
    }[]
  >("provenance")) {
    if (code !== undefined) {
      assert.deepEqual(await verdict(() => restore(raw, annotations ?? undefined)), { code, detail });
      continue;
    }
    const { packet, originType } = restore(raw, annotations ?? undefined);
    assert.equal(packet.packetId, packet_id);
    assert.equal(packet.canonical, text);
    assert.equal(originType ?? null, origin_type);
    await packet.verify();
  }
});

test("frames are read, and refused, as Python does", () => {
  for (const { frame, valid, detail, packet } of vectors<
    { frame: string; valid: boolean; detail?: string | null; packet?: string | null }[]
  >("messages")) {
    if (!valid) {
      assert.throws(
        () => decodeRelayMessage(frame),
        (error) => error instanceof InvalidMessage && (error.detail ?? null) === detail,
        frame,
      );
      continue;
    }
    const message = decodeRelayMessage(frame);
    if (message.type === "EVENT") assert.equal(message.packet, packet);
  }
});
