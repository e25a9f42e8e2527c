"""The files of a lake that say when other relays first received packets (`lake_format.witnesses`).

_witnesses/0000000000-<hash>.csv     the times of one batch, in place before its manifest

Compactions, erasures and Delta logs do not touch these files: they hold places and times, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple, Self, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from strata_pipeline.lake.stores.limits import ROWS_BYTES
from strata_pipeline.lake.stores.records import Records
from strata_pipeline.lake_format import (
    WITNESSES,
    LakeError,
    Manifest,
    most_witnesses_bytes,
    read_witnesses,
    witnesses_name,
)

__all__ = ["NO_TIMES", "FirstReceived", "ReceivedAt", "Times", "Witnesses", "as_received"]

_KEPT = 4
_Numbers: TypeAlias = np.ndarray[tuple[int], np.dtype[np.int64]]
_Mask: TypeAlias = np.ndarray[tuple[int], np.dtype[np.bool_]]

ReceivedAt: TypeAlias = Callable[[pa.Array, pa.Array], pa.Array]
"""Returns as of when rows are judged, from their sequences and from when this relay has received them."""


def as_received(sequences: pa.Array, received_at: pa.Array) -> pa.Array:
    """Rows of no peer are judged as of when this relay has received them."""
    return received_at


class Times(NamedTuple):
    """When other relays first received rows, for the rows of which this is known."""

    sequences: _Numbers
    """In order."""
    times: _Numbers

    @classmethod
    def of(cls, rows: Sequence[tuple[int, int]]) -> Self:
        """The times in rows (sequence, witnessed_at), which are in order of sequence."""
        table = np.array(rows, np.int64).reshape(-1, 2)
        return cls(table[:, 0], table[:, 1])

    def at(self, sequences: pa.Array) -> pa.Array:
        """The time of each of these rows, or null."""
        times, is_known = self.find(_places(sequences))
        return pa.array(times, pa.int64(), mask=~is_known)

    def find(self, places: _Numbers) -> tuple[_Numbers, _Mask]:
        """The time of each of these sequences, and whether it is known."""
        if not len(self.sequences):
            return np.zeros(len(places), np.int64), np.zeros(len(places), np.bool_)
        found = np.searchsorted(self.sequences, places).clip(max=len(self.sequences) - 1)
        return self.times[found], self.sequences[found] == places


NO_TIMES = Times.of([])


class Witnesses:
    """The files of a lake. It is sent to executors."""

    def __init__(self, records: Records) -> None:
        self._records = records

    def place(self, manifest: Manifest) -> str:
        """Where the file of a batch is, for messages."""
        return self.place_of(witnesses_name(manifest))

    def place_of(self, name: str) -> str:
        """Where the file with a name is, for messages."""
        return self._records.place(name)

    def names(self) -> list[str]:
        """The names of all files that are there, in order."""
        return self._records.names()

    def read(self, manifest: Manifest) -> bytes:
        """The file of a batch that has one, as it is. Raises OSError, `ObjectStoreError`, and `LakeError` for
        a file that is too long for the rows of the batch."""
        most = most_witnesses_bytes(manifest.packets + manifest.quarantined)
        return self._records.read(witnesses_name(manifest), min(ROWS_BYTES, most))

    def text_of(self, manifest: Manifest) -> bytes:
        """The file of a batch, empty for a batch without one.

        Raises `LakeError` unless it is the one that the manifest binds.
        """
        return self._checked(manifest)[0]

    def times_of(self, manifests: Iterable[Manifest]) -> Times:
        """The times of consecutive batches. Raises `LakeError` as `text_of` does."""
        return Times.of([row for manifest in manifests for row in self._checked(manifest)[1]])

    def _checked(self, manifest: Manifest) -> tuple[bytes, Sequence[tuple[int, int]]]:
        if not manifest.witnesses:
            return b"", ()
        try:
            text = self.read(manifest)
        except OSError as error:
            name = f"{WITNESSES}/{witnesses_name(manifest)}"
            raise LakeError(
                f"the lake's {name} cannot be read: {error}. Bring it back from a copy of the lake"
            ) from None
        return text, read_witnesses(text, manifest)


class FirstReceived:
    """When rows of some batches were first received anywhere: what a relay judges keys by.

    Files are read where rows need them, and the last few are kept. Tasks get this for tens of thousands of
    batches: 64 bytes for each are sent, and not its manifest.
    """

    def __init__(self, witnesses: Witnesses, manifests: Iterable[Manifest]) -> None:
        self._witnesses = witnesses
        bound = [one for one in manifests if one.witnesses]
        self._hashes = b"".join(bytes.fromhex(one.witnesses) for one in bound)
        told = [(one.number, one.after, one.up_to, one.packets + one.quarantined) for one in bound]
        self._told = np.array(told, np.int64).reshape(-1, 4)
        self._read: dict[int, Times] = {}

    def of(self, sequences: pa.Array, received_at: pa.Array) -> pa.Array:
        """The times of these rows, which the relay itself has received at `received_at`.

        Raises `LakeError` for a file that is missing or was altered.
        """
        places = _places(sequences)
        times, is_known = np.zeros(len(places), np.int64), np.zeros(len(places), np.bool_)
        for batch, rows in self._concerned(places):
            times[rows], is_known[rows] = self._times(batch).find(places[rows])
        return pc.if_else(pa.array(is_known), pa.array(times), received_at)

    def _concerned(self, places: _Numbers) -> Iterator[tuple[int, _Numbers]]:
        """The batches with files, by their place here, that have any of these rows, each with the numbers of
        its rows."""
        if not len(self._told):
            return
        after, up_to = self._told[:, 1], self._told[:, 2]
        last = np.searchsorted(after, places) - 1  # of the batches that begin below each row
        rows = np.flatnonzero((last >= 0) & (places <= up_to[last]))
        rows = rows[np.argsort(last[rows], kind="stable")]
        numbers, begins = np.unique(last[rows], return_index=True)
        parts = pairwise([*begins.tolist(), len(rows)])
        for number, (begin, end) in zip(numbers.tolist(), parts, strict=True):
            yield number, rows[begin:end]

    def _times(self, batch: int) -> Times:
        times = self._read.pop(batch, None)
        if times is None:
            times = self._witnesses.times_of([self._manifest(batch)])
        self._read[batch] = times  # as the newest
        if len(self._read) > _KEPT:
            del self._read[next(iter(self._read))]
        return times

    def _manifest(self, batch: int) -> Manifest:
        """As much of the manifest of a batch as concerns its file."""
        number, after, up_to, rows = self._told[batch].tolist()
        return Manifest(
            number=number,
            after=after,
            up_to=up_to,
            packets=rows,
            quarantined=0,
            rows="",
            contents="",
            body_bytes=0,
            kinds={},
            last_packet_id="",
            last_received_at=0,
            written_at=0,
            previous="",
            witnesses=self._hashes[32 * batch : 32 * batch + 32].hex(),
        )


def _places(sequences: pa.Array) -> _Numbers:
    """Sequences as numbers; a damaged row without one has the place -1, where no row is."""
    places: _Numbers = pc.fill_null(sequences, -1).to_numpy(zero_copy_only=False)
    return places
