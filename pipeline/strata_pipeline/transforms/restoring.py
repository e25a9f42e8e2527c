"""Rows of a lake as rows of a relay's log, for a staging table.

The manifest vouches for ids and places. Here each body is checked against its id, and each column against its
body, because a lake may be years old. Only the places of quarantined rows go into the log.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pyarrow as pa
from pyspark.sql import DataFrame
from strata.protocol.columns import string_key
from strata.protocol.equivalence import EQUIVALENT_TYPES, equivalence_key
from strata.protocol.packets import Packet
from strata.protocol.tombstones import Tombstone, told_place

from strata_pipeline.datasets import Packets
from strata_pipeline.errors import LakeError
from strata_pipeline.lake.witnesses import NO_TIMES, Times
from strata_pipeline.log.restoring import STAGED, write_staged
from strata_pipeline.transforms.checking import fault_of
from strata_pipeline.transforms.emptying import DAMAGED

__all__ = ["stage_packets", "staged_aside", "staged_batch"]

_CHECKED = ("body", "packet_id", "author_id", "content_type", "timestamp", "expires_at")
_PLACES = ("sequence", "received_at", "packet_id")
_UNCHANGED = ("sequence", "received_at", "timestamp", "expires_at", "packet_id", "body", "annotation")
_RESULT = pa.schema([("sequence", pa.int64()), ("reason", pa.string()), ("detail", pa.string())])
_RESULT_DDL = "sequence bigint, reason string, detail string"


def stage_packets(packets: Packets, url: str, table: str, batch: int, times: Times = NO_TIMES) -> DataFrame:
    """Write packets of one batch into a staging table when the result is computed. `times` has those at which
    other relays first received them.

    The result has the faulty packets: sequence, reason, detail. A task that finds one stages no more, so the
    batch is staged only if there is none.
    """

    def stage(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return _stage(batches, url, table, batch, times)

    return packets.frame.mapInArrow(stage, _RESULT_DDL)


def staged_batch(rows: pa.RecordBatch, batch: int, times: Times = NO_TIMES) -> pa.RecordBatch:
    """Rows of the lake, as `STAGED`, with the keys by which a relay finds repetitions."""
    authors, types = (rows.column(name).to_pylist() for name in ("author_id", "content_type"))
    keys = [
        equivalence_key(Packet.read(body.as_py())) if kind in EQUIVALENT_TYPES else None
        for kind, body in zip(types, rows.column("body"), strict=True)
    ]
    columns = {name: rows.column(name) for name in _UNCHANGED} | {
        "batch": pa.repeat(pa.scalar(batch, pa.int64()), rows.num_rows),
        "author_id": pa.array(map(string_key, authors), pa.binary()),
        "content_type": pa.array(map(string_key, types), pa.binary()),
        "equivalence_key": pa.array(keys, pa.binary()),
        "witnessed_at": times.at(rows.column("sequence")),
    }
    return pa.RecordBatch.from_arrays(
        [columns[field.name].cast(field.type) for field in STAGED], schema=STAGED
    )


def staged_aside(
    rows: pa.Table,
    tombstones: Mapping[int, tuple[Tombstone, bytes]],
    batch: int,
    times: Times = NO_TIMES,
) -> pa.Table:
    """Rows of `read_aside`, as `STAGED` and empty: an erased row with its tombstone if there is one, and any
    other with the mark of damage.

    Raises `LakeError` for a tombstone of another packet.
    """
    at, bodies, marks = [], [], []
    told = (rows[name].to_pylist() for name in (*_PLACES, "is_erased"))
    for place, received_at, packet_id, is_erased in zip(*told, strict=True):
        tombstone, text = tombstones.get(place, (None, b"")) if is_erased else (None, b"")
        if tombstone is not None and tombstone.packet_id != told_place(packet_id, received_at)[0]:
            raise LakeError(f"the lake's tombstone for {place} is of another packet than its row. Run audit")
        at.append(0 if tombstone is None else tombstone.erased_at)
        bodies.append(text)
        marks.append(None if is_erased else DAMAGED)
    count = rows.num_rows
    columns = {name: rows[name] for name in _PLACES} | {
        "batch": [batch] * count,
        "timestamp": at,
        "expires_at": [0] * count,
        "author_id": [b""] * count,
        "content_type": [b""] * count,
        "body": bodies,
        "annotation": marks,
        "equivalence_key": [None] * count,
        "witnessed_at": times.at(rows["sequence"].combine_chunks()),
    }
    return pa.table({name: columns[name] for name in STAGED.names}, schema=STAGED)


def _stage(
    batches: Iterator[pa.RecordBatch], url: str, table: str, batch: int, times: Times
) -> Iterator[pa.RecordBatch]:
    faults: list[dict[str, object]] = []

    def staged() -> Iterator[pa.RecordBatch]:
        for rows in batches:
            fault = next(_faults(rows), None)
            if fault is not None:
                faults.append(fault)
                return
            yield staged_batch(rows, batch, times)

    write_staged(url, table, staged())
    if faults:
        yield pa.RecordBatch.from_pylist(faults, schema=_RESULT)


def _faults(rows: pa.RecordBatch) -> Iterator[dict[str, object]]:
    columns = (rows.column(name).to_pylist() for name in _CHECKED)
    for sequence, fault in zip(rows.column("sequence"), map(fault_of, *columns), strict=True):
        if fault is not None:
            yield {"sequence": sequence.as_py(), "reason": fault[0], "detail": fault[1]}
