"""The log of a synthetic day, made and archived in portions, as a relay with retention lives.

What is archived leaves the log before the next portion is made: the log never has more than one portion.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

from benches.disk_use import taken
from benches.job_memory import Ran
from benches.pipeline_log import append, forget
from benches.pipeline_packets import Made

__all__ = ["PORTION_ROWS", "DayLog", "InLake"]

PORTION_ROWS = 5_000_000
"""The most packets of the day that the log has at a time."""


@dataclass(slots=True)
class InLake:
    """A day that is archived."""

    runs: list[Ran] = field(default_factory=list)
    """Of the archive: one for each portion."""
    packets: int = 0
    """That all runs together have archived."""
    log_row_bytes: float = 0.0
    """On the disk for each row of the first portion, with its WAL. Later portions find older WAL there."""


@dataclass(frozen=True, slots=True)
class DayLog:
    """A log that gets a day, and a few packets of the next day behind the last portion."""

    url: str
    folder: Path
    day: Made
    after: Made
    say: Callable[[str], None]
    portion_rows: int = PORTION_ROWS
    first: int = 0
    """So many packets of the day were archived before."""

    def archive(self, run: Callable[[], Ran]) -> InLake:
        """Make the packets, and run the archive for each portion."""
        done, began = InLake(), time.perf_counter()
        for part in self._parts():
            self._make(part, done)
            ran = run()
            told = json.loads(ran.told.splitlines()[-1])
            done.runs.append(ran)
            done.packets += told["packets"]
            if part.stop < self.day.rows:
                forget(self.url, told["reached"])
            self._tell(part, ran, time.perf_counter() - began)
        return done

    def _parts(self) -> Iterator[range]:
        rows, portion = self.day.rows, self.portion_rows
        return (range(start, min(start + portion, rows)) for start in range(self.first, rows, portion))

    def _make(self, part: range, done: InLake) -> None:
        began = time.perf_counter()
        append(self.url, self.day, part)
        if part.stop == self.day.rows:
            append(self.url, self.after)
        size, seconds = taken(self.folder), time.perf_counter() - began
        done.log_row_bytes = done.log_row_bytes or size / len(part)
        self.say(f"day: {len(part):,} rows made in {seconds:,.0f} s; the log takes {size / 1e9:,.2f} GB")

    def _tell(self, part: range, ran: Ran, seconds: float) -> None:
        rows, done = self.day.rows - self.first, part.stop - self.first
        left = seconds / done * (rows - done)
        self.say(
            f"day: portion {-(-done // self.portion_rows)} of {-(-rows // self.portion_rows)} archived "
            f"in {ran.seconds:,.1f} s: {done:,} of {rows:,} rows after {_clock(seconds)}, "
            f"{_clock(left)} left until the lake has all"
        )


def _clock(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))
