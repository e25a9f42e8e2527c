"""A Delta log beside the chain: the lake as a table for whoever reads Delta.

`packets/_delta_log` names the files of `packets/`, by day and kind. It says nothing that folders and chain do
not say, and it proves nothing: no job of ours reads it, and it can be removed and made again (decision 57). A
commit tells up to which manifest it goes, so publishing again changes nothing, whatever was killed.
"""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import CommitProperties, DeltaTable, Schema, Transaction
from deltalake.exceptions import DeltaError
from deltalake.transaction import AddAction, RemoveAction, create_table_with_add_actions
from pyspark.sql.types import StringType, StructField, StructType
from strata.protocol.lake import day_text, parse_day

from strata_pipeline.errors import LakeError, UsageError
from strata_pipeline.lake import files
from strata_pipeline.lake.lake import Lake
from strata_pipeline.lake.layout import span_of
from strata_pipeline.schemas import schema

__all__ = ["APP", "Published", "delta_log", "is_published", "publish", "published_files"]

APP = "strata-lake"
"""The application of our commits; its version is the number of the last manifest that they tell of."""

_PARTITIONS = ["day", "batch", "kind"]  # as folders tell: Polars refuses a table that leaves one out
_TIP = "strata_tip"
_BOUNDED = ("sequence", "received_at", "timestamp")
"""Columns by whose least and greatest value a reader may leave out a file."""
_PROPERTIES = {
    "delta.appendOnly": "true",  # whoever deletes rows of a lake by mistake is refused
    "delta.checkpointInterval": "100",
}


@dataclass(frozen=True, slots=True)
class Published:
    """The Delta table after a publishing."""

    version: int
    """The version of the table."""
    manifest: int
    """The number of the last manifest that it tells of."""
    added: int
    """Files that this run has added to the table."""
    removed: int
    """Files that this run has taken out: others with the same rows are in their place."""
    rows: int
    """Rows in the days at which this run has looked."""


def delta_log(lake: Lake) -> Path:
    """The folder of the log."""
    return lake.packets / "_delta_log"


def is_published(lake: Lake) -> bool:
    """Whether the lake has a Delta log."""
    return next(delta_log(lake).glob("*.json"), None) is not None


def publish(lake: Lake, *, days: Collection[int] | None = None, rebuild: bool = False) -> Published:
    """Bring the Delta log up to the chain, as `lake` has read it, in one commit.

    Looked at are all days; with `days`, these and what the chain has gained since the last commit. `rebuild`
    moves the log aside and makes another. Waits for another publisher and for a day that changes its files.
    Raises `LakeError` where log or files and chain do not belong together, `UsageError` for an empty lake.
    """
    if not lake.chain.end.number:
        raise UsageError(f"{lake.root} holds no lake yet: begin with strata-pipeline archive")
    with files.awaited(lake.root / "_delta_lock"), lake.held():
        if rebuild and delta_log(lake).exists():
            files.move(delta_log(lake), lake.aside, "delta_log")
        try:
            return _publish(lake, days)
        except DeltaError as error:
            raise LakeError(
                f"{delta_log(lake)} cannot be used: {error}. publish-delta --rebuild makes another log"
            ) from None


def published_files(lake: Path, version: int | None = None) -> list[Path]:
    """The files of the table, at a version or the last, for readers that do not know Delta.

    Raises `DeltaError`.
    """
    packets = lake.absolute() / "packets"
    return [packets / path for path in _actions(DeltaTable(packets, version=version))]


def _publish(lake: Lake, days: Collection[int] | None) -> Published:
    last = lake.chain.end.number - 1
    is_new = not is_published(lake)
    table = None if is_new else DeltaTable(lake.packets)
    known = {} if table is None else _actions(table)
    look = set(lake.days())
    if table is not None:
        begun = _check_same_chain(lake, table)
        if days is not None:
            look = {*days, *(manifest.span.day for manifest in lake.chain.after(str(begun)))} & look
    names = {day_text(day) for day in look}
    # A whole look finds out, too, what the log names of days that the chain does not tell of.
    there = known if days is None else {path: told for path, told in known.items() if told["day"] in names}
    adds = dict(_files(lake, look, known))
    added = [action for path, action in adds.items() if path not in known]
    removed = [path for path in there if path not in adds]
    rows = _check_rows(lake, look, adds, known)
    before: dict[str, int] = {}
    for told in there.values():
        before[told["day"]] = before.get(told["day"], 0) + told["rows"]
    for action in added:
        # Files in the place of others bring no rows: who follows the table need not read them.
        action.data_change = (
            before.get(str(action.partition_values["day"]))
            != rows[parse_day(str(action.partition_values["day"]))]
        )
    properties = CommitProperties(
        custom_metadata={_TIP: lake.tip}, app_transactions=[Transaction(APP, last)], max_commit_retries=0
    )
    if table is None:
        files.make_folder(lake.packets)
        create_table_with_add_actions(
            str(lake.packets), _schema(), added, partition_by=_PARTITIONS, name="packets",
            configuration=_PROPERTIES, commit_properties=properties,
        )  # fmt: skip
        return Published(0, last, len(added), 0, sum(rows.values()))
    if added or removed:
        now = int(time.time() * 1000)
        gone = [RemoveAction(path, False, now, known[path]["size"], _values(known[path])) for path in removed]
        table.create_write_transaction(
            [*added, *gone], "append", _schema(), _PARTITIONS, commit_properties=properties
        )
        table.update_incremental()
    return Published(table.version(), last, len(added), len(removed), sum(rows.values()))


