"""The order in which requests leave admission, and which requests have to wait for others.

Packets of one session enter the log in the order they were sent (R-133): each session has a `Lane`, and a
packet leaves it only when all packets before it have a verdict. A refusal holds up no other packet.

A verdict counts for the keys by which it was reached. A packet leaves its lane only while those are still the
author's keys; otherwise it is judged again. An identity packet bars its author's next packets until the feed
has applied it: a REVOKE and a PUBLISH sent together are judged one after the other (R-074), and those behind
the REVOKE in its lane not before. Identity packets and manifests of a client bar the packets that name the
client in the same way (R-236).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from strata.protocol.keys import IDENTITY_TYPES
from strata.protocol.packets import Packet
from strata.protocol.provenance import needed_dids
from strata.protocol.provenance.manifest import CLIENT_MANIFEST

from relayd.admission.knowledge import Knowledge
from relayd.admission.request import Lane, PublishRequest, PublishVerdict
from relayd.crowds import CrowdWork
from relayd.faults import FaultLog
from relayd.identity.authors import DECISIVE_TYPES
from relayd.slices import Slices

__all__ = ["Lanes"]

_KEYS: Final = "keys"
_MANIFEST: Final = "manifest"
_Change = tuple[str, str]
"""A DID, and whether its keys or its manifest change."""
_MOVABLE: Final = (PublishVerdict.PASSED, PublishVerdict.REFUSED, PublishVerdict.HELD)


class Lanes:
    """Lets requests out of their lanes: each goes once to `leave(request)`, or back to be judged.

    `judge` has a request judged by the current keys. `judge_held` does so for a request that has waited for a
    change of keys, and never raises. Errors that the others raise go to `lost(request, error)`, which takes
    the request out of its lane. `on_flush` is called when barred lanes have been let out. Use it on the loop.
    """

    def __init__(
        self,
        knowledge: Knowledge,
        *,
        leave: Callable[[PublishRequest], None],
        judge: Callable[[PublishRequest], None],
        judge_held: Callable[[PublishRequest], None],
        lost: Callable[[PublishRequest, Exception], None],
        on_flush: Callable[[], None],
        faults: FaultLog,
        slices: Slices,
    ) -> None:
        self._knowledge = knowledge
        self._leave = leave
        self._judge = judge
        self._judge_held = judge_held
        self._lost = lost
        # The packets on their way to the log that others are judged by, and the lanes that wait for them.
        self._changing: dict[_Change, PublishRequest] = {}
        self._barred: dict[_Change, dict[Lane, None]] = {}
        # The lanes that wait no more: a thousand sessions may publish for an author whose keys change.
        self._unbarred: CrowdWork[Lane] = CrowdWork(slices, self.let_out, faults, after=on_flush)

    def advance_from(self, request: PublishRequest) -> None:
        """Let requests leave the lane, if this one stands first. Never raises.

        An earlier request of the same batch may have taken this one along, and left the lane empty.
        """
        lane = request.lane
        if lane.requests and lane.requests[0] is request:
            self.let_out(lane)

    def let_out(self, lane: Lane) -> None:
        """Let the requests that have a verdict leave, in order. Never raises."""
        if lane.is_advancing:
            return
        lane.is_advancing = True
        requests = lane.requests
        while requests and requests[0].verdict in _MOVABLE:
            request = requests[0]
            try:
                if not self._leaves(request):
                    break
            except Exception as error:
                self._lost(request, error)
        if not requests:
            lane.changing.clear()
        lane.is_advancing = False

    def bar(self, request: PublishRequest) -> None:
        """This request enters the log: if it changes keys or a manifest, it bars others until `applied`."""
        packet = request.packet
        if packet.content_type in DECISIVE_TYPES:
            request.change = packet.author_id, _MANIFEST if packet.content_type == CLIENT_MANIFEST else _KEYS
            self._changing[request.change] = request

    def unbar(self, request: PublishRequest) -> None:
        """Let those pass that this request has barred, if any. Never raises."""
        change = request.change
        if change is not None and self._changing.get(change) is request:
            del self._changing[change]
            if lanes := self._barred.pop(change, None):
                self._unbarred.members |= lanes
                self._unbarred.go_on()

    @property
    def is_barring(self) -> bool:
        """Whether any request bars others."""
        return bool(self._changing)

    def overdue(self, since: float) -> list[PublishRequest]:
        """The requests held up only by a bar, and begun before `since`: the first of each lane."""
        firsts = [lane.requests[0] for lanes in self._barred.values() for lane in lanes if lane.requests]
        return [
            request
            for request in dict.fromkeys(firsts)
            if request.started_at <= since and request.verdict in _MOVABLE
        ]

    def applied(self, author: str, digest: bytes) -> None:
        """The feed has applied an identity packet or a manifest: those that wait for it may be judged by it.

        Never raises.
        """
        for kind in (_KEYS, _MANIFEST):
            request = self._changing.get((author, kind))
            if request is not None and request.packet.digest == digest:
                self.unbar(request)

    def _leaves(self, request: PublishRequest) -> bool:
        """Send the first of a lane on its way, or back to be judged by the current keys.

        Returns False if it must stay where it is.
        """
        is_held = request.verdict is PublishVerdict.HELD
        if request.verdict is PublishVerdict.PASSED or is_held or request.is_by_keys:
            if self._changing and (bar := self._bar_before(request.packet)) is not None:
                self._barred.setdefault(bar, {})[request.lane] = None
                return False
            if is_held:
                self._judge_behind(request.lane)
                return True
            if not self._knowledge.is_current(request.packet, request.known):
                request.forget_verdict()
                self._judge(request)
                return True
        request.lane.requests.popleft()
        self._leave(request)
        return True

    def _judge_behind(self, lane: Lane) -> None:
        """Nothing bars the first request any more: have it judged, and those behind it up to the next change
        of any keys."""
        for request in list(lane.requests):
            if request.verdict is PublishVerdict.HELD:
                request.verdict = PublishVerdict.PENDING
                self._judge_held(request)
                if request.packet.content_type in IDENTITY_TYPES:
                    break

    def _bar_before(self, packet: Packet) -> _Change | None:
        """The packet on its way to the log by which this packet is judged."""
        author, others = packet.author_id, needed_dids(packet)
        bars = [(author, _KEYS), *((did, kind) for did in others for kind in (_KEYS, _MANIFEST))]
        if packet.content_type == CLIENT_MANIFEST:  # one at a time, because `_changing` holds one
            bars.append((author, _MANIFEST))
        return next((bar for bar in bars if bar in self._changing), None)
