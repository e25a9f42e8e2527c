"""Packets to be added to a chain: read once, tried once with each key, and sorted by time."""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby

from strata.protocol.errors import InvalidPacket
from strata.protocol.keys.statements import Statement, read_statement
from strata.protocol.packets import Packet, verify_shared

__all__ = ["Entry", "in_seconds", "read_entries"]


class Entry:
    """A packet, its statement, its time of receipt, and the keys with which its signature was tried."""

    __slots__ = ("_tried", "packet", "received_at", "statement")

    def __init__(self, packet: Packet, received_at: int) -> None:
        """Raises `InvalidPacket` as `read_statement` does."""
        self.packet = packet
        self.received_at = received_at
        self.statement: Statement = read_statement(packet)
        self._tried: dict[bytes, bool] = {}

    @property
    def packet_id(self) -> str:
        """The id of the packet."""
        return self.packet.packet_id

    def is_signed_by(self, public_key: bytes) -> bool:
        """Whether the signature verifies under this key; computed once for each key.

        Threads that race here compute the same result twice.
        """
        verdict = self._tried.get(public_key)
        if verdict is None:
            # A relay needs this several times for a packet: when it is judged, stored and applied.
            verdict = verify_shared(self.packet, public_key)
            self._tried[public_key] = verdict
        return verdict


def read_entries(did: str, events: Iterable[tuple[Packet, int]]) -> list[Entry]:
    """The well-formed packets by this author, each once, with the earliest time at which it was received.

    A packet's id does not cover its signature (R-022), so a copy with another signature counts as a different
    packet here: otherwise a forged copy could keep the genuine packet out.
    """
    entries: dict[bytes, Entry] = {}
    for packet, received_at in events:
        known = entries.get(packet.canonical)
        if packet.author_id != did or (known is not None and known.received_at <= received_at):
            continue
        try:
            entries[packet.canonical] = Entry(packet, received_at)
        except InvalidPacket:
            continue
    return list(entries.values())


def in_seconds(entries: Iterable[Entry]) -> Iterator[list[Entry]]:
    """The packets grouped by the second in which they were received, the earliest second first."""
    ordered = sorted(entries, key=lambda entry: entry.received_at)
    for _, second in groupby(ordered, key=lambda entry: entry.received_at):
        yield list(second)
