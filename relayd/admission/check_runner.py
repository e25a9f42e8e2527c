"""The checks of one PUBLISH, on its own: its bytes, then its signature and all that follows.

They run on threads; for usual packets, the first of them run on the loop. `pipeline` says which runs where,
and `checks` defines each check. This module holds what the checks are run with, and records their outcome in
the request.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from strata.protocol import canonical
from strata.protocol.errors import InvalidPacket
from strata.protocol.packets import Packet
from strata.protocol.provenance import ProvenanceTrust

from relayd import failpoints
from relayd.admission.checks import judge, require_chain_room, require_room, trace, weigh
from relayd.admission.limits import AdmissionLimits
from relayd.admission.origin import witness_of
from relayd.admission.parsing_apart import ApartParser
from relayd.admission.request import PublishRequest, PublishVerdict
from relayd.policy import Policy

__all__ = ["Checker", "is_dear"]

_LARGE_BYTES: Final = 16_384
_MANY_VALUES: Final = 512
"""A packet above either limit is parsed off the loop, and one with this many values in a separate process:
its canonical form may take milliseconds."""
_SMALL_BYTES: Final = 2048
"""A packet up to this size is parsed faster than its values are counted."""


def is_dear(raw: bytes) -> bool:
    """Whether parsing this packet may take milliseconds."""
    return len(raw) > _LARGE_BYTES or _has_many_values(raw)


def _has_many_values(raw: bytes) -> bool:
    return len(raw) > _SMALL_BYTES and canonical.most_values(raw) > _MANY_VALUES


class Checker:
    """Checks requests, from any thread. `policy` and `trust` may be replaced at any time.

    Packets of many values are parsed by `apart`, or in the calling thread if that is None.
    """

    def __init__(
        self,
        policy: Policy,
        trust: ProvenanceTrust,
        *,
        limits: AdmissionLimits,
        clock: Callable[[], int],
        apart: ApartParser | None,
    ) -> None:
        self.policy = policy
        self.trust = trust
        self._limits = limits
        self._clock = clock
        self._apart = apart

    def check(self, request: PublishRequest) -> float:
        """Run checks 5 to 10 on a packet that is not parsed yet; otherwise 11 to 13, by what is `known`.

        Returns the processor time that another process spent on it, in seconds.
        """
        if failpoints.ARMED:
            failpoints.hit("admission.verify")
        if request.is_parsed:
            self._judge(request)
        elif self._apart is not None and _has_many_values(request.raw):
            return self._examine_apart(request, self._apart)
        else:
            self.examine(request)
        return 0.0

    def examine(self, request: PublishRequest) -> None:
        """Run checks 5 to 10."""
        try:
            self._weigh(request, self._limits.parse(request.raw))
        except InvalidPacket as error:
            request.refuse(error)

    def _examine_apart(self, request: PublishRequest, apart: ApartParser) -> float:
        found = apart.parse(request.raw)
        try:
            if isinstance(found.packet, InvalidPacket):
                raise found.packet
            self._weigh(request, found.packet)
        except InvalidPacket as error:
            request.refuse(error)
        return found.seconds

    def _weigh(self, request: PublishRequest, packet: Packet) -> None:
        request.parsed(packet)
        require_room(packet, self._limits.max_identity_bytes)
        origin, now = request.origin, self._clock()
        if origin is not None:
            request.witness = witness_of(packet, origin, now)
        self.weigh(request, now)

    def weigh(self, request: PublishRequest, now: int) -> None:
        """Run checks 9 and 10. Raises `InvalidPacket`."""
        packet, origin = request.packet, request.origin
        request.latest_check = max(request.latest_check, now)
        max_age = self._limits.max_packet_age_seconds
        weigh(packet, self.policy, now, max_age_seconds=max_age, origin=origin, witness=request.witness)

    def judge(self, request: PublishRequest, now: int) -> None:
        """Run checks 11 and 12, and see that there is room, by what is `known`. Raises `InvalidPacket`."""
        # For a packet that another relay accepted at that time, only what was known then counts.
        at, ingest = request.judged_at(now), request.witness is None
        request.latest_check = max(request.latest_check, now)
        request.queued = judge(request.packet, request.known, at, ingest=ingest)
        require_chain_room(request.packet, request.known, self._limits.max_identity_bytes)

    def _judge(self, request: PublishRequest) -> None:
        now = self._clock()
        try:
            self.judge(request, now)
        except InvalidPacket as error:
            request.refuse(error)
            request.is_by_keys = True
            return
        try:
            request.downgrade = trace(request.packet, request.known, self.trust, request.judged_at(now))
        except InvalidPacket as error:
            request.origin_refused(error)
        request.verdict = PublishVerdict.CHECKED
