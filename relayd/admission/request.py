"""One PUBLISH on its way, and the lane in which it keeps its place."""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from strata.protocol.canonical import most_values
from strata.protocol.errors import InvalidPacket
from strata.protocol.keys import IDENTITY_TYPES
from strata.protocol.packets import Packet
from strata.protocol.provenance import Downgrade

from relayd.admission.knowledge import Known
from relayd.admission.origin import PeerOrigin
from relayd.store.payers import Asker, Payer
from relayd.store.types import PeerMark

__all__ = ["Lane", "Marker", "PublishRequest", "PublishVerdict", "Submitter", "marks_of"]


_TEXTS: Final = 5
_VALUE_BYTES: Final = 100
_OBJECT_BYTES: Final = 2048
"""Measured: small packets take ten times their bytes, large texts five times, and objects of one member each,
the largest values for their bytes, thirty times."""


class Submitter(Asker, Protocol):
    """The publisher of a packet: one connection."""

    def publish_accepted(
        self,
        request: PublishRequest,
        received_at: int,
        *,
        duplicate: bool,
        duplicate_of: bytes | None = None,
        queued: bool = False,
    ) -> None:
        """The packet, or the packet `duplicate_of` that it repeats, is durably stored: answer OK.

        `queued` says that it has no effect yet (R-190). If this raises, nothing has been answered.
        """

    def publish_refused(self, request: PublishRequest, error: InvalidPacket) -> None:
        """The packet is not stored: answer ERROR. If this raises, nothing has been answered."""

    def publish_unanswerable(self) -> None:
        """No answer could be made: end the connection, so that the peer knows that none will come."""

    @property
    def payer(self) -> Payer:
        """The account that takes turns at the database for the publisher."""

    def room_again(self) -> None:
        """There is room for publishes again: the answer to `Admission.hold`."""


class PublishVerdict(enum.Enum):
    """How far the checks have come. With the first three the relay must go on; the others are final."""

    PENDING = enum.auto()
    HELD = enum.auto()
    """Behind a packet of its lane that changes the keys it is judged by: judged only when that is done."""
    CHECKED = enum.auto()
    """Passed the checks of the threads; the loop must run those that may have to wait."""
    PASSED = enum.auto()
    REFUSED = enum.auto()


class PublishRequest:
    """One PUBLISH. `started_at` is monotonic, for the latency histogram and the deadline."""

    __slots__ = (
        "change",
        "client_msg_id",
        "downgrade",
        "held_bytes",
        "identity",
        "is_by_keys",
        "is_charged",
        "is_dear",
        "is_ended",
        "is_finished",
        "is_parsed",
        "known",
        "lane",
        "latest_check",
        "origin",
        "origin_refusal",
        "packet",
        "queued",
        "raw",
        "refusal",
        "started_at",
        "verdict",
        "witness",
    )

    def __init__(
        self,
        raw: bytes,
        client_msg_id: str | None,
        lane: Lane,
        started_at: float,
        origin: PeerOrigin | None = None,
    ) -> None:
        self.raw = raw
        self.held_bytes = _memory_of(raw)
        """About the memory that it takes until it ends."""
        self.client_msg_id = client_msg_id
        self.lane = lane
        self.identity = lane.identity
        """The DID that the session had authenticated as when it sent the packet."""
        self.started_at = started_at
        self.origin = origin
        """The peer that delivered it; None if it was published here."""
        self.witness: int | None = None
        """When the first relay received it, if the peer's word for that counts."""
        self.is_dear = False
        """Whether its checks take milliseconds."""
        self.is_parsed = False
        self.packet: Packet
        """Unset until `parsed`."""
        self.latest_check = 0
        """The latest time as of which a check was made; at an earlier one the verdict might differ."""
        self.known: Known
        """The knowledge by which it was last judged; unset until then."""
        self.downgrade: Downgrade | None = None
        """The relay's finding about its origin, if the claim does not hold."""
        self.queued = False
        self.refusal: InvalidPacket | None = None
        self.is_by_keys = False
        """Whether it was refused because of the keys that were known; other keys might have let it pass."""
        self.origin_refusal: InvalidPacket | None = None
        """The verdict of check 13, which counts once check 12 is done."""
        self.change: tuple[str, str] | None = None
        """What it changes for packets behind it, while it is on its way to the log."""
        self.is_charged = False
        """Whether it counts against a budget of its author."""
        self.is_finished = False
        """Whether the checks that wait for something are done."""
        self.is_ended = False
        """Whether it has left admission and given back what it held. Any code that still has it skips it."""
        self.verdict = PublishVerdict.PENDING

    def judged_at(self, now: int) -> int:
        """The time as of which it is judged."""
        return now if self.witness is None else self.witness

    def parsed(self, packet: Packet) -> None:
        """The bytes hold this packet."""
        self.packet = packet
        self.is_parsed = True

    def refuse(self, error: InvalidPacket) -> None:
        """Note the refusal of the first check that failed."""
        self.refusal = _bare(error)
        self.verdict = PublishVerdict.REFUSED

    def forget_verdict(self) -> None:
        """Forget the verdict: the keys by which it was reached are no longer the author's."""
        self.verdict = PublishVerdict.PENDING
        self.is_by_keys = False
        self.refusal = self.origin_refusal = None

    def origin_refused(self, error: InvalidPacket) -> None:
        """Note that check 13 failed."""
        self.origin_refusal = _bare(error)


