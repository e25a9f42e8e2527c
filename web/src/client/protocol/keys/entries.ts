/** Packets to be added to a chain: read once, tried once with each key, and sorted by time. */

// Core: no I/O, no clock, no randomness (held by tests/layout.test.ts).

import { fromHex } from "../bytes.js";
import type { KeyHex } from "../documents.js";
import { InvalidPacket } from "../errors.js";
import type { Packet } from "../packets.js";
import { readStatement, type Statement } from "./statements.js";

/** An identity packet and the second in which a relay received it. */
export interface ReceivedPacket {
  readonly packet: Packet;
  /** Unix seconds. */
  readonly receivedAt: number;
}

/** A packet, its statement, its time of receipt, and the keys with which its signature was tried. */
export class Entry {
  readonly statement: Statement;
  private readonly tried = new Map<KeyHex, Promise<boolean>>();

  /** Throws `InvalidPacket` as `readStatement` does. */
  constructor(
    readonly packet: Packet,
    readonly receivedAt: number,
  ) {
    this.statement = readStatement(packet);
  }

  get packetId(): string {
    return this.packet.packetId;
  }

  /** Whether the signature verifies under this key; computed once for each key. */
  readonly isSignedBy = (publicKey: KeyHex): Promise<boolean> => {
    let verdict = this.tried.get(publicKey);
    if (verdict === undefined) {
      verdict = this.packet.isSignedBy(fromHex(publicKey) as Uint8Array);
      this.tried.set(publicKey, verdict);
    }
    return verdict;
  };
}

/**
 * The well-formed packets by this author, each once, with the earliest time at which it was received.
 *
 * A packet's id does not cover its signature, so a copy with another signature counts as a different packet here:
 * otherwise a forged copy could keep the genuine packet out.
 */
export function readEntries(did: string, events: Iterable<ReceivedPacket>): Entry[] {
  const entries = new Map<string, Entry>();
  for (const { packet, receivedAt } of events) {
    const known = entries.get(packet.canonical);
    if (packet.authorId !== did || (known !== undefined && known.receivedAt <= receivedAt)) continue;
    try {
      entries.set(packet.canonical, new Entry(packet, receivedAt));
    } catch (error) {
      if (!(error instanceof InvalidPacket)) throw error;
    }
  }
  return [...entries.values()];
}

/** The packets grouped by the second in which they were received, the earliest second first. */
export function inSeconds(entries: Iterable<Entry>): Entry[][] {
  const seconds = new Map<number, Entry[]>();
  for (const entry of [...entries].sort((one, other) => one.receivedAt - other.receivedAt)) {
    const second = seconds.get(entry.receivedAt);
    if (second === undefined) seconds.set(entry.receivedAt, [entry]);
    else second.push(entry);
  }
  return [...seconds.values()];
}
