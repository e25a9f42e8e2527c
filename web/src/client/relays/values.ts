/** The values that a relay connection takes and returns: plain data. */

// Core: no I/O, no clock, no randomness (held by tests/layout.test.ts).

import type { OriginType } from "../protocol/provenance.js";
import { DEFAULT_MAX_PACKET_AGE_SECONDS, MAX_FUTURE_SECONDS, type Packet } from "../protocol/packets.js";
import type { Filters } from "../protocol/wire.js";
import { checkSelection } from "./arguments.js";

/** How much older than its arrival a packet's timestamp may be, with the error of both clocks. */
export const RESUME_MARGIN_SECONDS = DEFAULT_MAX_PACKET_AGE_SECONDS + MAX_FUTURE_SECONDS;

/** The relay's confirmation that a packet is durably stored. */
export interface Published {
  readonly packetId: string;
  /** When the relay first saw the packet, in Unix seconds; undefined if it did not say. */
  readonly receivedAt: number | undefined;
  /** The relay already had the packet: a success like any other. */
  readonly duplicate: boolean;
  /** Stored, but without effect yet. */
  readonly queued: boolean;
  /** The origin the relay credits the packet with, if it found the claim unproven. */
  readonly downgradedTo: string | undefined;
  /** The packet that the relay has in this one's place, and has shown: this one only repeats it, and is not stored. */
  readonly duplicateOf?: string | undefined;
}

/** One verified packet, as a subscription delivers it. */
export interface Delivery {
  /** The packet as its author signed it. */
  readonly packet: Packet;
  /** When the relay first saw the packet, in Unix seconds: the time to judge age and keys by. */
  readonly receivedAt: number;
  /** The position after this packet, to resume from later; undefined if the relay gave none. */
  readonly cursor: string | undefined;
  /** Whether the packet arrived after the subscription had caught up; undefined if the relay does not say. */
  readonly live: boolean | undefined;
  /** The origin its media may be credited with; undefined if the packet claims none. */
  readonly originType: OriginType | undefined;
}

/**
 * Notice that the relay's log has lost its end: it was replaced by an older copy. The relay no longer has everything
 * that it acknowledged. Reading continues after the last good place.
 */
export interface LogReset {
  /** The cursor that is no longer valid: the position of this subscription. */
  readonly lost: string;
  /** The last good place, after which reading continues; undefined if the relay does not know it. */
  readonly cursor: string | undefined;
  /** If `cursor` is undefined, reading continues with packets of this time on, in Unix seconds. */
  readonly since: number | undefined;
}

/** What a relay says about itself on a connection. */
export interface Announced {
  readonly extensions: ReadonlySet<string>;
  readonly maxPacketBytes?: number | undefined;
  /** The DID in the relay's manifest. It proves nothing: AUTH is checked against the pin. */
  readonly relayId?: string | undefined;
}

/** The identity that the relay has confirmed for a session. */
export interface Authenticated {
  readonly authorId: string;
  /** All that the session may do; undefined if the relay does not enforce capabilities. */
  readonly capabilities: ReadonlySet<string> | undefined;
}

/**
 * Which packets to read. The values of one filter are alternatives, filters combine with AND, and an absent or empty
 * filter restricts nothing. Times are Unix seconds and inclusive.
 */
export interface PacketSelection {
  /** DIDs of authors, or one. */
  readonly authors?: readonly string[] | string;
  /** Content types such as `POST`, or one. */
  readonly types?: readonly string[] | string;
  /** Packet ids, or one. */
  readonly packetIds?: readonly string[] | string;
  /** The earliest timestamp of a packet. */
  readonly since?: number | undefined;
  /** The latest timestamp of a packet; only for queries that end. */
  readonly until?: number | undefined;
  /**
   * The earliest time at which the relay received a packet. For a packet from another relay, this is when it came to
   * this relay. Its `Delivery.receivedAt` is when the other relay had it, which may be earlier.
   */
  readonly receivedSince?: number | undefined;
  /** The latest time at which the relay received a packet. */
  readonly receivedUntil?: number | undefined;
  /** By time of receipt: `asc`, or `desc` for queries that end. */
  readonly order?: "asc" | "desc" | undefined;
  /** The most packets to deliver in all; only for queries that end. */
  readonly limit?: number | undefined;
}