def _memory_of(raw: bytes) -> int:
    """About the most memory that a packet of these bytes takes: its text as it came, as it is stored, signed
    and decoded, and its values."""
    return _TEXTS * len(raw) + _VALUE_BYTES * most_values(raw) + _OBJECT_BYTES


def _bare(error: InvalidPacket) -> InvalidPacket:
    """A refusal without the frames it was raised in.

    The frames hold the request, which holds the refusal. Such a cycle would keep the request's bytes until
    the next run of the cycle collector, and a stranger's refused frames would fill the memory before that.
    """
    error.__traceback__ = error.__context__ = error.__cause__ = None
    return error


Marker = Callable[[Sequence[PublishRequest]], PeerMark | None]


def marks_of(requests: Sequence[PublishRequest]) -> list[PeerMark]:
    """How far peers have been read once these requests are stored; empty if all were published here."""
    by_marker: dict[Marker, list[PublishRequest]] = {}
    for request in requests:
        if request.origin is not None and request.lane.marker is not None:
            by_marker.setdefault(request.lane.marker, []).append(request)
    marks = [marker(some) for marker, some in by_marker.items()]
    return [mark for mark in marks if mark is not None]


class Lane:
    """The publishes of one session that have no verdict yet, or wait for one before them.

    `identity` is the DID that the session has authenticated as, if any.
    """

    __slots__ = ("changing", "identity", "is_advancing", "marker", "publisher", "requests")

    def __init__(
        self, publisher: Submitter, identity: str | None = None, marker: Marker | None = None
    ) -> None:
        self.publisher = publisher
        self.identity = identity
        self.marker = marker
        """For packets of a peer: how far the peer has been read once these packets are stored."""
        self.requests: deque[PublishRequest] = deque()
        self.changing: set[str] = set()
        """The authors whose keys a packet in this lane changes, and some for whom one did recently."""
        self.is_advancing = False
        """Whether requests are leaving the lane in this very step."""

    def is_behind_change(self, request: PublishRequest) -> bool:
        """Whether a request before this one changes its author's keys. Notes it if this request changes keys.

        A verdict by the current keys would have to be reached again.
        """
        packet = request.packet
        is_behind = packet.author_id in self.changing and self.requests[0] is not request
        if packet.content_type in IDENTITY_TYPES:
            self._changes_keys_of(packet.author_id)
        return is_behind

    def _changes_keys_of(self, author: str) -> None:
        """Note that a packet in this lane changes this author's keys."""
        if len(self.changing) > 2 * len(self.requests):  # in a lane that is never empty
            self.changing = {
                each.packet.author_id
                for each in self.requests
                if each.is_parsed and each.packet.content_type in IDENTITY_TYPES
            }
        self.changing.add(author)

    def forget(self, request: PublishRequest) -> None:
        """Take a request out, wherever it stands; a request that has left changes nothing."""
        if self.requests and self.requests[0] is request:
            self.requests.popleft()
        elif request in self.requests:
            self.requests.remove(request)
