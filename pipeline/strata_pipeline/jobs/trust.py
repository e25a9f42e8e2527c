"""`strata-pipeline trust`: who trusts whom, according to the statements that authors have signed.

The newest statements of a day are kept beside the tables. The next run reads only days that are new or have
changed.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from strata.protocol.sequences import day_text

from strata_pipeline.datasets.trust import TrustAuthors, TrustEdges, TrustStatements
from strata_pipeline.jobs.day_tables import DayTables, bring_up
from strata_pipeline.jobs.failures import translate_failures
from strata_pipeline.jobs.tables import (
    DayWindow,
    check_output,
    rows_and_totals,
    rows_of,
    tables_of,
    write_page,
)
from strata_pipeline.lake.places import open_lake
from strata_pipeline.reports.trust import TENTHS, TrustFigures, render_trust
from strata_pipeline.transforms.trust import STATEMENTS, count_authors, standing_edges, statements_by_day

__all__ = ["trust"]

_SHOWN = 50
_FORMAT = 1


def trust(
    spark: SparkSession,
    path: str | Path,
    *,
    output: str | Path | None = None,
    progress: Callable[[str], None] = lambda step: None,
) -> TrustFigures:
    """The trust graph as it is at the end of the lake.

    With `output`, write into this folder the tables `trust_edges` and `trust_authors` as Parquet,
    `trust.html`, and `trust_days`, with which the next run into this folder reads no day twice. Only the
    folders of trust statements are read. `progress` is called as each step begins. Raises `PipelineError` and
    `LakeError`; the lake is only read.
    """
    lake = open_lake(path)
    window = DayWindow(lake)
    folder = check_output(output, lake)
    with lake.held(), translate_failures("trust"):
        if folder is None:
            progress("following statements")
            counted, statements = window.days, TrustStatements(_read(spark, window, window.days))
        else:
            days = DayTables(folder / "trust_days", TrustStatements, _FORMAT)
            counted = bring_up(
                [(days, lambda missing: _read(spark, window, missing))], lake, window.days, progress
            )
            progress("following statements")
            statements = days.read(spark, map(day_text, window.days))
        with tables_of(spark, folder) as made:
            edges = made.once("trust_edges", standing_edges(statements))
            authors = made.once("trust_authors", count_authors(edges))
            figures = _figures(window, edges, authors, len(counted))
    if folder is not None:
        progress("writing")
        write_page(folder / "trust.html", render_trust(figures))
    return figures


def _figures(window: DayWindow, edges: TrustEdges, authors: TrustAuthors, counted: int) -> TrustFigures:
    tenth = F.least(F.floor(F.col("strength") * TENTHS), F.lit(TENTHS - 1)).alias("tenth")
    strengths = {row["tenth"]: row["count"] for row in edges.frame.groupBy(tenth).count().collect()}
    sums = [F.count(F.lit(1)).alias("authors"), F.sum("mutual").alias("mutual")]
    trusted, totals = rows_and_totals(authors.frame, _SHOWN, F.desc("strength"), "author_id", totals=sums)
    return TrustFigures(
        note=window.note,
        counted=counted,
        edges=sum(strengths.values()),
        authors=totals["authors"],
        mutual=(totals["mutual"] or 0) // 2,
        strengths=strengths,
        trusted=trusted,
        newest=rows_of(edges.frame.orderBy(F.desc("received_at"), *_PLACE), _SHOWN),
    )


def _read(spark: SparkSession, window: DayWindow, days: list[int]) -> DataFrame:
    statements = statements_by_day(window.packets(spark, *STATEMENTS, days=days))
    return statements.repartition("day")  # there are few, so a day is one file


_PLACE = ("from_id", "to_id")
