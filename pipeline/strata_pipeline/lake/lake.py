"""A lake: packets by day and kind, quarantined rows, and the chain of manifests (drawn in `layout`).

A batch appears in four steps: it is written into `_staging` and flushed to the disk; its manifest is written
beside it there; it is renamed into place; its manifest is written into the chain. `recovery` describes what
happens if the writer is killed in between. So the chain is the only record of progress, and no checkpoint
beside it can disagree with it (decisions 19 and 48).

There are three locks: one for the process that adds batches, one for the process that replaces the files of
finished days, and one that readers share. The first two processes touch different folders, so an archive and
a compaction can run side by side.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from strata.protocol.sequences import Span

from strata_pipeline.errors import LakeBusy, LakeError, UsageError
from strata_pipeline.lake import files
from strata_pipeline.lake.checking import Unit, units_of_day
from strata_pipeline.lake.erasure_commit import RECORD
from strata_pipeline.lake.faults import Fault
from strata_pipeline.lake.layout import STAGED_MANIFEST, STAGED_WITNESSES, LakeLayout, span_of
from strata_pipeline.lake.recovery import recover_batches, recover_days
from strata_pipeline.lake.stores.schemes import not_on_a_disk
from strata_pipeline.lake.stores.shelves import MountedDisk
from strata_pipeline.lake_format import Manifest, encode, seal

__all__ = ["Lake"]

_BATCHES_LOCK = "_lock"
_DAYS_LOCK = "_compaction_lock"
_READERS_LOCK = "_readers_lock"


class Lake(LakeLayout):
    """A lake in a folder."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.shelf = MountedDisk()
        self.moved: list[Path] = []
        """The paths in `_aside` to which opening the lake for writing has moved files."""

    @classmethod
    def open(cls, path: str | Path) -> Lake:
        """The lake in a folder, for reading; its chain is checked. Raises `LakeError`, `UsageError`."""
        lake = cls.found(path)
        lake.load()
        return lake

    @classmethod
    def found(cls, path: str | Path) -> Lake:
        """The lake in a folder, not read yet. Raises `LakeError` if there is none, `UsageError`."""
        lake = cls(_local(path))
        if not lake.manifests_folder.is_dir():
            advice = ", bring it back from a copy" if lake.packets.is_dir() else ""
            raise LakeError(
                f"there is no lake in {lake.root}: {lake.manifests_folder.name} is missing{advice}"
            )
        return lake

    @classmethod
    @contextlib.contextmanager
    def write(cls, path: str | Path, *, copying: bool = False) -> Iterator[Lake]:
        """The lake in a folder, for adding batches; it need not exist yet.

        It is locked against other processes that add batches, and what an interrupted writer left is
        completed or moved aside. A compaction may run meanwhile. Raises `LakeBusy`, `UsageError`, and, before
        anything is changed, `LakeError` if folders and chain do not belong together. A half-copied lake,
        which has records of erasures before the batches that they name, is accepted only with `copying`.
        """
        lake = cls(_local(path))
        with files.locked(lake.root / _BATCHES_LOCK):
            # If another process holds that lock, it has recovered the days itself, and is working on them.
            with contextlib.suppress(LakeBusy), files.locked(lake.root / _DAYS_LOCK):
                lake.moved += recover_days(lake)
            lake._make_readers_lock()
            lake.load()
            if lake.is_half_copied and not copying:
                raise LakeError(
                    f"{lake.root} tells of erasures from days that its chain has not reached the end of: the "
                    "lake is being copied, or manifests are missing. Run strata-pipeline copy again, or "
                    f"bring {lake.manifests_folder.name} back from a copy of the lake"
                )
            lake.moved += recover_batches(lake)
            with contextlib.suppress(LakeBusy), files.locked(lake.root / _DAYS_LOCK):
                lake.links.mend()
            yield lake

    @classmethod
    @contextlib.contextmanager
    def replace(cls, path: str | Path) -> Iterator[Lake]:
        """The lake in a folder, for replacing the files of finished days. An archive may run meanwhile.

        Raises `LakeBusy`, `LakeError`, `UsageError`.
        """
        lake = cls(_local(path))
        with files.locked(lake.root / _DAYS_LOCK):
            lake.moved += recover_days(lake)
            lake._make_readers_lock()
            lake.load()
            lake.links.mend()
            yield lake

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Keep files where they are within the block: a compaction waits, or leaves the day to its next run.

        Raises `LakeError` if an erasure was interrupted during its last step.
        """
        with files.shared(self.root / _READERS_LOCK):
            if (self.staged_erasure / RECORD).exists():
                raise LakeError(
                    f"an erasure from {self.root} was cut off: strata-pipeline erase, or compact, or copy, "
                    "finishes it"
                )
            self.erasures.load()
            yield

    def _make_readers_lock(self) -> None:
        """Make the lock's file, which a job that may only read needs but cannot make."""
        (self.root / _READERS_LOCK).touch()

    @contextlib.contextmanager
    def unread(self, patience: float) -> Iterator[None]:
        """Keep others out of `held` within the block. Raises `LakeBusy` after waiting `patience` seconds."""
        with files.unread(self.root / _READERS_LOCK, patience):
            yield

    def contains(self, folder: Path) -> bool:
        """Whether a folder lies in the lake, with all links resolved."""
        root, place = self.root.resolve(), folder.resolve()
        return place == root or root in place.parents

    def written_anew(self) -> list[int]:
        """The days whose files may differ from those that the archive wrote: all, because folders do not show
        it."""
        return self.days()

    def units(self, day: int) -> tuple[list[Unit], list[Fault]]:
        """The batches of a day with their folders, and the faults that show without reading these: none."""
        return units_of_day(self, day, self.erasures.told(self.chain.of_day(day))), []

    @contextlib.contextmanager
    def at_hand(self, manifests: Sequence[Manifest], root: str | None = None) -> Iterator[LakeLayout]:
        """The files of batches on this machine's disk: those of the lake itself."""
        yield self

    @contextlib.contextmanager
    def quarantine_at_hand(self, day: int) -> Iterator[LakeLayout]:
        """The files of a day's quarantined rows on this machine's disk."""
        yield self

    def unexpected(self, days: Sequence[int]) -> tuple[list[Fault], int]:
        """Folders that belong to no batch, and files outside batches, on any day; and 0, because files left
        by interrupted writers are out of sight. An archive may run meanwhile: what it adds is not a fault."""
        found = [
            Fault("folder", "foreign", f"{one} belongs to no manifest: a plain reader would read it")
            for one in self._foreign_now()
        ]
        found += [
            Fault("file", "stray", f"{one} lies outside batches: a plain reader would read it", file=str(one))
            for one in self.strays()
        ]
        return found, 0

    def kept_witnesses(self, names: Collection[str]) -> set[str]:
        """Those of these files of witnesses that an interrupted writer has left: none, because the next
        writer removes them."""
        return set()

    def _foreign_now(self) -> list[Path]:
        if not self.foreign(beyond=True):
            return []
        while True:
            now = Lake.open(self.root)
            left = [
                folder
                for folder in now.foreign(beyond=True)
                if span_of(folder).after != now.reached or not now.staged_batch(span_of(folder)).is_dir()
            ]
            # If the tip changed, a batch was completed between the two looks: look again.
            if not left or Lake.open(self.root).tip == now.tip:
                return left

    def seal(self) -> None:
        """Write the summaries of finished days, unless another process is working on days; it writes them."""
        with contextlib.suppress(LakeBusy), files.locked(self.root / _DAYS_LOCK):
            self.chain.seal()

    def stage(self, span: Span) -> Path:
        """The folder into which a batch is to be written. It does not exist yet."""
        target = self.staged_batch(span)
        files.remove(target)
        files.make_folder(self.staging)
        return target

    def commit(
        self, manifest: Manifest, packets: Path | None, quarantine: Path | None, witnesses: bytes = b""
    ) -> Manifest:
        """Put a staged batch in place: first its folders, then its manifest. Return the manifest as written.

        `packets` and `quarantine` are the folders with these names in the folder of `stage`, or None.
        `witnesses` is the file whose hash the manifest has, empty if it has none.
        """
        sealed = seal(manifest)
        for source in (packets, quarantine):
            if source is not None:
                files.make_durable(source)
        if witnesses:
            files.write_new(self.staged_batch(sealed.span) / STAGED_WITNESSES, witnesses)
        # Before a reader sees anything: from it the next writer proves that the batch is ours and complete.
        files.write_new(self.staged_batch(sealed.span) / STAGED_MANIFEST, encode(sealed))
        files.sync(self.staging)
        self.publish(sealed)
        return sealed


def _local(path: str | Path) -> Path:
    text = str(path)
    if "://" in text and not text.startswith("file://"):
        raise UsageError(not_on_a_disk(text))
    return Path(text.removeprefix("file://")).absolute()
