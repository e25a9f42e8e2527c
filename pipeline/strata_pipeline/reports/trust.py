"""The report on trust."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from strata_pipeline.reports.page import Column, LakeNote, page, plot, section, table
from strata_pipeline.reports.svg import bars, columns
from strata_pipeline.reports.text import count_text, hour_text

__all__ = ["TENTHS", "TrustFigures", "render_trust"]

TENTHS = 10
_BARS = 15
_ABOUT = (
    "An edge says how far one author trusts another. The newest of a pair counts, unless it was revoked. "
    "Anybody may sign edges under as many names as they like: many edges prove little by themselves."
)


@dataclass(frozen=True)
class TrustFigures:
    """The figures of the report. Rows have the columns of their dataset, and may be a selection."""

    note: LakeNote
    counted: int
    """The number of days that were read for the report; an earlier run had kept the results of the others."""
    edges: int
    authors: int
    mutual: int
    """The number of pairs with an edge each way."""
    strengths: Mapping[int, int]
    """The number of edges by tenth of strength, from 0 to 9."""
    trusted: Sequence[Mapping[str, Any]]
    newest: Sequence[Mapping[str, Any]]


def render_trust(figures: TrustFigures) -> str:
    """The report as the text of an HTML file."""
    told = [
        ("edges", count_text(figures.edges)),
        ("authors", count_text(figures.authors)),
        ("mutual pairs", count_text(figures.mutual)),
    ]
    return page("Trust", figures.note, told, [_strengths(figures), _trusted(figures), _newest(figures)])


def _strengths(figures: TrustFigures) -> str:
    points = [(f"{tenth / TENTHS:.1f}", [float(figures.strengths.get(tenth, 0))]) for tenth in range(TENTHS)]
    return section("Strengths", f"{_ABOUT} Edges by strength.", plot(columns(points, ["edges"], count_text)))


def _trusted(figures: TrustFigures) -> str:
    rows = [
        [row["author_id"], *(count_text(row[name]) for name in ("trusted_by", "trusts", "mutual")),
         f"{row['strength']:.2f}"]
        for row in figures.trusted
    ]  # fmt: skip
    names = ("trusted by", "trusts", "mutual", "strength")
    picture = bars(
        [(row["author_id"], row["strength"]) for row in figures.trusted[:_BARS]], lambda sum_: f"{sum_:.2f}"
    )
    return section(
        "Most trusted",
        "By the sum of the strengths of the edges to an author.",
        plot(picture),
        table([Column("author", True), *(Column(name) for name in names)], rows, figures.authors),
    )


def _newest(figures: TrustFigures) -> str:
    rows = [
        [
            hour_text(row["received_at"]),
            row["from_id"],
            row["to_id"],
            f"{row['strength']:.2f}",
            row["context"] or "",
        ]
        for row in figures.newest
    ]
    heads = [Column("received"), Column("from", True), Column("to", True), Column("strength"),
             Column("context", True)]  # fmt: skip
    return section("Newest edges", "Those that stand.", table(heads, rows, figures.edges))
