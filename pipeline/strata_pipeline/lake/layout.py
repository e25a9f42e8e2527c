"""The folders of a lake on a disk.

packets/day=2026-11-21/batch=<first>-<last>/kind=POST/part-….parquet
quarantine/day=2026-11-21/batch=<first>-<last>/part-….parquet
_manifests/0000000000.json, 0000000001.json, …
_manifests/days/2026-11-21.json                       summaries of finished days
_staging/batch=…, _staging/day=…, _staging/erasure    what is being written
generations/day=2026-11-21/<Unix seconds>             a link to each set of files of a day (see `day_links`)
_retired/day=2026-11-21.<Unix seconds>                files of a day that were replaced
_aside/                                               visible folders that belonged to no manifest
_erased/0000000000.json, 0000000000.jsonl             what was erased since (see `erasures`)
_witnesses/0000000000-<hash>.csv                      when other relays received packets (see `witnesses`)
_searched/erased.json                                 what need not be searched again (see `searched`)
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Self

from strata.protocol.sequences import Span, day_text

from strata_pipeline.lake import files
from strata_pipeline.lake.chain import manifest_name
from strata_pipeline.lake.day_links import DayLinks
from strata_pipeline.lake.erasures import Erasures
from strata_pipeline.lake.state import LakeState
from strata_pipeline.lake.stores.records import DiskRecords
from strata_pipeline.lake.witnesses import Witnesses
from strata_pipeline.lake_format import WITNESSES, Manifest, encode, witnesses_name

__all__ = [
    "BATCH",
    "STAGED_MANIFEST",
    "STAGED_WITNESSES",
    "Folders",
    "LakeLayout",
    "batch_path",
    "is_stray",
    "is_visible",
    "listed",
    "span_of",
    "span_over",
]

STAGED_MANIFEST = "manifest.json"
"""The name of a batch's manifest in `_staging`."""

STAGED_WITNESSES = "witnesses.csv"
"""The name of a batch's file of witnesses in `_staging`."""

BATCH = re.compile(r"batch=(\d+)-(\d+)")
_DAY = re.compile(r"day=\d{4}-\d\d-\d\d")


class Folders(NamedTuple):
    """The folders that hold consecutive batches."""

    packets: list[Path]
    quarantine: list[Path]

    @classmethod
    def below(cls, folder: Path) -> Self:
        """The folders below a folder that is laid out like a lake."""
        return cls(*(sorted((folder / root).glob("day=*/batch=*"), key=span_of) for root in cls._fields))


