/**
 * Packets whose origin a relay found unproven, and how a reader restores what the author signed.
 *
 * A relay may serve a packet with another `origin_type`, which makes its id and signature fail. The annotation in the
 * same message carries the signed header, from which a reader rebuilds the packet. The annotation is not trusted: the
 * rebuilt packet must have the id under which it was sent, or it is refused.
 */

// Core: no I/O, no clock, no randomness (held by tests/layout.test.ts).

import * as canonical from "./canonical.js";
import { InvalidPacket } from "./errors.js";
import { isObject, type Json, type JsonObject, member } from "./json.js";
import { Packet } from "./packets.js";

/** The origins that a provenance header may claim, the weakest claim first. */
export const ORIGIN_TYPES = ["UNKNOWN", "SOFTWARE", "AI_MODEL", "HARDWARE_SECURE_ENCLAVE"] as const;

/** An origin that media may be credited with. */
export type OriginType = (typeof ORIGIN_TYPES)[number];

/** A packet as its author signed it, and the origin it may be credited with. */
export interface Restored {
  readonly packet: Packet;
  /** The lowest of the signed claim, the served header and the annotation; undefined without a header. */
  readonly originType: OriginType | undefined;
}

/**
 * Restore the packet as its author signed it.
 *
 * `raw` and `annotations` are those of one EVENT. Throws `InvalidPacket` as `Packet.parse` does. The detail
 * `packet_id_mismatch` means that rebuilding did not help, so the packet was tampered with. The signature is not
 * checked here.
 */
export function restore(
  raw: string | Uint8Array,
  annotations?: JsonObject,
  options: { maxBytes?: number } = {},
): Restored {
  const found = annotations === undefined ? undefined : member(annotations, "provenance");
  const finding: JsonObject = isObject(found) ? found : {};
  try {
    const packet = Packet.read(raw, options);
    return { packet, originType: effective(packet, finding) };
  } catch (error) {
    if (!(error instanceof InvalidPacket) || error.detail !== "packet_id_mismatch") throw error;
    return rebuild(raw, finding, error, options);
  }
}

function rebuild(
  raw: string | Uint8Array,
  finding: JsonObject,
  mismatch: InvalidPacket,
  options: { maxBytes?: number },
): Restored {
  const value = canonical.parse(raw, { maxDepth: canonical.DEEPEST }).value as JsonObject;
  const served = headerOf(value);
  if (served === undefined) throw mismatch; // a relay that downgrades a packet leaves the header in place
  const original = member(finding, "original_provenance_header");
  const claimed = member(served, "origin_type");
  const depth = { maxDepth: canonical.DEEPEST - 1 };
  const headers = isObject(original)
    ? [() => canonical.encode(original, depth)]
    : ORIGIN_TYPES.filter((origin) => origin !== claimed).map(
        (origin) => () => canonical.encodeWith(served, [], { origin_type: origin }, depth),
      );
  for (const header of headers) {
    try {
      const provenance_header = canonical.parse(header(), depth).value;
      const text = canonical.encodeWith(value, [], { provenance_header }, { maxDepth: canonical.DEEPEST });
      const packet = Packet.read(text, options);
      return { packet, originType: lower(readOrigin(claimed), effective(packet, finding) ?? "UNKNOWN") };
    } catch (error) {
      if (!(error instanceof InvalidPacket)) throw error;
    }
  }
  throw mismatch;
}

function headerOf(value: JsonObject): JsonObject | undefined {
  const header = member(value, "provenance_header");
  return isObject(header) ? header : undefined;
}

function effective(packet: Packet, finding: JsonObject): OriginType | undefined {
  const header = headerOf(packet.value);
  if (header === undefined) return undefined;
  const claimed = readOrigin(member(header, "origin_type"));
  const found = member(finding, "effective_origin_type");
  return found === undefined ? claimed : lower(claimed, readOrigin(found));
}

function readOrigin(value: Json | undefined): OriginType {
  return ORIGIN_TYPES.find((origin) => origin === value) ?? "UNKNOWN";
}

function lower(one: OriginType, other: OriginType): OriginType {
  return ORIGIN_TYPES.indexOf(one) <= ORIGIN_TYPES.indexOf(other) ? one : other;
}
