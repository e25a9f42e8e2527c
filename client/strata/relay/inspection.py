"""What every received packet goes through before anyone sees it: no I/O, no clock."""

from __future__ import annotations

from collections import OrderedDict

from strata.errors import ErrorCode, InvalidPacket
from strata.packets import Packet, observed_at
from strata.relay.options import Options
from strata.relay.subscribing import QueuedEvent
from strata.relay.values import Delivery, Query, Statistics

__all__ = ["Inspector"]


class Inspector:
    """Checks the events of one subscription; a packet that fails is dropped and counted, never handed on.

    It remembers the last `Options.dedup_packets` ids it passed, about 150 bytes each.
    """

    def __init__(self, query: Query, options: Options, statistics: Statistics) -> None:
        self._query = query
        self._window = options.dedup_packets
        self._statistics = statistics
        self._seen: OrderedDict[bytes, None] = OrderedDict()

    def inspect(self, event: QueuedEvent) -> Delivery | None:
        """The event as a delivery, or None if it must not be handed on. Takes about 80 µs, mostly crypto."""
        statistics = self._statistics
        try:
            packet = Packet.parse(event.packet, media_needs_header=False)  # recomputes the id
        except InvalidPacket:
            statistics.events_invalid += 1
            return None
        # Before the signature, which costs eight times more than all the rest. The id is recomputed and the
        # one remembered was verified, so a forged signature cannot hide a packet from us.
        if packet.digest in self._seen:
            self._seen.move_to_end(packet.digest)
            statistics.events_repeated += 1
            return None
        if not self._query.matches(packet, event.received_at):
            statistics.events_unasked += 1
            return None
        try:
            # judged at the time of receipt.
            packet.verify(now=observed_at(packet, event.received_at))
        except InvalidPacket as error:
            if error.code is ErrorCode.PACKET_EXPIRED:
                statistics.events_expired += 1
            else:
                statistics.events_invalid += 1
            return None
        self._seen[packet.digest] = None
        if len(self._seen) > self._window:
            self._seen.popitem(last=False)
        statistics.events_delivered += 1
        return Delivery(packet, event.received_at, event.cursor, event.live)
