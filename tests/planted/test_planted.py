"""The list of planted bugs matches the present source; `make planted` checks whether tests find the bugs."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.planted.bugs import BUGS, Bug

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: f"{bug.file}: {bug.name}")
def test_each_bug_still_has_its_place(bug: Bug):
    source = (ROOT / bug.file).read_text()
    planted = bug.planted_in(source)
    ast.parse(planted)
    assert planted != source
    assert all((ROOT / test).is_file() for test in bug.tests)


def test_there_are_fifty_of_them_with_names_of_their_own():
    assert len(BUGS) >= 50
    assert len({(bug.file, bug.name) for bug in BUGS}) == len({bug.name for bug in BUGS}) == len(BUGS)
