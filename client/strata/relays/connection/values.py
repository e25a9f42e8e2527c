"""The values that a relay connection takes and returns: plain data, no I/O."""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal, Self, TypedDict

from strata.protocol import wire
from strata.protocol.canonical import MAX_SAFE_INTEGER
from strata.protocol.fields import is_content_id
from strata.protocol.packets import DEFAULT_MAX_PACKET_AGE_SECONDS, MAX_FUTURE_SECONDS, Packet
from strata.relays.arguments import check_authors, check_text, check_whole, texts

__all__ = [
    "LONGEST_NAME",
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
"""How much older than its arrival a packet's timestamp may be, with the error of both clocks (A-042). A
reader that resumes from a time, without a cursor, starts this much earlier."""

Order = Literal["asc", "desc"]


@dataclass(frozen=True, slots=True)
class Published:
    """The relay's confirmation that a packet is durably stored (A-058)."""

    packet_id: str
    received_at: int | None
    """When the relay first saw the packet, in Unix seconds; None if it did not say."""
    duplicate: bool = False
    """The relay already had the packet: a success like any other (A-056)."""
    queued: bool = False
    """Stored, but without effect yet (R-190)."""
    downgraded_to: str | None = None
    """The origin the relay credits the packet with, if it found the claim unproven (R-209)."""
    duplicate_of: str | None = None
    """The packet that the relay has in this one's place, and has shown: this one only repeats it, and is not
    stored."""


@dataclass(frozen=True, slots=True)
class Delivery:
    """One verified packet, as a subscription delivers it."""

    packet: Packet
    received_at: int
    """When the relay first saw the packet, in Unix seconds: the time to judge age and keys by (R-105)."""
    cursor: str | None
    """The position after this packet, to resume from in another session; None if the relay gave none."""
    live: bool | None
    """Whether the packet arrived after the subscription had caught up; None if the relay does not say."""
    origin_type: str | None = None
    """The origin its media may be credited with: the lower of the author's claim and the relay's finding
    (R-212). None if the packet claims none. `packet` is always as its author signed it."""


@dataclass(frozen=True, slots=True)
class LogReset:
    """Notice that the relay's log has lost its end: it was replaced by an older copy.

    The relay no longer has everything that it acknowledged, and may have lost packets that this program never
    saw. Reading continues after the last good place. Packets that were already delivered are not delivered
    again, as far back as `Options.dedup_packets` reaches.
    """

    lost: str
    """The cursor that is no longer valid: the position of this subscription."""
    cursor: str | None
    """The last good place, after which reading continues; None if the relay does not know it."""
    since: int | None
    """If `cursor` is None, reading continues with packets of this time on, in Unix seconds."""


_MOST_EXTENSIONS: Final = 256
LONGEST_NAME: Final = 128
"""The longest name of an extension or code that is accepted, in characters; no real one is longer."""


@dataclass(frozen=True, slots=True)
class Announced:
    """What a relay says about itself on a connection. The default is a plain RFC-0004 relay."""

    extensions: frozenset[str] = frozenset()
    max_packet_bytes: int | None = None
    relay_id: str | None = None
    """The DID in the relay's manifest. It proves nothing (R-346): AUTH is checked against the pin."""

    def learnt(self, extensions: Iterable[str]) -> Announced:
        """This with more extensions, unless there are too many: a hostile relay may keep inventing names."""
        named = frozenset(name for name in extensions if len(name) <= LONGEST_NAME)
        known = self.extensions | named
        return self if len(known) > _MOST_EXTENSIONS else replace(self, extensions=known)


@dataclass(frozen=True, slots=True)
class Authenticated:
    """The identity that the relay has confirmed for a session (R-293)."""

    author_id: str
    capabilities: frozenset[str] | None
    """All that the session may do (R-291); None if the relay does not enforce capabilities."""

    def allows(self, capability: str) -> bool:
        """Whether an action that needs this capability may be attempted."""
        return self.capabilities is None or capability in self.capabilities


class PacketSelection(TypedDict, total=False):
    """Which packets to read: the keyword options that every `fetch` and `subscribe` takes.

    The values of one filter are alternatives, filters combine with AND, and an empty filter restricts nothing
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
    """The latest timestamp of a packet; only for queries that end."""
    received_since: int | None
    """The earliest time at which the relay received a packet. For a packet from another relay, this is when
    it came to this relay. Its `Delivery.received_at` is when the other relay had it, which may be earlier."""
    received_until: int | None
    """The latest time at which the relay received a packet."""
    order: Order
    """By time of receipt: `asc`, or `desc` for queries that end."""
    limit: int | None
    """The most packets to deliver in all; only for queries that end."""


class FetchOptions(PacketSelection, total=False):
    """The keyword options of `Relay.fetch`."""

    cursor: str | None
    """Start strictly after this position (`Delivery.cursor`), rather than at the oldest packet."""
    cursor_fallback_since: int | None
    """The `since` to use if the relay no longer knows `cursor`."""
    on_log_reset: Callable[[LogReset], None]
    """Called when the relay's log has lost its end, between the packets delivered before that point and those
    after it. Without it, a warning is logged. What it raises, iteration raises."""


class SubscribeOptions(FetchOptions, total=False):
    """The keyword options of `Relay.subscribe`."""

    live: bool
    """Whether to continue with new packets after the stored ones; True by default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """Which packets a subscription reads, where it starts and where it ends: `SubscribeOptions` as a value.

    `since` and `until` bound the packet's own timestamp, `received_since` and `received_until` the relay's
    time of receipt; `until` bounds history only (A-042).

    Construction raises `ValueError` for a query that no relay could serve, and `TypeError` for a member of
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
    """For relays that replicate: leave out packets that the relay received from these relays."""
    replication_profile: str | None = None
    """For relays that replicate: the kind of packets they request (RFC-0007 §6.2)."""

    @classmethod
    def of(cls, options: PacketSelection, known: type = SubscribeOptions) -> Self:
        """The query for these keyword options. Raises `TypeError` for an option that `known` lacks."""
        members: dict[str, Any] = {**options}
        unknown = members.keys() - known.__annotations__.keys()
        if unknown:
            raise TypeError(f"there is no option {min(unknown)!r}; {known.__name__} has them all")
        for name in ("authors", "types", "packet_ids"):
            members[name] = texts(name, members.get(name, ()))
        return cls(**members)

    def __post_init__(self) -> None:
        for name in ("since", "until", "received_since", "received_until", "cursor_fallback_since"):
            at = getattr(self, name)
            check_whole(name, at, "Unix seconds")
            if at is not None and abs(at) > MAX_SAFE_INTEGER:  # no message can hold it
                raise ValueError(f"{name} must be Unix seconds, and no time is {at}")
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
            # `until` does not bound live packets, but it bounds history, and a live packet that was
            # missed during a lost connection comes back as history: together, the two would lose packets.
            raise ValueError("limit, until and descending order are for queries that end: pass live=False")
        for packet_id in self.packet_ids:
            if not is_content_id(packet_id):
                raise ValueError(f"not a packet id: {packet_id!r}; one is 0x and 64 hex digits in lower case")

    def filters(
        self, announced: Announced, *, cursor: str | None, since: int | None, limit: int | None
    ) -> wire.Filters:
        """The filters to send. Those of extensions go only to relays that announced them (A-048, A-050)."""
        by_id = "packet_ids" in announced.extensions
        by_receipt = "received_range" in announced.extensions
        if self.received_since is not None and not by_receipt:
            # A packet received since then is no older than this. Without a bound, such a relay would send all
            # that it has.
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
        """Whether the relay applies every filter itself, so that everything it sends is wanted."""
        return (not self.packet_ids or "packet_ids" in announced.extensions) and (
            (self.received_since is None and self.received_until is None)
            or "received_range" in announced.extensions
        )

    def matches(self, packet: Packet, received_at: int, *, by_receipt: bool = False) -> bool:
        """Whether the packet matches the query (R-166).

        `by_receipt` means that the relay was asked to apply `received_since`, so it is not checked here: the
        relay applies it to the time at which the packet came to that relay. `received_at` is when the first
        relay of a federation had the packet, which may be earlier.
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
    """Counts of what has happened on one relay connection since it was opened. They only grow."""

    connections: int = 0
    connections_lost: int = 0
    connections_failed: int = 0
    """Attempts to connect that failed."""
    authentications: int = 0
    """Sessions that the relay has confirmed as authenticated."""
    authentications_refused: int = 0
    authentications_timed_out: int = 0
    challenges_refused: int = 0
    """Challenges not signed, because they were malformed or from a relay other than expected (R-298)."""
    challenges_short: int = 0
    """Challenges that left less time than the minute that a relay must give (R-273): a fault of the relay."""
    publishes: int = 0
    publishes_acknowledged: int = 0
    publishes_duplicate: int = 0
    """Publishes acknowledged with `duplicate`: the relay already had the packet."""
    publishes_refused: int = 0
    publishes_timed_out: int = 0
    publishes_repeated: int = 0
    """Packets sent again after no answer, after a temporary refusal, or on a new connection."""
    events_received: int = 0
    events_delivered: int = 0
    events_repeated: int = 0
    """Packets dropped because the subscription had already delivered them (R-116)."""
    events_invalid: int = 0
    """Packets dropped because their schema or key check failed (R-336)."""
    events_tampered: int = 0
    """Packets dropped because they are not what their author signed: the id or the signature fails. A packet
    that the relay downgraded with an annotation does not count (R-342)."""
    events_forged: int = 0
    """Those tampered and invalid packets that only the relay can be responsible for: the id fails. A
    signature may also fail for lack of a key that the relay had when it accepted the packet."""
    events_expired: int = 0
    """Packets dropped because the relay received them after their own `expires_at` (R-337)."""
    events_unasked: int = 0
    """Packets dropped because they are outside the filter (R-166)."""
    events_unclaimed: int = 0
    """Events of no open subscription: unsolicited (R-174), or late events of a subscription that was left."""
    messages_invalid: int = 0
    """Messages that RFC-0004 does not define, and answers to no request."""
    key_fetches: int = 0
    """Times the relay was asked for authors' key events (R-075)."""
    log_resets: int = 0
    """Times the relay's log had lost the position of a subscription (`LogReset`)."""
    cursor_fallbacks: int = 0
    """Cursors that a relay no longer knew, so that reading continued from a time."""
    subscriptions_deferred: int = 0
    """Times a subscription left the relay's feed because its consumer was slower."""
    refusals: dict[str, int] = field(default_factory=dict)
    """ERRORs by code; `other` counts overlong codes, and all new codes after the first 256."""
