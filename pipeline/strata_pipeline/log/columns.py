"""The columns of the log: their types in the Spark source and in PostgreSQL."""

from __future__ import annotations

import pyarrow as pa
from pyspark.sql.types import StructType
from strata.protocol.columns import HASHED, string_key

from strata_pipeline.bodies import read_body
from strata_pipeline.errors import DatasetError
from strata_pipeline.schemas import schema

__all__ = ["BYTEA_STRINGS", "NUMBERS", "WITNESSED_AT", "arrow_schema", "convert", "select_list"]

WITNESSED_AT = "witnessed_at"
"""A column that the log of a relay from before federation does not have; it is null there."""
NUMBERS = ("sequence", "received_at", "timestamp", "expires_at", WITNESSED_AT)
BYTEA_STRINGS = ("author_id", "content_type")
"""The columns that are bytea in the log: keys of strings (`strata.protocol.columns.string_key`)."""

_BODY_OF_LONG = "body_of_long"
_TYPES = {
    "sequence": pa.int64(),
    "received_at": pa.int64(),
    "timestamp": pa.int64(),
    "expires_at": pa.int64(),
    "packet_id": pa.binary(),
    "author_id": pa.string(),
    "content_type": pa.string(),
    "body": pa.binary(),
    "annotation": pa.binary(),
    WITNESSED_AT: pa.int64(),
}


def arrow_schema(wanted: StructType) -> pa.Schema:
    """The Arrow schema of the wanted columns. Raises `DatasetError` for a column that the log lacks."""
    log = schema("log")
    for field in wanted.fields:
        if field.name not in _TYPES:
            raise DatasetError(f"the log has no column {field.name!r}; it has {', '.join(_TYPES)}")
        if field.dataType != log[field.name].dataType:
            raise DatasetError(f"{field.name} is {log[field.name].dataType.simpleString()} in the log")
    return pa.schema([pa.field(field.name, _TYPES[field.name], field.nullable) for field in wanted.fields])


def select_list(columns: list[str]) -> str:
    """The SELECT list for these columns, with the body of a row whose strings are stored as hashes."""
    selected = [f'"{column}"' for column in columns]
    if "body" not in columns and (strings := [name for name in BYTEA_STRINGS if name in columns]):
        long = " OR ".join(f"substring(\"{name}\" FOR 1) = '\\xff'::bytea" for name in strings)
        selected.append(f"CASE WHEN {long} THEN body END AS {_BODY_OF_LONG}")
    return ", ".join(selected)


def convert(batch: pa.RecordBatch, wanted: pa.Schema) -> pa.RecordBatch:
    """A batch from the database, converted to the types of the Spark source."""
    told_by = "body" if "body" in wanted.names else _BODY_OF_LONG
    bodies = batch.column(told_by) if told_by in batch.schema.names else None
    arrays = []
    for number, field in enumerate(wanted):
        column = batch.column(number)
        if field.name in BYTEA_STRINGS:
            column = _as_text(column, bodies, field.name)
        arrays.append(column if column.type == field.type else column.cast(field.type))
    return pa.RecordBatch.from_arrays(arrays, schema=wanted)


def _as_text(keys: pa.Array, bodies: pa.Array | None, name: str) -> pa.Array:
    try:
        return keys.cast(pa.string())
    except pa.ArrowInvalid:  # a string stored as a hash, or a damaged row: the body shows which
        assert bodies is not None
        pairs = zip(keys.to_pylist(), bodies.to_pylist(), strict=True)
        return pa.array([_text(key, body, name) for key, body in pairs], pa.string())


def _text(key: bytes, body: bytes | None, name: str) -> str:
    told = read_body(body) if body is not None and key.startswith(HASHED) else None
    if told is not None:
        said = told.author_id if name == "author_id" else told.content.type
        if string_key(said) == key:
            return said
    return key.decode("utf-8", "backslashreplace")
