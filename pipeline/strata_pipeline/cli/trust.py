"""`strata-pipeline trust`."""

from __future__ import annotations

from strata_pipeline.cli.app import Json, LakePlace, Master, SparkConf, failures_told, say, session_on
from strata_pipeline.cli.progress import steps_shown
from strata_pipeline.cli.report_parts import Output, print_row, print_table
from strata_pipeline.reports.text import count_text, shortened

__all__ = ["trust_command"]

_SHOWN = 15
_DID_CHARACTERS = 40


def trust_command(
    lake: LakePlace,
    output: Output = None,
    master: Master = None,
    conf: SparkConf = None,
    json: Json = False,
) -> None:
    """Report who trusts whom, by signed and standing edges.

    --output writes the graph as Parquet, edges and authors, and trust.html. It keeps what each day says as
    well: the next run into the same folder reads only days that are new or have changed.
    """
    from strata_pipeline.jobs.trust import trust

    with failures_told(), session_on(lake, "trust", master, conf) as spark:
        with steps_shown("trust", json, spark) as progress:
            figures = trust(spark, lake, output=output, progress=progress)
    if json:
        for row in figures.trusted:
            print_row("author", row)
    else:
        rows = [
            (
                shortened(row["author_id"], _DID_CHARACTERS),
                count_text(row["trusted_by"]),
                f"{row['strength']:.2f}",
            )
            for row in figures.trusted[:_SHOWN]
        ]
        print_table(("author", "trusted by", "strength"), rows, wrapped={"author"})
    days = figures.note.days
    text = f"{figures.edges:,} edges between {figures.authors:,} authors, {figures.mutual:,} mutual pairs"
    text += f"; {days:,} days, {figures.counted:,} of these read now"
    written = f"; see {output}/trust.html" if output else ""
    counts = {
        "days": days,
        "counted": figures.counted,
        "edges": figures.edges,
        "authors": figures.authors,
        "mutual": figures.mutual,
    }
    say(text + written, json, event="done", tip=figures.note.tip, **counts)
