"""`strata-pipeline archive`: copy the log to the lake batch by batch, each packet exactly once.

The last manifest of the lake says where to continue, also after a kill. A batch is a part of one day. The
number of its rows is known before it is read, because a day has no gaps in its sequences.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as pads
from pyspark.sql import DataFrame, Observation, SparkSession
from pyspark.sql import functions as F
from strata.protocol.sequences import Span

from strata_pipeline.errors import LogError, PipelineError, log_too_short
from strata_pipeline.jobs.drafts import Draft, drafting
from strata_pipeline.jobs.failures import translate_failures
from strata_pipeline.jobs.publishing import DeltaFollower
from strata_pipeline.jobs.same_log import check_same_log
from strata_pipeline.lake.contents import contents_of
from strata_pipeline.lake.lake import Lake
from strata_pipeline.lake.places import AnyLake, write_lake
from strata_pipeline.lake.rows import digest_of, read_places, received_on
from strata_pipeline.lake_format import Manifest, read_witnesses, witnesses_hash
from strata_pipeline.log.database import connect, last_of, log_state
from strata_pipeline.log.spans import DEFAULT_BATCH_ROWS, LogState, next_batch
from strata_pipeline.planning import parallelism
from strata_pipeline.transforms.checking import check_rows
from strata_pipeline.transforms.witnessing import gathered_witnesses, witnesses_text

__all__ = ["Archived", "archive"]

_MIN_PART_ROWS = 10_000
"""Each part writes a file for each kind: small batches in many parts would make a lake of tiny files."""


@dataclass(slots=True)
class Archived:
    """The progress of a run."""

    batches: int = 0
    packets: int = 0
    quarantined: int = 0
    body_bytes: int = 0
    reached: int = 0
    """The sequence up to which the lake holds the log."""
    behind: int = 0
    """The number of rows of the log that the lake did not hold at the last look."""
    tip: str = ""
    """The hash of the last manifest."""
    moved_aside: list[str] = field(default_factory=list)
    """The incomplete folders that an interrupted writer had left in sight of readers; they are in `_aside`
    now."""
    left_behind: list[str] = field(default_factory=list)
    """In a bucket: objects that interrupted writers have left and that no manifest names."""
    deleted: list[str] = field(default_factory=list)
    """In a bucket: such objects that were deleted, because nobody can commit them any more."""


def archive(
    spark: SparkSession,
    url: str,
    path: str | Path,
    *,
    batch_rows: int = DEFAULT_BATCH_ROWS,
    partitions: int | None = None,
    delta: bool = False,
    follow: Callable[[], bool] = lambda: False,
    stopped: Callable[[], bool] = lambda: False,
    progress: Callable[[Archived], None] = lambda done: None,
) -> Archived:
    """Bring the lake up to the head of the log.

    A batch is read in `partitions` parts; by default in one for each core, but none below 10,000 rows. With
    `delta`, the Delta log is brought up to date once a minute and at the end. At the head, `follow` may wait,
    and returns whether to look again. After each batch, `stopped` returns whether to end there. `progress` is
    called after each batch and at the head. Raises `PipelineError` and `LakeError`; the next run completes
    the work in any case.
    """
    done = Archived()
    cores = parallelism(spark)
    with write_lake(path) as lake, contextlib.closing(connect(url)) as connection:
        published = DeltaFollower(lake) if delta else None
        _tell_of_leftovers(lake, done)
        check_same_log(lake, connection)
        while True:
            state = log_state(connection)
            if state.head < lake.reached:
                raise log_too_short(state.head, lake.reached)
            done.behind = sum(span.up_to - span.after for span in state.spans(lake.reached))
            span = next_batch(state, lake.reached, batch_rows)
            if span is None:
                done.reached, done.tip = lake.reached, lake.tip
                progress(done)
                if published is not None:
                    published.look(lake.reached)
                if not follow():
                    break
                continue
            if state.rows_expected(span) is None:  # the rows of a day that retention has spared are sparse
                span = span._replace(up_to=last_of(connection, span, batch_rows))
            parts = partitions or min(cores, -(-span.ordinals // _MIN_PART_ROWS))
            manifest = _archive_batch(spark, url, lake, span, state, parts)
            done.batches += 1
            done.packets += manifest.packets
            done.quarantined += manifest.quarantined
            done.body_bytes += manifest.body_bytes
            done.reached, done.tip = manifest.up_to, manifest.hash
            done.behind -= manifest.packets + manifest.quarantined
            progress(done)
            if published is not None:
                published.look(lake.reached)
            if stopped():
                break
        if published is not None:
            published.look(lake.reached, at_once=True)
    return done


def _tell_of_leftovers(lake: AnyLake, done: Archived) -> None:
    if isinstance(lake, Lake):
        done.moved_aside = [str(path) for path in lake.moved]
    else:
        done.left_behind, done.deleted = lake.left


def _archive_batch(
    spark: SparkSession, url: str, lake: AnyLake, span: Span, state: LogState, partitions: int
) -> Manifest:
    log = (
        spark.read.format("relay_log")
        .option("url", url)
        .option("after", span.after)
        .option("up_to", span.up_to)
        .option("partitions", partitions)
        .load()
    )
    witnessed, seen = Observation(), Observation()
    checked = _checked(log.observe(witnessed, gathered_witnesses().alias("rows")))
    counted = checked.observe(seen, F.count(F.lit(1)).alias("rows"), F.count("reason").alias("quarantined"))
    with drafting(lake, span) as draft:
        with translate_failures("archiving"):
            draft.write("packets", _packets(counted))
            quarantined = seen.get["quarantined"]
            if quarantined:  # rare, so the batch is read a second time, for these rows alone
                draft.write("quarantine", _checked(log).where("reason IS NOT NULL").drop("kind"))
        witnesses = witnesses_text(witnessed.get["rows"])
        try:
            return _commit(lake, span, state, draft, seen.get["rows"], quarantined, witnesses)
        except (ValueError, pa.ArrowException) as error:
            raise PipelineError(
                f"Spark has written a file that a lake does not take: {error}. Nothing was committed; does a "
                "setting of the cluster change how Spark writes Parquet?"
            ) from error


def _checked(log: DataFrame) -> DataFrame:
    return check_rows(log.drop("witnessed_at"))


def _packets(checked: DataFrame) -> DataFrame:
    return checked.where("reason IS NULL").drop("reason", "detail")


def _commit(
    lake: AnyLake,
    span: Span,
    state: LogState,
    draft: Draft,
    rows: int,
    quarantined: int,
    witnesses: bytes,
) -> Manifest:
    """Commit what was actually written: the files are read again before the manifest covers them."""
    packets = draft.folder("packets")
    quarantine = draft.folder("quarantine") if quarantined else None
    places = read_places([*_folders(packets), *_folders(quarantine)])
    expected = state.rows_expected(span)
    sequences = pc.unique(places["sequence"])
    is_other = expected is not None and rows != expected
    if not rows or not places.num_rows == len(sequences) == rows or is_other:
        raise LogError(
            f"the log must have {expected if expected is not None else rows or 'some'} packets in {span}, "
            f"and {len(sequences)} were found: rows are missing, or retention removed them just now"
        )
    last = places.num_rows - 1
    manifest = Manifest(
        number=lake.chain.end.number,
        after=span.after,
        up_to=span.up_to,
        packets=rows - quarantined,
        quarantined=quarantined,
        rows=digest_of(places),
        contents=contents_of(_folders(packets), _folders(quarantine), span),
        witnesses=witnesses_hash(witnesses),
        body_bytes=pc.sum(places["size"]).as_py() or 0,
        kinds=_kinds(packets),
        last_packet_id=(places["packet_id"][last].as_py() or b"").hex(),
        last_received_at=received_on(span.day, places["received_at"][last].as_py()),
        written_at=int(time.time()),
        previous=lake.tip,
    )
    if witnesses:
        read_witnesses(witnesses, manifest)  # no audit, copy or restore could get past one that is not right
    return draft.commit(manifest, witnesses)


def _folders(folder: Path | None) -> list[Path]:
    return [] if folder is None else [folder]


def _kinds(packets: Path | None) -> dict[str, int]:
    if packets is None:
        return {}
    return {
        folder.name.removeprefix("kind="): pads.dataset(folder, format="parquet").count_rows()
        for folder in sorted(packets.iterdir())
    }
