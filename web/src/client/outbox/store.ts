/** The interface between an outbox and the store of its packets. */

import type { Published } from "../relays/values.js";

/** Why a relay refused a packet. */
export interface Refusal {
  readonly code: string;
  readonly reason: string;
}

/** One packet in a store. */
export interface StoredEntry {
  readonly packetId: string;
  readonly canonical: string;
  /** Set once a relay has refused the packet permanently; the packet is kept for the program to inspect. */
  readonly refusal?: Refusal | undefined;
}

/** Where an outbox keeps its packets. */
export interface OutboxStore {
  /** Append a packet; resolves when it is durable. A packet that is stored already changes nothing. */
  add(entry: StoredEntry): Promise<void>;
  /** How many packets there are. */
  count(): Promise<number>;
  /** All packets, in the order they were added. */
  list(): Promise<readonly StoredEntry[]>;
  /** Note the refusal of a packet. */
  refuse(packetId: string, refusal: Refusal): Promise<void>;
  /** Forget a packet; `published` is the relay's confirmation, for other users of the store that wait for it. */
  remove(packetId: string, published?: Published): Promise<void>;
  /** Run `drain` while no other user of the store does; waits for its turn until `signal` aborts. */
  exclusively(drain: () => Promise<void>, signal: AbortSignal): Promise<void>;
  /** Call `heard` with what other users of the store do, as far as it is known; returns a function that stops this. */
  watch(heard: (news: OutboxNews) => void): () => void;
}

/** What another user of a store has done. */
export type OutboxNews =
  | { readonly kind: "added" }
  | { readonly kind: "sent"; readonly published: Published }
  | { readonly kind: "refused"; readonly packetId: string; readonly refusal: Refusal }
  | { readonly kind: "removed"; readonly packetId: string };
