"""Match the rows of the requirements with the tests that carry their marks; write docs/conformance.md.

The exit code is 1 if a test names a row that does not exist, if a row is an exception but has a test, or if a
MUST row of a section that counts as done has neither a test nor an exception with its reason.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REQUIREMENTS = ROOT / "docs" / "requirements"
REPORT = ROOT / "docs" / "conformance.md"

DONE_SECTIONS = {
    "relay.md": tuple(range(1, 23)),
    "channel.md": tuple(range(1, 17)),
    "transport.md": tuple(range(1, 9)),
}
"""The sections of each document in which every MUST row must be tested."""

EXCEPTIONS = {
    "R-019": "an absence: no SHA-256 identifier is made or accepted anywhere, so there is no path to test",
    "R-021": "an absence: ids are made in one place, `strata.protocol.packets.byte_hash`, which R-022 covers",
    "R-089": "half kept: what signs takes a `Signer`, and no setting names an external one yet",
    "R-104": "a permission to clients, of which the library makes no use: it keeps no copies of packets",
    "R-107": "a permission, of which the pool makes no use: it shows the earliest time and keeps no other",
    "R-125": "an absence: no helper takes inline media",
    "R-329": "a permission; what must not be logged is tested by R-328 and R-330",
    "R-331": "a permission to authors; that a relay takes any body of a MESSAGE is tested by R-332",
    "R-409": "a posture of defaults with tests of their own: no addresses in logs (R-330), no `require_auth`",
}
"""The rows that no test can cover, and why."""

_ROW = re.compile(
    r"\| (?P<id>[RCT]-\d{3}) \| (?P<level>MUST|SHOULD|MAY) \| (?P<text>.*?) \| (?P<rest>.*) \|$"
)
_SECTION = re.compile(r"## (?P<number>\d+)\. (?P<title>.+)")


@dataclass(frozen=True, slots=True)
class Row:
    """One requirement."""

    id: str
    level: str
    text: str
    section: int


@dataclass(frozen=True, slots=True)
class Section:
    """A heading of a requirements document, and the rows below it."""

    number: int
    title: str
    rows: list[Row]


def read_sections(path: Path) -> list[Section]:
    """The sections that have rows, in order."""
    sections: list[Section] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if headline := _SECTION.match(line):
            sections.append(Section(int(headline["number"]), headline["title"], []))
        elif (row := _ROW.match(line)) and sections:
            sections[-1].rows.append(Row(row["id"], row["level"], row["text"], sections[-1].number))
    return [section for section in sections if section.rows]


def collect_marks() -> dict[str, list[str]]:
    """Row id → tests, as collected by pytest. Exits if the tests cannot be collected."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "rows.json"
        command = [sys.executable, "-m", "pytest", "--collect-only", "-qq", "--req-report", str(report)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            sys.exit(f"the tests cannot be collected:\n{done.stdout[-4000:]}{done.stderr[-2000:]}")
        marks: dict[str, list[str]] = json.loads(report.read_text(encoding="utf-8"))
        return marks


def untested(sections: list[Section], marks: dict[str, list[str]]) -> list[Row]:
    """The MUST rows without a test."""
    return [
        row for section in sections for row in section.rows if row.level == "MUST" and row.id not in marks
    ]


def page(documents: dict[str, list[Section]], marks: dict[str, list[str]]) -> str:
    """The text of docs/conformance.md."""
    lines = [
        "# Conformance",
        "",
        "<!-- Made by `make conformance`; do not edit. -->",
        "",
        "Which test fails when a row of `requirements/` is broken. *Done* sections have a test for every",
        "MUST row, but for the exceptions named here.",
        "",
    ]
    for name, sections in documents.items():
        lines += [f"## {name}", "", f"{summary(name, sections, marks)}.", ""]
        for section in sections:
            lines += _section(section, section.number in DONE_SECTIONS[name], marks)
    return "\n".join(lines)


def summary(name: str, sections: list[Section], marks: dict[str, list[str]]) -> str:
    """A phrase that says how many rows of a document have a test."""
    rows = [row for section in sections for row in section.rows]
    return f"{sum(row.id in marks for row in rows)} of {len(rows)} rows of {name} tested"


def _section(section: Section, is_done: bool, marks: dict[str, list[str]]) -> list[str]:
    tested = sum(row.id in marks for row in section.rows)
    return [
        f"### {section.number}. {section.title}{' (done)' if is_done else ''}",
        "",
        f"{tested} of {len(section.rows)} rows tested.",
        "",
        "| row | level | tests |",
        "|---|---|---|",
        *(f"| {row.id} | {row.level} | {_tests(row, marks)} |" for row in section.rows),
        "",
    ]


def _tests(row: Row, marks: dict[str, list[str]]) -> str:
    tests = marks.get(row.id)
    if not tests:
        return f"*{EXCEPTIONS[row.id]}*" if row.id in EXCEPTIONS else "–"
    return "<br>".join(f"`{test.removeprefix('tests/')}`" for test in sorted(tests))


def main() -> int:
    documents = {name: read_sections(REQUIREMENTS / name) for name in DONE_SECTIONS}
    marks = collect_marks()
    known = {row.id for sections in documents.values() for section in sections for row in section.rows}
    REPORT.write_text(page(documents, marks), encoding="utf-8")
    problems = [f"{row}: no such row, but {marks[row][0]} claims it" for row in sorted(marks.keys() - known)]
    problems += [
        f"{row}: is an exception, yet it is tested" for row in sorted(EXCEPTIONS.keys() & marks.keys())
    ]
    for name, sections in documents.items():
        for row in untested(sections, marks):
            if row.section in DONE_SECTIONS[name] and row.id not in EXCEPTIONS:
                problems.append(f"{row.id} (section {row.section} of {name}): no test. {row.text}")
    print(*problems, sep="\n" if problems else "")
    print(*(summary(name, sections, marks) for name, sections in documents.items()), sep="\n")
    print(f"{REPORT.relative_to(ROOT)} written")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
