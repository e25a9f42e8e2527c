// Checks packets in a worker, so that the page never waits for it.

import { InvalidInput } from "../client/protocol/errors.js";
import { DEEPEST, parse } from "../client/protocol/canonical.js";
import type { Packet } from "../client/protocol/packets.js";
import { asSigned, type Chain, chainOf } from "./chains.js";
import type { Answer, Ask, Given, Step } from "./state/checking.js";

/** This worker's signature check, exported so that tests can run the shared vectors on the script that relays serve. */
export { verify } from "../client/protocol/ed25519.js";

const MOST_AUTHORS = 2000;
const chains = new Map<string, Chain>();

/** Check the packet in the order of relay.md §11, and report how far it got. */
async function examine(given: Given): Promise<Omit<Answer, "number">> {
  const steps: Step[] = [];
  let packet: Packet;
  try {
    packet = asSigned(given);
  } catch (error) {
    if (!(error instanceof InvalidInput)) throw error;
    const failed = error.detail === "packet_id_mismatch" ? "id" : "form";
    if (failed === "id") steps.push({ name: "form", holds: true, words: "The text is well formed." });
    steps.push({ name: failed, holds: false, words: error.reason });
    return { verdict: error.detail ?? error.code, steps };
  }
  const { text, received_at } = given;
  const same = packet.canonical === text || parse(text, { maxDepth: DEEPEST }).text === text;
  const signed = same && packet.canonical !== text ? packet.canonical : undefined;
  const whose = signed === undefined ? "the canonical form" : "the form that its author signed";
  steps.push(
    { name: "form", holds: same, words: same ? "The bytes are in canonical form (RFC 8785)." : "The bytes are not in canonical form." },
    { name: "id", holds: true, words: `BLAKE3 of ${whose} without id and signature is the packet's id.` },
  );
  if (!same) return { verdict: "not_canonical", steps };
  const chain = chains.get(packet.authorId);
  // The key in the DID alone proves nothing: it may have been revoked since.
  if (!chain) return {};
  const { verdict, key } = await chain.judge(packet, received_at);
  const holds = key !== null; // a packet is valid exactly if a key has signed it
  steps.push(
    { name: "signature", holds, words: holds ? `Ed25519 by the key ${key}.` : "No key of the author that counted at that time has signed this packet." },
    { name: "key", holds, words: holds ? chain.words : verdict.replaceAll("_", " ") },
  );
  return { verdict, steps, signed };
}

async function answer(ask: Ask): Promise<Answer> {
  if (ask.kind === "keys") {
    if (chains.size >= MOST_AUTHORS) chains.clear();
    const chain = await chainOf(ask.did, ask.events, ask.rules);
    chains.set(ask.did, chain);
    return { number: ask.number, history: await chain.history(ask.at) };
  }
  return { number: ask.number, ...(await examine(ask.given)) };
}

addEventListener("message", ({ data }: MessageEvent<Ask>) => {
  answer(data).then(postMessage, (error: unknown) => {
    postMessage({ number: data.number, verdict: "not_checked", steps: [{ name: "form", holds: false, words: String(error) }] });
  });
});
