"""A Delta log beside the chain: the lake as a table for whoever reads Delta.

`packets/_delta_log` names the files of `packets/`, by day and kind. It says nothing that folders and chain do
not say, and it proves nothing: no job of ours reads it, and it can be removed and made again (decision 57). A
commit tells up to which manifest it goes, so publishing again changes nothing, whatever was killed.
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
"""The application of our commits; its version is the number of the last manifest that they tell of."""

_PARTITIONS = ["day", "batch", "kind"]  # as folders tell: Polars refuses a table that leaves one out
_TIP = "strata_tip"
_ATTEMPTS = 5
"""In a bucket the second of two publishers begins again: what the first has published is there then."""
_CHECKPOINT_EVERY = 100
"""Versions. Old ones are cleaned up as often: to find them is to look at the names of all."""
_PROPERTIES = {
    "delta.appendOnly": "true",  # whoever deletes rows of a lake by mistake is refused
    "delta.checkpointInterval": str(_CHECKPOINT_EVERY),
    "delta.logRetentionDuration": "interval 7 days",  # of a commit a minute: each looks at the names of all
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
    """Rows in the days at which this run has looked, be it at new batches of theirs alone."""


class OpenTable:
    """The table as one who publishes again and again has left it: the more files a log names, the longer it
    takes to open. What others have committed since is read on top; a log that was made again is opened anew.
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
        """Keep this for the next time."""
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
    """Bring the Delta log up to the chain, as `lake` has read it, in one commit.

    Looked at are all days; with `days`, these and what the chain has gained since the last commit. Where that
    lies in its batches, as the archive has written them, and `days` is empty, nothing else is looked at: such
    a publishing takes as long after a year as on the first day, with `opened` of the one before. `rebuild`
    moves the log aside, in a bucket deletes it, and makes another. On a disk it waits for another publisher
    and for a day that changes its files; in a bucket it raises `LakeBusy` where others are faster again and
    again. Raises `LakeError` where log or files and chain do not belong together, `UsageError` for an empty
    lake, and `StoreError`.
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
                continue  # somebody else has put the same version
            except OSError as error:
                raise place.failed(error) from None
            except DeltaError as error:
                raise LakeError(
                    f"{place.log} cannot be used: {error}. publish-delta --rebuild makes another log"
                ) from None
    raise LakeBusy(f"others write to {place.log} all the time: run this again later")


def published_files(lake: Path, version: int | None = None) -> list[Path]:
    """The files of the table, at a version or the last, for readers that do not know Delta.

    Raises `DeltaError`.
    """
    packets = lake.absolute() / "packets"
    return [packets / path for path in _actions(DeltaTable(packets, version=version))]


def _publish(lake: AnyLake, place: DeltaPlace, days: Collection[int] | None, opened: OpenTable) -> Published:
    table = opened.open(place) if place.has_log() else None
    if place.is_outdated():
        lake.load()  # else objects that were replaced would take the place of what the log has by now
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
    # A whole look finds out, too, what the log names of days that the chain does not tell of.
    there = known if days is None else {path: told for path, told in known.items() if told["day"] in names}
    adds = place.files(look, known)
    added = [action for action in adds.values() if action is not None]
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
    """Add the batches that the chain has gained since manifest `begun`, and read nothing of older ones.

    None where they do not lie in folders of their own: a day was written anew meanwhile.
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
        version += 1  # nothing is tried again, and who opens the table next reads what was added
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
    """The number of the last manifest that the log tells of. Raises `LakeError` for one of another chain."""
    number = table.transaction_version(APP)
    if number is not None and number >= lake.chain.end.number:
        lake.load()  # what the chain has gained since it was read here, somebody else has published
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
    """The rows of each of these days. Raises `LakeError` unless the files have as many as the chain tells."""
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