class LakeLayout(LakeState):
    """A lake's folders."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.packets = root / "packets"
        self.quarantine = root / "quarantine"
        self.manifests_folder = root / "_manifests"
        self.staging = root / "_staging"
        self.retired = root / "_retired"
        self.aside = root / "_aside"
        self.erased = root / "_erased"
        self.witnesses_folder = root / WITNESSES
        self.links = DayLinks(root)
        super().__init__(
            str(root),
            DiskRecords(self.manifests_folder),
            Erasures(DiskRecords(self.erased)),
            Witnesses(DiskRecords(self.witnesses_folder)),
        )

    def publish(self, manifest: Manifest) -> None:
        """Put the staged folders and witnesses of a batch in place, and append its sealed manifest to the
        chain."""
        staged, day = self.staged_batch(manifest.span), self.day_folder(manifest.span.day).name
        if (staged / self.packets.name).exists() and self.links.newest(day) is None:
            self.links.current(day)  # first: whoever reads by links must not miss a day
        for root in (self.packets, self.quarantine):
            if (staged / root.name).exists():
                files.place(staged / root.name, root / batch_path(manifest.span))
        if (staged / STAGED_WITNESSES).exists():
            files.settle(staged / STAGED_WITNESSES, self.witnesses_folder / witnesses_name(manifest))
        files.write_new(self.manifests_folder / manifest_name(manifest.number), encode(manifest))
        self.chain.append(manifest)
        self.discard(manifest.span)

    def staged_batch(self, span: Span) -> Path:
        """The folder of a batch in `_staging`."""
        return self.staging / f"batch={span}"

    @property
    def staged_erasure(self) -> Path:
        """The folder of an erasure in `_staging`."""
        return self.staging / "erasure"

    def discard(self, span: Span) -> None:
        """Remove the staged folder of a batch."""
        files.remove(self.staged_batch(span))
        files.remove_if_empty(self.staging)

    def day_folder(self, day: int) -> Path:
        """The folder of a day's packets."""
        return self.packets / f"day={day_text(day)}"

    def folders_of_day(self, root: Path, day: int) -> list[Path]:
        """The folders of batches in a day's folder below `packets` or `quarantine`, sorted by name."""
        folders = listed(root / f"day={day_text(day)}")
        return [folder for folder in folders if BATCH.fullmatch(folder.name) and folder.is_dir()]

    def day(self, day: int) -> Folders:
        """The folders of batches of a day, sorted by name."""
        return Folders(*(self.folders_of_day(root, day) for root in (self.packets, self.quarantine)))

    def folders_of(self, span: Span) -> Folders:
        """The folders that hold the packets and quarantined rows of a batch: its own, or that of its day."""
        return Folders(*([one for one in some if span_of(one).overlaps(span)] for some in self.day(span.day)))

    def batches(self, day: int) -> list[Span]:
        """The spans of a day's folders of packets, in order: one for each batch, or one for all of them."""
        return sorted(span_of(folder) for folder in self.folders_of_day(self.packets, day))

    def batch_folders(self, day: int | None = None) -> list[Path]:
        """Every folder of a batch that readers see, no matter in which day's folder it is; with `day`, only
        those in that day's folder."""
        return [
            batch
            for folder in self._visible(day)
            for batch in listed(folder)
            if BATCH.fullmatch(batch.name) is not None and batch.is_dir()
        ]

    def foreign(self, *, beyond: bool = False, day: int | None = None) -> list[Path]:
        """Folders of batches that no manifest names; with `beyond`, also those after the last manifest, where
        a batch may be in the process of being committed; with `day`, only those in that day's folder."""
        found = []
        told: dict[int, tuple[set[int], set[int]]] = {}
        days = set(self.days())
        for folder in self.batch_folders(day):
            span = span_of(folder)
            is_in_place = folder.parent.name == f"day={day_text(span.day)}"
            is_told = is_in_place and span.day in days and self._tells(span, told)
            if not is_told and (beyond or span.up_to <= self.reached):
                found.append(folder)
        return found

    def _tells(self, span: Span, told: dict[int, tuple[set[int], set[int]]]) -> bool:
        """Whether the chain has a folder of these sequences; `told` caches what it has for the last day that
        was asked for."""
        summary = self.chain.summary_of(span.day)
        if summary is not None and summary.span == span:  # a compacted day
            return True
        if span.day not in told:
            manifests = self.chain.of_day(span.day)
            told.clear()  # after a year there are millions
            told[span.day] = {one.after for one in manifests}, {one.up_to for one in manifests}
        begins, ends = told[span.day]
        return span.after < span.up_to and span.after in begins and span.up_to in ends

    def strays(self, day: int | None = None) -> list[Path]:
        """Everything else that readers see outside the folders of batches; with `day`, only what is in that
        day's folder."""
        found = []
        for folder in self._visible(day):
            if not (folder.is_dir() and _DAY.fullmatch(folder.name)):
                found.append(folder)
                continue
            found += filter(is_stray, listed(folder))
        return found

    def _visible(self, day: int | None) -> list[Path]:
        """What readers see directly below `packets` and `quarantine`, or the folders of a day there."""
        roots = (self.packets, self.quarantine)
        if day is not None:
            name = self.day_folder(day).name
            return [root / name for root in roots if (root / name).exists()]
        return [one for root in roots for one in listed(root) if is_visible(one.name)]


def listed(folder: Path) -> Sequence[Path]:
    """The contents of a folder, sorted by name; empty if there is no such folder."""
    return sorted(folder.iterdir()) if folder.is_dir() else []


def is_stray(path: Path) -> bool:
    """Whether something in the folder of a day is no batch, and some reader sees it."""
    is_batch = path.is_dir() and BATCH.fullmatch(path.name) is not None
    return not is_batch and (is_visible(path.name) or _has_parquet(path))


def is_visible(name: str) -> bool:
    """Whether most readers of Parquet look at a file or folder with this name. Spark takes `_a=b` for a
    partition, and columns from files with the names that summaries of a folder once had."""
    is_hidden = name.startswith(".") or (name.startswith("_") and "=" not in name)
    return not is_hidden or name.startswith(("_metadata", "_common_metadata"))


def _has_parquet(path: Path) -> bool:
    """Whether DuckDB or Polars reads something here even though the name hides it from other readers."""
    return path.suffix == ".parquet" or next(path.rglob("*.parquet"), None) is not None


def batch_path(span: Span) -> Path:
    """The place of a batch below `packets` or `quarantine`."""
    return Path(f"day={day_text(span.day)}", f"batch={span}")


def span_over(batches: Sequence[Manifest | Span]) -> Span:
    """The span of consecutive batches."""
    return Span(batches[0].after, batches[-1].up_to)


def span_of(folder: Path) -> Span:
    """The span in the name of a batch's folder."""
    match = BATCH.fullmatch(folder.name)
    assert match is not None
    return Span(int(match[1]) - 1, int(match[2]))
