"""What was promised and what was seen: the judge of a run.

Core: it receives all events with their sources, and keeps the list of broken promises.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence, Set

__all__ = ["Ledger", "Reading"]

_SHOWN = 3


class Reading:
    """One reader of the whole log: the packets it got, in order, and the cursor after the last."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.packets: list[str] = []
        self.cursor: str | None = None
        self.told_of = 0
        """The number of restored backups when this reader learned that the log had lost its end."""
        self._seen: set[str] = set()

    def __len__(self) -> int:
        return len(self.packets)

    def take(self, packet_id: str, cursor: str) -> bool:
        """Record a packet; returns False if this reader already had it."""
        is_new = packet_id not in self._seen
        self._seen.add(packet_id)
        self.packets.append(packet_id)
        self.cursor = cursor
        return is_new

    def go_back(self, kept: Set[str], cursor: str | None) -> None:
        """Forget the packets that the log has lost, or everything if there is no place to continue from."""
        self.packets = [packet for packet in self.packets if packet in kept] if cursor else []
        self._seen = set(self.packets)
        self.cursor = cursor

    def missing(self, packets: Iterable[str]) -> list[str]:
        """The packets among these that this reader has not received."""
        return [packet for packet in packets if packet not in self._seen]


class Ledger:
    """What publishers were promised, what readers got, and which promises were broken."""

    def __init__(self) -> None:
        self.acknowledged: dict[str, int] = {}
        """Packet id to the `received_at` of its OK."""
        self.readings: list[Reading] = []
        self.broken: list[str] = []
        """One sentence for each broken promise; the first few of a kind stand for all."""
        self.checked: Counter[str] = Counter()
        """The number of operations checked, by kind."""
        self._times: dict[str, int] = {}
        self.refused: Counter[str] = Counter()
        """The number of requests refused, by code. A refusal promises nothing."""

        self.restored = 0
        """The number of backups restored."""
        self.lost = 0
        """The number of acknowledged packets that were not in a backup, and were lost with the log's end."""
        self._kept: Set[str] = frozenset()

    def restore(self, kept: Set[str]) -> None:
        """A backup with exactly these packets was restored: only these still count as acknowledged."""
        self.restored += 1
        self._kept = kept
        self.lost += len(self.acknowledged.keys() - kept)
        self.acknowledged = {name: at for name, at in self.acknowledged.items() if name in kept}
        self._times = {name: at for name, at in self._times.items() if name in kept}

    def log_reset(self, reading: Reading, cursor: str | None) -> None:
        """A reader learned that its log has lost its end, and where to continue."""
        self.checked["log reset"] += 1
        if reading.told_of == self.restored:
            self.breaks("a reader was told of a loss that never was", reading.name)
        reading.told_of = self.restored
        reading.go_back(self._kept, cursor)

    def breaks(self, promise: str, *details: object) -> None:
        """Record a broken promise."""
        self.broken.append(": ".join([promise, *map(str, details)]))

    def reading(self, name: str) -> Reading:
        """A new reader."""
        reading = Reading(name)
        self.readings.append(reading)
        return reading

    def ok(self, packet_id: str, received_at: int) -> None:
        """A publisher received an OK."""
        self.checked["publish"] += 1
        self.acknowledged[packet_id] = received_at
        self._timed(packet_id, received_at)

    def _timed(self, packet_id: str, received_at: int) -> None:
        known = self._times.setdefault(packet_id, received_at)
        if known != received_at:
            self.breaks("received_at of a packet changed", packet_id, f"{known} and {received_at}")

    def event(self, reading: Reading, packet_id: str, received_at: int, cursor: str) -> None:
        """A reader of the whole log got a packet."""
        self.checked["event"] += 1
        if not reading.take(packet_id, cursor):
            self.breaks("a packet was delivered twice", f"to {reading.name}", packet_id)
        self._timed(packet_id, received_at)

    def page_walk(self, asked: Iterable[str], packets: Sequence[str]) -> None:
        """A reader paged through the log, after these packets were acknowledged."""
        self.checked["page walk"] += 1
        got = set(packets)
        if len(got) != len(packets):
            self.breaks("a page repeated a packet", len(packets) - len(got))
        for packet_id in [packet for packet in asked if packet not in got][:_SHOWN]:
            self.breaks("pages left out an acknowledged packet", packet_id)

    def by_id(self, packet_id: str, status: int) -> None:
        """A GET of a packet that was acknowledged, and not lost since, was answered."""
        self.checked["get by id"] += 1
        if status == 404:
            self.breaks("an acknowledged packet was not found", packet_id)

    def close(self, log: Sequence[str]) -> None:
        """All is quiet, and a new reader got this log: compare it with everything recorded before."""
        self.page_walk(self.acknowledged, log)
        for reading in self.readings:
            self.checked["reader"] += 1
            if reading.packets != list(log):
                missing = reading.missing(log)
                what = f"{len(reading)} of {len(log)} packets, without {missing[:_SHOWN]}"
                self.breaks("a reader's log is not the log", reading.name, what)
