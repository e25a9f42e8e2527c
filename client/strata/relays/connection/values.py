"""What a relay connection takes and gives: plain values, no I/O."""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, Self, TypedDict

from strata.protocol import wire
from strata.protocol.fields import is_content_id
from strata.protocol.packets import DEFAULT_MAX_PACKET_AGE_SECONDS, MAX_FUTURE_SECONDS, Packet
from strata.relays.arguments import check_authors, check_text, check_whole, texts

__all__ = [
    "RESUME_MARGIN_SECONDS",
    "Announced",
    "Authenticated",
    "Delivery",
    "FetchOptions",
    "LogReset",
    "Order",
    "PacketSelection",
    "Published",
    "Query",
    "Statistics",
    "SubscribeOptions",
]

RESUME_MARGIN_SECONDS = DEFAULT_MAX_PACKET_AGE_SECONDS + MAX_FUTURE_SECONDS
"""How much older than its arrival a packet's timestamp may be, with both clocks' error (A-042): whoever goes
on from a time, without a cursor, begins so much earlier."""

Order = Literal["asc", "desc"]


@dataclass(frozen=True, slots=True)
class Published:
    """The relay's word that a packet is durably stored (A-058)."""

    packet_id: str
    received_at: int | None
    """When the relay first saw the packet, in Unix seconds; None if it did not say."""
    duplicate: bool = False
    """The relay had the packet already: a success like any other (A-056)."""
    queued: bool = False
    """Stored, but without effect yet (R-190)."""
    downgraded_to: str | None = None
    """The origin the relay credits the packet with, if it found the claim unproven (R-209)."""


@dataclass(frozen=True, slots=True)
class Delivery:
    """One verified packet, as a subscription hands it on."""

    packet: Packet
    received_at: int
    """When the relay first saw the packet, in Unix seconds: the time to judge age and keys by (R-105)."""
    cursor: str | None
    """The position after this packet, to go on from in another session; None where the relay gave none."""
    live: bool | None
    """Whether the packet came in after the subscription had caught up; None if the relay does not say."""
    origin_type: str | None = None
    """The origin its media may be credited with: the lower of the author's claim and the relay's finding
    (R-212). None if the packet claims none. `packet` is always as its author signed it."""


@dataclass(frozen=True, slots=True)
class LogReset:
    """The relay's log has lost its end: an older copy was put in its place.

    The relay has no longer all that it had acknowledged, and may lack packets that this program never saw.
    Reading goes on behind the last good place; what was handed on before is not handed on again, as far as
    `Options.dedup_packets` reaches.
    """

    lost: str
    """The cursor that is good no more: where this subscription stood."""
    cursor: str | None
    """The last good place, where the relay knows it: reading goes on behind it."""
    since: int | None
    """Otherwise reading goes on with packets of this time, in Unix seconds."""


@dataclass(frozen=True, slots=True)
class Announced:
    """What a relay says about itself when a connection is made. The default is a plain RFC-0004 relay."""

    extensions: frozenset[str] = frozenset()
    max_packet_bytes: int | None = None
    relay_id: str | None = None
    """The DID the relay's manifest gives. It proves nothing (R-346): AUTH is held to the pin."""


@dataclass(frozen=True, slots=True)
class Authenticated:
    """Whom the relay takes a session for, by its own word (R-293)."""

    author_id: str
    capabilities: frozenset[str] | None
    """What the session may do, and nothing else (R-291); None where the relay enforces no capabilities."""

    def allows(self, capability: str) -> bool:
        """Whether an action that takes this capability may be attempted."""
        return self.capabilities is None or capability in self.capabilities


class PacketSelection(TypedDict, total=False):
    """Which packets to read: the keyword options that every `fetch` and `subscribe` takes.

    Values inside one filter are alternatives, filters combine with AND, and an empty filter restricts nothing
    (A-051). Times are Unix seconds and inclusive.
    """

    authors: Iterable[str] | str
    """DIDs of authors, or one."""
    types: Iterable[str] | str
    """Content types such as `POST`, or one."""
    packet_ids: Iterable[str] | str
    """Packet ids, or one."""
    since: int | None
    """The earliest timestamp of a packet."""
    until: int | None
    """The latest timestamp of a packet; only for reading that ends."""
    received_since: int | None
    """The earliest time at which the relay received a packet. One that it got from another relay counts by
    when it came here, and shows when that one had it (`Delivery.received_at`), which may be earlier."""
    received_until: int | None
    """The latest time at which the relay received a packet."""
    order: Order
    """By time of receipt: `asc`, or `desc` for reading that ends."""
    limit: int | None
    """The most packets to hand on in all; only for reading that ends."""


