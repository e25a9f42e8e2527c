"""The results of a run: a table for people, objects for programs, and a verdict.

`summarise` counts; `write_table` draws with rich; `record` and `summary_record` are the JSON lines. Text that
a relay chose goes through `_harmless`, so that it cannot steer the terminal that shows it.
"""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from strata_testkit.conformance.model import SECTIONS, Check, Keyword, Outcome, Result

__all__ = [
    "Summary",
    "check_record",
    "record",
    "summarise",
    "summary_record",
    "write_list",
    "write_table",
    "write_unseen",
]

_STYLES = {
    Outcome.PASSED: "green",
    Outcome.FAILED: "bold red",
    Outcome.SKIPPED: "dim",
    Outcome.BROKEN: "bold magenta",
}


@dataclass(frozen=True, slots=True)
class Summary:
    """The totals of a run. `conforms`: all MUSTs that could be judged hold, and at least one check passed."""

    counts: Counter[tuple[Keyword, Outcome]]
    seconds: float

    def of(self, level: Keyword, outcome: Outcome) -> int:
        """The number of checks of this level with this outcome."""
        return self.counts[level, outcome]

    def total(self, outcome: Outcome) -> int:
        """The number of checks with this outcome."""
        return sum(self.of(level, outcome) for level in Keyword)

    @property
    def conforms(self) -> bool:
        bad = self.of(Keyword.MUST, Outcome.FAILED) + self.of(Keyword.MUST, Outcome.BROKEN)
        return bad == 0 and self.total(Outcome.PASSED) > 0


def summarise(results: Sequence[Result], seconds: float) -> Summary:
    """Count the results of a run that took `seconds`."""
    return Summary(Counter((result.check.level, result.outcome) for result in results), seconds)


def check_record(check: Check) -> dict[str, object]:
    """The description of a check, for programs."""
    return {
        "check": check.name,
        "rows": list(check.rows),
        "level": check.level.value,
        "section": check.section,
        "source": check.source,
        "title": check.title,
        "extension": check.extension,
    }


def record(result: Result) -> dict[str, object]:
    """One result, for programs."""
    return {
        **check_record(result.check),
        "result": result.outcome.value,
        "expected": result.expected,
        "seen": result.seen,
        "seconds": round(result.seconds, 3),
    }


def summary_record(summary: Summary, url: str) -> dict[str, object]:
    """The last line of a run, for programs."""
    levels = {
        level.value: {outcome.value: summary.of(level, outcome) for outcome in Outcome} for level in Keyword
    }
    return {
        "summary": levels,
        "conforms": summary.conforms,
        "url": url,
        "seconds": round(summary.seconds, 3),
    }


def write_list(checks: Sequence[Check], console: Console) -> None:
    """Print the checks."""
    table = _table("rows", "level", "check", "what it says", "source")
    for check in checks:
        mark = f" [{check.extension}]" if check.extension else ""
        _add(table, _rows(check), check.level.value, check.name, check.title + mark, check.source)
    console.print(table)


def write_unseen(reasons: Mapping[str, str], console: Console) -> None:
    """Print the MUST rows that no check can judge, by reason."""
    by_reason: dict[str, list[str]] = {}
    for row, reason in reasons.items():
        by_reason.setdefault(reason, []).append(row)
    table = _table("MUST rows out of sight", "why")
    for reason, rows in by_reason.items():
        _add(table, " ".join(rows), reason)
    console.print(table)


def write_table(results: Sequence[Result], summary: Summary, console: Console) -> None:
    """Print every result, a summary by section, and the failures again with what was expected."""
    table = _table("rows", "level", "result", "what it says", "seen")
    for result in results:
        outcome = Text(result.outcome.value, style=_STYLES[result.outcome])
        _add(table, _rows(result.check), result.check.level.value, outcome, result.check.title, result.seen)
    console.print(table)
    console.print(_sections(results))
    for result in results:
        if result.outcome in (Outcome.FAILED, Outcome.BROKEN):
            console.print(_failure(result))
    console.print(Text(_verdict(summary), style="bold"))


def _failure(result: Result) -> Text:
    check = result.check
    lines = [
        f"{check.level} {_rows(check)}  {check.name}  ({check.source})",
        f"  {check.title}",
        *([f"  expected: {_harmless(result.expected)}"] if result.expected else []),
        f"  seen:     {_harmless(result.seen)}",
        f"  again:    strata conformance URL --only {check.name}",
        "",
    ]
    return Text("\n".join(lines))


def _sections(results: Sequence[Result]) -> Table:
    table = _table("section", *(outcome.value for outcome in Outcome))
    for number, title in SECTIONS.items():
        counts = Counter(result.outcome for result in results if result.check.section == number)
        if counts:
            _add(table, f"{number}. {title}", *(str(counts[outcome] or "") for outcome in Outcome))
    return table


def _verdict(summary: Summary) -> str:
    counts = ", ".join(f"{summary.total(outcome)} {outcome.value}" for outcome in Outcome)
    bad = summary.of(Keyword.MUST, Outcome.FAILED) + summary.of(Keyword.MUST, Outcome.BROKEN)
    if summary.conforms:
        said = "Every MUST that could be judged holds"
    elif bad:
        said = f"{bad} MUST {'checks do' if bad > 1 else 'check does'} not hold"
    else:
        said = "Nothing could be judged"
    return f"{said}: {counts}, in {summary.seconds:.1f} s."


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold", no_wrap=column in ("level", "result"))
    return table


def _add(table: Table, *cells: str | Text) -> None:
    """Add a row of plain text: text from a relay is not markup."""
    table.add_row(*(cell if isinstance(cell, Text) else Text(_harmless(cell)) for cell in cells))


def _rows(check: Check) -> str:
    return " ".join(check.rows)


def _harmless(text: str) -> str:
    """Text with blanks for the characters that could steer a terminal: control, format and surrogate."""
    return "".join(c if unicodedata.category(c) not in ("Cc", "Cf", "Cs", "Zl", "Zp") else " " for c in text)
