"""The report site: an index and a page for each question, from figures that are kept by day."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from strata_pipeline.days.cohorts import GAP, cohorts_of
from strata_pipeline.days.figures import DayFigures, calendar, week_of
from strata_pipeline.days.forecast import Forecast, forecast
from strata_pipeline.days.lags import added, percentile, share_below
from strata_pipeline.reports.page import Column, LakeNote, page, plot, section, table
from strata_pipeline.reports.series import LONGEST, by_day, by_month, by_week
from strata_pipeline.reports.svg import columns, lines, triangle
from strata_pipeline.reports.text import count_text, escaped, hour_text, seconds_text, share_text, size_text

__all__ = ["RelayScore", "SiteFigures", "render_site"]

_SHARES = (("1 %", 0.01), ("median", 0.5), ("90 %", 0.9), ("99 %", 0.99))
_AHEAD = -2.0
"""In seconds. Timestamps are whole seconds, so a lag between this and zero may be due to rounding."""
_SERIES = 5
_TREND_DAYS = 28
_HORIZONS = (30, 90, 365)
_COHORTS = 26
_AFTER = (1, 2, 4, 8, 12)
_ABOUT_LAG = (
    "From the time that an author wrote into a packet to the relay's receipt: so many of a hundred packets "
    "took as long or less. Old packets that were handed in later count as well."
)
_ABOUT_CLOCKS = (
    "The least lag of each author within a day. A network only adds to it: below zero the author's clock is "
    "ahead; far above zero all day it is behind, or the author's packets come with delay."
)
_ABOUT_FUTURE = (
    "“From the future” is the share of packets that were dated more than two seconds after their receipt, "
    "and “authors ahead” that of authors all of whose packets were."
)
_ABOUT_WEEKS = (
    "New is who was not seen before on the days shown here; returned is who was seen before, but not in the "
    "week before; left is who was there in the week before, and not in this one. The last week may go on."
)
_ABOUT_COHORTS = (
    "Each row has the authors first seen in a week, and each cell which part of them was there so many weeks "
    "later. The first weeks shown also have whoever came before."
)
_NO_DATA = '<p class="dim">None.</p>'


@dataclass(frozen=True)
class RelayScore:
    """The score of a relay at a time."""

    at: int
    url: str
    score: float
    standing: str


@dataclass(frozen=True)
class SiteFigures:
    """The figures that the pages show; days are in order, and the last may not be over."""

    note: LakeNote
    days: Sequence[DayFigures]
    periods: Mapping[str, int]
    """The approximate number of authors of each week (2026-W47) and month (2026-11)."""
    scores: Sequence[RelayScore] = ()
    others: Sequence[tuple[str, str]] = field(default=())
    """Titles and files of other reports in the same folder."""


def render_site(figures: SiteFigures) -> dict[str, str]:
    """The text of each file by its name."""
    pages: dict[str, tuple[str, Callable[[SiteFigures], list[str]], str]] = {
        "lag.html": (
            "Lag and clocks",
            _lag,
            "How long packets take to the relay, and whether clocks are right.",
        ),
        "authors.html": ("Authors", _authors, "How many authors there are by day, week and month."),
        "cohorts.html": ("Cohorts", _cohorts, "Which authors are new, which stay, return and leave."),
        "kinds.html": ("Packets and bytes", _kinds, "What is sent, and how the lake will grow."),
        "provenance.html": ("Provenance", _provenance, "What packets with media claim of their origin."),
        "quarantine.html": ("Quarantine", _quarantine, "Rows of the log that are not what they must be."),
    }
    if figures.scores:
        pages["relays.html"] = ("Relays", _relays, "How the scores of relays changed.")
    links = [("Overview", "index.html"), *((title, file) for file, (title, _, _) in pages.items())]
    links += figures.others
    abouts = {file: about for file, (_, _, about) in pages.items()}
    site = {
        file: page(title, figures.note, _totals(figures), render(figures), links)
        for file, (title, render, _) in pages.items()
    }
    site["index.html"] = page(
        "The lake", figures.note, _totals(figures), _index(figures, links, abouts), links
    )
    return site


def _totals(figures: SiteFigures) -> list[tuple[str, str]]:
    days = figures.days
    lags = added(day.lags for day in days)
    return [
        ("packets", count_text(sum(day.packets for day in days))),
        ("size", size_text(sum(day.size for day in days))),
        ("authors on the last day", count_text(days[-1].authors)),
        ("median lag", seconds_text(percentile(lags, 0.5))),
        ("in quarantine", count_text(sum(sum(day.quarantined.values()) for day in days))),
    ]


def _index(figures: SiteFigures, links: Sequence[tuple[str, str]], abouts: Mapping[str, str]) -> list[str]:
    listed = "".join(
        f'<li><a href="{escaped(file)}">{escaped(title)}</a> {escaped(abouts.get(file, ""))}</li>'
        for title, file in links[1:]
    )
    return [
        _stacked(figures, "Packets by day", "Packets by the day of their receipt and by kind.",
                 lambda day: {name: kind.packets for name, kind in day.kinds.items()}, count_text),
        f"<section><h2>Pages</h2><ul>{listed}</ul></section>",
    ]  # fmt: skip


def _lag(figures: SiteFigures) -> list[str]:
    names = [name for name, _ in _SHARES]
    unknown: list[float | None] = [None for _ in _SHARES]
    fan = by_day({day.day: [percentile(day.lags, s) for _, s in _SHARES] for day in figures.days}, unknown)
    clocks = by_day(
        {day.day: [percentile(day.skews, s) for _, s in _SHARES] for day in figures.days}, unknown
    )
    rows = [
        [
            day.day,
            *(seconds_text(percentile(day.lags, share)) for _, share in _SHARES),
            share_text(share_below(day.lags, _AHEAD)),
            share_text(share_below(day.skews, _AHEAD)),
        ]
        for day in reversed(figures.days)
    ]
    heads = [Column("day"), *(Column(name) for name in names), Column("from the future"),
             Column("authors ahead")]  # fmt: skip
    return [
        section("Lag", _ABOUT_LAG, plot(lines(fan, names, seconds_text))),
        section("Clocks", _ABOUT_CLOCKS, plot(lines(clocks, names, seconds_text))),
        section("By day", _ABOUT_FUTURE, table(heads, rows)),
    ]


def _authors(figures: SiteFigures) -> list[str]:
    points = by_day({day.day: [float(day.authors)] for day in figures.days}, [0.0])
    weeks = {name: count for name, count in sorted(figures.periods.items()) if "W" in name}
    months = {name: count for name, count in sorted(figures.periods.items()) if "W" not in name}
    about = "About, to some 2 %: they are added up from sketches, without reading the days again."
    parts = [
        section("By day", "Authors that sent something.", plot(columns(points, ["authors"], count_text)))
    ]
    for title, series in (
        ("By week", by_week({name: [float(count)] for name, count in weeks.items()}, [0.0])),
        ("By month", by_month({name: [float(count)] for name, count in months.items()}, [0.0])),
    ):
        parts.append(section(title, about, plot(columns(series, ["authors"], count_text))))
    newest_first = [*reversed(months.items()), *reversed(weeks.items())]
    rows = [[name, count_text(count)] for name, count in newest_first]
    return [*parts, section("Months and weeks", about, table([Column("period"), Column("authors")], rows))]


def _cohorts(figures: SiteFigures) -> list[str]:
    # The last day may not be over, so its week may not be over either.
    found = cohorts_of(_samples(figures.days), is_over=False)
    about = (
        "All authors are counted."
        if found.share == 1
        else f"Counted in a sample of {share_text(found.share)} of all authors, and scaled up."
    )
    weeks = [(week.name, [float(week.stayed), float(week.returned), float(week.new)]) for week in found.weeks]
    names = ["stayed", "returned", "new"]
    rows = [
        [week.name, *map(count_text, (week.active, week.new, week.returned, week.stayed)),
         "" if week.lost is None else count_text(week.lost)]
        for week in reversed(found.weeks)
    ]  # fmt: skip
    heads = [Column(name) for name in ("week", "authors", "new", "returned", "stayed", "left")]
    shown = found.cohorts[-_COHORTS:]
    returned = [
        [
            one.week,
            count_text(one.authors),
            count_text(one.known),
            *(_share_after(one.shares, weeks) for weeks in _AFTER),
        ]
        for one in reversed(shown)
    ]
    later = [Column("first seen"), Column("authors"), Column("of these in the sample"),
             *(Column(f"after {weeks}") for weeks in _AFTER)]  # fmt: skip
    return [
        section("Come and gone", f"{about} {_ABOUT_WEEKS}",
                plot(columns(weeks, names, count_text)) + table(heads, rows)),
        section("Who stays", _ABOUT_COHORTS,
                plot(triangle([(one.week, one.shares) for one in shown])) + table(later, returned)),
    ]  # fmt: skip


def _samples(days: Sequence[DayFigures]) -> Iterator[tuple[str, bytes]]:
    """The samples of all days, with their weeks, including days without packets. As in other series, one
    entry stands for many weeks without packets: one packet from a clock that was decades wrong makes
    thousands."""
    for before, day in zip([None, *days], days, strict=False):
        if before is not None:
            begin, end = map(datetime.date.fromisoformat, (before.day, day.day))
            if (end - begin).days > 7 * LONGEST:
                yield f"{GAP} {week_of(day.day)}", b""
            else:
                yield from ((week_of(one), b"") for one in calendar(before.day, day.day)[1:-1])
        yield week_of(day.day), day.sample


def _share_after(shares: Sequence[float], weeks: int) -> str:
    return share_text(shares[weeks]) if weeks < len(shares) else ""


def _kinds(figures: SiteFigures) -> list[str]:
    names = sorted({name for day in figures.days for name in day.kinds})
    sums = {name: [day.kinds[name] for day in figures.days if name in day.kinds] for name in names}
    rows = [
        [name, count_text(sum(kind.packets for kind in found)), size_text(sum(kind.size for kind in found)),
         size_text(sum(kind.size for kind in found) / max(1, sum(kind.packets for kind in found)))]
        for name, found in sorted(sums.items(), key=lambda item: -sum(kind.size for kind in item[1]))
    ]  # fmt: skip
    return [
        _stacked(figures, "Bytes by day", "Bodies by day of receipt and by kind; files are smaller.",
                 lambda day: {name: kind.size for name, kind in day.kinds.items()}, size_text, 1024),
        _growth(figures),
        section("By kind", "All days together.",
                table([Column("kind", True), Column("packets"), Column("size"), Column("a packet")], rows)),
    ]  # fmt: skip


def _growth(figures: SiteFigures) -> str:
    # A day without packets has no figures, and counts as zero bytes; the last day may not be over.
    sizes_by_day = {day.day: float(day.size) for day in figures.days}
    first, last = (datetime.date.fromisoformat(figures.days[place].day) for place in (0, -1))
    since = last - datetime.timedelta(min(_TREND_DAYS, (last - first).days))
    sizes = [sizes_by_day.get(day, 0.0) for day in calendar(str(since), str(last))[:-1]]
    found = [forecast(sizes, days) for days in _HORIZONS]
    rows = [_growth_row(one) for one in found if one is not None]
    about = (
        "By a straight line through the last finished days, 28 at most. In four of five cases the sum lies "
        "between the bounds, if everything goes on as it did."
    )
    if not rows:
        return section("What is to come", about, '<p class="dim">A trend takes seven finished days.</p>')
    heads = [Column("in"), Column("bytes of bodies"), Column("at least"), Column("at most")]
    return section("What is to come", about, table(heads, rows))


def _growth_row(one: Forecast) -> list[str]:
    return [f"{one.days} days", size_text(one.expected), size_text(one.low), size_text(one.high)]


def _provenance(figures: SiteFigures) -> list[str]:
    about = (
        "Packets with media, by the origin that they claim. “Not proven” are those whose claim did not hold "
        "when the relay checked it: they are served with the origin UNKNOWN."
    )
    return [_stacked(figures, "Claims by day", about, lambda day: day.origins, count_text)]


def _quarantine(figures: SiteFigures) -> list[str]:
    about = (
        "Rows that were put aside, by what was wrong. Each is a row that somebody damaged, or the empty row "
        "that an erasure has left of a packet, which is malformed_json."
    )
    reasons = sorted({reason for day in figures.days for reason in day.quarantined})
    rows = [
        [day.day, reason, count_text(day.quarantined[reason])]
        for day in reversed(figures.days) for reason in reasons if reason in day.quarantined
    ]  # fmt: skip
    heads = [Column("day"), Column("reason", True), Column("rows")]
    return [
        _stacked(figures, "By day", about, lambda day: day.quarantined, count_text),
        section("Rows", "The newest days first.", table(heads, rows)),
    ]


def _relays(figures: SiteFigures) -> list[str]:
    times = sorted({score.at for score in figures.scores})
    last = {score.url: score for score in figures.scores if score.at == times[-1]}
    best = sorted(last.values(), key=lambda score: (-score.score, score.url))
    first: dict[str, RelayScore] = {}
    for score in sorted(figures.scores, key=lambda score: score.at):
        first.setdefault(score.url, score)
    rows = [
        [score.url, score.standing, f"{score.score:.2f}", f"{score.score - first[score.url].score:+.2f}",
         hour_text(first[score.url].at)]
        for score in best
    ]  # fmt: skip
    heads = [
        Column("relay", True),
        Column("standing", True),
        Column("score"),
        Column("change"),
        Column("since"),
    ]
    about = f"{count_text(len(times))} scorings by reputation, the last of {hour_text(times[-1])}."
    return [section("Scores", about, table(heads, rows))]


def _stacked(
    figures: SiteFigures,
    title: str,
    about: str,
    values: Callable[[DayFigures], Mapping[str, float]],
    show: Callable[[float], str],
    base: float = 1,
) -> str:
    """Columns by day of the largest series; the smaller ones are combined."""
    found = [(day.day, values(day)) for day in figures.days]
    sums: dict[str, float] = {}
    for _, told in found:
        for name, value in told.items():
            sums[name] = sums.get(name, 0) + value
    if not sums:
        return section(title, about, _NO_DATA)
    names = sorted(sums, key=lambda name: (-sums[name], name))[:_SERIES]
    rest = len(sums) > len(names)
    stacks = {
        day: [float(told.get(name, 0)) for name in names]
        + ([float(sum(value for name, value in told.items() if name not in names))] if rest else [])
        for day, told in found
    }
    shown = [*names, "the rest"] if rest else names
    return section(title, about, plot(columns(by_day(stacks, [0.0] * len(shown)), shown, show, base)))