class FetchOptions(PacketSelection, total=False):
    """The keyword options of `Relay.fetch`."""

    cursor: str | None
    """Start strictly after this position (`Delivery.cursor`), rather than at the oldest packet."""
    cursor_fallback_since: int | None
    """The `since` to use if the relay does not know `cursor` any more."""
    on_log_reset: Callable[[LogReset], None]
    """Called when the relay's log has lost its end: after the packets before that were handed on and before
    those behind it are. Unless given, a warning is logged. What it raises, iterating raises."""


class SubscribeOptions(FetchOptions, total=False):
    """The keyword options of `Relay.subscribe`."""

    live: bool
    """Whether to go on with new packets once the stored ones are read; True unless given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """Which packets a subscription is for, where it starts and where it ends: `SubscribeOptions` as a value.

    `since` and `until` are about the packet's own timestamp, `received_since` and `received_until` about the
    relay's; `until` bounds history alone (A-042).

    Raises `ValueError` on construction for a query that no relay could serve, and `TypeError` for a member of
    another type.
    """

    authors: tuple[str, ...] = ()
    types: tuple[str, ...] = ()
    packet_ids: tuple[str, ...] = ()
    since: int | None = None
    until: int | None = None
    received_since: int | None = None
    received_until: int | None = None
    cursor: str | None = None
    cursor_fallback_since: int | None = None
    order: Order = "asc"
    limit: int | None = None
    live: bool = True
    not_via: tuple[str, ...] = ()
    """For relays that replicate: leave out what the relay got from these relays."""
    replication_profile: str | None = None
    """For relays that replicate: what kind of packets they ask for (RFC-0007 §6.2)."""

    @classmethod
    def of(cls, options: PacketSelection, known: type = SubscribeOptions) -> Self:
        """The query that keyword options ask for. Raises `TypeError` for an option that `known` has not."""
        members: dict[str, Any] = {**options}
        unknown = members.keys() - known.__annotations__.keys()
        if unknown:
            raise TypeError(f"there is no option {min(unknown)!r}; {known.__name__} has them all")
        for name in ("authors", "types", "packet_ids"):
            members[name] = texts(name, members.get(name, ()))
        return cls(**members)

    def __post_init__(self) -> None:
        for name in ("since", "until", "received_since", "received_until", "cursor_fallback_since"):
            check_whole(name, getattr(self, name), "Unix seconds")
        check_whole("limit", self.limit, "a number of packets")
        check_text("cursor", self.cursor)
        check_authors(self.authors)
        if not isinstance(self.live, bool):
            raise TypeError(f"live must be True or False, not {self.live!r}")
        if self.order not in ("asc", "desc"):
            raise ValueError(f"order must be asc or desc, not {self.order!r}")
        if self.limit is not None and self.limit < 1:
            raise ValueError("limit must be at least 1")
        if self.live and (self.limit is not None or self.until is not None or self.order != "asc"):
            # `until` does not bind live packets, but it binds history, and a live packet missed
            # during a cut comes back as history: together, the two would lose packets.
            raise ValueError("limit, until and descending order are for queries that end: pass live=False")
        for packet_id in self.packet_ids:
            if not is_content_id(packet_id):
                raise ValueError(f"not a packet id: {packet_id!r}; one is 0x and 64 hex digits in lower case")

    def filters(
        self, announced: Announced, *, cursor: str | None, since: int | None, limit: int | None
    ) -> wire.Filters:
        """The filters as sent. Additive ones go only to relays that announced them (A-048, A-050)."""
        by_id = "packet_ids" in announced.extensions
        by_receipt = "received_range" in announced.extensions
        if self.received_since is not None and not by_receipt:
            # Such a relay has taken nothing older by then: without a bound it would send all that it has.
            since = max(since or 0, self.received_since - RESUME_MARGIN_SECONDS)
        return wire.Filters(
            authors=list(self.authors) or None,
            types=list(self.types) or None,
            since=since,
            until=self.until,
            limit=limit,
            cursor=cursor,
            order="desc" if self.order == "desc" else None,
            packet_ids=list(self.packet_ids) or None if by_id else None,
            received_since=self.received_since if by_receipt else None,
            received_until=self.received_until if by_receipt else None,
            not_via=list(self.not_via) or None if "not_via" in announced.extensions else None,
        )

    def is_served_by(self, announced: Announced) -> bool:
        """Whether the relay applies every filter itself, so that all it sends is wanted."""
        return (not self.packet_ids or "packet_ids" in announced.extensions) and (
            (self.received_since is None and self.received_until is None)
            or "received_range" in announced.extensions
        )

    def matches(self, packet: Packet, received_at: int, *, by_receipt: bool = False) -> bool:
        """Whether the packet was asked for (R-166).

        With `by_receipt` the relay was asked to apply `received_since`. It goes by when the packet came to
        it; `received_at` is when the first relay of a federation had it, which may be earlier.
        """
        return (
            (not self.authors or packet.author_id in self.authors)
            and (not self.types or packet.content_type in self.types)
            and (not self.packet_ids or packet.packet_id in self.packet_ids)
            and (self.since is None or packet.timestamp >= self.since)
            and (self.until is None or packet.timestamp <= self.until)
            and (by_receipt or self.received_since is None or received_at >= self.received_since)
            and (self.received_until is None or received_at <= self.received_until)
        )


@dataclass(slots=True)
class Statistics:
    """What has happened on one relay connection since it was opened. Every number only grows."""

    connections: int = 0
    connections_lost: int = 0
    connections_failed: int = 0
    """Attempts that did not become a connection."""
    authentications: int = 0
    """Sessions the relay has confirmed as authenticated."""
    authentications_refused: int = 0
    authentications_timed_out: int = 0
    challenges_refused: int = 0
    """Challenges not signed, because they were malformed or of another relay than expected (R-298)."""
    challenges_short: int = 0
    """Challenges with less time left than the minute a relay owes (R-273): a fault of the relay's."""
    publishes: int = 0
    publishes_acknowledged: int = 0
    publishes_duplicate: int = 0
    """Acknowledged with `duplicate`: the relay had the packet before."""
    publishes_refused: int = 0
    publishes_timed_out: int = 0
    publishes_repeated: int = 0
    """Packets sent again for want of an answer, after a refusal that may pass, or on a new connection."""
    events_received: int = 0
    events_delivered: int = 0
    events_repeated: int = 0
    """Packets a subscription had handed on before, dropped (R-116)."""
    events_invalid: int = 0
    """Packets whose schema or key failed, dropped (R-336)."""
    events_tampered: int = 0
    """Packets that are not what their author signed, dropped: the id or the signature fails. A packet
    that the relay downgraded with an annotation does not count (R-342)."""
    events_forged: int = 0
    """Tampered and invalid packets that the relay alone can account for: the id fails, or the signature does
    by the keys that this relay has told in full. It may also fail for want of the author's newer keys."""
    events_expired: int = 0
    """Packets received after their own `expires_at`, dropped (R-337)."""
    events_unasked: int = 0
    """Packets outside the filter, dropped (R-166)."""
    events_unclaimed: int = 0
    """Events of no open subscription: unsolicited (R-174), or late ones of a subscription that was left."""
    messages_invalid: int = 0
    """Messages that RFC-0004 does not know, and answers to no request."""
    key_fetches: int = 0
    """Times the relay was asked for authors' key events (R-075)."""
    log_resets: int = 0
    """Times the relay's log had lost the place where a subscription stood (`LogReset`)."""
    cursor_fallbacks: int = 0
    """Cursors that a relay knew no more: reading went on from a time."""
    subscriptions_deferred: int = 0
    """Times a subscription left the relay's feed because its consumer was slower."""
    refusals: dict[str, int] = field(default_factory=dict)
    """ERRORs by code; `other` stands for what is no code, and for what comes after 256 of them."""
