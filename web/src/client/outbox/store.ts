/** What an outbox asks of the place where it keeps its packets. */

import type { Published } from "../relays/values.js";

/** Why a relay does not take a packet. */
export interface Refusal {
  readonly code: string;
  readonly reason: string;
}

/** One packet in a store. */
export interface StoredEntry {
  readonly packetId: string;
  readonly canonical: string;
  /** Set once a relay has refused the packet for good: it is kept for the program to look at. */
  readonly refusal?: Refusal | undefined;
}

/** Where an outbox keeps its packets. */
export interface OutboxStore {
  /** Keep a packet behind all others; resolves when it is durable. One that is there already changes nothing. */
  add(entry: StoredEntry): Promise<void>;
  /** How many packets there are. */
  count(): Promise<number>;
  /** All packets, in the order they were added. */
  list(): Promise<readonly StoredEntry[]>;
  /** Note the refusal of a packet. */
  refuse(packetId: string, refusal: Refusal): Promise<void>;
  /** Forget a packet; `published` is the relay's word on it, for others who wait for that. */
  remove(packetId: string, published?: Published): Promise<void>;
  /** Run `drain` while no other user of the store does so; until `signal` aborts. */
  exclusively(drain: () => Promise<void>, signal: AbortSignal): Promise<void>;
  /** Have `heard` called with what other users of the store do, as far as that can be told; returns how to stop that. */
  watch(heard: (news: OutboxNews) => void): () => void;
}

/** What another user of a store has done. */
export type OutboxNews =
  | { readonly kind: "added" }
  | { readonly kind: "sent"; readonly published: Published }
  | { readonly kind: "refused"; readonly packetId: string; readonly refusal: Refusal }
  | { readonly kind: "removed"; readonly packetId: string };
