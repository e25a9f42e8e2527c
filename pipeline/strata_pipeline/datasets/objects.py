"""Rows in the objects of a bucket. Tasks get and put them: without a jar, Spark itself knows no buckets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from blake3 import blake3
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructField, StructType

from strata_pipeline.errors import LakeError
from strata_pipeline.lake.attempts import Attempt
from strata_pipeline.lake.contents import GROUP_ROWS, UNREADABLE
from strata_pipeline.lake.footers import check_content
from strata_pipeline.lake.stores.objects import ObjectStore
from strata_pipeline.lake.stores.shelves import fault_of_object
from strata_pipeline.lake_format import StoredObject
from strata_pipeline.planning import parallelism

__all__ = ["ARROW", "OBJECT_BYTES", "put_rows", "read_objects", "write_objects"]

OBJECT_BYTES: Final = 64 * 2**20
"""Bytes of rows that a task gathers before it writes them: an object must fit into memory when it is read."""
_READ_ROWS = 2_048
_TASKS_PER_CORE = 4
ARROW: Final = {"bigint": pa.int64(), "int": pa.int32(), "string": pa.string(), "binary": pa.binary()}
_WRITTEN_DDL = "name string, size bigint, rows bigint, hash string"
_WRITTEN = pa.schema(
    [("name", pa.string()), ("size", pa.int64()), ("rows", pa.int64()), ("hash", pa.string())]
)


def write_objects(rows: DataFrame, store: ObjectStore, attempt: Attempt, root: str) -> list[StoredObject]:
    """Put rows into objects of an attempt, by `kind` if there is such a column; return the objects put.

    Objects of a task that failed, or of the other run of a task that Spark ran twice, are not among them.
    """

    def write(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return _write(batches, store, attempt, root)

    put = rows.mapInArrow(write, _WRITTEN_DDL).collect()
    return [StoredObject(**row.asDict()) for row in put]


def put_rows(store: ObjectStore, name: str, rows: pa.Table) -> StoredObject:
    """Put rows into one object under this name."""
    sink = pa.BufferOutputStream()
    pq.write_table(rows, sink, compression="zstd", row_group_size=GROUP_ROWS)
    content = sink.getvalue().to_pybytes()
    store.put(name, content)
    hashed = blake3(content).hexdigest()
    return StoredObject(name=name, size=len(content), rows=rows.num_rows, hash=hashed)


def read_objects(
    spark: SparkSession,
    store: ObjectStore,
    objects: Sequence[StoredObject],
    wanted: StructType,
    *,
    damaged: bool = False,
) -> DataFrame:
    """The rows of objects, with columns from the names of their folders (`day`, `batch`, `kind`) if wanted.

    The task raises `LakeError` for an object that is missing or
    has other bytes than were written; with `damaged` it reads the object as far as possible.
    """
    columns = StructType([StructField(one.name, one.dataType) for one in wanted.fields])
    if not objects:
        return spark.createDataFrame([], columns)
    schema = pa.schema([(one.name, ARROW[one.dataType.simpleString()]) for one in wanted.fields])

    def read(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for told in batch.column("object").to_pylist():
                yield from _read(store, msgspec.json.decode(told, type=StoredObject), schema, damaged)

    asked = spark.createDataFrame([(msgspec.json.encode(one),) for one in objects], "object binary")
    tasks = min(len(objects), _TASKS_PER_CORE * parallelism(spark))
    return asked.repartition(tasks).mapInArrow(read, columns)


def _write(
    batches: Iterator[pa.RecordBatch], store: ObjectStore, attempt: Attempt, root: str
) -> Iterator[pa.RecordBatch]:
    gathered: dict[str | None, list[pa.RecordBatch]] = {}
    size = 0
    for batch in batches:
        for kind, some in _by_kind(batch):
            gathered.setdefault(kind, []).append(some)
        size += batch.nbytes
        if size >= OBJECT_BYTES:
            yield _put(gathered, store, attempt, root)
            gathered, size = {}, 0
    if gathered:
        yield _put(gathered, store, attempt, root)


def _by_kind(batch: pa.RecordBatch) -> Iterator[tuple[str | None, pa.RecordBatch]]:
    if not batch.num_rows:
        return
    if "kind" not in batch.schema.names:
        yield None, batch
        return
    kinds = batch.column("kind")
    rest = batch.select([name for name in batch.schema.names if name != "kind"])
    for kind in pc.unique(kinds).to_pylist():
        yield kind, rest.filter(pc.equal(kinds, kind))


def _put(
    gathered: dict[str | None, list[pa.RecordBatch]], store: ObjectStore, attempt: Attempt, root: str
) -> pa.RecordBatch:
    put = [
        put_rows(store, attempt.object_name(root, kind), pa.Table.from_batches(some))
        for kind, some in gathered.items()
    ]
    return pa.RecordBatch.from_pylist([msgspec.to_builtins(one) for one in put], schema=_WRITTEN)


def _read(
    store: ObjectStore, told: StoredObject, schema: pa.Schema, damaged: bool
) -> Iterator[pa.RecordBatch]:
    try:
        content = store.get(told.name)
    except FileNotFoundError:
        content = None
    fault = fault_of_object(told, content, store.url(told.name))
    if fault is not None and not damaged:
        raise LakeError(f"{fault.detail}. Bring it back from a copy of the lake")
    if content is None:
        return
    folders = dict(part.split("=", 1) for part in told.name.split("/") if "=" in part)
    try:
        check_content(content)
        file = pq.ParquetFile(pa.BufferReader(content))
        there = [name for name in schema.names if name in file.schema_arrow.names]
        for batch in file.iter_batches(_READ_ROWS, columns=there):
            yield pa.RecordBatch.from_arrays([_column(batch, one, folders) for one in schema], schema=schema)
    except UNREADABLE:
        if not damaged:
            raise


def _column(batch: pa.RecordBatch, wanted: pa.Field, folders: dict[str, str]) -> pa.Array:
    if wanted.name in batch.schema.names:
        return batch.column(wanted.name).cast(wanted.type)
    return pa.array([folders.get(wanted.name)] * batch.num_rows, wanted.type)
