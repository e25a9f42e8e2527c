"""The report on reliable channels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from strata_pipeline.reports.page import Column, LakeNote, page, plot, section, table
from strata_pipeline.reports.series import by_day
from strata_pipeline.reports.svg import columns, ranges
from strata_pipeline.reports.text import count_text, hour_text, seconds_text, share_text, size_text

__all__ = ["ReliabilityFigures", "render_reliability"]

_Rows = Sequence[Mapping[str, Any]]
_PLOTTED = 20


@dataclass(frozen=True)
class ReliabilityFigures:
    """The figures of the report. Rows have the columns of the dataset of their name, and may be a
    selection."""

    note: LakeNote
    totals: Mapping[str, Any]
    """The numbers of `channels`, `messages`, `retransmissions`, `unacknowledged` (messages), `gaps`,
    `silences` and `unreadable` packets; how many rows there are of `channel_days`, and how many of these are
    `readable_days`; `days`; and `counted`, the number of days that were read for the report."""
    daily: _Rows
    """`messages`, `retransmissions` and `unreadable` for each day, oldest first."""
    channel_days: _Rows
    gaps: _Rows
    silences: _Rows


def render_reliability(figures: ReliabilityFigures) -> str:
    """The report as the text of an HTML file."""
    totals = figures.totals
    return page(
        "Reliability of channels",
        figures.note,
        [
            ("channels", count_text(totals["channels"])),
            ("messages", count_text(totals["messages"])),
            ("retransmissions", count_text(totals["retransmissions"])),
            ("never acknowledged", count_text(totals["unacknowledged"])),
            ("causal gaps", count_text(totals["gaps"])),
            ("unreadable packets", count_text(totals["unreadable"])),
        ],
        [_days(figures), _delays(figures), _channels(figures), _unreadable(figures), _silences(figures),
         _gaps(figures)],
    )  # fmt: skip


def _days(figures: ReliabilityFigures) -> str:
    names = ("messages", "retransmissions", "unreadable")
    counts = {str(row["day"]): [float(row[name]) for name in names] for row in figures.daily}
    points = by_day(counts, [0.0] * len(names))
    about = (
        "Messages by the day of their first packet, packets that carried one again, and packets in which no "
        "message can be read."
    )
    return section("By day", about, plot(columns(points, names, count_text)))


def _delays(figures: ReliabilityFigures) -> str:
    known = [row for row in figures.channel_days if row["ack_delay_p50"] is not None]
    slowest = sorted(known, key=lambda row: -row["ack_delay_p95"])[:_PLOTTED]
    rows = [(f"{_name(row)} {row['day']}", row["ack_delay_p50"], row["ack_delay_p95"]) for row in slowest]
    about = (
        "From a message's first packet to the first packet of another participant that names it, or names "
        "what follows it: median (left dot) and 95th percentile (right dot) of the slowest channels and days."
    )
    drawn = plot(ranges(rows, seconds_text)) if rows else '<p class="dim">No message was acknowledged.</p>'
    return section("Acknowledgement delay", about, drawn)


def _channels(figures: ReliabilityFigures) -> str:
    heads = [
        Column("day"), Column("topic and channel", True), Column("messages"), Column("again"),
        Column("syncs"), Column("ephemerals"), Column("senders"), Column("delay"), Column("p95"),
        Column("never"), Column("gaps"), Column("silences"),
    ]  # fmt: skip
    rows = [
        [
            str(row["day"]), _name(row), count_text(row["messages"]), count_text(row["retransmissions"]),
            count_text(row["syncs"]), count_text(row["ephemerals"]), count_text(row["participants"]),
            seconds_text(row["ack_delay_p50"]), seconds_text(row["ack_delay_p95"]),
            share_text(row["unacknowledged"]), count_text(row["gaps"]), count_text(row["silences"]),
        ]
        for row in figures.channel_days if row["readable"]
    ]  # fmt: skip
    about = (
        "“Again” counts retransmissions, “delay” is the median, “p95” the 95th percentile, “never” the share "
        "of messages that nobody acknowledged until the lake ends; filters are not read, so an "
        "acknowledgement by filters alone is not seen. “Silences” counts pairs of participants, one of whom "
        "acknowledged nothing of the other."
    )
    return section("Channels", about, table(heads, rows, figures.totals["readable_days"]))


def _unreadable(figures: ReliabilityFigures) -> str:
    heads = [
        Column("day"), Column("topic", True), Column("packets"), Column("of these malformed"), Column("size"),
        Column("authors"), Column("first"), Column("last"),
    ]  # fmt: skip
    rows = [
        [
            str(row["day"]), row["content_topic"], count_text(row["packets"]), count_text(row["malformed"]),
            size_text(row["bytes"]), count_text(row["authors"]), hour_text(row["first_at"]),
            hour_text(row["last_at"]),
        ]
        for row in figures.channel_days if not row["readable"]
    ]  # fmt: skip
    about = (
        "The messages in these packets cannot be read: encrypted, in an encoding of their own, or garbage. "
        "So only what packets themselves tell is known, and nothing about acknowledgements. Malformed "
        "packets do not even have the form in which channels send."
    )
    total = figures.totals["channel_days"] - figures.totals["readable_days"]
    return section("Unreadable", about, table(heads, rows, total))


def _silences(figures: ReliabilityFigures) -> str:
    heads = [Column("day"), Column("topic and channel", True), Column("sender", True),
             Column("never acknowledged by", True), Column("messages")]  # fmt: skip
    rows = [
        [str(row["day"]), _name(row), row["sender_id"], row["participant_id"], count_text(row["messages"])]
        for row in figures.silences
    ]
    about = (
        "Participants that sent something after another's messages of a day, and acknowledged none of these, "
        "neither then nor later."
    )
    return section("Who never acknowledged", about, table(heads, rows, figures.totals["silences"]))


def _gaps(figures: ReliabilityFigures) -> str:
    heads = [Column("first named"), Column("topic and channel", True), Column("message", True),
             Column("named by")]  # fmt: skip
    rows = [
        [hour_text(row["named_at"]), _name(row), row["message_id"], count_text(row["named_by"])]
        for row in figures.gaps
    ]
    about = "Messages that others name in their causal history, and that no packet of the lake carries."
    return section("Causal gaps", about, table(heads, rows, figures.totals["gaps"]))


def _name(row: Mapping[str, Any]) -> str:
    return f"{row['content_topic']} {row['channel_id'] or ''}".rstrip()
