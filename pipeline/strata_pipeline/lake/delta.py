"""A Delta log beside the chain: the lake as a table for readers of Delta.

`generations/_delta_log`, in a bucket `packets/_delta_log`, names the files of `packets/`, by day and kind. It
says nothing that folders and chain do not say, and it proves nothing: no job of ours reads it, and it can be
removed and made again (decision 57).
Each commit records the manifest up to which it goes, so publishing can be repeated safely after a kill.
"""

from __future__ import annotations

import json
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Schema, Transaction
from deltalake.exceptions import CommitFailedError, DeltaError
from deltalake.transaction import AddAction, RemoveAction, create_table_with_add_actions
from pyspark.sql.types import StringType, StructField, StructType
from strata.protocol.sequences import day_text, parse_day

from strata_pipeline.errors import LakeBusy, LakeError, UsageError
from strata_pipeline.lake.checking import batch_name
from strata_pipeline.lake.day_links import GENERATIONS
from strata_pipeline.lake.delta_commits import encode_commit, read_commit
from strata_pipeline.lake.delta_places import DeltaOnDisk, DeltaPlace, delta_log, place_of
from strata_pipeline.lake.places import AnyLake
from strata_pipeline.lake_format import Manifest
from strata_pipeline.schemas import schema

__all__ = ["APP", "DeltaPublished", "delta_log", "is_published", "publish", "published_files"]

APP = "strata-lake"
"""The application id of our commits; its version is the number of the last manifest that a commit covers."""

_PARTITIONS = ["day", "batch", "kind"]  # all that folders name: Polars refuses a table that omits one
_TIP = "strata_tip"
_ATTEMPTS = 5
"""In a bucket the slower of two publishers starts again, and then finds what the first has published."""
_CHECKPOINT_EVERY = 100
"""In versions. Old ones are cleaned up at the same interval, because that means listing the names of all."""
_PROPERTIES = {
    "delta.appendOnly": "true",  # refuses attempts to delete rows of a lake by mistake
    "delta.checkpointInterval": str(_CHECKPOINT_EVERY),
    "delta.logRetentionDuration": "interval 7 days",  # at a commit a minute, each of which lists all names
}


@dataclass(frozen=True, slots=True)
class DeltaPublished:
    """The Delta table after a publishing."""

    version: int
    """The version of the table."""
    manifest: int
    """The number of the last manifest that it covers."""
    added: int
    """The number of files that this run has added to the table."""
    removed: int
    """The number of files that this run has removed, replaced by others with the same rows."""
    rows: int
    """The number of rows in the days at which this run has looked, even if only at their new batches."""


def is_published(lake: AnyLake) -> bool:
    """Whether the lake has a Delta log."""
    return place_of(lake).version() is not None


def publish(lake: AnyLake, *, days: Collection[int] | None = None, rebuild: bool = False) -> DeltaPublished:
    """Bring the Delta log up to date with the chain, as `lake` has read it, in one commit.

    This looks at all days or, with `days`, at these and at the days of what the chain has gained since the
    last commit. If the gained batches lie in folders as the archive wrote them, and `days` is empty, it looks
    at these batches alone, and of the log only at the last commit: such a publication takes as long after a
    year as on the first day. `rebuild` moves the log aside (in a bucket, deletes it) and makes another. On a
    disk this waits for another publisher and for a day whose files are being replaced; in a bucket it raises
    `LakeBusy` if others are repeatedly faster. Raises `LakeError` if the log or the files do not belong to
    the chain, `UsageError` for an empty lake, and `ObjectStoreError`.
    """
    place = place_of(lake)
    if not lake.chain.end.number:
        raise UsageError(f"{lake.place} holds no lake yet: begin with strata-pipeline archive")
    with place.alone(), lake.held():
        if rebuild:
            place.put_log_away()
        for _ in range(_ATTEMPTS):
            try:
                return _publish(lake, place, days)
            except CommitFailedError:
                continue  # another publisher has put the same version
            except OSError as error:
                raise place.failed(error) from None
            except DeltaError as error:
                reason = str(error).partition("\n")[0]  # what follows may be the library's stack
                raise LakeError(
                    f"{place.log} cannot be used: {reason}. publish-delta --rebuild makes another log"
                ) from None
    raise LakeBusy(f"others write to {place.log} all the time: run this again later")


def published_files(lake: Path, version: int | None = None) -> list[Path]:
    """The files of the table at a version, by default the last, for readers that do not support Delta.

    Raises `DeltaError`.
    """
    table = lake.absolute() / GENERATIONS
    return [table / path for path in _actions(DeltaTable(table, version=version))]


