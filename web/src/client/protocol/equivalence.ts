/**
 * Packets that repeat another one: attestations, metrics, documents (RFC-0002 §8, decision A-037).
 *
 * An attestation repeats another if author, `attestation_id` and target agree; a consensus metric if author, target and
 * `observed_at` do; a DID document if it is the same document, whoever published it.
 */

// Core: no I/O, no clock, no randomness (held by tests/layout.test.ts).

import * as canonical from "./canonical.js";
import { isObject, type Json, member } from "./json.js";
import type { Packet } from "./packets.js";

/** Whether one packet states what the other does; never for types that have no such rule. */
export function repeats(one: Packet, other: Packet): boolean {
  const statement = stated(one);
  return statement !== undefined && statement === stated(other);
}

/** What two packets have in common if one repeats the other; undefined if no such rule applies. */
export function stated({ authorId, contentType, value }: Packet): string | undefined {
  const content = member(value, "content");
  if (!isObject(content)) return undefined;
  if (contentType === "DID_DOCUMENT") return text([contentType, member(content, "document") ?? null]);
  const attestation = member(content, "attestation");
  let parts: readonly (Json | undefined)[];
  if (contentType === "ATTESTATION" && isObject(attestation)) {
    parts = [member(attestation, "attestation_id"), member(content, "target_packet")];
  } else if (contentType === "CONSENSUS_METRIC") {
    parts = [member(content, "target_packet"), member(content, "observed_at")];
  } else return undefined;
  if (!parts.every((part) => ["string", "number", "boolean"].includes(typeof part))) return undefined;
  return text([contentType, authorId, ...(parts as readonly Json[])]);
}

function text(members: readonly Json[]): string {
  return canonical.encode(members, { maxDepth: canonical.DEEPEST });
}