/** Which packets to read, and from where. */
export interface FetchOptions extends PacketSelection {
  /** Start strictly after this position (`Delivery.cursor`), rather than at the oldest packet. */
  readonly cursor?: string | null | undefined;
  /** The `since` to use if the relay no longer knows `cursor`. */
  readonly cursorFallbackSince?: number | undefined;
  /** Called when the relay's log has lost its end; what it throws, iteration throws. By default a warning is logged. */
  readonly onLogReset?: (reset: LogReset) => void;
  /** Aborting ends the reading at once, as `Subscription.close` does; iteration then throws the signal's reason. */
  readonly signal?: AbortSignal | undefined;
}

/** Which packets to read, from where, and whether to continue with new ones. */
export interface SubscribeOptions extends FetchOptions {
  /** Whether to continue with new packets after the stored ones; true by default. */
  readonly live?: boolean;
}

/** Which packets a subscription reads, where it starts and where it ends. */
export class Query {
  readonly authors: readonly string[];
  readonly types: readonly string[];
  readonly packetIds: readonly string[];
  readonly since: number | undefined;
  readonly until: number | undefined;
  readonly receivedSince: number | undefined;
  readonly receivedUntil: number | undefined;
  readonly cursor: string | undefined;
  readonly cursorFallbackSince: number | undefined;
  readonly order: "asc" | "desc";
  readonly limit: number | undefined;
  readonly live: boolean;

  /** Throws `TypeError` for a query that no relay could serve. */
  constructor(options: SubscribeOptions = {}) {
    checkSelection(options);
    this.authors = asList(options.authors);
    this.types = asList(options.types);
    this.packetIds = asList(options.packetIds);
    this.since = options.since ?? undefined;
    this.until = options.until ?? undefined;
    this.receivedSince = options.receivedSince ?? undefined;
    this.receivedUntil = options.receivedUntil ?? undefined;
    this.cursor = options.cursor ?? undefined;
    this.cursorFallbackSince = options.cursorFallbackSince ?? undefined;
    this.order = options.order ?? "asc";
    this.limit = options.limit;
    this.live = options.live ?? true;
    if (this.live && (this.limit !== undefined || this.until !== undefined || this.order !== "asc")) {
      // A live packet missed while disconnected is read as history, which `until` bounds: packets would be lost.
      throw new TypeError("limit, until and descending order are for queries that end: pass live: false");
    }
  }

  /** The filters to send. Those of extensions go only to relays that announced them. */
  filters(
    announced: Announced,
    place: { cursor: string | undefined; since: number | undefined; limit: number | undefined },
  ): Filters {
    const byId = announced.extensions.has("packet_ids");
    const byReceipt = announced.extensions.has("received_range");
    const filters: Filters = {};
    if (this.authors.length > 0) filters.authors = this.authors;
    if (this.types.length > 0) filters.types = this.types;
    let since = place.since;
    if (this.receivedSince !== undefined && !byReceipt) {
      // A packet received since then is no older than this. Without a bound, such a relay would send all that it has.
      since = Math.max(since ?? 0, this.receivedSince - RESUME_MARGIN_SECONDS);
    }
    if (since !== undefined) filters.since = since;
    if (this.until !== undefined) filters.until = this.until;
    if (place.limit !== undefined) filters.limit = place.limit;
    if (place.cursor !== undefined) filters.cursor = place.cursor;
    if (this.order === "desc") filters.order = "desc";
    if (byId && this.packetIds.length > 0) filters.packet_ids = this.packetIds;
    if (byReceipt && this.receivedSince !== undefined) filters.received_since = this.receivedSince;
    if (byReceipt && this.receivedUntil !== undefined) filters.received_until = this.receivedUntil;
    return filters;
  }

