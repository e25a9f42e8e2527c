/**
 * Reliable channels over a relay: every message, once, after those that it follows, and acknowledged.
 *
 * It needs `@waku/sds` beside this package (`npm install @waku/sds@0.0.8`).
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
