// Which keys count, and when: the author's key chain, judged as a relay judges it.

import { InvalidInput } from "../client/protocol/errors.js";
import { fromHex } from "../client/protocol/bytes.js";
import type { JsonObject } from "../client/protocol/json.js";
import { KeyChain } from "../client/protocol/keys/chain.js";
import { standing } from "../client/protocol/keys/states.js";
import type { Packet } from "../client/protocol/packets.js";
import { restore } from "../client/protocol/provenance.js";
import type { Given, KeyHistory, Known, Rules } from "./state/checking.js";

/** The packet as its author signed it. Throws `InvalidInput` if it cannot be restored from what the relay served. */
export function asSigned({ text, relay_annotations }: Given): Packet {
  return restore(text, relay_annotations as JsonObject | undefined).packet;
}

export interface Chain {
  /** A sentence that says why the key counts. */
  readonly words: string;
  judge(packet: Packet, receivedAt: number): Promise<{ verdict: string; key: string | null }>;
  history(at: number): Promise<KeyHistory>;
}

/** The chain of these identity packets, as the relay served them. */
export async function chainOf(did: string, events: Known, rules?: Rules): Promise<Chain> {
  if (events === null) return OVERGROWN;
  const received = events.flatMap((given) => {
    const packet = read(given);
    return packet === null || packet.authorId !== did ? [] : [{ packet, receivedAt: given.received_at }];
  });
  const chain = await KeyChain.replay(did, received, rules === undefined ? {} : { rules });
  const refused = events.length - chain.events.length;
  return {
    words:
      chain.events.length === 0
        ? "The DID itself is this key, and the relay knows of no change to it."
        : "By the author's key events, this key could sign when the relay received the packet.",
    judge: (packet, receivedAt) => judge(chain, packet, receivedAt),
    history: (at) => historyOf(chain, at, refused),
  };
}

const OVERGROWN: Chain = {
  words: "",
  judge: () => Promise.resolve({ verdict: "too_many_key_events", key: null }),
  history: () =>
    Promise.resolve({
      conflict: "The author has published more about keys than anybody judges by.",
      document: null,
      keys: [],
      events: [],
      refused: 0,
    }),
};

function read(given: Given): Packet | null {
  try {
    return asSigned(given);
  } catch (error) {
    if (error instanceof InvalidInput) return null;
    throw error;
  }
}

async function judge(chain: KeyChain, packet: Packet, receivedAt: number): Promise<{ verdict: string; key: string | null }> {
  try {
    await chain.verify(packet, receivedAt, { ingest: false });
  } catch (error) {
    if (!(error instanceof InvalidInput)) throw error;
    return { verdict: error.detail ?? error.code, key: null };
  }
  for (const state of await chain.keys(receivedAt)) {
    if (await packet.isSignedBy(fromHex(state.publicKey) ?? new Uint8Array())) return { verdict: "valid", key: `0x${state.publicKey}` };
  }
  return { verdict: "valid", key: "of the author" };
}

const WORDS: Readonly<Record<string, string>> = {
  DID_DOCUMENT: "published a document",
  RECOVERY_APPROVAL: "approved a recovery",
  ADD: "added a key",
  ROTATE: "replaced a key",
  REVOKE: "revoked a key",
};

async function historyOf(chain: KeyChain, at: number, refused: number): Promise<KeyHistory> {
  const keys = await chain.keys(at);
  const events = [];
  for (const { packet, receivedAt } of chain.events) {
    const kind = String(packet.contentType === "KEY_EVENT" ? packet.content["event"] : packet.contentType);
    events.push({
      id: packet.packetId,
      type: packet.contentType,
      receivedAt,
      pending: await chain.isPending(packet.packetId, at),
      words: WORDS[kind] ?? kind,
    });
  }
  return {
    conflict: chain.conflict ?? null,
    document: chain.head?.hash ?? null,
    keys: keys.map((key) => ({
      keyId: key.keyId,
      publicKey: `0x${key.publicKey}`,
      // In a conflict of documents no key resolves, regardless of its window.
      standing: chain.conflict === undefined ? standing(key, at, chain.rules.clockSkewSeconds) : "in_conflict",
      validFrom: key.validFrom,
      validUntil: key.validUntil ?? 0,
      revokedAt: key.revokedAt ?? null,
      recovery: key.recovery,
    })),
    events,
    refused,
  };
}
