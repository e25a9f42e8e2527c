/** The checks on every received packet, before a program sees it. */

// Core: no I/O, no clock, no randomness (held by tests/layout.test.ts).

import { InvalidPacket } from "../protocol/errors.js";
import { idHolds, type Packet } from "../protocol/packets.js";
import { type OriginType, restore } from "../protocol/provenance.js";
import type { KeyRing } from "./keyring.js";
import type { Options } from "./options.js";
import type { QueuedEvent } from "./stream.js";
import type { Delivery, Query, Statistics } from "./values.js";

/** A wanted and new packet whose form and id are valid; its signature has not been checked yet. */
export interface Candidate {
  readonly event: QueuedEvent;
  readonly packet: Packet;
  readonly originType: OriginType | undefined;
}

/** The relay must be asked for the author's keys before the packet can be judged. */
export const KEYS_WANTED = "keys_wanted";

/**
 * Checks the events of one subscription; a packet that fails is dropped and counted, never delivered.
 *
 * With a `KeyRing` an author's key events are applied first; without one, only the key in the author's DID counts. The
 * inspector remembers the ids of the last `dedupPackets` packets it passed. When the stream has gone back, it keeps those
 * that it remembers then: what comes again comes in the old order, and would push out each of them before its turn.
 */
export class Inspector {
  private readonly seen = new Set<string>();
  private turn = 0;
  private beforeTurn: ReadonlySet<string> = new Set();

  constructor(
    private readonly query: Query,
    private readonly options: Options,
    private readonly statistics: Statistics,
    private readonly keys: KeyRing | undefined,
  ) {}

  /** The event's packet, if it is intact, new and wanted: every check except the signature. */
  read(event: QueuedEvent): Candidate | undefined {
    let candidate: Candidate;
    try {
      candidate = { event, ...restore(event.packet, event.annotations) }; // recomputes the id
    } catch (error) {
      if (!(error instanceof InvalidPacket)) throw error;
      this.count(error);
      // Malformed by our rules: the author's doing if the id matches, the relay's if not.
      if (error.code === "invalid_schema" && !idHolds(event.packet)) this.statistics.eventsForged++;
      return undefined;
    }
    const { packetId } = candidate.packet;
    if (event.turn !== this.turn) {
      this.turn = event.turn;
      this.beforeTurn = new Set(this.seen);
    }
    // Before the signature check, which costs more than all the rest. The id is recomputed and the remembered packet
    // was verified, so a forged signature cannot hide a packet from us.
    if (this.seen.has(packetId) || this.beforeTurn.has(packetId)) {
      this.remember(packetId);
      this.statistics.eventsRepeated++;
      return undefined;
    }
    if (!this.query.matches(candidate.packet, event.receivedAt, event.byReceipt)) {
      this.statistics.eventsUnasked++;
      return undefined;
    }
    return candidate;
  }

  /** The packet as a delivery, undefined if it must not be delivered, or `KEYS_WANTED`. */
  async judge(candidate: Candidate): Promise<Delivery | typeof KEYS_WANTED | undefined> {
    const { packet, event, originType } = candidate;
    try {
      if (this.keys === undefined) await packet.verify(event.receivedAt);
      else if (!(await this.keys.verify(packet, event.receivedAt, event.arrivedAt))) return KEYS_WANTED;
    } catch (error) {
      if (!(error instanceof InvalidPacket)) throw error;
      this.count(error);
      return undefined;
    }
    this.remember(packet.packetId);
    this.statistics.eventsDelivered++;
    const { receivedAt, cursor, live } = event;
    return { packet, receivedAt, cursor, live, originType };
  }

  private remember(packetId: string): void {
    this.seen.delete(packetId);
    this.seen.add(packetId);
    if (this.seen.size > this.options.dedupPackets) this.seen.delete(this.seen.values().next().value as string);
  }

  private count(error: InvalidPacket): void {
    const tampered = error.detail === undefined || error.detail === "packet_id_mismatch";
    if (error.code === "packet_expired") this.statistics.eventsExpired++;
    else if (error.code === "invalid_signature" && tampered) {
      this.statistics.eventsTampered++;
      // Without a detail the signature fits no key that is known here, but the relay may have had one.
      if (error.detail === "packet_id_mismatch") this.statistics.eventsForged++;
    } else this.statistics.eventsInvalid++;
  }
}

/** The author that an event claims, unchecked; undefined if the event cannot be read. */
export function authorOf(event: QueuedEvent): string | undefined {
  try {
    const author = (JSON.parse(event.packet) as { author_id?: unknown } | null)?.author_id;
    return typeof author === "string" ? author : undefined;
  } catch {
    return undefined;
  }
}
