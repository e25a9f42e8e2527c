"""Packets that a peer names and does not send, from one comparison to the next (decision 69).

Once is no proof: between the naming and the request, a packet can be erased or banned there. A peer that
names the packet again in a later comparison, and again does not send it, contradicts itself.
"""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["MOST_REMEMBERED", "Withholding"]

MOST_REMEMBERED = 10_000
"""The number of packets that are remembered of a peer; the oldest are forgotten first."""


class Withholding:
    """The packets that one peer has not sent."""

    def __init__(self) -> None:
        self._before: dict[bytes, None] = {}
        self._now: set[bytes] = set()

    def withheld(self, ids: Iterable[bytes]) -> None:
        """The peer named these packets in this comparison, and answered to the end without them."""
        self._now.update(ids)

    def round_ended(self) -> bool:
        """End a comparison. Returns whether a packet was withheld in it and in an earlier one."""
        now, self._now = self._now, set()
        again = any(packet_id in self._before for packet_id in now)
        for packet_id in now:
            self._before.pop(packet_id, None)
            self._before[packet_id] = None
        while len(self._before) > MOST_REMEMBERED:
            del self._before[next(iter(self._before))]
        return again
