"""The checks agree with the requirements: rows, levels, and what cannot be observed from outside."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from strata.protocol.wire import EXTENSIONS
from strata_testkit.conformance import Keyword, Selection, all_checks
from strata_testkit.conformance.coverage import JUDGED_SECTIONS, UNSEEN, uncovered
from strata_testkit.conformance.model import SECTIONS
from strata_testkit.conformance.verdicts import DECISIONS

REQUIREMENTS = Path(__file__).parents[3] / "docs" / "requirements" / "relay.md"
_ROW = re.compile(r"\| (R-\d{3}) \| (MUST|SHOULD|MAY) \| .* \| (.*?) \| .*? \|$")
_SECTION = re.compile(r"## (\d+)\. (.+)")


def read_rows() -> dict[str, tuple[Keyword, int, str]]:
    """Return level, section and source by row."""
    rows, section = {}, 0
    for line in REQUIREMENTS.read_text(encoding="utf-8").splitlines():
        if headline := _SECTION.match(line):
            section = int(headline[1])
        elif row := _ROW.match(line):
            rows[row[1]] = (Keyword(row[2]), section, row[3])
    return rows


ROWS = read_rows()


def test_every_row_of_a_check_exists_and_the_check_is_as_binding_as_one_of_them():
    order = list(Keyword)
    for check in all_checks():
        assert check.rows and set(check.rows) <= set(ROWS), check.name
        assert check.section in SECTIONS, check.name
    asks_more = {
        check.name: check.rows
        for check in all_checks()
        if order.index(check.level) < min(order.index(ROWS[row][0]) for row in check.rows)
    }
    assert asks_more == {}


def test_names_are_unique_and_titles_are_sentences_about_relays():
    names = [check.name for check in all_checks()]
    assert len(names) == len(set(names))
    for check in all_checks():
        assert re.fullmatch(r"[a-z0-9-]+", check.name)
        assert check.title[0].isupper() or check.title.startswith("`"), check.title
        assert not check.title.endswith("."), check.title
        assert check.source, check.name
        assert check.extension in (None, DECISIONS, *EXTENSIONS), check.name


def test_rows_that_rest_on_decisions_alone_are_asked_only_of_relays_that_announce_them():
    wrong = {
        check.name: check.rows
        for check in all_checks()
        if check.extension is None and not any("RFC" in ROWS[row][2] for row in check.rows)
    }
    assert wrong == {}


def test_every_must_row_is_judged_or_has_a_reason_why_it_cannot_be():
    musts = {
        row
        for row, (level, section, _) in ROWS.items()
        if level is Keyword.MUST and section in JUDGED_SECTIONS
    }
    assert sorted(uncovered(musts)) == []
    covered = {row for check in all_checks() for row in check.rows}
    assert sorted(UNSEEN.keys() & covered) == [], "has a check, so it can be seen"
    assert sorted(UNSEEN.keys() - musts) == [], "no MUST row of the judged sections"


@pytest.mark.parametrize(
    ("patterns", "level", "expected"),
    [
        (("R-152",), Keyword.MAY, {"history-is-in-order-of-arrival"}),
        (("history-*",), Keyword.MUST, {"history-is-in-order-of-arrival", "history-has-cursors"}),
        (("R-999",), Keyword.MAY, set()),
    ],
)
def test_selection_is_by_row_name_and_level(patterns, level, expected):
    assert {check.name for check in Selection(patterns, level).of(all_checks())} == expected


def test_floods_run_only_when_asked_for():
    assert not any(check.floods for check in Selection().of(all_checks()))
    assert any(check.floods for check in Selection(floods=True).of(all_checks()))
