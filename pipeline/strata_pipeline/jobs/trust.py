"""`strata-pipeline trust`: who trusts whom, according to the statements that authors have signed.

The newest statements of a day are kept beside the tables. The next run reads only days that are new or have
changed.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from strata.protocol.lake import day_text

from strata_pipeline.datasets.trust import TrustStatements
from strata_pipeline.jobs.day_tables import DayTables, bring_up
from strata_pipeline.jobs.failures import translate_failures
from strata_pipeline.jobs.tables import DayWindow, check_output, keep, rows_of, write_page, write_tables
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
        edges = standing_edges(statements)
        with keep(edges):
            authors = count_authors(edges)
            with keep(authors):
                tenth = F.least(F.floor(F.col("strength") * TENTHS), F.lit(TENTHS - 1)).alias("tenth")
                strengths = edges.frame.groupBy(tenth).count().collect()
                figures = TrustFigures(
                    note=window.note,
                    counted=len(counted),
                    edges=sum(row["count"] for row in strengths),
                    authors=authors.frame.count(),
                    mutual=(authors.frame.agg(F.sum("mutual")).collect()[0][0] or 0) // 2,
                    strengths={row["tenth"]: row["count"] for row in strengths},
                    trusted=rows_of(authors.frame.orderBy(F.desc("strength"), "author_id"), _SHOWN),
                    newest=rows_of(edges.frame.orderBy(F.desc("received_at"), *_PLACE), _SHOWN),
                )
                if folder is not None:
                    progress("writing")
                    write_tables(folder, {"trust_edges": edges, "trust_authors": authors})
                    write_page(folder / "trust.html", render_trust(figures))
                return figures


def _read(spark: SparkSession, window: DayWindow, days: list[int]) -> DataFrame:
    statements = statements_by_day(window.packets(spark, *STATEMENTS, days=days))
    return statements.repartition("day")  # there are few, so a day is one file


_PLACE = ("from_id", "to_id")
