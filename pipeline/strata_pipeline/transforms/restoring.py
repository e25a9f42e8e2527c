"""Packets of a lake as rows of a relay's log, written to a staging table.

The manifest vouches for ids and places. Each body is checked against its id here, and each column against its
body, for a lake may be years old.
"""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
from pyspark.sql import DataFrame
from strata.protocol.equivalence import EQUIVALENT_TYPES, equivalence_key
from strata.protocol.lake import string_key
from strata.protocol.packets import Packet

from strata_pipeline.datasets import Packets
from strata_pipeline.log.restoring import STAGED, write_staged
from strata_pipeline.transforms.checking import fault_of

__all__ = ["stage_packets", "staged_batch"]

_CHECKED = ("body", "packet_id", "author_id", "content_type", "timestamp", "expires_at")
_UNCHANGED = ("sequence", "received_at", "timestamp", "expires_at", "packet_id", "body", "annotation")
_RESULT = pa.schema([("sequence", pa.int64()), ("reason", pa.string()), ("detail", pa.string())])
_RESULT_DDL = "sequence bigint, reason string, detail string"


def stage_packets(packets: Packets, url: str, table: str, batch: int) -> DataFrame:
    """Write packets of one batch into a staging table as this is computed.

    Gives packets that are not what they must be: sequence, reason, detail. A task that meets one stages no
    more, and a batch is staged when there is none.
    """

    def stage(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return _stage(batches, url, table, batch)

    return packets.frame.mapInArrow(stage, _RESULT_DDL)


def staged_batch(rows: pa.RecordBatch, batch: int) -> pa.RecordBatch:
    """Rows of the lake as `STAGED`, with the keys by which a relay finds repetitions."""
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
    }
    return pa.RecordBatch.from_arrays(
        [columns[field.name].cast(field.type) for field in STAGED], schema=STAGED
    )


def _stage(batches: Iterator[pa.RecordBatch], url: str, table: str, batch: int) -> Iterator[pa.RecordBatch]:
    faults: list[dict[str, object]] = []

    def staged() -> Iterator[pa.RecordBatch]:
        for rows in batches:
            fault = next(_faults(rows), None)
            if fault is not None:
                faults.append(fault)
                return
            yield staged_batch(rows, batch)

    write_staged(url, table, staged())
    if faults:
        yield pa.RecordBatch.from_pylist(faults, schema=_RESULT)


def _faults(rows: pa.RecordBatch) -> Iterator[dict[str, object]]:
    columns = (rows.column(name).to_pylist() for name in _CHECKED)
    for sequence, fault in zip(rows.column("sequence"), map(fault_of, *columns), strict=True):
        if fault is not None:
            yield {"sequence": sequence.as_py(), "reason": fault[0], "detail": fault[1]}
