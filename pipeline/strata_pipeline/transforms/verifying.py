"""Verifying every packet of a lake, in tasks that read the files themselves (`lake.slices`)."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import SparkSession
from strata.protocol.sequences import Span

from strata_pipeline.errors import LakeError
from strata_pipeline.lake.checking import Unit
from strata_pipeline.lake.contents import UNREADABLE
from strata_pipeline.lake.faults import Fault
from strata_pipeline.lake.slices import Slice, rows_of, slices
from strata_pipeline.lake.stores.shelves import Shelf
from strata_pipeline.lake.witnesses import ReceivedAt, as_received
from strata_pipeline.planning import parallelism
from strata_pipeline.transforms.signatures import AuthorShare, SigningKeys, packet_fault

__all__ = ["Verified", "verify_packets"]

_TASKS_PER_CORE = 3
_TASK_BYTES = 128 * 2**20
"""With more bytes for each task, there are more tasks: half a million packets take half a minute."""
_LISTED = 1_000
"""The most faults of one reason that a slice lists; it counts all."""
_COLUMNS = (
    "sequence",
    "received_at",
    "packet_id",
    "body",
    "author_id",
    "content_type",
    "timestamp",
    "expires_at",
    "size",
)
_RECEIVED_AT = _COLUMNS.index("received_at")
_AUTHOR = _COLUMNS.index("author_id")
_WRONG_SIZE = ("columns_differ", "size is not that of the body")
_TOLD_DDL = "verified binary"
_TOLD = pa.schema([("verified", pa.binary())])


class Verified(msgspec.Struct):
    """The result of a verification."""

    packets: int = 0
    """The number of packets that were checked, valid or not."""
    counts: dict[str, int] = {}
    """The number of faults by reason."""
    listed: list[Fault] = []
    """Some faults of each reason."""
    unread: list[str] = []
    """Why files could not be read, or not to the end."""

    def add(self, other: Verified) -> None:
        """Add the result of another slice."""
        self.packets += other.packets
        for reason, count in other.counts.items():
            self.counts[reason] = self.counts.get(reason, 0) + count
        self.listed += other.listed
        self.unread += other.unread

    def found(self, fault: Fault) -> None:
        """Count a fault, and list it if there are few."""
        self.counts[fault.reason] = self.counts.get(fault.reason, 0) + 1
        if self.counts[fault.reason] <= _LISTED:
            self.listed.append(fault)


def verify_packets(
    spark: SparkSession,
    shelf: Shelf,
    units: Iterable[Unit],
    span: Span,
    authors: AuthorShare,
    keys: SigningKeys,
    received: ReceivedAt = as_received,
) -> Verified:
    """Verify the packets of some authors whose sequences lie in a span, in the files of these units.

    `received` may raise `LakeError`; then the rest of a file is not verified.
    """

    def verify(rows: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in rows:
            for told in batch.column("slice").to_pylist():
                one = msgspec.json.decode(told, type=Slice)
                found = _verify_slice(one, shelf, span, authors, keys, received)
                yield pa.RecordBatch.from_arrays([pa.array([msgspec.json.encode(found)])], schema=_TOLD)

    least = _TASKS_PER_CORE * parallelism(spark)
    work = slices(units, least)
    verified = Verified()
    if not work:
        return verified
    tasks = max(least, sum(one.size // one.among for one in work) // _TASK_BYTES)
    asked = spark.createDataFrame([(msgspec.json.encode(one),) for one in work], "slice binary")
    for row in asked.repartition(min(len(work), tasks)).mapInArrow(verify, _TOLD_DDL).collect():
        verified.add(msgspec.json.decode(row.verified, type=Verified))
    return verified


def _verify_slice(
    one: Slice, shelf: Shelf, span: Span, authors: AuthorShare, keys: SigningKeys, received: ReceivedAt
) -> Verified:
    verified = Verified()
    with shelf.at_hand(one.objects) as (folder, _):
        try:
            for rows in rows_of(one, folder, _COLUMNS, span):
                at = received(rows.column("sequence"), rows.column("received_at"))
                _verify_rows(rows.set_column(_RECEIVED_AT, "received_at", at), authors, keys, verified)
        except UNREADABLE as error:
            why = f"{os.fsdecode(one.file)}: {error}"
            verified.unread.append(shelf.told(Fault("packet", "unchecked", why), folder).detail)
        except LakeError as error:
            verified.unread.append(str(error))
    return verified


def _verify_rows(rows: pa.RecordBatch, authors: AuthorShare, keys: SigningKeys, verified: Verified) -> None:
    columns: Sequence[list[Any]] = [rows.column(name).to_pylist() for name in _COLUMNS[:-1]]
    sizes = pc.equal(rows.column("size"), pc.binary_length(rows.column("body"))).to_pylist()
    for (sequence, *row), is_size in zip(zip(*columns, strict=True), sizes, strict=True):
        if not authors.have(row[_AUTHOR - 1]):
            continue
        verified.packets += 1
        fault = packet_fault(keys, *row) or (None if is_size else _WRONG_SIZE)
        if fault is not None:
            verified.found(Fault("packet", *fault, sequence, row[1]))
