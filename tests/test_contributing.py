"""What the pages for contributors name exists: places on the map, version numbers, the licence."""

from __future__ import annotations

import ast
import re
import tomllib
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
    rooms = [
        "relayd/",
        "client/strata/protocol/",
        "client/strata/relays/",
        "client/strata/channels/",
        "client/strata/txrx/",
        "pipeline/",
    ]
    assert len(ROWS) == 10
    assert all(any(row["path"].startswith(room) for row in ROWS) for room in rooms)


_NUMBER = re.compile(r"`((?:client|relayd|pipeline|migrations)/[^`]+)`(?:, `([A-Z_]+)`)?")
_VERSIONING = (ROOT / "docs/reference/versioning.md").read_text()
NUMBERS = [place for line in _VERSIONING.splitlines() if line[:1] == "|" for place in _NUMBER.findall(line)]


@pytest.mark.parametrize(("path", "name"), NUMBERS)
def test_the_number_of_a_version_stands_where_the_policy_says(path, name):
    assert (ROOT / path).exists()
    assert not name or re.search(rf"^{name}\b.* = ", (ROOT / path).read_text(), re.M)


def test_the_licence_is_whole_and_part_of_the_distribution():
    text = (ROOT / "LICENSE").read_text()
    assert text.split("\n", 2)[1].strip() == "Apache License"
    assert "END OF TERMS AND CONDITIONS" in text and "APPENDIX: How to apply the Apache License" in text
    assert text.rstrip().endswith("limitations under the License.")
    for folder in ("client", "relayd", "pipeline", "testkit"):
        project = tomllib.loads((ROOT / folder / "pyproject.toml").read_text())
        assert project["project"]["license-files"] == ["LICENSE"]
        assert (ROOT / folder / "LICENSE").read_text() == text
