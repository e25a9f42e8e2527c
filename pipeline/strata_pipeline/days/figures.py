"""The figures of one day, and the folder that keeps them from one report to the next."""

from __future__ import annotations

import datetime
import re
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from strata_pipeline.errors import UsageError
from strata_pipeline.lake import files

__all__ = ["AUTHORS", "DayFigures", "Kind", "calendar", "forget_changed", "keep_days", "kept", "week_of"]

_FORMAT = 2
AUTHORS = 12
"""The binary logarithm of the size of a sketch of authors: 4 KiB, and 1.6 % from the truth."""


class Kind(msgspec.Struct, frozen=True):
    """What packets of one kind there were."""

    packets: int
    size: int


class DayFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of one day of a lake. All add up but `authors`, which `sketch` and `sample` are for."""

    format: int = _FORMAT
    day: str
    tip: str
    """The day's mark (`LakeState.mark_of`): another one means that the day has changed."""
    kinds: dict[str, Kind]
    origins: dict[str, int]
    """Packets with media by what they claim of their origin, or `not proven`."""
    lags: dict[int, int]
    """Packets by the seconds from the author's timestamp to the receipt, in buckets of `days.lags`."""
    skews: dict[int, int]
    """Authors by the least of these seconds in the day. No network makes them less: they tell of clocks."""
    authors: int
    sketch: bytes
    """A HyperLogLog sketch of the authors, as Spark's `hll_sketch_agg` makes it."""
    sample: bytes
    """The least hashes of authors (`days.cohorts`) in ascending order, 8 bytes each: all, or `SAMPLED`."""
    quarantined: dict[str, int]
    """Rows in quarantine by reason."""

    @property
    def packets(self) -> int:
        """All packets."""
        return sum(kind.packets for kind in self.kinds.values())

    @property
    def size(self) -> int:
        """The bytes of all bodies."""
        return sum(kind.size for kind in self.kinds.values())


_DECODER = msgspec.json.Decoder(DayFigures)
_FILE = re.compile(r"\d{4}-\d\d-\d\d(\.json)?")
"""A day, by which earlier versions named their drafts, or its file."""


def kept(folder: Path, day: str, tip: str) -> DayFigures | None:
    """What an earlier report has kept of a day; None unless it is of this very day of the lake."""
    try:
        found = _DECODER.decode((folder / f"{day}.json").read_bytes())
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return None
    return found if (found.format, found.day, found.tip) == (_FORMAT, day, tip) else None


def keep_days(folder: Path, days: Iterable[DayFigures]) -> None:
    """Keep days for the next report. Raises `UsageError` where the folder cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for figures in days:
            text = msgspec.json.format(msgspec.json.encode(figures), indent=1)
            files.replace(folder / f"{figures.day}.json", text)
    except OSError as error:
        raise UsageError(f"{folder} cannot be written: {error.strerror or error}") from None


def forget_changed(folder: Path, mark_of: Callable[[str], str]) -> dict[str, DayFigures]:
    """What is kept of days whose mark is still the same, by day. What is kept of others is removed: something
    may have been erased from them, and no later report need ask for them. What killed reports were writing
    goes as well. Raises `UsageError` as above."""
    current: dict[str, DayFigures] = {}
    try:
        files.remove_drafts(folder, lambda name: _FILE.fullmatch(name) is not None)
        for file in folder.glob("????-??-??.json"):  # whatever else is there is not ours
            figures = kept(folder, file.stem, mark_of(file.stem))
            if figures is None:
                file.unlink(missing_ok=True)
            else:
                current[file.stem] = figures
    except OSError as error:
        raise UsageError(f"{folder} cannot be written: {error.strerror or error}") from None
    return current


def calendar(first: str, last: str) -> list[str]:
    """All days from one to another."""
    begin, end = map(datetime.date.fromisoformat, (first, last))
    return [str(begin + datetime.timedelta(n)) for n in range((end - begin).days + 1)]


def week_of(day: str) -> str:
    """The week of a day, as ISO 8601 names it: 2026-W47."""
    year, week, _ = datetime.date.fromisoformat(day).isocalendar()
    return f"{year}-W{week:02}"
