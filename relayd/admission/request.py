"""One PUBLISH on its way, and the lane it keeps its place in."""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from strata.protocol.errors import InvalidPacket
from strata.protocol.keys import IDENTITY_TYPES
from strata.protocol.packets import Packet
from strata.protocol.provenance import Downgrade

from relayd.admission.knowledge import Known
from relayd.admission.origin import PeerOrigin
from relayd.store.types import PeerMark

__all__ = ["Lane", "Marker", "PublishRequest", "PublishVerdict", "Publisher", "marks_of"]


class Publisher(Protocol):
    """Who published: one connection."""

    def publish_accepted(
        self,
        request: PublishRequest,
        received_at: int,
        *,
        duplicate: bool,
        duplicate_of: bytes | None = None,
        queued: bool = False,
    ) -> None:
        """The packet, or for `duplicate_of` the one it repeats, is durably stored; answer OK.

        `queued` says that it has no effect yet (R-190). If this raises, nothing has been answered.
        """

    def publish_refused(self, request: PublishRequest, error: InvalidPacket) -> None:
        """The packet is not stored; answer ERROR. If this raises, nothing has been answered."""

    def publish_unanswerable(self) -> None:
        """No answer could be made: end the connection, so that the peer knows that none will come."""

    def checked_for(self, seconds: float) -> None:
        """The checks of one of its packets took so much of the processor, and that is much."""

    def turn(self, now: float) -> float:
        """The place of its dear packets among those of others: the lowest is first. `now` is monotonic."""

    def room_again(self) -> None:
        """There is room for publishes again: the answer to `Admission.hold`."""


class PublishVerdict(enum.Enum):
    """How far the checks have come. The first three are for the relay to go on with, the others decide."""

    PENDING = enum.auto()
    HELD = enum.auto()
    """Behind one of its lane that changes the keys by which it is judged: not judged before that is done."""
    CHECKED = enum.auto()
    """Passed what the threads check; the loop has to look at what may have to wait for something."""
    PASSED = enum.auto()
    REFUSED = enum.auto()


class PublishRequest:
    """One PUBLISH. `started_at` is monotonic, for the latency histogram and the deadline."""

    __slots__ = (
        "change",
        "client_msg_id",
        "downgrade",
        "is_by_keys",
        "is_charged",
        "is_dear",
        "is_ended",
        "is_finished",
        "is_parsed",
        "known",
        "lane",
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
        self.client_msg_id = client_msg_id
        self.lane = lane
        self.started_at = started_at
        self.origin = origin
        """The peer that it comes from, where it was not published here."""
        self.witness: int | None = None
        """When the first relay received it, where the peer's word for that counts."""
        self.is_dear = False
        """Its checks take milliseconds."""
        self.is_parsed = False
        self.packet: Packet
        """Unset until `parsed`."""
        self.known: Known
        """The knowledge by which it was last judged; unset until then."""
        self.downgrade: Downgrade | None = None
        """The relay's finding about its origin, where the claim does not hold."""
        self.queued = False
        self.refusal: InvalidPacket | None = None
        self.is_by_keys = False
        """It was refused by the keys that were known, and other keys might have let it pass."""
        self.origin_refusal: InvalidPacket | None = None
        """The verdict of check 13, which counts once check 12 is done."""
        self.change: tuple[str, str] | None = None
        """What it changes for others on their way, while it is on its own to the log."""
        self.is_charged = False
        """It counts against a budget of its author."""
        self.is_finished = False
        """The checks that wait for something are done."""
        self.is_ended = False
        """It has left admission, and what it held is given back. Whoever still has it passes it over."""
        self.verdict = PublishVerdict.PENDING

    def judged_at(self, now: int) -> int:
        """The time at which it is judged."""
        return now if self.witness is None else self.witness

    def parsed(self, packet: Packet) -> None:
        """The bytes hold a packet."""
        self.packet = packet
        self.is_parsed = True

    def refuse(self, error: InvalidPacket) -> None:
        """Note the first check that failed."""
        self.refusal = _bare(error)
        self.verdict = PublishVerdict.REFUSED

    def forget_verdict(self) -> None:
        """The keys it was judged by are not the author's any more."""
        self.verdict = PublishVerdict.PENDING
        self.is_by_keys = False
        self.refusal = self.origin_refusal = None

    def origin_refused(self, error: InvalidPacket) -> None:
        """Note that check 13 failed."""
        self.origin_refusal = _bare(error)


def _bare(error: InvalidPacket) -> InvalidPacket:
    """A refusal without the frames it was raised in.

    They hold the request, which holds the refusal: such a circle would keep the request's bytes until the
    next run of the cycle collector, and a stranger's refused frames would fill the memory before that.
    """
    error.__traceback__ = error.__context__ = error.__cause__ = None
    return error


Marker = Callable[[Sequence[PublishRequest]], PeerMark | None]


def marks_of(requests: Sequence[PublishRequest]) -> list[PeerMark]:
    """How far peers have been read once these are stored; nothing where all were published here."""
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
        self, publisher: Publisher, identity: str | None = None, marker: Marker | None = None
    ) -> None:
        self.publisher = publisher
        self.identity = identity
        self.marker = marker
        """For packets of a peer: how far the peer has been read once these are stored."""
        self.requests: deque[PublishRequest] = deque()
        self.changing: set[str] = set()
        """Authors whose keys a packet changes that stands here, and some of whom one has not long ago."""
        self.is_advancing = False
        """Requests are leaving it in this very step."""

    def is_behind_change(self, request: PublishRequest) -> bool:
        """Whether one before this one changes its author's keys; notes it where this one does.

        What would be said by the keys of now would have to be said again.
        """
        packet = request.packet
        is_behind = packet.author_id in self.changing and self.requests[0] is not request
        if packet.content_type in IDENTITY_TYPES:
            self._changes_keys_of(packet.author_id)
        return is_behind

    def _changes_keys_of(self, author: str) -> None:
        """A packet that stands here changes this author's keys."""
        if len(self.changing) > 2 * len(self.requests):  # of a lane that is never empty
            self.changing = {
                each.packet.author_id
                for each in self.requests
                if each.is_parsed and each.packet.content_type in IDENTITY_TYPES
            }
        self.changing.add(author)

    def forget(self, request: PublishRequest) -> None:
        """Take a request out, wherever it stands; one that has left changes nothing."""
        if self.requests and self.requests[0] is request:
            self.requests.popleft()
        elif request in self.requests:
            self.requests.remove(request)
