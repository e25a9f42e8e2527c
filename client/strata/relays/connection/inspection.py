"""The checks on every received packet, before a program sees it: no I/O, no clock."""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

import enum
from collections import OrderedDict
from typing import Final, Literal, NamedTuple

import msgspec

from strata.protocol.errors import ErrorCode, InvalidPacket
from strata.protocol.packets import Packet, id_holds, observed_at
from strata.relays.connection.keyring import KeyRing
from strata.relays.connection.options import Options
from strata.relays.connection.queue import QueuedEvent
from strata.relays.connection.values import Delivery, Query, Statistics

__all__ = ["KEYS_WANTED", "Candidate", "Collector", "Inspector", "author_of"]


class _Verdict(enum.Enum):
    KEYS_WANTED = enum.auto()


KEYS_WANTED: Final = _Verdict.KEYS_WANTED
"""The relay must be asked for the author's keys before the packet can be judged."""

_TAMPERED = frozenset({None, "packet_id_mismatch"})
"""Details of `invalid_signature` that mean: these are not the bytes that the author signed."""


class Candidate(NamedTuple):
    """A wanted and new packet whose form and id are valid; its signature has not been checked yet."""

    event: QueuedEvent
    packet: Packet
    origin_type: str | None


class Inspector:
    """Checks the events of one subscription; a packet that fails is dropped and counted, never delivered.

    Call `read` and then `judge`, or `inspect` for both at once. With a `KeyRing` an author's key events are
    applied first (R-075); without one, only the key in the author's DID counts. The inspector remembers the
    ids of the last `Options.dedup_packets` packets it passed, about 150 bytes each. When the stream has gone
    back, it keeps those that it remembers then: what comes again comes in the old order, and would push out
    each of them before its turn.
    """

    def __init__(
        self, query: Query, options: Options, statistics: Statistics, keys: KeyRing | None = None
    ) -> None:
        self._query = query
        self._window = options.dedup_packets
        self._statistics = statistics
        self._keys = keys
        self._seen: OrderedDict[bytes, None] = OrderedDict()
        self._turn = 0
        self._before_turn: frozenset[bytes] = frozenset()

    def inspect(self, event: QueuedEvent) -> Delivery | None:
        """The event as a delivery, or None if it must not be delivered. Takes about 80 µs, mostly crypto.

        Only for an inspector without a key ring, which never needs to ask for keys.
        """
        candidate = self.read(event)
        delivery = None if candidate is None else self.judge(candidate)
        assert delivery is not KEYS_WANTED
        return delivery

    def read(self, event: QueuedEvent) -> Candidate | None:
        """The event's packet, if it is intact, new and wanted: every check except the signature."""
        try:
            packet, origin_type = _restore(event)  # recomputes the id
        except InvalidPacket as error:
            self._count(error)
            if error.code is ErrorCode.INVALID_SCHEMA:
                # Malformed by our rules: the author's doing if the id is right, the relay's if not.
                self._statistics.events_forged += not id_holds(bytes(event.packet))
            return None
        if event.turn != self._turn:
            self._turn, self._before_turn = event.turn, frozenset(self._seen)
        # Before the signature, which costs eight times as much as everything else. The id was recomputed and
        # the remembered packet was verified, so a forged signature cannot hide a packet from us.
        if packet.digest in self._seen or packet.digest in self._before_turn:
            self._remember(packet)
            self._statistics.events_repeated += 1
            return None
        if not self._query.matches(packet, event.received_at, by_receipt=event.by_receipt):
            self._statistics.events_unasked += 1
            return None
        return Candidate(event, packet, origin_type)

    def judge(self, candidate: Candidate) -> Delivery | Literal[_Verdict.KEYS_WANTED] | None:
        """The packet as a delivery, None if it must not be delivered, or `KEYS_WANTED`."""
        packet, event = candidate.packet, candidate.event
        try:
            if not self._verify(candidate):
                return KEYS_WANTED
        except InvalidPacket as error:
            self._count(error)
            return None
        self._remember(packet)
        self._statistics.events_delivered += 1
        return Delivery(packet, event.received_at, event.cursor, event.live, candidate.origin_type)

    def _remember(self, packet: Packet) -> None:
        self._seen[packet.digest] = None
        self._seen.move_to_end(packet.digest)
        if len(self._seen) > self._window:
            self._seen.popitem(last=False)

    def _verify(self, candidate: Candidate) -> bool:
        """Check the packet as of its time of receipt (R-336, R-337); False if keys are wanted first."""
        packet, event = candidate.packet, candidate.event
        if self._keys is not None:
            return self._keys.verify(packet, event.received_at, event.arrived_at)
        packet.verify(now=observed_at(packet, event.received_at))
        return True

    def _count(self, error: InvalidPacket) -> None:
        if error.code is ErrorCode.PACKET_EXPIRED:
            self._statistics.events_expired += 1
        elif error.code is ErrorCode.INVALID_SIGNATURE and error.detail in _TAMPERED:
            self._statistics.events_tampered += 1
            self._statistics.events_forged += error.detail == "packet_id_mismatch"
        else:
            self._statistics.events_invalid += 1


class Collector(Inspector):
    """Passes on packets that are intact, new and wanted; the caller checks the signatures."""

    def _verify(self, candidate: Candidate) -> bool:
        return True


class _Authored(msgspec.Struct, gc=False):
    author_id: str


_AUTHORED = msgspec.json.Decoder(_Authored)


def author_of(event: QueuedEvent) -> str | None:
    """The author that an event claims, unchecked; None if the event cannot be read."""
    try:
        return _AUTHORED.decode(event.packet).author_id
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def _restore(event: QueuedEvent) -> tuple[Packet, str | None]:
    """The packet as its author signed it, and the origin it may be credited with (R-209, R-212)."""
    try:
        packet = Packet.read(event.packet)
        if event.annotations is None and packet.value.get("provenance_header") is None:
            return packet, None
    except InvalidPacket as error:
        if error.detail != "packet_id_mismatch":
            raise
    # Loaded when the first packet claims an origin: most programs never receive one.
    from strata.protocol.provenance.serving import restore

    return restore(event.packet, event.annotations)
