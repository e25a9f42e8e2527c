"""A lake as a DuckDB database in this process, on a disk or in a bucket: the views of `views`.

For a lake in a bucket, DuckDB reads the objects that its listings name through PyArrow, whose wheels contain
an S3 client. So nothing else is downloaded, and each object that counts, and no other, is read once.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import msgspec
import pyarrow as pa
import pyarrow.dataset as pads

from strata_pipeline.datasets.objects import ARROW
from strata_pipeline.errors import UsageError
from strata_pipeline.lake.object_lake import ObjectLake
from strata_pipeline.lake.places import open_lake
from strata_pipeline.lake_format import StoredObject
from strata_pipeline.schemas import schema
from strata_pipeline.views import statements, statements_over_tables

if TYPE_CHECKING:
    import duckdb
    from pyarrow.fs import FileSystem

    from strata_pipeline.lake.stores.objects import ObjectStore

__all__ = ["database_of"]

_MANIFEST = pa.schema(
    [
        ("format", pa.int32()),
        *((name, pa.int64()) for name in ("number", "after", "up_to", "packets", "quarantined")),
        *((name, pa.string()) for name in ("rows", "contents", "witnesses")),
        ("body_bytes", pa.int64()),
        ("kinds", pa.map_(pa.string(), pa.int64())),
        ("last_packet_id", pa.string()),
        ("last_received_at", pa.int64()),
        ("written_at", pa.int64()),
        ("previous", pa.string()),
        ("hash", pa.string()),
    ]
)


def database_of(place: str | Path) -> duckdb.DuckDBPyConnection:
    """A new database in memory with the views of the lake at a place: a folder, or s3://bucket/prefix.

    The views of a folder also show what the lake gains later. Those of a bucket show the lake as it was when
    it was opened: call this again to see later batches. If compact or erase has replaced objects and their
    grace period is over, a query fails with an error of DuckDB and never gives a wrong answer. Raises
    `LakeError`, `ObjectStoreError`, and `UsageError` if DuckDB is not installed or a folder holds no packets.
    """
    try:
        import duckdb
    except ModuleNotFoundError:
        raise UsageError("a database needs DuckDB: pip install duckdb") from None
    lake = open_lake(place)
    tables: dict[str, object] = {}
    made: list[str] = []
    if isinstance(lake, ObjectLake):
        tables = _tables(lake)
        made = statements_over_tables(tables)
    elif lake.chain.end.number:
        made = statements(place)
    if not made:
        raise UsageError(f"{place} holds no lake yet: begin with strata-pipeline archive")
    database = duckdb.connect()
    for name, table in tables.items():
        database.register(name, table)
    for text in made:
        database.execute(text)
    return database


def _tables(lake: ObjectLake) -> dict[str, object]:
    reached = _reached_by_arrow(lake.store)
    found: dict[str, object] = {
        "lake_packets": _rows(lake, "packets", reached),
        "lake_manifests": _Manifests(lake),
    }
    quarantine = _rows(lake, "quarantine", reached)
    if quarantine.files:
        found["lake_quarantine"] = quarantine
    return found


def _rows(lake: ObjectLake, root: str, reached: FileSystem) -> pads.FileSystemDataset:
    """The rows of all objects below a root that count, with columns from the names of their folders."""
    columns = [(one.name, ARROW[one.dataType.simpleString()]) for one in schema(root).fields]
    folders = [("day", pa.date32()), ("kind", pa.string())] if root == "packets" else [("day", pa.date32())]
    file = pads.ParquetFileFormat()
    fragments = [
        file.make_fragment(
            "/".join(part for part in (lake.store.bucket, lake.store.prefix, one.name) if part),
            reached,
            _told_by_folders(one, day),
            file_size=one.size,
        )
        for day in lake.days()
        for one in lake.objects_of_day(day, root)
    ]
    return pads.FileSystemDataset(fragments, pa.schema([*columns, *folders]), file, reached)


def _told_by_folders(one: StoredObject, day: int) -> pads.Expression:
    """What a query can know about an object without reading it: its day and kind."""
    told = pads.field("day") == pa.scalar(day, pa.int32()).cast(pa.date32())
    kinds = [part.removeprefix("kind=") for part in one.name.split("/") if part.startswith("kind=")]
    return told if not kinds else told & (pads.field("kind") == kinds[0])


def _reached_by_arrow(store: ObjectStore) -> FileSystem:
    from pyarrow.fs import S3FileSystem

    settings = store.settings
    endpoint = urlsplit(settings["endpoint"]) if "endpoint" in settings else None
    return S3FileSystem(
        access_key=settings.get("access_key_id"),
        secret_key=settings.get("secret_access_key"),
        session_token=settings.get("session_token"),
        region=settings.get("region"),
        scheme=endpoint.scheme if endpoint else "https",
        endpoint_override=f"{endpoint.netloc}{endpoint.path.rstrip('/')}" if endpoint else None,
    )


class _Manifests:
    """All manifests, read only when a query needs them: a lake that covers years has millions."""

    def __init__(self, lake: ObjectLake) -> None:
        self._lake = lake

    def __arrow_c_schema__(self) -> object:
        return _MANIFEST.__arrow_c_schema__()

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        rows = list(map(msgspec.to_builtins, self._lake.manifests))
        return pa.Table.from_pylist(rows, _MANIFEST).__arrow_c_stream__(requested_schema)