def _check_same_chain(lake: Lake, table: DeltaTable) -> int:
    """The number of the last manifest that the log tells of. Raises `LakeError` for one of another chain."""
    number = table.transaction_version(APP)
    tip = table.history(1)[0].get(_TIP)
    end = lake.chain.end
    if number is not None and number < end.number:
        found = end.tip if number == end.number - 1 else lake.chain.one(number).hash
        if tip is None or tip == found:
            return number
    raise LakeError(
        f"{delta_log(lake)} is not of this chain, which was migrated, cut off or replaced since. If "
        "the chain is right, publish-delta --rebuild makes another log"
    )


def _files(
    lake: Lake, days: Collection[int], known: dict[str, dict[str, Any]]
) -> Iterator[tuple[str, AddAction]]:
    """The files of these days up to the chain's end; those that the log knows are not opened."""
    for day in sorted(days):
        for folder in lake.folders_of_day(lake.packets, day):
            if span_of(folder).up_to > lake.reached:
                continue  # a batch in the making
            for path in sorted(folder.glob("kind=*/*.parquet")):
                name = path.relative_to(lake.packets).as_posix()
                parts = (part.partition("=") for part in Path(name).parts[:-1])
                values = {partition: value for partition, _, value in parts}
                yield name, _action(path, name, values, known.get(name))


def _action(path: Path, name: str, values: dict[str, str], known: dict[str, Any] | None) -> AddAction:
    if known is not None:
        return AddAction(name, known["size"], values, 0, False, "")
    told = path.stat()
    return AddAction(name, told.st_size, values, int(told.st_mtime * 1000), True, json.dumps(_stats(path)))


def _stats(path: Path) -> dict[str, Any]:
    try:
        footer = pq.read_metadata(path)
    except (OSError, ValueError) as error:  # Arrow's errors are ValueErrors
        raise LakeError(f"{path} cannot be read: {error}. Run audit") from None
    least: dict[str, int] = {}
    greatest: dict[str, int] = {}
    for group in map(footer.row_group, range(footer.num_row_groups)):
        for column in map(group.column, range(group.num_columns)):
            bounds = column.statistics
            if column.path_in_schema in _BOUNDED and bounds is not None and bounds.has_min_max:
                name = column.path_in_schema
                least[name] = min(least.get(name, bounds.min), bounds.min)
                greatest[name] = max(greatest.get(name, bounds.max), bounds.max)
    return {"numRecords": footer.num_rows, "minValues": least, "maxValues": greatest, "nullCount": {}}


def _check_rows(
    lake: Lake, days: Collection[int], adds: dict[str, AddAction], known: dict[str, dict[str, Any]]
) -> dict[int, int]:
    """The rows of each of these days. Raises `LakeError` unless the files have as many as the chain tells."""
    found = dict.fromkeys(days, 0)
    for path, action in adds.items():
        rows = known[path]["rows"] if path in known else json.loads(action.stats)["numRecords"]
        found[parse_day(str(action.partition_values["day"]))] += rows
    for day, rows in found.items():
        if rows != lake.rows_of(day):
            raise LakeError(
                f"the files of {day_text(day)} have {rows:,} rows, and its manifests tell of "
                f"{lake.rows_of(day):,}: nothing was published. Run audit"
            )
    return found


def _actions(table: DeltaTable) -> dict[str, dict[str, Any]]:
    """The files of a table by path: partition, size and rows of each."""
    told = pa.table(table.get_add_actions(flatten=True))
    if not told.num_rows:
        return {}
    names = {"size_bytes": "size", "num_records": "rows"} | {
        f"partition.{name}": name for name in _PARTITIONS
    }
    columns = zip(*(told[column].to_pylist() for column in names), strict=True)
    paths = told["path"].to_pylist()
    return {
        path: dict(zip(names.values(), row, strict=True)) for path, row in zip(paths, columns, strict=True)
    }


def _values(known: dict[str, Any]) -> dict[str, str | None]:
    return {name: known[name] for name in _PARTITIONS}


def _schema() -> Schema:
    partitions = [StructField(name, StringType(), nullable=False) for name in _PARTITIONS]
    return Schema.from_json(StructType([*schema("packets").fields, *partitions]).json())
