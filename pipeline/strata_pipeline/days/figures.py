"""The figures of one day, and the folder that keeps them from one report to the next."""

from __future__ import annotations

import datetime
import re
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from strata_pipeline.errors import UsageError
from strata_pipeline.lake import files

__all__ = [
    "AUTHORS",
    "DayFigures",
    "KindTotals",
    "calendar",
    "forget_changed",
    "keep_days",
    "kept",
    "week_of",
]

_FORMAT = 2
AUTHORS = 12
"""The binary logarithm of the size of a sketch of authors: 4 KiB, with an error of about 1.6 %."""


class KindTotals(msgspec.Struct, frozen=True):
    """The number and total size of the packets of one kind."""

    packets: int
    size: int


class DayFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of one day of a lake. All can be added up except `authors`; `sketch` and `sample` are for
    that."""

    format: int = _FORMAT
    day: str
    tip: str
    """The day's mark (`LakeState.mark_of`): a different one means that the day has changed."""
    kinds: dict[str, KindTotals]
    origins: dict[str, int]
    """Packets with media by the origin that they claim, or `not proven`."""
    lags: dict[int, int]
    """Packets by the seconds from the author's timestamp to the receipt, in the buckets of `days.lags`."""
    skews: dict[int, int]
    """Authors by their least number of these seconds in the day. Networks only add to it, so it shows clock
    errors."""
    authors: int
    sketch: bytes
    """A HyperLogLog sketch of the authors, as Spark's `hll_sketch_agg` makes it."""
    sample: bytes
    """The least hashes of authors (`days.cohorts`) in ascending order, 8 bytes each: all, or `SAMPLED`."""
    quarantined: dict[str, int]
    """Quarantined rows by reason."""

    @property
    def packets(self) -> int:
        """The number of all packets."""
        return sum(kind.packets for kind in self.kinds.values())

    @property
    def size(self) -> int:
        """The size of all bodies, in bytes."""
        return sum(kind.size for kind in self.kinds.values())


_DECODER = msgspec.json.Decoder(DayFigures)
_FILE = re.compile(r"\d{4}-\d\d-\d\d\.json")


def kept(folder: Path, day: str, tip: str) -> DayFigures | None:
    """The figures of a day that an earlier report has kept; None unless they are of this state of the day."""
    try:
        found = _DECODER.decode((folder / f"{day}.json").read_bytes())
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return None
    return found if (found.format, found.day, found.tip) == (_FORMAT, day, tip) else None


def keep_days(folder: Path, days: Iterable[DayFigures]) -> None:
    """Keep days for the next report. Raises `UsageError` if the folder cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for figures in days:
            text = msgspec.json.format(msgspec.json.encode(figures), indent=1)
            files.replace(folder / f"{figures.day}.json", text)
    except OSError as error:
        raise UsageError(f"{folder} cannot be written: {error.strerror or error}") from None


def forget_changed(folder: Path, mark_of: Callable[[str], str]) -> dict[str, DayFigures]:
    """The kept figures of days whose mark is still the same, by day. Those of other days are removed, because
    something may have been erased from these and a later report may never look at them. Drafts of killed
    reports are removed too. Raises `UsageError` as above."""
    current: dict[str, DayFigures] = {}
    try:
        files.remove_drafts(folder, lambda name: _FILE.fullmatch(name) is not None)
        for file in folder.glob("????-??-??.json"):  # other files are not ours
            figures = kept(folder, file.stem, mark_of(file.stem))
            if figures is None:
                file.unlink(missing_ok=True)
            else:
                current[file.stem] = figures
    except OSError as error:
        raise UsageError(f"{folder} cannot be written: {error.strerror or error}") from None
    return current


def calendar(first: str, last: str) -> list[str]:
    """All days from one to another, both included."""
    begin, end = map(datetime.date.fromisoformat, (first, last))
    return [str(begin + datetime.timedelta(n)) for n in range((end - begin).days + 1)]


def week_of(day: str) -> str:
    """The ISO 8601 week of a day: 2026-W47."""
    year, week, _ = datetime.date.fromisoformat(day).isocalendar()
    return f"{year}-W{week:02}"
