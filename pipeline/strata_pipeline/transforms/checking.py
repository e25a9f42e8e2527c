"""Checking the rows of a log: every packet_id is recomputed, and a faulty row gets a reason.

The body is authoritative, and each other column must agree with it (A-006). The usual row takes three steps:
decode the members to compare, cut `packet_id` and `signature` out of the bytes, and hash the rest. If the
hash is the id, these are the bytes that the author signed, because nobody can find others with this hash; so
the canonical form need not be made again. Any other row is parsed in full to find its fault. Signatures are
not verified here, but by an audit.
"""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame
from strata.protocol.errors import InvalidPacket
from strata.protocol.packets import Packet

from strata_pipeline.bodies import PacketBody, read_body, signed_bytes
from strata_pipeline.lake.kinds import kind_of
from strata_pipeline.schemas import schema

__all__ = [
    "CHECKED",
    "check_batch",
    "check_rows",
    "columns_fault",
    "explain",
    "fault_of",
]


CHECKED = pa.schema(
    [
        ("sequence", pa.int64()),
        ("received_at", pa.int64()),
        ("timestamp", pa.int64()),
        ("expires_at", pa.int64()),
        ("packet_id", pa.binary()),
        ("author_id", pa.string()),
        ("content_type", pa.string()),
        ("size", pa.int32()),
        ("body", pa.binary()),
        ("annotation", pa.binary()),
        ("reason", pa.string()),
        ("detail", pa.string()),
        ("kind", pa.string()),
    ]
)
"""A row of the log with its size, its fault (null for none), and its folder."""


def check_rows(log: DataFrame) -> DataFrame:
    """The log with `size` and `kind`, and with `reason` and `detail` for a faulty row."""
    fields = {field.name: field.dataType.simpleString() for field in schema("quarantine").fields}
    ddl = ", ".join(f"{name} {kind}" for name, kind in (*fields.items(), ("kind", "string")))
    return log.mapInArrow(_check, ddl)


def _check(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        yield check_batch(batch)


def check_batch(batch: pa.RecordBatch) -> pa.RecordBatch:
    """One batch of the log, as `CHECKED`."""
    columns = {name: batch.column(name) for name in batch.schema.names}
    bodies = columns["body"].to_pylist()
    types = columns["content_type"].to_pylist()
    faults = list(
        map(
            fault_of,
            bodies,
            columns["packet_id"].to_pylist(),
            columns["author_id"].to_pylist(),
            types,
            columns["timestamp"].to_pylist(),
            columns["expires_at"].to_pylist(),
        )
    )
    columns["size"] = pc.binary_length(columns["body"]).cast(pa.int32())
    columns["reason"] = pa.array([None if fault is None else fault[0] for fault in faults], pa.string())
    columns["detail"] = pa.array([None if fault is None else fault[1] for fault in faults], pa.string())
    columns["kind"] = pa.array([None if kind is None else kind_of(kind) for kind in types], pa.string())
    return pa.RecordBatch.from_arrays([columns[field.name] for field in CHECKED], schema=CHECKED)


def fault_of(
    body: bytes | None,
    packet_id: bytes | None,
    author_id: str | None,
    content_type: str | None,
    timestamp: int | None,
    expires_at: int | None,
) -> tuple[str, str] | None:
    """The fault of a row as a word and a sentence; None for none."""
    if body is None or packet_id is None:
        return "null", "a row without a body or an id"
    told = read_body(body)
    if told is None:
        return explain(body, packet_id) or ("unreadable", "the body lacks what every packet has")
    if signed_bytes(body, packet_id, told) is None and (fault := explain(body, packet_id)) is not None:
        return fault
    return columns_fault(told, author_id, content_type, timestamp, expires_at)


def columns_fault(
    told: PacketBody,
    author_id: str | None,
    content_type: str | None,
    timestamp: int | None,
    expires_at: int | None,
) -> tuple[str, str] | None:
    """The fault of columns that disagree with the body; None for none."""
    for column, found, said in (
        ("author_id", author_id, told.author_id),
        ("content_type", content_type, told.content.type),
        ("timestamp", timestamp, told.timestamp),
        ("expires_at", expires_at, told.expires_at),
    ):
        if found != said:
            return "columns_differ", f"{column} is {_short(found)}, and {_short(said)} in the body"
    return None


def explain(body: bytes, packet_id: bytes) -> tuple[str, str] | None:
    """The fault of a body according to all rules for packets; None for none."""
    try:
        # A log may hold media without a header: accepting them was the relay's decision.
        packet = Packet.read(body)
    except InvalidPacket as error:
        return error.detail or str(error.code), error.reason
    if packet.canonical != body:
        return "not_canonical", "the body is a packet, but not in canonical form"
    if packet.digest != packet_id:
        return "packet_id_mismatch", f"the body is packet {packet.packet_id}, its column says otherwise"
    return None


def _short(value: object) -> str:
    return f"{str(value)[:80]!r}"
