/** The values that a channel takes and returns: plain data. */

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

/** The options of a channel. Times are seconds. */
export interface ChannelOptions {
  /** The channel's name, the same for all participants. */
  readonly id: string;
  /** The content topic, the same for all participants and used by no other channel. */
  readonly topic: string;
  /** The identity that signs. The sender id is its DID, `#`, and the name of a device, which the store keeps. */
  readonly identity: Signer;
  /** Where the channel's state is stored; by default in memory, which does not survive a reload. */
  readonly store?: ChannelStore;
  /**
   * Called once with each message, including own ones, and never before those that it follows; not called for restored
   * messages. What the handler throws is logged.
   */
  readonly onMessage?: (message: ChannelMessage) => void;
  /** Called when `messages`, a state or `status` may have changed, but not while the channel is opening. */
  readonly onChange?: () => void;
  /** How long until an unacknowledged own message is sent again; the wait doubles each time, up to 16 times this. */
  readonly resendAfter?: number;
  /** The longest wait before received messages are acknowledged. */
  readonly acknowledgeWithin?: number;
  /** About how often a participant of an idle channel sends a sync. */
  readonly syncEvery?: number;
  /** How long a missing message is searched for; only time with a connection counts. */
  readonly giveUpAfter?: number;
  /** The most messages kept; of the oldest only the ids are kept. Messages that no relay has yet do not count. */
  readonly maxMessages?: number;
}

/** A message of the channel. */
export interface ChannelMessage {
  /** The message's id, the same for all participants. */
  readonly id: string;
  /** The bytes that were sent. */
  readonly payload: Uint8Array;
  /** The DID that signed it; undefined if another participant repeated it without proof. */
  readonly author: string | undefined;
  /** The sender id, which only the signature (`author`) proves. */
  readonly sender: string;
  readonly isOwn: boolean;
  /** When it was sent, in Unix seconds by the author's clock; undefined if `author` is, or if far ahead of ours. */
  readonly sentAt: number | undefined;
  readonly lamport: bigint;
  /** The ids of messages that the sender had before. */
  readonly follows: readonly string[];
  readonly state: MessageState;
}

/** Counts that describe the state of a channel. */
export interface ChannelStatus {
  /** Messages that are known to exist but are not here. */
  readonly missing: number;
  /** Messages that are here and wait for missing ones. */
  readonly heldBack: number;
  /** Own messages that no relay has yet, and own messages that no other participant has acknowledged. */
  readonly sending: number;
  readonly unacknowledged: number;
  /** Messages given up, received again, refused (malformed, forged, or too many held back), and own ones sent again. */
  readonly lost: number;
  readonly repeated: number;
  readonly refused: number;
  readonly resent: number;
  /** Messages found by reading the relay's history. */
  readonly repaired: number;
  /**
   * Messages that came so late that they may have been handed over before, and were dropped: older than a message whose
   * id is no longer kept. The store keeps 20 000 ids in addition to `maxMessages`.
   */
  readonly refusedOld: number;
}

/** The largest payload: a packet must hold it in base64, together with a filter of 18 KB and a history. */
export const MAX_PAYLOAD_BYTES = 65_536;
