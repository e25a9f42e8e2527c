/**
 * A client for Strata relays, in browsers and in Node.
 *
 * `connect` opens a `Relay`, which posts, subscribes and authenticates. `Packet`, `build` and `verify` work without a
 * relay. `strata-client/node` has the parts that only work in Node.
 *
 * @packageDocumentation
 */

export { browserIdentity } from "./browser-identity.js";
export { build, verdict, verify, type VerifyOptions } from "./building.js";
export { canonicalize, encode, parse as parseJson, type Parsed } from "./protocol/canonical.js";
export { DidDocument, type KeyHex, type RecoveryPolicy, type VerificationMethod } from "./protocol/documents.js";
export {
  Closed,
  ConnectionFailed,
  ERROR_CODES,
  type ErrorCode,
  IdentityError,
  InvalidInput,
  InvalidMessage,
  InvalidPacket,
  MissingCapability,
  OutboxError,
  RequestRefused,
  RequestTimeout,
  type Retry,
  retryAdvice,
  StrataError,
} from "./protocol/errors.js";
export { didFromPublicKey, Identity, isDid, publicKeyFromDid, type Signer } from "./protocol/ids.js";
export { isObject, type Json, type JsonObject, member } from "./protocol/json.js";
export { type ChainOptions, KeyChain } from "./protocol/keys/chain.js";
export type { ReceivedPacket } from "./protocol/keys/entries.js";
export {
  addContent,
  IDENTITY_TYPES,
  type KeyEvent,
  type NewKey,
  type PublishedDocument,
  readStatement,
  type RecoveryApproval,
  revokeContent,
  rotateContent,
  type Statement,
} from "./protocol/keys/statements.js";
export { type KeyRules, type KeyStanding, type KeyState, standing, type Use } from "./protocol/keys/states.js";
export {
  type BuildOptions,
  byteHash,
  checkFreshness,
  DEFAULT_MAX_PACKET_AGE_SECONDS,
  DEFAULT_MAX_PACKET_BYTES,
  MAX_FUTURE_SECONDS,
  Packet,
  type ParseOptions,
} from "./protocol/packets.js";
export { ORIGIN_TYPES, type OriginType, restore, type Restored } from "./protocol/provenance.js";
export type { Moderated } from "./protocol/wire.js";
export { indexedDbOutbox } from "./outbox/indexeddb.js";
export { memoryOutbox } from "./outbox/memory.js";
export { MAX_OUTBOX_PACKETS, Outbox, type OutboxEntry, type Queued, type Send } from "./outbox/outbox.js";
export type { OutboxNews, OutboxStore, Refusal, StoredEntry } from "./outbox/store.js";
export type { WebSocketConstructor, WebSocketLike } from "./relays/driver.js";
export type { Anchors } from "./relays/keyring.js";
export { DEFAULT_OPTIONS, type Options } from "./relays/options.js";
export { addressOf, localStoragePins, memoryPins, type Pins } from "./relays/pins.js";
export { connect, type ConnectOptions, Relay } from "./relays/relay.js";
export { Subscription } from "./relays/subscription.js";
export type {
  Announced,
  Authenticated,
  Delivery,
  FetchOptions,
  LogReset,
  PacketSelection,
  Published,
  PublishOptions,
  Query,
  Statistics,
  SubscribeOptions,
} from "./relays/values.js";
