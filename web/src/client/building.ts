/** What needs a clock: packets as of now, and verdicts in one word. */

import type { KeyChain } from "./protocol/keys/chain.js";
import { type ErrorCode, InvalidPacket } from "./protocol/errors.js";
import type { Signer } from "./protocol/ids.js";
import { buildAt, type BuildOptions, type Packet } from "./protocol/packets.js";

/**
 * Make and sign a packet, as of now unless told otherwise.
 *
 * Rejects with `InvalidPacket` for what a relay would refuse, `TypeError` for options that contradict each other, and
 * what the signer rejects with. Keep the packet, and send the same one again: another signature of the same content
 * may be another packet.
 */
export function build(
  identity: Signer,
  content: Readonly<Record<string, unknown>>,
  options: Partial<BuildOptions> = {},
): Promise<Packet> {
  return buildAt(identity, content, { ...options, timestamp: options.timestamp ?? Math.floor(Date.now() / 1000) });
}

/** By which keys, and as of when, a packet is judged. */
export interface VerifyOptions {
  /** What is known of its author's keys; without it the key in the author's DID counts alone. */
  readonly keys?: KeyChain | undefined;
  /** When a relay received the packet, in Unix seconds; without it the packet's own timestamp counts. */
  readonly receivedAt?: number | undefined;
}

/**
 * Check that the packet's author signed it, with a key that could sign when a relay received it, and that it had not
 * expired then.
 *
 * Rejects with `InvalidPacket`, whose `code` and `detail` say why.
 */
export async function verify(packet: Packet, options: VerifyOptions = {}): Promise<void> {
  const at = options.receivedAt ?? packet.timestamp;
  if (options.keys === undefined) {
    await packet.verify(at);
    return;
  }
  await options.keys.verify(packet, at, { ingest: false });
  if (packet.expiresAt !== undefined && at > packet.expiresAt) {
    throw new InvalidPacket("packet_expired", "the packet had expired when it was received");
  }
}

/** The same in one word: `"valid"`, or the code of the refusal. */
export async function verdict(packet: Packet, options: VerifyOptions = {}): Promise<"valid" | ErrorCode> {
  try {
    await verify(packet, options);
  } catch (error) {
    if (error instanceof InvalidPacket) return error.code;
    throw error;
  }
  return "valid";
}
