/** What a relay connection takes and gives: plain values. */

// Core: no I/O, no clock, no randomness (held by tests/layout.test.ts).

import type { OriginType } from "../protocol/provenance.js";
import { DEFAULT_MAX_PACKET_AGE_SECONDS, MAX_FUTURE_SECONDS, type Packet } from "../protocol/packets.js";
import type { Filters } from "../protocol/wire.js";
import { checkSelection } from "./arguments.js";

/** How much older than its arrival a packet's timestamp may be, with both clocks' error. */
export const RESUME_MARGIN_SECONDS = DEFAULT_MAX_PACKET_AGE_SECONDS + MAX_FUTURE_SECONDS;

/** The relay's word that a packet is durably stored. */
export interface Published {
  readonly packetId: string;
  /** When the relay first saw the packet, in Unix seconds; undefined if it did not say. */
  readonly receivedAt: number | undefined;
  /** The relay had the packet already: a success like any other. */
  readonly duplicate: boolean;
  /** Stored, but without effect yet. */
  readonly queued: boolean;
  /** The origin that the relay credits the packet with, if it found the claim unproven. */
  readonly downgradedTo: string | undefined;
}

/** One verified packet, as a subscription hands it on. */
export interface Delivery {
  /** As its author signed it. */
  readonly packet: Packet;
  /** When the relay first saw the packet, in Unix seconds: the time to judge age and keys by. */
  readonly receivedAt: number;
  /** The position after this packet, to go on from later; undefined where the relay gave none. */
  readonly cursor: string | undefined;
  /** Whether the packet came in after the subscription had caught up; undefined if the relay does not say. */
  readonly live: boolean | undefined;
  /** The origin that its media may be credited with; undefined if the packet claims none. */
  readonly originType: OriginType | undefined;
}

/**
 * The relay's log has lost its end: an older copy was put in its place. The relay has no longer all that it had
 * acknowledged. Reading goes on behind the last good place.
 */
export interface LogReset {
  /** The cursor that is good no more: where the subscription stood. */
  readonly lost: string;
  /** The last good place, where the relay knows it. */
  readonly cursor: string | undefined;
  /** Otherwise reading goes on with packets of this time, in Unix seconds. */
  readonly since: number | undefined;
}

/** What a relay says about itself when a connection is made. */
export interface Announced {
  readonly extensions: ReadonlySet<string>;
  readonly maxPacketBytes?: number | undefined;
  /** The DID in the relay's manifest. It proves nothing: AUTH is held to the pin. */
  readonly relayId?: string | undefined;
}

/** Whom the relay takes a session for, by its own word. */
export interface Authenticated {
  readonly authorId: string;
  /** What the session may do, and nothing else; undefined where the relay enforces no capabilities. */
  readonly capabilities: ReadonlySet<string> | undefined;
}

/**
 * Which packets to read. Values inside one filter are alternatives, filters combine with AND, and an absent or
 * empty one restricts nothing. Times are Unix seconds and inclusive.
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
  /** The latest timestamp; only for reading that ends. */
  readonly until?: number | undefined;
  /**
   * The earliest time at which the relay received a packet. One that it got from another relay counts by when it
   * came here, and shows when that one had it (`Delivery.receivedAt`), which may be earlier.
   */
  readonly receivedSince?: number | undefined;
  /** The latest such time. */
  readonly receivedUntil?: number | undefined;
  /** By time of receipt; `desc` only for reading that ends. */
  readonly order?: "asc" | "desc" | undefined;
  /** The most packets to hand on in all; only for reading that ends. */
  readonly limit?: number | undefined;
}

/** Which packets to read, and from where. */
export interface FetchOptions extends PacketSelection {
  /** Start strictly after this position (`Delivery.cursor`), rather than at the oldest packet. */
  readonly cursor?: string | null | undefined;
  /** The `since` to use if the relay does not know `cursor` any more. */
  readonly cursorFallbackSince?: number | undefined;
  /** Called when the relay's log has lost its end; what it throws, iterating throws. Else a warning is logged. */
  readonly onLogReset?: (reset: LogReset) => void;
}

