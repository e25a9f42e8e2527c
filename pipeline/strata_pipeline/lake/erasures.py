"""The records of what was erased from a lake, and how one becomes true: all of it or nothing.

_erased/0000000000.json       what the batches of a day hold since (`strata.protocol.lake.erasure`)
_erased/0000000000.jsonl      its tombstones
_staging/erasure/             the next one, while it is being made

New files of the day, record and tombstones are written into `_staging/erasure`. Its file `record.json` comes
last: with it the erasure is complete, and whoever next opens the lake for writing finishes it. Then the files
change places with the old ones, the record is put in place, and the old files are deleted.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from blake3 import blake3
from strata.protocol.errors import InvalidInput
from strata.protocol.lake import (
    GENESIS,
    Erasure,
    Manifest,
    check_erasures,
    day_text,
    decode_erasure,
    encode_erasure,
    told,
)
from strata.protocol.tombstones import Tombstone, read_tombstone

from strata_pipeline.errors import LakeError
from strata_pipeline.lake import files

__all__ = ["RECORD", "STAGED", "TOMBSTONES", "Erasures", "finish_erasure"]

STAGED = "erasure"
"""The folder in `_staging`."""
RECORD = "record.json"
TOMBSTONES = "tombstones.jsonl"
_MARK = "_erasure."
"""A file of this name and the record's number tells a folder of new files from one of old ones."""


class Erasures:
    """The records in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.records: list[Erasure] = []

    def load(self) -> None:
        """Read and check them. Raises `LakeError`."""
        names = sorted(self.folder.glob("*.json"))
        try:
            self.records = [
                decode_erasure(path.read_bytes(), f"{path.parent.name}/{path.name}") for path in names
            ]
        except OSError as error:
            raise LakeError(f"the lake's records of erasures cannot be read: {error}") from None
        check_erasures(self.records)

    @property
    def tip(self) -> str:
        """The hash of the last record."""
        return self.records[-1].hash if self.records else GENESIS

    def told(self, manifests: list[Manifest]) -> list[Manifest]:
        """Manifests, each with what its batch holds now."""
        return told(manifests, self.records) if self.records else manifests

    def erased_from(self, day: int) -> int:
        """How many packets of a day were erased."""
        return sum(record.erased for record in self.records if record.day == day)

    def tombstones(self, record: Erasure) -> Iterator[Tombstone]:
        """Those of a record, in order of sequence; their signatures hold. Raises `LakeError`."""
        path = self.folder / f"{record.number:010}.jsonl"
        try:
            text = path.read_bytes()
        except OSError as error:
            raise LakeError(f"the lake's tombstones cannot be read: {error}") from None
        if blake3(text).hexdigest() != record.tombstones:
            raise LakeError(f"{path} was changed after it was written: its hash does not recompute")
        for line in text.splitlines():
            try:
                yield read_tombstone(line)
            except InvalidInput as error:
                raise LakeError(f"{path} has a tombstone that does not hold: {error.reason}") from None


def mark(folder: Path, number: int) -> None:
    """Mark a staged folder of a day as one with new files."""
    files.make_folder(folder)
    (folder / f"{_MARK}{number}").touch()


def finish_erasure(root: Path) -> Erasure | None:
    """Finish the erasure that is staged in a lake, from wherever it was cut off; None if there is none.

    What is not complete is removed. Nobody else may read or replace the files of the day meanwhile.
    """
    staged = root / "_staging" / STAGED
    if not (staged / RECORD).exists():
        files.remove(staged)
        return None
    record = decode_erasure((staged / RECORD).read_bytes(), f"{STAGED}/{RECORD}")
    day = f"day={day_text(record.day)}"
    for name in ("packets", "quarantine"):
        live, new = root / name / day, staged / name / day
        if (live / f"{_MARK}{record.number}").exists() or not new.exists():
            continue
        if live.exists():
            files.exchange(live, new)
        else:
            files.place(new, live)
    target = root / "_erased" / f"{record.number:010}.json"
    if not target.exists():
        tombstones = target.with_suffix(".jsonl")
        tombstones.unlink(missing_ok=True)  # without its record it is nobody's
        files.write_new(tombstones, (staged / TOMBSTONES).read_bytes())
        files.write_new(target, encode_erasure(record))
    # They hold what was to be erased: unlike the files that compaction replaces, they are not kept.
    for old in (root / "_retired").glob(f"{day}.*"):
        files.remove(old)
    files.remove_if_empty(root / "_retired")
    files.remove(staged / "packets")
    files.remove(staged / "quarantine")
    files.remove(staged)
    files.remove_if_empty(root / "_staging")
    return record
