"""`strata-pipeline trust`: who trusts whom, by the statements that authors have signed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from strata_pipeline.datasets import Packets
from strata_pipeline.jobs.failures import translate_failures
from strata_pipeline.jobs.tables import DayWindow, check_output, keep, rows_of, write_page, write_tables
from strata_pipeline.lake.places import open_lake
from strata_pipeline.reports.trust import TENTHS, TrustFigures, render_trust
from strata_pipeline.transforms.trust import STATEMENTS, count_authors, standing_edges

__all__ = ["trust"]

_SHOWN = 50


def trust(
    spark: SparkSession,
    path: str | Path,
    *,
    output: str | Path | None = None,
    progress: Callable[[str], None] = lambda step: None,
) -> TrustFigures:
    """The trust graph as it stands at the lake's end.

    With `output`, a folder: the tables `trust_edges` and `trust_authors` as Parquet, and `trust.html`. Only
    the folders of trust statements are read. `progress` is told what begins. Raises `PipelineError` and
    `LakeError`; the lake is only read.
    """
    lake = open_lake(path)
    window = DayWindow(lake)
    folder = check_output(output, lake)
    with lake.held(), translate_failures("trust"):
        progress("following statements")
        rows = Packets.of(spark, lake, window.days, kinds=STATEMENTS).frame
        edges = standing_edges(Packets(rows.where(F.col("sequence") <= lake.reached)))
        with keep(edges):
            authors = count_authors(edges)
            with keep(authors):
                tenth = F.least(F.floor(F.col("strength") * TENTHS), F.lit(TENTHS - 1)).alias("tenth")
                strengths = edges.frame.groupBy(tenth).count().collect()
                figures = TrustFigures(
                    note=window.note,
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


_PLACE = ("from_id", "to_id")
