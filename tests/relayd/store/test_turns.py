"""Whose turn it is: readers of expensive pages beside readers of cheap ones."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relayd.store import turns as turns_module
from relayd.store.turns import Turn, Turns


def served(turns: Turns, costs: dict[str, float], count: int) -> Counter[str]:
    """The turns that each gets while each requests another as soon as it has had one; the piece with the
    least time left ends first, as in real time."""
    names: dict[Turn, str] = {}
    under_way: list[tuple[float, int, Turn]] = []
    got: Counter[str] = Counter()
    now = 0.0

    def ask(name: str) -> None:
        names[turns.ask(name.partition("/")[0])] = name

    for name in costs:
        ask(name)
    for number in range(count):
        while (turn := turns.begin()) is not None:
            under_way.append((now + costs[names[turn]], number, turn))
        under_way.sort(key=lambda item: item[:2])
        now, _, turn = under_way.pop(0)
        name = names.pop(turn)
        turns.end(turn, costs[name])
        got[name.partition("/")[0]] += 1
        ask(name)
    return got


@pytest.mark.req("R-321")
def test_a_reader_of_dear_pages_waits_behind_the_others():
    costs = {"honest": 0.005, "dear": 1.0}
    got = served(Turns(1), costs, 1000)
    assert got["honest"] > 900
    assert got["dear"] >= 4, "nobody starves"


@pytest.mark.req("R-321")
def test_many_connections_of_one_payer_get_no_more_than_one():
    costs = {"honest": 0.01} | {f"crowd/{n}": 0.01 for n in range(500)}
    got = served(Turns(4), costs, 2000)
    # With four places one reader can never fill its half: it requests one page at a time.
    assert got["honest"] > 450
    alone = served(Turns(1), costs, 2000)
    assert 950 < alone["honest"] < 1050


@pytest.mark.req("R-321")
def test_whoever_comes_goes_before_those_who_have_had_much():
    turns = Turns(1)
    for _ in range(100):
        turn = turns.ask("dear")
        assert turns.begin() is turn
        turns.end(turn, 10.0)
    running, later = turns.ask("dear"), turns.ask("dear")
    assert turns.begin() is running
    fresh = turns.ask("fresh")
    turns.end(running, 10.0)
    assert [turns.begin()] == [fresh]
    turns.end(fresh, 0.01)
    assert turns.begin() is later


def test_a_turn_given_up_costs_nothing_and_holds_nobody_up():
    turns = Turns(1)
    running, given_up, waits = turns.ask("a"), turns.ask("b"), turns.ask("c")
    assert turns.begin() is running
    turns.end(given_up, 0.0)
    turns.end(running, 0.01)
    assert turns.begin() is waits
    turns.end(waits, 0.01)
    assert turns.begin() is None


def test_an_idle_reader_saves_nothing_up():
    turns = Turns(1)
    for _ in range(50):
        turn = turns.ask("busy")
        turns.begin()
        turns.end(turn, 1.0)
    costs = {"busy": 1.0, "idle": 1.0}
    got = served(turns, costs, 100)
    assert abs(got["busy"] - got["idle"]) <= 4


def test_whoever_has_had_much_and_comes_back_gets_no_credit_for_its_pause():
    turns = Turns(1)
    for payer, cost in (("a", 10.0), *[("b", 1.0)] * 100):
        turn = turns.ask(payer)
        assert turns.begin() is turn
        turns.end(turn, cost)
    waiting = {turns.ask(payer): payer for payer in ("a", "b") * 10}
    got: Counter[str] = Counter()
    for _ in range(10):
        begun = turns.begin()
        assert begun is not None
        got[waiting[begun]] += 1
        turns.end(begun, 1.0)
    assert 4 <= got["a"] <= 6


def test_who_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(turns_module, "_MAX_IDLE", 10)
    turns = Turns(1)
    for number in range(1000):
        turn = turns.ask(number)
        assert turns.begin() is turn
        turns.end(turn, 1.0)
        assert len(turns) <= 11


@given(
    st.lists(
        st.tuples(st.integers(0, 5), st.floats(0, 5), st.sampled_from(["ask", "begin", "end", "give up"]))
    ),
    st.integers(1, 3),
)
def test_every_turn_asked_for_begins_once_and_no_more_than_there_is_room_for(steps, size):
    turns = Turns(size)
    waiting: list[Turn] = []
    under_way: list[Turn] = []
    for payer, cost, what in steps:
        if what == "ask":
            waiting.append(turns.ask(payer))
        elif what == "begin":
            turn = turns.begin()
            assert (turn is not None) == (bool(waiting) and len(under_way) < size)
            if turn is not None:
                waiting.remove(turn)
                under_way.append(turn)
        elif what == "end" and under_way:
            turns.end(under_way.pop(payer % len(under_way)), cost)
        elif what == "give up" and waiting:
            turns.end(waiting.pop(payer % len(waiting)), 0.0)
    while waiting or under_way:
        while (turn := turns.begin()) is not None:
            waiting.remove(turn)
            under_way.append(turn)
        turns.end(under_way.pop(), 1.0)


@pytest.mark.req("R-321")
def test_a_piece_is_paid_at_what_it_has_cost_and_not_at_what_was_expected():
    """One piece of ten seconds, the first of all, costs as much as two thousand pieces of another."""
    turns = Turns(1)
    first = turns.ask("dear")
    assert turns.begin() is first
    turns.end(first, 10.0)
    again = turns.ask("dear")
    for _ in range(1000):
        cheap = turns.ask("cheap")
        assert turns.begin() is cheap
        turns.end(cheap, 0.005)
    assert turns.begin() is again
