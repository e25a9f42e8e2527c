from __future__ import annotations

import pytest
from strata.relays.connection.values import RESUME_MARGIN_SECONDS
from strata.relays.pool.sweeping import Start, Sweeps, start_after
from strata.relays.pool.values import Position

T = 1_760_000_000


def sweeps(interval: float | None = 300.0, overlap: int = 60) -> Sweeps:
    return Sweeps(interval=interval, overlap=overlap, started_at=T)


def starts(it: Sweeps, url: str) -> Start:
    return it.start(url, since=None, received_since=None)


def test_each_relay_has_its_own_schedule_and_is_asked_once_at_a_time():
    it = sweeps()
    assert it.due(["a", "b"], 0) == [] and it.get_timer() == 300
    assert it.due(["a", "b"], 300) == ["a", "b"]
    assert it.due(["a", "b"], 9999) == [], "still at it"
    it.succeeded("a", None, began_at=T + 300, now=310)
    assert it.due(["a", "b"], 609) == [] and it.due(["a", "b"], 610) == ["a"]


@pytest.mark.req("C-276", "C-275")
def test_after_an_outage_of_10_minutes_a_window_of_5_spans_10():
    it = sweeps()
    it.due(["a"], 0)
    it.due(["a"], 300)
    it.succeeded("a", None, began_at=T + 300, now=300)
    for now in (600.0, 900.0):  # two in a row fail
        assert it.due(["a"], now) == ["a"]
        it.failed("a", None, now)
    assert it.due(["a"], 1200) == ["a"]
    assert starts(it, "a").received_since == T + 300 - 60, "15 minutes: all since the last success"


@pytest.mark.req("C-275")
def test_a_relay_with_cursors_goes_on_from_the_last_one_exactly():
    it = sweeps()
    it.due(["a"], 0)
    it.due(["a"], 300)
    it.failed("a", Position("c7", T + 200), 300)
    assert starts(it, "a").cursor == "c7", "what was reached is not lost with the rest"
    it.due(["a"], 600)
    it.succeeded("a", Position("c9", T + 500), began_at=T + 600, now=600)
    start = starts(it, "a")
    assert start.cursor == "c9"
    assert start.cursor_fallback_since == T + 600 - 60 - RESUME_MARGIN_SECONDS


def test_what_a_reader_left_unread_is_found_by_sweeps():
    it = sweeps()
    it.due(["a", "b"], 0)
    it.left_at("a", Position("c3", T - 5000))
    assert starts(it, "a") == Start("c3", T - 5000 - 60 - RESUME_MARGIN_SECONDS, None, None)
    it.left_at("b", None)
    assert starts(it, "b").received_since == 0, "it had given nothing: all of its history"
    it.left_at("a", Position("c9", T + 50))
    assert starts(it, "a").cursor == "c3", "only ever further back"


@pytest.mark.req("C-276")
@pytest.mark.parametrize("ending", ["failed", "succeeded"])
@pytest.mark.parametrize("reached", [None, Position("c8", T + 200)])
def test_what_a_reader_left_unread_while_a_sweep_ran_is_found_by_the_next(ending, reached):
    it = sweeps()
    it.due(["a"], 0)
    assert it.due(["a"], 300) == ["a"]  # it begins where the subscription began
    it.left_at("a", Position("c3", T - 5000))
    it.left_at("a", Position("c9", T + 50))
    if ending == "failed":
        it.failed("a", reached, 310)
    else:
        it.succeeded("a", reached, began_at=T + 300, now=310)
    assert starts(it, "a").cursor == "c3"
    it.due(["a"], 610)
    it.succeeded("a", Position("c10", T + 500), began_at=T + 610, now=611)
    assert starts(it, "a").cursor == "c10", "once"


def test_bounds_of_the_query_hold_for_sweeps_as_well():
    start = start_after(T, since=T - 5, received_since=T + 5)
    assert (start.since, start.received_since) == (T - 5, T + 5)
    start = start_after(T, since=None, received_since=None)
    assert (start.since, start.received_since) == (None, T), "however old what a peer brings is"


@pytest.mark.req("C-279")
def test_they_can_be_switched_off():
    it = sweeps(interval=None)
    assert it.due(["a"], 1e9) == []


def test_a_relay_that_is_back_is_asked_at_once():
    it = sweeps()
    it.due(["a"], 0)
    it.hasten("a", 5)
    it.hasten("unknown", 5)
    assert it.due(["a"], 5) == ["a"]


@pytest.mark.req("C-276")
@pytest.mark.parametrize("ending", ["failed", "succeeded"])
def test_a_sweep_that_is_called_for_while_one_runs_follows_it_at_once(ending):
    it = sweeps()
    it.due(["a"], 0)
    assert it.due(["a"], 300) == ["a"]
    it.hasten("a", 310)  # its connection was cut, and has been restored
    assert it.due(["a"], 320) == [], "one at a time"
    if ending == "failed":
        it.failed("a", None, 330)
    else:
        it.succeeded("a", None, began_at=T + 300, now=330)
    assert it.due(["a"], 330) == ["a"]
    it.succeeded("a", None, began_at=T + 330, now=331)
    assert it.due(["a"], 332) == [], "once"
