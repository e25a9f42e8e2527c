"""The records of erasures from a lake (`strata_pipeline.lake_format.erasure`).

_erased/0000000000.json       what the batches of a day hold since the erasure
_erased/0000000000.jsonl      its tombstones

`erasure_commit` describes how a record is put there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Final

from blake3 import blake3
from strata.protocol.errors import InvalidInput
from strata.protocol.tombstones import Tombstone

from strata_pipeline.errors import LakeError
from strata_pipeline.lake.stores.limits import DAY_RECORD_BYTES, ROWS_BYTES
from strata_pipeline.lake.stores.records import Records
from strata_pipeline.lake_format import (
    GENESIS,
    ErasedBatch,
    Erasure,
    Manifest,
    check_erasures,
    decode_erasure,
    read_tombstone_line,
    seal_erasure,
    told,
)

__all__ = ["Erasures"]

_LINE_BYTES: Final = 1024
"""The most bytes of a line: a tombstone has 420, and 90 more at another place than its own."""


class Erasures:
    """The records of a lake."""

    def __init__(self, records: Records) -> None:
        self._records = records
        self.records: list[Erasure] = []

    def load(self) -> None:
        """Read and check them. Raises `LakeError`."""
        # Some systems put a file `._name` beside each file that they copy.
        names = [name for name in self._records.names() if name.endswith(".json") and name[0] not in "._"]
        texts = self._records.read_all(names, DAY_RECORD_BYTES)
        try:
            self.records = [
                decode_erasure(text, f"_erased/{name}") for text, name in zip(texts, names, strict=True)
            ]
        except OSError as error:
            raise LakeError(f"the lake's records of erasures cannot be read: {error}") from None
        check_erasures(self.records)

    def of_day(self, day: int) -> list[Erasure]:
        """The records of a day, in order."""
        return [record for record in self.records if record.day == day]

    @property
    def tip(self) -> str:
        """The hash of the last record."""
        return self.records[-1].hash if self.records else GENESIS

    def next(
        self, day: int, written_at: int, batches: list[ErasedBatch], text: bytes, *, emptied: int = 0
    ) -> Erasure:
        """A record that follows the last one and says what batches of a day hold now. `text` is the file of
        its tombstones, a line for each in order of sequence; `emptied` of them are for rows that were
        quarantined when they were archived."""
        record = Erasure(
            number=len(self.records),
            day=day,
            written_at=written_at,
            batches=batches,
            tombstones=blake3(text).hexdigest(),
            erased=len(text.splitlines()) - emptied,
            previous=self.tip,
        )
        return seal_erasure(record)

    @staticmethod
    def names(number: int) -> tuple[str, str]:
        """The names of a record and of its tombstones."""
        return f"{number:010}.json", f"{number:010}.jsonl"

    def told(self, manifests: Iterable[Manifest]) -> list[Manifest]:
        """These manifests, each changed to what its batch holds now: files are compared with the result.

        A record names only batches of its own day, so records of other days are not searched.
        """
        return [
            one
            for day, some in groupby(manifests, lambda one: one.span.day)
            for one in told(some, self.of_day(day))
        ]

    def erased_from(self, day: int) -> int:
        """The number of packets of a day that were erased, without the quarantined rows that were emptied."""
        return sum(record.erased for record in self.of_day(day))

    def tombstones(self, record: Erasure) -> Iterator[Tombstone]:
        """The tombstones of a record, with the places of the rows that they stand for, in order of sequence
        and with verified signatures. Raises `LakeError`."""
        return (tombstone for tombstone, _ in self.signed_tombstones(record))

    def signed_tombstones(self, record: Erasure) -> Iterator[tuple[Tombstone, bytes]]:
        """The same tombstones, each with its text, which includes the signature; the text is empty where the
        tombstone itself names another place of the packet."""
        path = self._records.place(self._tombstones_of(record))
        for line in self.text_of(record).splitlines():
            try:
                yield read_tombstone_line(line)
            except InvalidInput as error:
                raise LakeError(f"{path} has a tombstone that does not hold: {error.reason}") from None

    def text_of(self, record: Erasure) -> bytes:
        """The file of a record's tombstones, checked against the record's hash. Raises `LakeError`."""
        name = self._tombstones_of(record)
        try:
            text = self._records.read(name, _most_bytes(record))
        except OSError as error:
            raise LakeError(f"the lake's tombstones cannot be read: {error}") from None
        if blake3(text).hexdigest() != record.tombstones:
            path = self._records.place(name)
            raise LakeError(f"{path} was changed after it was written: its hash does not recompute")
        return text

    def _tombstones_of(self, record: Erasure) -> str:
        return self.names(record.number)[1]


def _most_bytes(record: Erasure) -> int:
    """The most bytes of a record's tombstones: one for each packet, and for some quarantined rows."""
    rows = record.erased + sum(batch.quarantined for batch in record.batches)
    return min(ROWS_BYTES, rows * _LINE_BYTES)
