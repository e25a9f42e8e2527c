"""`strata-pipeline traffic`."""

from __future__ import annotations

from typing import Annotated

import typer

from strata_pipeline.cli.app import Json, LakePlace, Master, SparkConf, failures_told, say, session_on
from strata_pipeline.cli.progress import steps_shown
from strata_pipeline.cli.report_parts import Days, Output, print_row, print_table
from strata_pipeline.errors import UsageError
from strata_pipeline.reports.text import count_text, shortened, size_text
from strata_pipeline.reports.traffic import TrafficFigures
from strata_pipeline.transforms.thresholds import BURST_CEILING, BURST_FLOOR, Thresholds

__all__ = ["traffic_command"]

_SHOWN = 15
_DID_CHARACTERS = 40
_USUAL = Thresholds()


def traffic_command(
    lake: LakePlace,
    days: Days = None,
    output: Output = None,
    database_url: Annotated[
        str | None,
        typer.Option(
            "--database-url",
            envvar="STRATA_PIPELINE_DATABASE_URL",
            metavar="URL",
            help="The relay's primary PostgreSQL, for --load-abuse; the role must be able to write to abuse.",
            show_default=False,
            show_envvar=True,
        ),
    ] = None,
    load_abuse: Annotated[
        bool, typer.Option("--load-abuse", help="Bring the relay's abuse table up to date.")
    ] = False,
    burst_floor: Annotated[
        int,
        typer.Option(
            metavar="N", help="This many packets within a second or fewer are never a burst.", min=1
        ),
    ] = BURST_FLOOR,
    burst_ceiling: Annotated[
        int,
        typer.Option(
            metavar="N", help="More packets than this within a second are a burst for any author.", min=1
        ),
    ] = BURST_CEILING,
    burst_hours: Annotated[
        int, typer.Option(metavar="N", help="Number of hours with bursts that limit an author.", min=1)
    ] = _USUAL.burst_hours,
    limit_copies: Annotated[
        int,
        typer.Option(
            metavar="N", help="Number of near-duplicates within an hour that limit an author.", min=1
        ),
    ] = _USUAL.limit_copies,
    block_copies: Annotated[
        int,
        typer.Option(
            metavar="N", help="Number of near-duplicates within an hour that block an author.", min=1
        ),
    ] = _USUAL.block_copies,
    copies_share: Annotated[
        float,
        typer.Option(
            metavar="SHARE",
            help="The share of the hour's texts that must be near-duplicates.",
            min=0.01,
            max=1,
        ),
    ] = _USUAL.copies_share,
    verdict_hours: Annotated[
        int,
        typer.Option(
            metavar="N", help="A verdict ends this many hours after the last hour that gave cause.", min=1
        ),
    ] = _USUAL.hours,
    master: Master = None,
    conf: SparkConf = None,
    json: Json = False,
) -> None:
    """Report who sends how much, and whom to slow down or block.

    The report counts by author, type and hour, and finds bursts and near-duplicates. --output writes tables
    as Parquet, and traffic.html. It keeps what was read of each day as well: the next run into the same
    folder reads only days that are new or have changed. Only --load-abuse changes the relay's database; rows
    that an operator wrote there stay as they are.
    """
    from strata_pipeline.jobs.traffic import TrafficOptions, traffic

    with failures_told():
        if load_abuse and not database_url:
            raise UsageError("--load-abuse needs --database-url")
        options = TrafficOptions(
            burst_floor,
            burst_ceiling,
            Thresholds(burst_hours, limit_copies, block_copies, copies_share, verdict_hours),
        )
        with (
            session_on(lake, "traffic", master, conf) as spark,
            steps_shown("traffic", json, spark) as progress,
        ):
            figures = traffic(
                spark,
                lake,
                days=days,
                output=output,
                load_into=database_url if load_abuse else None,
                options=options,
                progress=progress,
            )
    if json:
        for event, rows in (
            ("author", figures.authors),
            ("type", figures.types),
            ("burst", figures.bursts),
            ("cluster", figures.clusters),
            ("verdict", figures.abuse),
        ):
            for row in rows:
                print_row(event, row)
    else:
        _print(figures)
    say(_told(figures, output, load_abuse), json, event="done", tip=figures.note.tip, **figures.totals)


def _print(figures: TrafficFigures) -> None:
    heads = ("author", "packets", "size", "in one second", "near-duplicates")
    rows = [
        (
            shortened(row["author_id"], _DID_CHARACTERS),
            count_text(row["packets"]),
            size_text(row["size"]),
            count_text(row["peak_packets"]),
            count_text(row["near_duplicates"]),
        )
        for row in figures.authors[:_SHOWN]
    ]
    print_table(heads, rows, wrapped={"author"})
    verdicts = [(row["author_id"], row["verdict"], row["reason"]) for row in figures.abuse[:_SHOWN]]
    print_table(("author", "verdict", "reason"), verdicts, wrapped={"author", "reason"})


def _told(figures: TrafficFigures, output: str | None, loaded: bool) -> str:
    totals = figures.totals
    written = f"; see {output}/traffic.html" if output else ""
    into = ", loaded into the relay's table" if loaded else ""
    return (
        f"{totals['packets']:,} packets of {totals['authors']:,} authors, {totals['near_duplicates']:,} "
        f"near-duplicates, {totals['bursts']:,} bursts, {totals['abuse']:,} verdicts{into}{written}"
    )