def _publish(lake: AnyLake, place: DeltaPlace, days: Collection[int] | None) -> DeltaPublished:
    version = place.version()
    if days is not None and not days and version is not None and isinstance(place, DeltaOnDisk):
        done = _publish_gained(lake, place, version)
        if done is not None:
            return done
    table = None if version is None else DeltaTable(place.table, storage_options=place.options)
    if place.is_outdated():
        lake.load()  # else replaced objects would displace the newer ones that the log may already name
    begun = -1 if table is None else _covered_by_table(lake, place, table)
    last = lake.chain.end.number - 1
    look = set(lake.days())
    if table is not None and days is not None:
        look = {*days, *(manifest.span.day for manifest in lake.chain.after(str(begun)))} & look
    known = {} if table is None else _actions(table)
    names = {day_text(day) for day in look}
    # A look at all days also finds files in the log from days that the chain does not have.
    there = known if days is None else {path: told for path, told in known.items() if told["day"] in names}
    adds = place.files(look, known)
    added = [action for action in adds.values() if action is not None]
    removed = [path for path in there if path not in adds]
    rows = _check_rows(lake, look, adds, known)
    before: dict[str, int] = {}
    for told in there.values():
        before[told["day"]] = before.get(told["day"], 0) + told["rows"]
    for action in added:
        # Files that replace others bring no new rows: programs that follow the table need not read them.
        action.data_change = (
            before.get(str(action.partition_values["day"]))
            != rows[parse_day(str(action.partition_values["day"]))]
        )
    properties = _properties(lake)
    if table is None:
        create_table_with_add_actions(
            place.table, _schema(), added, partition_by=_PARTITIONS, name="packets",
            configuration=_PROPERTIES, commit_properties=properties, storage_options=place.options,
        )  # fmt: skip
        return DeltaPublished(0, last, len(added), 0, sum(rows.values()))
    if added or removed:
        now = int(time.time() * 1000)
        gone = [RemoveAction(path, False, now, known[path]["size"], _values(known[path])) for path in removed]
        table.create_write_transaction(
            [*added, *gone], "append", _schema(), _PARTITIONS, commit_properties=properties
        )
        table.update_incremental()
    return DeltaPublished(table.version(), last, len(added), len(removed), sum(rows.values()))


def _publish_gained(lake: AnyLake, place: DeltaOnDisk, version: int) -> DeltaPublished | None:
    """Add the batches that the chain has gained since the last commit, without reading older ones.

    Return None if that commit is not ours, or if the batches do not lie in their own folders, because a day
    was rewritten meanwhile.
    """
    commit = read_commit(place.commit(version), APP)
    if commit.transaction is None or _TIP not in commit.info:
        return None
    gained = lake.chain.after(str(_covered(lake, place, commit.transaction, commit.info[_TIP])))
    days = {manifest.span.day for manifest in gained}
    if any(map(lake.erasures.erased_from, days)):
        return None
    added: list[AddAction] = []
    for manifest in gained:
        found = place.batch(manifest.span)
        if found is None and manifest.packets:
            return None
        _check_batch(manifest, found or [])
        added += found or []
    last = lake.chain.end.number - 1
    if added:
        version += 1
        text = encode_commit(added, _PARTITIONS, APP, last, {_TIP: lake.tip}, time.time())
        if not place.put_commit(version, text):
            raise CommitFailedError(f"version {version} is there already")
        if version % _CHECKPOINT_EVERY == 0:
            table = DeltaTable(place.table, storage_options=place.options)
            table.create_checkpoint()
            table.cleanup_metadata()
    return DeltaPublished(version, last, len(added), 0, sum(map(lake.rows_of, days)))


def _check_batch(manifest: Manifest, files: list[AddAction]) -> None:
    rows = sum(map(_rows_in, files))
    if rows != manifest.packets:
        raise LakeError(
            f"the files of {batch_name(manifest)} have {rows:,} rows, and its manifest tells of "
            f"{manifest.packets:,}: nothing was published. Run audit"
        )


def _rows_in(action: AddAction) -> int:
    rows: int = json.loads(action.stats)["numRecords"]
    return rows


def _properties(lake: AnyLake) -> CommitProperties:
    transaction = Transaction(APP, lake.chain.end.number - 1)
    return CommitProperties(
        custom_metadata={_TIP: lake.tip}, app_transactions=[transaction], max_commit_retries=0
    )


def _covered_by_table(lake: AnyLake, place: DeltaPlace, table: DeltaTable) -> int:
    """The number of the last manifest that the log covers. Raises `LakeError` for a log of another chain."""
    tip = read_commit(place.commit(table.version()), APP).info.get(_TIP)
    return _covered(lake, place, table.transaction_version(APP), tip)


def _covered(lake: AnyLake, place: DeltaPlace, number: int | None, tip: object) -> int:
    """Check the number of the last manifest that the log covers, as our last commit has it, by the tip that
    the log's last commit names. Raises `LakeError` for a log of another chain."""
    if number is not None and number >= lake.chain.end.number:
        lake.load()  # another publisher has published what the chain has gained since it was read here
    end = lake.chain.end
    if number is not None and number < end.number:
        found = end.tip if number == end.number - 1 else lake.chain.one(number).hash
        if tip is None or tip == found:
            return number
    raise LakeError(
        f"{place.log} is not of this chain, which was cut off or replaced since. If "
        "the chain is right, publish-delta --rebuild makes another log"
    )


def _check_rows(
    lake: AnyLake,
    days: Collection[int],
    adds: dict[str, AddAction | None],
    known: dict[str, dict[str, Any]],
) -> dict[int, int]:
    """The number of rows of each of these days. Raises `LakeError` unless the files have as many as the chain
    says."""
    found = dict.fromkeys(days, 0)
    for path, action in adds.items():
        if action is None:
            day, rows = known[path]["day"], known[path]["rows"]
        else:
            day, rows = action.partition_values["day"], _rows_in(action)
        found[parse_day(str(day))] += rows
    for day, rows in found.items():
        if rows != lake.rows_of(day):
            raise LakeError(
                f"the files of {day_text(day)} have {rows:,} rows, and its manifests tell of "
                f"{lake.rows_of(day):,}: nothing was published. Run audit"
            )
    return found


def _actions(table: DeltaTable) -> dict[str, dict[str, Any]]:
    """The files of a table by path: the partition, size and number of rows of each. Raises `DeltaError`."""
    told = pa.table(table.get_add_actions(flatten=True))
    if not told.num_rows:
        return {}
    names = {"size_bytes": "size", "num_records": "rows"} | {
        f"partition.{name}": name for name in _PARTITIONS
    }
    if any(name not in told.column_names or told[name].null_count for name in names):
        raise DeltaError("another program has added files to it, and does not say how many rows they have")
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
