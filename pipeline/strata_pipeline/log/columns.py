"""The columns of the log, as the source gives them and as PostgreSQL holds them."""

from __future__ import annotations

import pyarrow as pa
from pyspark.sql.types import StructType

from strata_pipeline.errors import DatasetError
from strata_pipeline.schemas import schema

__all__ = ["BYTEA_STRINGS", "NUMBERS", "arrow_schema", "convert", "select_list"]

NUMBERS = ("sequence", "received_at", "timestamp", "expires_at")
BYTEA_STRINGS = ("author_id", "content_type")
"""bytea in the log, since a JSON string may hold U+0000 and text may not; UTF-8 unless a row was damaged."""

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
}


def arrow_schema(wanted: StructType) -> pa.Schema:
    """The Arrow schema of the columns asked for. Raises `DatasetError` for one the log has not."""
    log = schema("log")
    for field in wanted.fields:
        if field.name not in _TYPES:
            raise DatasetError(f"the log has no column {field.name!r}; it has {', '.join(_TYPES)}")
        if field.dataType != log[field.name].dataType:
            raise DatasetError(f"{field.name} is {log[field.name].dataType.simpleString()} in the log")
    return pa.schema([pa.field(field.name, _TYPES[field.name], field.nullable) for field in wanted.fields])


def select_list(columns: list[str]) -> str:
    """The columns as SQL names them."""
    return ", ".join(f'"{column}"' for column in columns)


def convert(batch: pa.RecordBatch, wanted: pa.Schema) -> pa.RecordBatch:
    """A batch as the database gave it in the types the source promises."""
    arrays = []
    for field, column in zip(wanted, batch.columns, strict=True):
        if field.name in BYTEA_STRINGS:
            column = _as_text(column)
        arrays.append(column if column.type == field.type else column.cast(field.type))
    return pa.RecordBatch.from_arrays(arrays, schema=wanted)


def _as_text(column: pa.Array) -> pa.Array:
    try:
        return column.cast(pa.string())
    except pa.ArrowInvalid:  # a damaged row: told apart later, by its body
        values = column.to_pylist()
        return pa.array(
            [None if value is None else value.decode("utf-8", "backslashreplace") for value in values],
            pa.string(),
        )
