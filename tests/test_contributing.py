"""The map of CONTRIBUTING.md leads somewhere: each place exists, and defines the name that the map gives."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
_ROW = re.compile(r"^\| (?P<question>[^|]+\?) \| `(?P<path>[^`:]+):(?P<name>[^`]+)` \|$", re.M)
ROWS = list(_ROW.finditer((ROOT / "CONTRIBUTING.md").read_text()))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["path"])
def test_a_place_on_the_map_exists(row):
    tree = ast.parse((ROOT / row["path"]).read_text())
    defined = {
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert row["name"] in defined


def test_the_map_has_ten_questions_through_all_of_the_house():
    rooms = ("relayd/", "client/strata/protocol/", "client/strata/relays/", "client/strata/channels/")
    rooms += ("client/strata/txrx/", "pipeline/")
    assert len(ROWS) == 10
    assert all(any(row["path"].startswith(room) for row in ROWS) for room in rooms)
