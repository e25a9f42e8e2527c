/**
 * Reliable channels over a relay: every message arrives once, in causal order, and is acknowledged.
 *
 * Channels need `@waku/sds` in addition to this package (`npm install @waku/sds@0.0.8`).
 *
 * @packageDocumentation
 */

export { ReliableChannel } from "./channel.js";
export type { Horizon } from "./forgotten.js";
export { openChannel } from "./opening.js";
export {
  type ChannelStore,
  indexedDbChannelStore,
  type Kept,
  memoryChannelStore,
  type MessageState,
  type StoredMessage,
} from "./store.js";
export {
  type ChannelMessage,
  type ChannelOptions,
  type ChannelRelay,
  type ChannelStatus,
  MAX_PAYLOAD_BYTES,
  type Reading,
} from "./values.js";
