"""`strata-pipeline reputation`: how relays did over seven days, as seen by many clients.

A client's scores are its own and are sent to nobody (R-340). This job is for operators who run many clients
and collect from them what `strata relays export` prints. A log is any file of JSON lines below the folder,
which may be compressed:

    probes/laptop-1/2026-11-21.jsonl
    probes/phone.jsonl.gz
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from strata_pipeline.datasets.probes import RelayScores
from strata_pipeline.errors import UsageError
from strata_pipeline.globs import for_spark
from strata_pipeline.jobs.failures import translate_failures
from strata_pipeline.jobs.tables import keep, write_frames
from strata_pipeline.schemas import schema
from strata_pipeline.transforms.reputation import FUTURE, OLD, read_probes, relay_scores

__all__ = ["Scored", "reputation", "require_probes"]

_FILES = "{*.jsonl,*.jsonl.gz,*.jsonl.bz2,*.jsonl.zst}"
_HAS_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*://").match


@dataclass(slots=True)
class Scored:
    """The result of a run."""

    at: float
    """The time of the scores, in Unix seconds."""
    lines: int = 0
    malformed: int = 0
    """The number of lines that are not observations."""
    future: int = 0
    """The number of observations made after `at`."""
    old: int = 0
    """The number of observations made before the seven days."""
    relays: list[dict[str, Any]] = field(default_factory=list)
    """Rows of `RelayScores`, the best first."""


def require_probes(probes: str | Path) -> None:
    """Raise `UsageError` if the logs should be in a folder of this machine that is none."""
    if _is_local(probes) and not Path(probes).is_dir():
        raise UsageError(
            f"{probes} is not a folder; put there what `strata relays export` prints, as *.jsonl"
        )


def _is_local(probes: str | Path) -> bool:
    return not _HAS_SCHEME(str(probes))


def reputation(
    spark: SparkSession, probes: str | Path, *, at: float | None = None, output: str | Path | None = None
) -> Scored:
    """Score all relays in the logs below a folder, as of `at`, by default now.

    With `output`, the scores are written to `output/relay_scores` and malformed lines to `output/malformed`,
    both Parquet, and replace earlier ones, which stay if the job fails or is killed. The scores of each time
    stay in `output/relay_score_history`. Raises `UsageError` if the folder is missing or the output cannot
    be written, and `PipelineError` if the logs cannot be read.
    """
    require_probes(probes)
    is_local = _is_local(probes)
    now = time.time() if at is None else at
    with translate_failures("reading probe logs"):
        # As bytes, because a damaged line need not be UTF-8.
        text = (
            spark.read.option("recursiveFileLookup", "true")
            .option("pathGlobFilter", _FILES)
            .text(for_spark(Path(probes)) if is_local else str(probes))
        )
        lines = text.select(
            F.col("value").cast("binary").alias("line"), F.col("_metadata.file_path").alias("file")
        )
        read = read_probes(lines, now)
        with keep(read):
            # Counted apart: where nothing is left to score, Spark skips what would count along the way.
            counts = {row["reason"]: row["count"] for row in read.frame.groupBy("reason").count().collect()}
            rows = [row.asDict() for row in relay_scores(read, now).frame.collect()]
            rows.sort(key=lambda row: (-row["score"], row["url"]))
            scored = Scored(
                now,
                lines=sum(counts.values()),
                malformed=counts.get("malformed", 0),
                future=counts.get(FUTURE, 0),
                old=counts.get(OLD, 0),
                relays=rows,
            )
            if output is not None:
                scores = RelayScores(spark.createDataFrame(rows, schema("relay_scores"))).frame.coalesce(1)
                aside = read.frame.where(F.col("reason") == "malformed").select("file", "line")
                history = f"relay_score_history/at={int(now)}"
                _write(output, {"malformed": aside, history: scores, "relay_scores": scores})
    return scored


def _write(output: str | Path, frames: Mapping[str, DataFrame]) -> None:
    if not _HAS_SCHEME(str(output)):
        write_frames(Path(output).absolute(), frames)
        return
    for name, frame in frames.items():  # in a place that only Spark reaches, nothing can be renamed here
        frame.write.mode("overwrite").parquet(f"{output}/{name}")
