"""A Delta log beside the chain: the lake as a table for readers of Delta.

`packets/_delta_log` names the files of `packets/`, by day and kind. It says nothing that folders and chain do
not say, and it proves nothing: no job of ours reads it, and it can be removed and made again (decision 57).
Each commit records the manifest up to which it goes, so publishing can be repeated safely after a kill.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, PostCommitHookProperties, Schema, Transaction
from deltalake.exceptions import CommitFailedError, DeltaError
from deltalake.transaction import AddAction, RemoveAction, create_table_with_add_actions
from pyspark.sql.types import StringType, StructField, StructType
from strata.protocol.lake import Manifest, day_text, parse_day

from strata_pipeline.errors import LakeBusy, LakeError, UsageError
from strata_pipeline.lake.checking import batch_name
from strata_pipeline.lake.delta_places import DeltaPlace, delta_log, place_of
from strata_pipeline.lake.places import AnyLake
from strata_pipeline.schemas import schema

__all__ = ["APP", "OpenTable", "Published", "delta_log", "is_published", "publish", "published_files"]

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
class Published:
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


class OpenTable:
    """The table as the last publication left it, for a process that publishes repeatedly: the more files a
    log names, the longer it takes to open. Later commits by others are read on top of it; a log that was made
    again is opened from the start.
    """

    def __init__(self) -> None:
        self._left: tuple[DeltaTable, bytes] | None = None  # with the last commit

    def open(self, place: DeltaPlace) -> DeltaTable:
        """The table as it is now. Raises `DeltaError`."""
        table = self._at_hand(place)
        if table is None:
            return DeltaTable(place.table, storage_options=place.options)
        table.update_incremental()
        return table

    def _at_hand(self, place: DeltaPlace) -> DeltaTable | None:
        if self._left is None:
            return None
        (table, commit), self._left = self._left, None
        with contextlib.suppress(OSError):
            if place.commit(table.version()) == commit:
                return table
        return None

    def leave(self, place: DeltaPlace, table: DeltaTable) -> None:
        """Keep the table for the next time."""
        self._left = table, place.commit(table.version())


def is_published(lake: AnyLake) -> bool:
    """Whether the lake has a Delta log."""
    return place_of(lake).has_log()


def publish(
    lake: AnyLake,
    *,
    days: Collection[int] | None = None,
    rebuild: bool = False,
    opened: OpenTable | None = None,
) -> Published:
    """Bring the Delta log up to date with the chain, as `lake` has read it, in one commit.

    This looks at all days or, with `days`, at these and at the days of what the chain has gained since the
    last commit. If the gained batches lie in folders as the archive wrote them, and `days` is empty, it looks
    at these batches alone: such a publication, with `opened` from the previous one, takes as long after a
    year as on the first day. `rebuild` moves the log aside (in a bucket, deletes it) and makes another. On a
    disk this waits for another publisher and for a day whose files are being replaced; in a bucket it raises
    `LakeBusy` if others are repeatedly faster. Raises `LakeError` if the log or the files do not belong to
    the chain, `UsageError` for an empty lake, and `StoreError`.
    """
    place = place_of(lake)
    if not lake.chain.end.number:
        raise UsageError(f"{lake.place} holds no lake yet: begin with strata-pipeline archive")
    with place.alone(), lake.held():
        if rebuild:
            place.put_log_away()
        for _ in range(_ATTEMPTS):
            try:
                return _publish(lake, place, days, opened or OpenTable())
            except CommitFailedError:
                continue  # another publisher has put the same version
            except OSError as error:
                raise place.failed(error) from None
            except DeltaError as error:
                raise LakeError(
                    f"{place.log} cannot be used: {error}. publish-delta --rebuild makes another log"
                ) from None
    raise LakeBusy(f"others write to {place.log} all the time: run this again later")


def published_files(lake: Path, version: int | None = None) -> list[Path]:
    """The files of the table at a version, by default the last, for readers that do not support Delta.

    Raises `DeltaError`.
    """
    packets = lake.absolute() / "packets"
    return [packets / path for path in _actions(DeltaTable(packets, version=version))]


def _publish(lake: AnyLake, place: DeltaPlace, days: Collection[int] | None, opened: OpenTable) -> Published:
    table = opened.open(place) if place.has_log() else None
    if place.is_outdated():
        lake.load()  # else replaced objects would displace the newer ones that the log may already name
    begun = -1 if table is None else _check_same_chain(lake, place, table)
    last = lake.chain.end.number - 1
    look = set(lake.days())
    if table is not None:
        if days is not None:
            done = None if days else _publish_gained(lake, place, table, begun, opened)
            if done is not None:
                return done
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
        return Published(0, last, len(added), 0, sum(rows.values()))
    if added or removed:
        now = int(time.time() * 1000)
        gone = [RemoveAction(path, False, now, known[path]["size"], _values(known[path])) for path in removed]
        table.create_write_transaction(
            [*added, *gone], "append", _schema(), _PARTITIONS, commit_properties=properties
        )
        table.update_incremental()
    return Published(table.version(), last, len(added), len(removed), sum(rows.values()))


def _publish_gained(
    lake: AnyLake, place: DeltaPlace, table: DeltaTable, begun: int, opened: OpenTable
) -> Published | None:
    """Add the batches that the chain has gained since manifest `begun`, without reading older ones.

    Return None if they do not lie in their own folders, because a day was rewritten meanwhile.
    """
    gained = lake.chain.after(str(begun))
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
    version = table.version()
    opened.leave(place, table)
    if added:
        cleans_up = (version + 1) % _CHECKPOINT_EVERY == 0
        table.create_write_transaction(
            [*added], "append", _schema(), _PARTITIONS, commit_properties=_properties(lake),
            post_commithook_properties=PostCommitHookProperties(cleanup_expired_logs=cleans_up),
        )  # fmt: skip
        version += 1  # the commit was not retried, and the next `open` of the table reads it
    rows = sum(map(lake.rows_of, days))
    return Published(version, lake.chain.end.number - 1, len(added), 0, rows)


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


def _check_same_chain(lake: AnyLake, place: DeltaPlace, table: DeltaTable) -> int:
    """The number of the last manifest that the log covers. Raises `LakeError` for a log of another chain."""
    number = table.transaction_version(APP)
    if number is not None and number >= lake.chain.end.number:
        lake.load()  # another publisher has published what the chain has gained since it was read here
    tip = _tip_of(place.commit(table.version()))
    end = lake.chain.end
    if number is not None and number < end.number:
        found = end.tip if number == end.number - 1 else lake.chain.one(number).hash
        if tip is None or tip == found:
            return number
    raise LakeError(
        f"{place.log} is not of this chain, which was migrated, cut off or replaced since. If "
        "the chain is right, publish-delta --rebuild makes another log"
    )


def _tip_of(commit: bytes) -> str | None:
    """The tip of the chain that a commit names."""
    told = (json.loads(line) for line in commit.splitlines())
    return next((one["commitInfo"].get(_TIP) for one in told if "commitInfo" in one), None)


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
    """The files of a table by path: the partition, size and number of rows of each."""
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
