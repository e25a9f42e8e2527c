"""The chain of manifests of a lake, of which no more is read than is needed.

Finished days have summaries (`lake_format.summary`). If the summaries follow each other and the
later manifests follow the last summary, opening a lake reads only the summaries and those manifests; the
manifests of a summarised day are read, and compared with its summary, when they are needed. If summaries do
not fit, they are ignored and all manifests are read: the manifests are authoritative.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import count, groupby, zip_longest

from strata.protocol.sequences import day_of

from strata_pipeline.errors import LakeError, UsageError
from strata_pipeline.lake.stores.records import Records
from strata_pipeline.lake_format import (
    GENESIS,
    SUMMARIES,
    ChainEnd,
    DaySummary,
    Manifest,
    check_chain,
    check_day,
    check_summaries,
    decode,
    decode_summary,
    encode_summary,
    manifests_of_day,
    summarise,
)

__all__ = ["Chain", "manifest_name"]

_MANIFEST = re.compile(r"\d{10}\.json")
_SUMMARY = re.compile(r"\d{4}-\d\d-\d\d\.json")
_NUMBER = re.compile(r"\d{1,10}")
_HASH = re.compile(r"[0-9a-f]{64}")
_LOOK_AHEAD = 10_000
"""The number of manifests looked for after the end, to distinguish a chain with a hole from one that ends."""


class Chain:
    """The manifests of a lake."""

    def __init__(self, records: Records) -> None:
        self._records = records
        self.sealed: list[DaySummary] = []
        """The summaries of its first days, without gaps."""
        self._stored = 0  # how many of them, from the first, are in the folder
        self.end = ChainEnd()
        self._opened: list[Manifest] = []  # those after the sealed days
        self._whole: list[Manifest] | None = None
        self._is_proven = False
        self._asked: tuple[DaySummary, list[Manifest]] | None = None

    def __getstate__(self) -> dict[str, object]:
        # Tasks read the manifests of the days that they need: all of them would be sent to each.
        return self.__dict__ | {"_whole": None, "_asked": None}

    def load(self, *, whole: bool = False) -> None:
        """Read what opening a lake requires, and check it; with `whole`, all manifests and no summaries.

        Raises `LakeError`.
        """
        self._asked = None
        if whole:
            self.replace(self._listed())
            return
        try:
            sealed = self._summaries()
            before = check_summaries(sealed)
            opened = self._from(before.number) if sealed else self._listed()
            self.end = check_chain(opened, before)
            self.sealed, self._opened, self._whole = sealed, opened, None
            self._stored = len(sealed)
        except LakeError:
            if not self._records.names(SUMMARIES):
                raise
            self.load(whole=True)

    def prove(self) -> None:
        """Read all manifests, one day at a time, and check them. Summaries computed from them replace the
        stored ones, which are not trusted (`summary_faults` compares them). For readers only.

        Raises `LakeError`.
        """
        names = [name for name in self._records.names() if _MANIFEST.fullmatch(name)]
        sealed: list[DaySummary] = []
        end, last = ChainEnd(), list[Manifest]()
        for _, group in groupby(self._stream(names), key=lambda manifest: day_of(manifest.up_to)):
            if last:
                sealed.append(summarise(last, sealed[-1].hash if sealed else GENESIS))
            last = list(group)
            end = check_chain(last, end)
        self.end, self.sealed, self._opened, self._whole = end, sealed, last, None
        self._stored = 0
        self._is_proven, self._asked = True, None

    def all(self) -> list[Manifest]:
        """All manifests. Raises `LakeError` if those of a sealed day differ from its summary."""
        if not self.sealed:
            return self._opened
        if self._whole is None:
            sealed = [one for summary in self.sealed for one in self._of_summary(summary)]
            self._whole = sealed + self._opened
        return self._whole

    def replace(self, manifests: list[Manifest]) -> None:
        """Take another chain as the contents of the folder, without summaries."""
        self.end = check_chain(manifests)
        self.sealed, self._opened, self._whole = [], manifests, None
        self._stored = 0

    def append(self, manifest: Manifest) -> None:
        """Add a manifest that was written. If it ends a day, only the summary of that day, which `seal`
        stores, stays in memory: a writer that runs for months adds millions of manifests."""
        begins_day = bool(self._opened) and day_of(self._opened[-1].up_to) != day_of(manifest.up_to)
        self.end = check_chain([manifest], self.end)
        if self._whole is not None:
            self._whole.append(manifest)
        self._opened.append(manifest)
        if begins_day:
            self._summarise()

    def days(self) -> list[int]:
        """The days of its batches, in order."""
        opened = {day_of(manifest.up_to) for manifest in self._opened}
        return [summary.day for summary in self.sealed] + sorted(opened)

    def of_day(self, day: int) -> list[Manifest]:
        """The manifests of a day. Raises `LakeError` if they differ from its summary."""
        summary = self.summary_of(day)
        if summary is None:
            return manifests_of_day(self._opened, day)
        return self._of_summary(summary) if self._whole is None else manifests_of_day(self._whole, day)

    def summary_of(self, day: int) -> DaySummary | None:
        """The summary of a day; None if it has none."""
        return next((summary for summary in self.sealed if summary.day == day), None)

    def may_have_witnesses(self, day: int) -> bool:
        """Whether a batch of a day may have a file of witnesses."""
        summary = self.summary_of(day)
        return summary is None or summary.witnesses > 0

    def rows_of(self, day: int) -> int:
        """The number of packets of a day, as archived."""
        summary = self.summary_of(day)
        if summary is not None:
            return summary.packets
        return sum(manifest.packets for manifest in manifests_of_day(self._opened, day))

    def quarantined_of(self, day: int) -> int:
        """The number of rows of a day that were quarantined."""
        summary = self.summary_of(day)
        if summary is not None:
            return summary.quarantined
        return sum(manifest.quarantined for manifest in manifests_of_day(self._opened, day))

    def backwards(self) -> Iterator[Manifest]:
        """The manifests, from the last to the first."""
        yield from reversed(self._opened)
        for summary in reversed(self.sealed):
            yield from reversed(self.of_day(summary.day))

    def one(self, number: int) -> Manifest:
        """The manifest with a number. Raises `LakeError` if it cannot be read."""
        return next(iter(self._read([manifest_name(number)])))

    def after(self, tip: str) -> list[Manifest]:
        """The manifests that the chain gained after one, which is named by its hash or its number.

        The tip of an empty lake, 64 zeros, names the beginning. Raises `LakeError` for a tip that is not in
        the chain, and `UsageError` for text that is neither a hash nor a number.
        """
        if tip == GENESIS:
            return list(self.all())
        if not _NUMBER.fullmatch(tip) and not _HASH.fullmatch(tip):
            raise UsageError(
                f"{tip} is not a tip: a tip is 64 lowercase hex digits, or the number of a manifest"
            )
        number = int(tip) if _NUMBER.fullmatch(tip) else None
        gained: list[Manifest] = []
        if number is None or number < self.end.number:
            for manifest in self.backwards():
                if tip == manifest.hash or manifest.number == number:
                    return gained[::-1]
                gained.append(manifest)
        held = f"ends with manifest {self.end.number - 1}" if self.end.number else "is empty"
        raise LakeError(
            f"{tip} is not in the chain, which {held}: the chain was cut off or replaced since, or the "
            "tip is that of another lake. Audit all of it, without --since"
        )

    def seal(self) -> int:
        """Write the summaries of finished days that have none, or none that fits; return how many.

        A day is finished when the chain has begun the next. Raises `LakeError`.
        """
        self._summarise()
        self._records.tidy(SUMMARIES)
        finished = self.sealed[self._stored :]
        for summary in finished:
            # A summary adds no information and can be made again, so one that does not fit is not kept.
            self._records.replace(f"{SUMMARIES}/{summary.name}", encode_summary(summary))
            self._stored += 1
        return len(finished)

    def _summarise(self) -> None:
        """Replace the manifests of each finished day in memory by a summary."""
        for day in self.days()[len(self.sealed) : -1]:
            previous = self.sealed[-1].hash if self.sealed else GENESIS
            summary = summarise(manifests_of_day(self._opened, day), previous)
            self.sealed.append(summary)
            self._opened = self._opened[summary.batches :]
        self._whole = None

    def summary_faults(self) -> list[tuple[str, str]]:
        """The first file of a summary that differs from the manifests, and why; empty if none differs.

        If summaries were used to open the lake, they fitted, and only reading all manifests can show more.
        """
        stored = self.stored_summaries()
        if self.sealed and len(stored) == len(self.sealed) and not self._is_proven:
            return []
        previous, days = GENESIS, self.days()
        for day, name in zip_longest(days, stored):
            if name is None:
                break
            place = self._records.place(f"{SUMMARIES}/{name}")
            why = f"{place} is not the summary of the manifests of its day; compact writes it again"
            try:
                summary = decode_summary(self._records.read(f"{SUMMARIES}/{name}"), name)
            except (LakeError, OSError) as error:
                return [(place, f"{error}; compact writes it again")]
            told = self.summary_of(day) if day is not None and self._is_proven else None
            if day is None or summary != (told or summarise(self.of_day(day), previous)):
                return [(place, why)]
            previous = summary.hash
        return []

    def stored_summaries(self) -> list[str]:
        """The names of summaries, whether or not they fit."""
        return [name for name in self._records.names(SUMMARIES) if _SUMMARY.fullmatch(name)]

    def _summaries(self) -> list[DaySummary]:
        names = self.stored_summaries()
        texts = self._records.read_all(f"{SUMMARIES}/{name}" for name in names)
        try:
            found = [decode_summary(text, name) for text, name in zip(texts, names, strict=True)]
        except OSError as error:
            raise LakeError(f"the lake's summaries cannot be read: {error}") from None
        # A truncated chain must not pass for a complete one, to which a writer may add.
        ends = self._records.all_exist(manifest_name(summary.end.number - 1) for summary in found)
        for summary, is_there in zip(found, ends, strict=True):
            if not is_there:
                raise LakeError(f"the manifests of the lake's summary {summary.name} are missing")
        return found

    def _of_summary(self, summary: DaySummary) -> list[Manifest]:
        """The manifests of a sealed day. Rewriting a day reads them several times, so those of one day are
        cached."""
        if self._asked is None or self._asked[0] != summary:
            self._asked = summary, self._checked(summary)
        return list(self._asked[1])

    def _checked(self, summary: DaySummary) -> list[Manifest]:
        place = self.sealed.index(summary)
        before = self.sealed[place - 1].end if place else ChainEnd()
        numbers = range(summary.first, summary.first + summary.batches)
        manifests = self._read(list(map(manifest_name, numbers)))
        check_day(summary, before, manifests)
        return manifests

    def _from(self, first: int) -> list[Manifest]:
        """The manifests from a number on, without the earlier ones."""
        names = self._records.leading(map(manifest_name, count(first)))
        end = first + len(names)
        if self._records.has_any([manifest_name(one) for one in range(end + 1, end + _LOOK_AHEAD)]):
            raise LakeError(
                f"the lake's manifest {end} cannot be used: it is missing, and those after it prove that "
                "it was there"
            )
        return self._read(names)

    def _listed(self) -> list[Manifest]:
        return self._read([name for name in self._records.names() if _MANIFEST.fullmatch(name)])

    def _read(self, names: Sequence[str]) -> list[Manifest]:
        return list(self._stream(names))

    def _stream(self, names: Sequence[str]) -> Iterator[Manifest]:
        texts = self._records.read_all(names)
        try:
            for text, name in zip(texts, names, strict=True):
                yield decode(text, name)
        except OSError as error:
            raise LakeError(f"the lake's manifests cannot be read: {error}") from None


def manifest_name(number: int) -> str:
    """The name of a manifest's file in the chain."""
    return f"{number:010}.json"
