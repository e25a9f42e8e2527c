"""A lake: packets by day and kind, what was quarantined, and the chain of manifests.

    packets/day=2026-11-21/batch=<first>-<last>/kind=POST/part-….parquet
    quarantine/day=2026-11-21/batch=<first>-<last>/part-….parquet
    _manifests/0000000000.json, 0000000001.json, …
    _staging/                                             the batch that is being written

A batch appears in three steps: it is written into `_staging` and flushed to the disk; it is renamed into
place; its manifest is written. A writer that is killed before the second step leaves nothing. A writer that
is killed before the third leaves a whole batch without a manifest, and `recover` removes it: the log still
has those rows, and the manifests say where to go on. So the chain is the only record of progress, and no
checkpoint beside it can disagree (decision 19).
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from strata.protocol.lake import GENESIS, Manifest, Span, check_chain, day_of, day_text, decode, encode, seal

from strata_pipeline.errors import LakeError, UsageError
from strata_pipeline.lake import files

__all__ = ["Lake"]

_BATCH = re.compile(r"batch=(\d+)-(\d+)")
_MANIFEST = re.compile(r"\d{10}\.json")


class Lake:
    """A lake in a folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.packets = root / "packets"
        self.quarantine = root / "quarantine"
        self.manifests_folder = root / "_manifests"
        self.staging = root / "_staging"
        self.manifests: list[Manifest] = []
        """The chain, as `load` read it and `commit` extends it."""

    @classmethod
    def open(cls, path: str | Path) -> Lake:
        """The lake in a folder, for reading; its chain is checked. Raises `LakeError`, `UsageError`."""
        lake = cls(_local(path))
        if not lake.manifests_folder.is_dir():
            raise LakeError(f"there is no lake in {lake.root}: {lake.manifests_folder.name} is missing")
        lake.load()
        return lake

    @classmethod
    @contextlib.contextmanager
    def write(cls, path: str | Path) -> Iterator[Lake]:
        """The lake in a folder, for writing; it need not exist yet. It is locked against other writers, and
        what an interrupted writer left is removed. Raises `LakeBusy` too."""
        lake = cls(_local(path))
        with files.locked(lake.root / "_lock"):
            lake.load()
            lake.recover()
            yield lake

    @property
    def reached(self) -> int:
        """The sequence up to which the lake holds the log."""
        return self.manifests[-1].up_to if self.manifests else 0

    @property
    def tip(self) -> str:
        """The hash of the last manifest: it stands for the whole contents of the lake."""
        return self.manifests[-1].hash if self.manifests else GENESIS

    def load(self) -> None:
        """Read the chain and check it. Raises `LakeError`."""
        names = sorted(path for path in self._listed(self.manifests_folder) if _MANIFEST.fullmatch(path.name))
        try:
            manifests = [decode(path.read_bytes(), path.name) for path in names]
        except OSError as error:
            raise LakeError(f"the lake's manifests cannot be read: {error}") from None
        check_chain(manifests)
        self.manifests = manifests

    def recover(self) -> list[Path]:
        """Remove what an interrupted writer left, and return its folders. Raises `LakeError`."""
        removed = [self.staging] if self.staging.exists() else []
        files.remove(self.staging)
        for folder in self.foreign(beyond=True):
            if _span_of(folder).up_to <= self.reached:
                raise LakeError(f"{folder} is none of the lake's batches: was it copied here? Move it away")
            files.remove(folder)
            removed.append(folder)
        return removed

    def foreign(self, *, beyond: bool = False) -> list[Path]:
        """Folders that no manifest names; with `beyond`, also those after the last manifest: there a batch
        may be in the making."""
        ends = {manifest.up_to for manifest in self.manifests}
        return [
            folder
            for folder in self._batch_folders(self.packets) + self._batch_folders(self.quarantine)
            if (end := _span_of(folder).up_to) not in ends and (beyond or end <= self.reached)
        ]

    def stage(self, span: Span) -> Path:
        """The folder to write a batch into. It does not exist yet."""
        target = self.staging / f"batch={span}"
        files.remove(target)
        self.staging.mkdir(parents=True, exist_ok=True)
        return target

    def commit(self, manifest: Manifest, packets: Path | None, quarantine: Path | None) -> Manifest:
        """Put a staged batch in place: its folders, then its manifest. Returns the manifest as written."""
        sealed = seal(manifest)
        for source, target in ((packets, self.packets), (quarantine, self.quarantine)):
            if source is not None:
                files.make_durable(source)
                files.place(source, target / _batch_path(sealed.span))
        files.write_new(self.manifests_folder / f"{sealed.number:010}.json", encode(sealed))
        self.manifests.append(sealed)
        files.remove(self.staging)
        return sealed

    def days(self) -> list[int]:
        """The days of which the lake has packets or quarantined rows."""
        return sorted({day_of(manifest.up_to) for manifest in self.manifests})

    def folders_of(self, span: Span) -> list[Path]:
        """The folders that hold the packets and quarantined rows of a batch: its own, or those of its day."""
        day = f"day={day_text(span.day)}"
        return [
            folder
            for root in (self.packets, self.quarantine)
            for folder in self._listed(root / day)
            if _BATCH.fullmatch(folder.name) and _span_of(folder).overlaps(span)
        ]

    def batches(self, day: int) -> list[Span]:
        """The spans of a day's folders of packets, in order: its batches, or one for all of them."""
        folders = self._listed(self.packets / f"day={day_text(day)}")
        return sorted(_span_of(folder) for folder in folders if _BATCH.fullmatch(folder.name))

    def day_folder(self, day: int) -> Path:
        """The folder of a day's packets."""
        return self.packets / f"day={day_text(day)}"

    def _batch_folders(self, root: Path) -> list[Path]:
        return [
            batch
            for day in self._listed(root)
            for batch in self._listed(day)
            if _BATCH.fullmatch(batch.name) is not None
        ]

    def _listed(self, folder: Path) -> Sequence[Path]:
        return sorted(folder.iterdir()) if folder.is_dir() else []


def _batch_path(span: Span) -> Path:
    return Path(f"day={day_text(span.day)}", f"batch={span}")


def _span_of(folder: Path) -> Span:
    match = _BATCH.fullmatch(folder.name)
    assert match is not None
    return Span(int(match[1]) - 1, int(match[2]))


def _local(path: str | Path) -> Path:
    text = str(path)
    if "://" in text and not text.startswith("file://"):
        raise UsageError(
            f"a lake is a folder, not {text}: "
            "mount the storage, or copy the lake there (docs/guides/pipeline.md)"
        )
    return Path(text.removeprefix("file://")).absolute()
