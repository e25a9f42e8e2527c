/** The search for messages that are known to exist: which are missing, where to look next, and when to give up. */

// Core: no I/O, no clock, no randomness (held by tests/layout.test.ts).

import type { HistoryEntry } from "@waku/sds";

import { hex } from "../protocol/bytes.js";
import type { Announced, FetchOptions } from "../relays/values.js";

const MAX_MISSING = 10_000;
const MAX_IDS_AT_ONCE = 100;
const MAX_PLACES = 32;

/** Plans the search for one channel's missing messages at a relay. Times are milliseconds unless stated otherwise. */
export class Search {
  /** The number of messages that were given up. */
  lost = 0;
  private readonly missing = new Map<string, { readonly hint: Uint8Array | undefined; waited: number }>();
  private looks = 0;
  private lookAt = Infinity;
  private isLooking = false;

  constructor(
    private readonly topic: string,
    private readonly giveUpAfter: number,
    private readonly pause: number,
  ) {}

  /** How many messages are missing. */
  get size(): number {
    return this.missing.size;
  }

  /** Whether this message is missing. */
  wants(id: string): boolean {
    return this.missing.has(id);
  }

  /** Set the messages that are missing now. */
  note(entries: readonly HistoryEntry[], now: number): void {
    const hints = new Map(entries.map((each) => [each.messageId, each.retrievalHint]));
    for (const id of this.missing.keys()) if (!hints.has(id)) this.missing.delete(id);
    for (const [id, hint] of hints) {
      if (this.missing.has(id) || this.missing.size >= MAX_MISSING) continue;
      this.missing.set(id, { hint, waited: 0 });
      this.looks = 0; // a new message is missing: begin with the nearest place again
      this.lookAt = Math.min(this.lookAt, now);
    }
  }

  /**
   * What to read now; undefined if there is nothing, or while a reading is under way. The first reading is by packet
   * id, if the relay supports that. Each further one begins twice as far back; the last ones read the whole topic.
   */
  begin(now: number, places: readonly string[], announced: Announced | undefined): FetchOptions | undefined {
    if (this.missing.size === 0 || this.isLooking || now < this.lookAt || announced === undefined) return undefined;
    this.isLooking = true;
    const types = this.topic;
    const packetIds: string[] = [];
    for (const { hint } of this.missing.values()) if (hint?.length === 32) packetIds.push(`0x${hex(hint)}`);
    if (this.looks++ === 0 && packetIds.length > 0 && announced.extensions.has("packet_ids")) {
      return { types, packetIds: packetIds.slice(0, MAX_IDS_AT_ONCE) };
    }
    const cursor = places.at(-(2 ** this.looks));
    return cursor === undefined ? { types } : { types, cursor };
  }

  /** Note that a reading has ended. Each next one waits longer, and at least `wait`. */
  ended(now: number, wait: number): void {
    this.isLooking = false;
    this.lookAt = now + Math.max(wait, this.pause * 2 ** Math.min(this.looks, 6));
  }

  /** Add these seconds to the wait for every missing message; returns those that are now given up. */
  givenUp(seconds: number): string[] {
    const gone: string[] = [];
    for (const [id, each] of this.missing) {
      each.waited += seconds;
      if (each.waited >= this.giveUpAfter) gone.push(id);
    }
    for (const id of gone) this.missing.delete(id);
    this.lost += gone.length;
    return gone;
  }
}

/** The places with one more at the end: a bounded number, dense at the end and sparse before. */
export function withPlace(places: readonly string[], cursor: string): string[] {
  const kept = places.length < MAX_PLACES ? places : places.filter((_, at) => at % 2 === 1);
  return [...kept, cursor];
}
