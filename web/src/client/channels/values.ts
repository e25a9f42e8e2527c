/** What a channel takes and gives: plain values. */

import type { Signer } from "../protocol/ids.js";
import type { Relay } from "../relays/relay.js";
import type { Delivery, FetchOptions } from "../relays/values.js";
import type { ChannelStore, MessageState } from "./store.js";

/** The part of a relay that a channel uses. */
export interface ChannelRelay extends Pick<Relay, "publish" | "announced" | "keyChain"> {
  subscribe(options: FetchOptions): Reading;
  fetch(options: FetchOptions): Reading;
}

/** Packets one by one, until `close`. */
export interface Reading extends AsyncIterable<Delivery> {
  close(): void;
}

/** What a channel is told at its opening. Times are seconds. */
export interface ChannelOptions {
  /** The channel's name, the same for all participants. */
  readonly id: string;
  /** The content topic, the same for all participants, and of no other channel. */
  readonly topic: string;
  /** Who signs. The participant's own name is this DID and a device, which the store keeps. */
  readonly identity: Signer;
  /** What survives a reload; memory unless given. */
  readonly store?: ChannelStore;
  /**
   * Called with each message, own ones too, once and never before those that it follows. Not for restored ones. What a
   * handler throws is logged.
   */
  readonly onMessage?: (message: ChannelMessage) => void;
  /** Called when `messages`, a state or `status` may have changed, and not while the channel opens. */
  readonly onChange?: () => void;
  /** After how long an own message that nobody has acknowledged is sent again; doubled each time, up to 16 times that. */
  readonly resendAfter?: number;
  /** The longest wait before what was received is acknowledged. */
  readonly acknowledgeWithin?: number;
  /** About how often somebody in an idle room says what there is. */
  readonly syncEvery?: number;
  /** How long a missing message is looked for, while there is a connection. */
  readonly giveUpAfter?: number;
  /** Most messages kept; the oldest are forgotten, but for their ids. Those that no relay has yet are kept besides. */
  readonly maxMessages?: number;
}

/** A message of the channel. */
export interface ChannelMessage {
  /** The id that all participants have for it. */
  readonly id: string;
  /** What was said. */
  readonly payload: Uint8Array;
  /** The DID that signed it; undefined where somebody repeated it without proof. */
  readonly author: string | undefined;
  /** The participant's name, which only the signature proves. */
  readonly sender: string;
  readonly isOwn: boolean;
  /** By the author's clock, in Unix seconds; undefined as `author` is, and where that is far ahead of ours. */
  readonly sentAt: number | undefined;
  readonly lamport: bigint;
  /** The ids of messages that its sender had handed on before. */
  readonly follows: readonly string[];
  readonly state: MessageState;
}

/** How the channel stands. */
export interface ChannelStatus {
  /** Messages that are known to exist and are not here. */
  readonly missing: number;
  /** Messages that are here and wait for those. */
  readonly heldBack: number;
  /** Own messages that no relay has yet, and those that nobody has acknowledged. */
  readonly sending: number;
  readonly unacknowledged: number;
  /** Messages that were given up, received again after that, refused as malformed, and own ones sent again. */
  readonly lost: number;
  readonly repeated: number;
  readonly refused: number;
  readonly resent: number;
  /** Messages found by reading the relay's history. */
  readonly repaired: number;
}

/** The largest payload: a packet has to hold it in base64, with a filter of 18 KB and a history beside it. */
export const MAX_PAYLOAD_BYTES = 65_536;
