"""Failpoints: which there are, what arms them, and that they do nothing unless armed."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import pytest

import relayd
from relayd import failpoints
from relayd.failpoints import POINTS, FailpointRaised, parse

ROOT = Path(relayd.__file__).parent


def calls(tree: ast.AST) -> list[str]:
    """The places that this code declares to reach."""
    return [
        node.args[0].value
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) in ("failpoints.hit", "failpoints.reached")
        and isinstance(node.args[0], ast.Constant)
        and isinstance(node.args[0].value, str)
    ]


@pytest.mark.slow
def test_each_place_is_one_place_in_the_code_and_asks_first_whether_it_is_armed():
    found: Counter[str] = Counter()
    guarded: Counter[str] = Counter()
    for path in ROOT.rglob("*.py"):
        tree = ast.parse(path.read_text())
        found.update(calls(tree))
        for node in ast.walk(tree):
            if isinstance(node, ast.If) and ast.unparse(node.test) == "failpoints.ARMED":
                guarded.update(calls(ast.Module(node.body, [])))
    assert found == guarded == Counter(dict.fromkeys(POINTS, 1))
    assert len(POINTS) >= 15


def test_nothing_is_armed_here():
    assert failpoints.ARMED is False
    for place in POINTS:
        failpoints.hit(place)


def test_what_the_variable_says():
    text = "store.append.after_commit=raise@3, feed.tail.read=delay:0.5@p0.1:seed7,*=kill"
    found = parse(text)
    assert found.keys() == POINTS.keys()
    after = found["store.append.after_commit"]
    assert after.action == "raise"
    assert [after.is_due() for _ in range(5)] == [False, False, True, False, False]
    read = found["feed.tail.read"]
    assert (read.action, read.seconds) == ("delay", 0.5)
    assert 10 < sum(read.is_due() for _ in range(500)) < 120
    assert found["server.start"].action == "kill" and found["server.start"].is_due()
    assert parse("") == {}


def test_the_same_seed_draws_the_same():
    one, two, other = (parse(f"feed.dispatch=stop@p0.5:seed{seed}")["feed.dispatch"] for seed in (1, 1, 2))
    draws = [[point.is_due() for _ in range(64)] for point in (one, two, other)]
    assert draws[0] == draws[1] != draws[2]


@pytest.mark.parametrize(
    "text",
    [
        "feed.dispatch",
        "feed.dispatch=explode",
        "feed.dispatch=delay",
        "nowhere=raise",
        "feed.dispatch=raise@0",
    ],
)
def test_what_it_cannot_say(text):
    with pytest.raises(ValueError, match="RELAYD_FAILPOINTS"):
        parse(text)


async def test_an_armed_place_raises_or_waits(monkeypatch):
    monkeypatch.setattr(failpoints, "_armed", parse("feed.dispatch=raise@2,feed.tail.read=delay:0.001"))
    failpoints.hit("feed.dispatch")
    with pytest.raises(FailpointRaised, match=r"feed\.dispatch"):
        failpoints.hit("feed.dispatch")
    await failpoints.reached("feed.tail.read")
    failpoints.hit("feed.tail.read")
