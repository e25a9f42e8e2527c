"""`python -m benches.channel_sds`: what `benches.sds` measures, while changes are recorded for a store.

One sender and one receiver of Scalable Data Sync, without a network; nothing is acknowledged. After each
message the changes are handled in one of three ways: not recorded, taken and dropped, or turned into records
and applied to a state in memory. The differences are the cost of keeping state. The figures are the CPU time
of the last messages before each size; `collector_seconds` of it went to the garbage collector, whose rare
full passes fall into some windows and not into others.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from strata.channels.persistence.interface import StoredState
from strata.channels.persistence.state import sds_changes
from strata.channels.sds import Participant, SdsConfig

__all__ = ["WAYS", "main", "measure_tracked"]

SIZES = (10_000, 100_000)
WAYS = ("untracked", "taken", "stored")
_WINDOW = 2_000
_BATCH = 500
_START_MS = 1_760_000_000_000
_HINT = b"\7" * 32


class _Side:
    def __init__(self, name: str, config: SdsConfig, way: str) -> None:
        self._way = way
        self._state = StoredState()
        self.seconds = 0.0
        self.participant = Participant(
            "room",
            name,
            config,
            now_ms=_START_MS,
            random=random.Random(1).random,
            track_changes=way != "untracked",
        )

    def wrap(self, first: int, end: int) -> list[bytes]:
        wire: list[bytes] = []
        began_at = time.process_time()
        for number in range(first, end):
            now = _START_MS + number
            message = self.participant.wrap(b"%08d" % number + b"." * 112, now, number)
            self._keep()
            wire.append(message.encode())
            self.participant.dispatched(message.message_id, now, _HINT)
            self._keep()
        self.seconds += time.process_time() - began_at
        return wire

    def receive(self, wire: Sequence[bytes], now: int) -> None:
        began_at = time.process_time()
        for data in wire:
            self.participant.receive(data, _START_MS + now, _HINT)
            self.participant.events()
            self._keep()
        self.seconds += time.process_time() - began_at

    def _keep(self) -> None:
        if self._way == "taken":
            self.participant.changes()
        elif self._way == "stored":
            self._state.apply(sds_changes(self.participant.changes()))


class _Collector:
    """The CPU seconds that garbage collections have taken."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._began_at = 0.0

    def __call__(self, phase: str, _: dict[str, int]) -> None:
        now = time.process_time()
        if phase == "start":
            self._began_at = now
        else:
            self.seconds += now - self._began_at


def measure_tracked(sizes: Sequence[int], way: str) -> Iterator[dict[str, Any]]:
    """Rates at each size of history, with changes kept in one of the `WAYS`."""
    largest = max(sizes)
    config = SdsConfig(
        max_history=largest, max_known_ids=largest, max_unacknowledged=largest, max_history_bytes=1 << 40
    )
    collector = _Collector()
    gc.callbacks.append(collector)
    sender, receiver = _Side("alice", config, way), _Side("bob", config, way)
    done = 0

    def run(until: int) -> None:
        nonlocal done
        while done < until:
            end = min(done + _BATCH, until)
            receiver.receive(sender.wrap(done, end), end)
            done = end

    try:
        for size in sizes:
            window = min(_WINDOW, size // 2)
            run(size - window)
            before = sender.seconds, receiver.seconds, collector.seconds
            run(size)
            yield {
                "changes": way,
                "messages": size,
                "wraps_per_second": window / (sender.seconds - before[0]),
                "receives_per_second": window / (receiver.seconds - before[1]),
                "collector_seconds": collector.seconds - before[2],
            }
    finally:
        gc.callbacks.remove(collector)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print JSON lines."""
    parser = argparse.ArgumentParser(prog="python -m benches.channel_sds", description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--output", type=Path, help="file for the figures, as JSON")
    options = parser.parse_args(arguments)
    figures = []
    for way in WAYS:
        for figure in measure_tracked(sorted(options.sizes), way):
            figures.append(figure)
            print(json.dumps(figure), flush=True)
    if options.output is not None:
        options.output.write_text(json.dumps(figures, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
