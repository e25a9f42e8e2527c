"""The report on traffic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from strata_pipeline.reports.page import Column, LakeNote, page, plot, section, table
from strata_pipeline.reports.series import by_number
from strata_pipeline.reports.svg import bars, columns, heat
from strata_pipeline.reports.text import count_text, date_text, hour_text, size_text

__all__ = ["TrafficFigures", "render_traffic"]

_Rows = Sequence[Mapping[str, Any]]
_HOUR, _DAY = 3_600, 86_400
_MAX_HOURS = 14 * 24
_WEEK = 7 * 24
_WEEKDAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")


@dataclass(frozen=True)
class TrafficFigures:
    """The figures of the report. Rows have the columns of their dataset, and may be a selection."""

    note: LakeNote
    totals: Mapping[str, Any]
    """`packets`, `size`, `authors`, `near_duplicates`; the numbers of rows of the lists below; `days`; and
    `counted`, the number of days that were read for the report."""
    hourly: _Rows
    """`hour_at`, `packets` and `near_duplicates` for each hour, oldest first."""
    authors: _Rows
    """`author_id`, `packets`, `size`, `near_duplicates` and `peak_packets` of those who send most."""
    types: _Rows
    """`content_type`, `packets` and `size` of the most frequent types."""
    bursts: _Rows
    clusters: _Rows
    abuse: _Rows


def render_traffic(figures: TrafficFigures) -> str:
    """The report as the text of an HTML file."""
    totals = figures.totals
    return page(
        "Traffic",
        figures.note,
        [
            ("packets", count_text(totals["packets"])),
            ("size", size_text(totals["size"])),
            ("authors", count_text(totals["authors"])),
            ("near-duplicates", count_text(totals["near_duplicates"])),
            ("bursts", count_text(totals["bursts"])),
            ("verdicts", count_text(totals["abuse"])),
        ],
        [_time(figures), _week(figures), _types(figures), _authors(figures), _bursts(figures),
         _clusters(figures), _abuse(figures)],
    )  # fmt: skip


def _time(figures: TrafficFigures) -> str:
    hours = [row["hour_at"] // _HOUR for row in figures.hourly]
    by_hour = not hours or max(hours) - min(hours) < _MAX_HOURS
    seconds = _HOUR if by_hour else _DAY
    year = figures.note.last_day[:5]
    sums: dict[int, list[float]] = {}
    for row in figures.hourly:
        counts = sums.setdefault(row["hour_at"] // seconds, [0.0, 0.0])
        counts[0] += row["packets"] - row["near_duplicates"]
        counts[1] += row["near_duplicates"]
    about = f"Packets received in each {'hour' if by_hour else 'day'}, by the relay's clock (UTC)."

    def label(number: int) -> str:
        at = number * seconds
        return hour_text(at).removeprefix(year) if by_hour else date_text(at)

    points = by_number(sums, [0.0, 0.0], label)
    return section("Over time", about, plot(columns(points, ("packets", "near-duplicates"), count_text)))


def _week(figures: TrafficFigures) -> str:
    counts = {row["hour_at"] // _HOUR: row["packets"] for row in figures.hourly}
    first, last = min(counts, default=0), max(counts, default=-1)
    sums = [0.0] * _WEEK
    for hour, packets in counts.items():
        sums[hour % _WEEK] += packets
    # Of each hour of a week, how often it has come: an hour without packets counts too.
    means = [
        total / max(1, (last - hour) // _WEEK - (first - 1 - hour) // _WEEK)
        for hour, total in enumerate(sums)
    ]
    begin = 4 * 24  # the first day of 1970 was a Thursday
    rows = [
        (name, [means[(begin + 24 * day + hour) % _WEEK] for hour in range(24)])
        for day, name in enumerate(_WEEKDAYS)
    ]

    def show(mean: float) -> str:
        return count_text(round(mean, 1))

    about = (
        "Packets received in an hour of the week, on average, by the relay's clock (UTC). The fullest cell "
        f"stands for {show(max(means))}."
    )
    return section("In a week", about, plot(heat(rows, [f"{hour:02}" for hour in range(24)], show)))


def _types(figures: TrafficFigures) -> str:
    rows = [(str(row["content_type"]), float(row["packets"])) for row in figures.types]
    return section("Types", "The most frequent content types, by packets.", plot(bars(rows, count_text)))


def _authors(figures: TrafficFigures) -> str:
    heads = [Column("author", True), Column("packets"), Column("size"), Column("in one second"),
             Column("near-duplicates")]  # fmt: skip
    rows = [
        [row["author_id"], count_text(row["packets"]), size_text(row["size"]),
         count_text(row["peak_packets"]), count_text(row["near_duplicates"])]
        for row in figures.authors
    ]  # fmt: skip
    drawn = bars([(str(row["author_id"]), float(row["packets"])) for row in figures.authors[:15]], count_text)
    about = "Who sends most. “In one second” is the most packets received within one, of one type."
    return section("Authors", about, plot(drawn), table(heads, rows, figures.totals["authors"]))


def _bursts(figures: TrafficFigures) -> str:
    heads = [Column("hour"), Column("author", True), Column("packets"), Column("in one second"),
             Column("usual up to")]  # fmt: skip
    rows = [
        [hour_text(row["hour_at"]), row["author_id"], count_text(row["packets"]),
         count_text(row["peak_packets"]), count_text(round(row["threshold"], 1))]
        for row in figures.bursts
    ]  # fmt: skip
    about = "Hours in which an author sent far more within a second than in that author's other hours."
    return section("Bursts", about, table(heads, rows, figures.totals["bursts"]))


def _clusters(figures: TrafficFigures) -> str:
    heads = [Column("copies"), Column("authors"), Column("begins with", True), Column("first author", True)]
    rows = [
        [count_text(row["copies"]), count_text(row["authors"]), row["sample"], row["first_author_id"]]
        for row in figures.clusters
    ]
    about = "Texts that came again nearly the same, numbers and letter case aside, from one author or many."
    return section("Near-duplicates", about, table(heads, rows, figures.totals["clusters"]))


def _abuse(figures: TrafficFigures) -> str:
    heads = [Column("author", True), Column("verdict"), Column("reason", True), Column("until")]
    rows = [
        [row["author_id"], row["verdict"], row["reason"], hour_text(row["expires_at"])]
        for row in figures.abuse
    ]
    about = (
        "Whom the relay should hold to the limits of anonymous sessions (limit) or refuse (block), once the "
        "table is loaded."
    )
    return section("Abuse", about, table(heads, rows, figures.totals["abuse"]))
