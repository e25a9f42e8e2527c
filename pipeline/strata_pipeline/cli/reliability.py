"""`strata-pipeline reliability`."""

from __future__ import annotations

from strata_pipeline.cli.app import Json, LakePlace, Master, SparkConf, failures_told, say, session_on
from strata_pipeline.cli.progress import steps_shown
from strata_pipeline.cli.report_parts import Days, Output, print_row, print_table
from strata_pipeline.reports.reliability import ReliabilityFigures
from strata_pipeline.reports.text import count_text, seconds_text, share_text

__all__ = ["reliability_command"]

_SHOWN = 20


def reliability_command(
    lake: LakePlace,
    days: Days = None,
    output: Output = None,
    master: Master = None,
    conf: SparkConf = None,
    json: Json = False,
) -> None:
    """Report how reliable channels are, by channel and day.

    The report has delays, retransmissions, gaps and silences. Of an encrypted channel only the packets can be
    counted, and its rows say so. --output writes tables as Parquet, and reliability.html. It keeps the
    messages of each day as well: the next run into the same folder reads only days that are new or have
    changed.
    """
    from strata_pipeline.jobs.reliability import reliability

    with failures_told(), session_on(lake, "reliability", master, conf) as spark:
        with steps_shown("reliability", json, spark) as progress:
            figures = reliability(spark, lake, days=days, output=output, progress=progress)
    if json:
        for row in figures.channel_days:
            print_row("channel_day", row)
    else:
        _print(figures)
    say(_told(figures, output), json, event="done", tip=figures.note.tip, **figures.totals)


def _print(figures: ReliabilityFigures) -> None:
    heads = (
        "day",
        "topic and channel",
        "messages",
        "again",
        "p50",
        "p95",
        "never",
        "gaps",
        "unreadable",
    )
    rows = [
        (
            str(row["day"]),
            f"{row['content_topic']} {row['channel_id'] or '(unreadable)'}",
            count_text(row["messages"]),
            count_text(row["retransmissions"]),
            seconds_text(row["ack_delay_p50"]),
            seconds_text(row["ack_delay_p95"]),
            share_text(row["unacknowledged"]),
            count_text(row["gaps"]),
            count_text(row["unreadable"]),
        )
        for row in figures.channel_days[:_SHOWN]
    ]
    print_table(heads, rows, wrapped={"topic and channel"})


def _told(figures: ReliabilityFigures, output: str | None) -> str:
    totals = figures.totals
    written = f"; see {output}/reliability.html" if output else ""
    return (
        f"{totals['messages']:,} messages in {totals['channels']:,} channels, {totals['retransmissions']:,} "
        f"retransmissions, {totals['unacknowledged']:,} never acknowledged, {totals['gaps']:,} gaps, "
        f"{totals['unreadable']:,} unreadable packets{written}"
    )
