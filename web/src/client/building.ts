/** Building packets with the current time, and verifying packets. */

import type { KeyChain } from "./protocol/keys/chain.js";
import { type ErrorCode, InvalidPacket } from "./protocol/errors.js";
import type { Signer } from "./protocol/ids.js";
import { buildAt, type BuildOptions, type Packet } from "./protocol/packets.js";

/**
 * Make and sign a packet, by default with the current time.
 *
 * Rejects with `InvalidPacket` for a packet that a relay would refuse, `TypeError` for options that cannot work, and
 * what the signer rejects with. To retry, send the same packet again: the same content signed again may be another
 * packet.
 */
export function build(
  identity: Signer,
  content: Readonly<Record<string, unknown>>,
  options: Partial<BuildOptions> = {},
): Promise<Packet> {
  return buildAt(identity, content, { ...options, timestamp: options.timestamp ?? Math.floor(Date.now() / 1000) });
}

/** The keys and the time by which a packet is judged. */
export interface VerifyOptions {
  /** The author's keys; without it, only the key in the author's DID counts. */
  readonly keys?: KeyChain | undefined;
  /** When a relay received the packet, in Unix seconds; without it, the packet's own timestamp counts. */
  readonly receivedAt?: number | undefined;
}

/**
 * Check that the packet's author signed it with a key that could sign when a relay received the packet, and that the
 * packet had not expired then.
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

/** Verify a packet and return the verdict in one word: `"valid"`, or the code of the refusal. */
export async function verdict(packet: Packet, options: VerifyOptions = {}): Promise<"valid" | ErrorCode> {
  try {
    await verify(packet, options);
  } catch (error) {
    if (error instanceof InvalidPacket) return error.code;
    throw error;
  }
  return "valid";
}