  /** Whether the relay applies every filter itself, so that everything it sends is wanted. */
  isServedBy(announced: Announced): boolean {
    const byReceipt = this.receivedSince === undefined && this.receivedUntil === undefined;
    return (
      (this.packetIds.length === 0 || announced.extensions.has("packet_ids")) &&
      (byReceipt || announced.extensions.has("received_range"))
    );
  }

  /**
   * Whether the packet matches the query.
   *
   * `byReceipt` means that the relay was asked to apply `receivedSince`, so it is not checked here: the relay applies
   * it to the time at which the packet came to that relay. `receivedAt` is when the first relay of a federation had
   * the packet, which may be earlier.
   */
  matches(packet: Packet, receivedAt: number, byReceipt = false): boolean {
    return (
      (this.authors.length === 0 || this.authors.includes(packet.authorId)) &&
      (this.types.length === 0 || this.types.includes(packet.contentType)) &&
      (this.packetIds.length === 0 || this.packetIds.includes(packet.packetId)) &&
      (this.since === undefined || packet.timestamp >= this.since) &&
      (this.until === undefined || packet.timestamp <= this.until) &&
      (byReceipt || this.receivedSince === undefined || receivedAt >= this.receivedSince) &&
      (this.receivedUntil === undefined || receivedAt <= this.receivedUntil)
    );
  }
}

/** Counts of what has happened on one relay connection since it was opened. They only grow. */
export class Statistics {
  connections = 0;
  connectionsLost = 0;
  /** Attempts to connect that failed. */
  connectionsFailed = 0;
  authentications = 0;
  authenticationsRefused = 0;
  authenticationsTimedOut = 0;
  /** Challenges not signed, because they were malformed or from a relay other than expected. */
  challengesRefused = 0;
  /** Challenges that left less time than the minute that a relay must give. */
  challengesShort = 0;
  publishes = 0;
  publishesAcknowledged = 0;
  /** Publishes acknowledged with `duplicate`: the relay already had the packet. */
  publishesDuplicate = 0;
  publishesRefused = 0;
  publishesTimedOut = 0;
  /** Packets sent again after no answer, after a temporary refusal, or on a new connection. */
  publishesRepeated = 0;
  eventsReceived = 0;
  eventsDelivered = 0;
  /** Packets dropped because the subscription had already delivered them. */
  eventsRepeated = 0;
  /** Packets dropped because their schema or key check failed. */
  eventsInvalid = 0;
  /** Packets dropped because they are not what their author signed. */
  eventsTampered = 0;
  /** Those tampered and invalid packets that only the relay can be responsible for: the id fails. */
  eventsForged = 0;
  /** Packets dropped because the relay received them after their own `expires_at`. */
  eventsExpired = 0;
  /** Packets dropped because they are outside the filter. */
  eventsUnasked = 0;
  /** Events of no open subscription. */
  eventsUnclaimed = 0;
  /** Messages that RFC-0004 does not define, and answers to no request. */
  messagesInvalid = 0;
  /** Times the relay was asked for authors' key events. */
  keyFetches = 0;
  /** Times the relay's log had lost the position of a subscription (`LogReset`). */
  logResets = 0;
  /** Cursors that a relay no longer knew, so that reading continued from a time. */
  cursorFallbacks = 0;
  /** Times a subscription left the relay's feed because its consumer was slower. */
  subscriptionsDeferred = 0;
  /** ERRORs by code; `other` counts overlong codes, and all new codes after the first 256. */
  refusals: Record<string, number> = {};
}

function asList(values: readonly string[] | string | null | undefined): readonly string[] {
  return values === undefined || values === null ? [] : typeof values === "string" ? [values] : [...new Set(values)];
}

/** Options of one publish. */
export interface PublishOptions {
  /** How long the publish may take in all, in seconds; by default `Options.publishTimeout`. */
  readonly timeout?: number | undefined;
  /** Aborting forgets the publish; the relay may still store the packet. */
  readonly signal?: AbortSignal | undefined;
}