/** Which packets to read, from where, and whether to go on. */
export interface SubscribeOptions extends FetchOptions {
  /** Whether to go on with new packets once the stored ones are read; true unless given. */
  readonly live?: boolean;
}

/** Which packets a subscription is for, where it starts and where it ends. */
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
      // A live packet missed during a cut comes back as history, which `until` binds: that would lose packets.
      throw new TypeError("limit, until and descending order are for queries that end: pass live: false");
    }
  }

  /** The filters as sent. Additive ones go only to relays that announced them. */
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
      // Such a relay has taken nothing older by then: without a bound it would send all that it has.
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

  /** Whether the relay applies every filter itself, so that all it sends is wanted. */
  isServedBy(announced: Announced): boolean {
    const byReceipt = this.receivedSince === undefined && this.receivedUntil === undefined;
    return (
      (this.packetIds.length === 0 || announced.extensions.has("packet_ids")) &&
      (byReceipt || announced.extensions.has("received_range"))
    );
  }

  /**
   * Whether the packet was asked for.
   *
   * With `byReceipt` the relay was asked to apply `receivedSince`. It goes by when the packet came to it;
   * `receivedAt` is when the first relay of a federation had it, which may be earlier.
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

/** What has happened on one relay connection since it was opened. Every number only grows. */
export class Statistics {
  connections = 0;
  connectionsLost = 0;
  /** Attempts that did not become a connection. */
  connectionsFailed = 0;
  authentications = 0;
  authenticationsRefused = 0;
  authenticationsTimedOut = 0;
  /** Challenges not signed: malformed, or of another relay than expected. */
  challengesRefused = 0;
  /** Challenges with less time left than the minute that a relay owes. */
  challengesShort = 0;
  publishes = 0;
  publishesAcknowledged = 0;
  /** Acknowledged with `duplicate`: the relay had the packet before. */
  publishesDuplicate = 0;
  publishesRefused = 0;
  publishesTimedOut = 0;
  /** Packets sent again for want of an answer, after a passing refusal, or on a new connection. */
  publishesRepeated = 0;
  eventsReceived = 0;
  eventsDelivered = 0;
  /** Packets that a subscription had handed on before, dropped. */
  eventsRepeated = 0;
  /** Packets whose schema or key failed, dropped. */
  eventsInvalid = 0;
  /** Packets that are not what their author signed, dropped. */
  eventsTampered = 0;
  /** Tampered and invalid packets that the relay alone can account for. */
  eventsForged = 0;
  /** Packets received after their own `expires_at`, dropped. */
  eventsExpired = 0;
  /** Packets outside the filter, dropped. */
  eventsUnasked = 0;
  /** Events of no open subscription. */
  eventsUnclaimed = 0;
  /** Messages that RFC-0004 does not know, and answers to no request. */
  messagesInvalid = 0;
  /** Times that the relay was asked for authors' key events. */
  keyFetches = 0;
  /** Times that the relay's log had lost the place where a subscription stood. */
  logResets = 0;
  /** Cursors that a relay knew no more: reading went on from a time. */
  cursorFallbacks = 0;
  /** Times that a subscription left the relay's feed because its consumer was slower. */
  subscriptionsDeferred = 0;
  /** ERRORs by code. */
  refusals: Record<string, number> = {};
}

function asList(values: readonly string[] | string | null | undefined): readonly string[] {
  return values === undefined || values === null ? [] : typeof values === "string" ? [values] : [...new Set(values)];
}

/** What one publish may be given. */
export interface PublishOptions {
  /** Seconds in all; default `publishTimeout`. */
  readonly timeout?: number | undefined;
  /** Aborting forgets the publish; the relay may store the packet all the same. */
  readonly signal?: AbortSignal | undefined;
}
