"""Budgets, with a clock that the test sets."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relayd.access.limits import Budget, Limits, Purse, Quota, Quotas

LIMITS = Limits(publishes=5, subscribes=3, backfill_bytes=1000, auths=2, connects=2, window_seconds=60)


def taken(budget: Budget | None, now: float, times: int = 100) -> int:
    assert budget is not None
    return sum(budget.take(now) for _ in range(times))


@pytest.mark.req("R-314")
def test_five_in_a_minute_and_the_sixth_is_refused():
    budget = Budget(5, 60)
    assert [budget.take(1000.0) for _ in range(6)] == [True] * 5 + [False]


@pytest.mark.req("R-314", "R-315")
def test_a_refusal_says_when_to_come_back_in_whole_seconds():
    budget = Budget(5, 60)
    taken(budget, 1000.0)
    excess = budget.excess(1000.0)
    assert (excess.limit, excess.remaining, excess.window_seconds) == (5, 0, 60)
    assert excess.retry_after == 12  # one of five comes back every twelfth second
    taken(budget, 1000.0)
    assert budget.excess(1011.5).retry_after >= 1


@pytest.mark.req("R-314")
def test_what_is_spent_comes_back_evenly():
    budget = Budget(60, 60)
    assert taken(budget, 0.0) == 60
    assert taken(budget, 0.5) == 0
    assert taken(budget, 1.0) == 1
    assert taken(budget, 31.0) == 30
    assert taken(budget, 1000.0) == 60


@pytest.mark.req("R-319")
def test_a_crowd_that_was_refused_comes_back_one_by_one():
    budget = Budget(5, 60)
    taken(budget, 0.0, 5)
    waits = [budget.excess(0.0).retry_after for _ in range(5)]
    assert waits == [12, 24, 36, 48, 60]
    assert all(budget.take(float(wait)) for wait in waits)


@pytest.mark.req("R-319")
def test_nobody_is_put_off_for_longer_than_a_window():
    budget = Budget(5, 60)
    taken(budget, 0.0, 5)
    assert max(budget.excess(0.0).retry_after for _ in range(1000)) == 60
    assert taken(budget, 60.0) == 5


@pytest.mark.req("R-314", "R-319")
@settings(deadline=None)
@given(
    limit=st.integers(1, 2000),
    window=st.integers(1, 3600),
    start=st.floats(0, 1e7),
    steps=st.lists(st.floats(0, 400), max_size=40),
    refused=st.integers(1, 40),
)
def test_whoever_waits_as_told_is_let_in(limit, window, start, steps, refused):
    budget, now = Budget(limit, window), start
    for step in steps:
        now += step
        budget.take(now)
    while budget.take(now):
        pass
    waits = [budget.excess(now).retry_after for _ in range(min(refused, limit))]
    assert all(isinstance(wait, int) and wait >= 1 for wait in waits)
    assert max(waits) <= max(window, 1)
    assert all(budget.take(now + wait) for wait in sorted(waits))


@settings(deadline=None)
@given(
    limit=st.integers(1, 30),
    window=st.integers(1, 600),
    start=st.floats(0, 1e7),
    steps=st.lists(st.floats(0, 20), min_size=1, max_size=20),
)
def test_no_window_ever_passes_more_than_twice_the_limit(limit, window, start, steps):
    """What can be spent at once, plus what is refilled during the window."""
    budget, now, passed = Budget(limit, window), start, []
    for step in steps:
        now += step
        passed += [now] * taken(budget, now, limit + 1)
    for at in passed:
        assert sum(at <= other < at + window for other in passed) <= 2 * limit


@pytest.mark.req("R-317")
def test_bytes_that_are_spent_already_leave_a_debt_that_time_pays():
    budget = Budget(1000, 60)
    budget.spend(1000, 0.0)
    assert budget.debt_seconds(0.0) <= 0
    budget.spend(1, 0.0)
    assert budget.debt_seconds(0.0) in (0.06, 0.061)
    assert budget.debt_seconds(0.061) <= 0
    budget = Budget(1000, 60)
    budget.spend(500, 60.0)
    assert budget.debt_seconds(60.0) <= 0
    budget.spend(2000, 60.0)
    assert budget.debt_seconds(60.0) == pytest.approx(90, abs=0.01)
    wait = budget.excess(60.0).retry_after
    assert wait in (90, 91)
    assert budget.debt_seconds(60.0 + wait) <= 0


@pytest.mark.req("R-316")
def test_all_sockets_of_one_holder_share_its_budgets():
    quotas = Quotas(LIMITS)
    one, other, stranger = quotas.hold("did:a"), quotas.hold("did:a"), quotas.hold("did:b")
    assert one is other
    assert taken(one.publish, 0.0, 3) + taken(other.publish, 0.0, 3) == 5
    assert taken(stranger.publish, 0.0) == 5


@pytest.mark.req("R-316")
async def test_however_many_tasks_ask_at_once_no_more_than_the_limit_pass():
    quotas = Quotas(Limits(publishes=37))
    passed = 0

    async def ask() -> None:
        nonlocal passed
        quota = quotas.hold("did:a")
        for _ in range(5):
            await asyncio.sleep(0)
            passed += taken(quota.publish, 1.0, 1)
        quotas.release(quota, 1.0)

    async with asyncio.TaskGroup() as group:
        for _ in range(50):
            group.create_task(ask())
    assert passed == 37


@pytest.mark.req("R-317")
def test_each_kind_of_request_has_its_own_budget():
    quota = Quotas(LIMITS).hold("a")
    budgets = {"publish": 5, "subscribe": 3, "auth": 2, "connect": 2}
    for name, limit in budgets.items():
        assert taken(getattr(quota, name), 0.0) == limit


def test_whoever_is_refused_by_one_budget_pays_no_other():
    ample, empty = Budget(5, 60), Budget(1, 60)
    assert empty.take(1000.0)
    assert not Purse((ample, empty)).take(1000.0)
    assert taken(ample, 1000.0) == 5


def test_zero_sets_no_limit():
    quota = Quotas(Limits(publishes=1)).hold("a")
    assert quota.publish is not None
    assert (quota.subscribe, quota.backfill, quota.auth, quota.connect) == (None,) * 4


@pytest.mark.req("R-319")
def test_leaving_and_coming_back_gives_nothing_anew():
    quotas = Quotas(LIMITS)
    quota = quotas.hold("a")
    assert taken(quota.publish, 0.0) == 5
    quotas.release(quota, 1.0)
    assert taken(quotas.hold("a").publish, 1.0) == 0


@pytest.mark.req("R-321")
def test_a_full_quota_that_nobody_holds_is_forgotten():
    quotas = Quotas(LIMITS)
    quota = quotas.hold("a")
    quotas.release(quota, 0.0)
    assert len(quotas) == 0
    spent = quotas.hold("b")
    taken(spent.publish, 0.0)
    quotas.release(spent, 0.0)
    assert len(quotas) == 1
    quotas.release(quotas.hold("c"), 61.0)
    assert len(quotas) == 0


@pytest.mark.req("R-321")
@given(st.lists(st.tuples(st.integers(0, 30), st.booleans()), max_size=200))
def test_the_number_kept_is_bounded_and_what_is_held_is_never_dropped(steps):
    quotas, now = Quotas(LIMITS, max_idle=4), 0.0
    held: dict[str, Quota] = {}
    for number, spend in steps:
        now += 0.01
        key = str(number)
        if key in held:
            quotas.release(held.pop(key), now)
        else:
            held[key] = quotas.hold(key)
            if spend:
                taken(held[key].publish, now, 1)
        assert len(quotas) <= len(held) + 4
        assert all(quotas.holds(quota) for quota in held.values())


def test_whoever_has_had_little_of_the_loop_stands_before_those_who_have_had_much():
    limits = Limits(loop_share=0.1)
    little, much, exempt = Quota("a", limits), Quota("b", limits), Quota("c")
    assert [quota.turn(50.0) for quota in (little, much, exempt)] == [50.0] * 3
    for _ in range(3):
        much.used_loop(0.1, 50.0)
    little.used_loop(0.001, 50.0)
    assert exempt.turn(50.0) < little.turn(50.0) < 50.1 < much.turn(50.0)
    assert much.turn(50.0) <= 50.0 + (0.3 + 0.1) / 0.1 + 1e-9  # until that is refilled, and its next step
    assert much.turn(50.0) < exempt.turn(55.0), "nobody stands behind those who come for ever"


def test_a_step_that_is_usually_long_stands_behind_short_ones_that_came_a_little_later():
    limits = Limits(loop_share=0.1)
    long, short = Quota("a", limits), Quota("b", limits)
    long.used_loop(0.010, 50.0)
    short.used_loop(0.001, 50.0)
    assert short.turn(60.0) < short.turn(60.05) < long.turn(60.0) < short.turn(60.2)
    for _ in range(100):
        long.used_loop(0.001, 55.0)
    assert long.turn(70.0) == pytest.approx(short.turn(70.0)), "what was once is forgotten"


def test_a_part_of_a_network_stands_where_the_network_stands():
    limits = Limits(loop_share=0.1)
    network, one, other = Quota("network", limits), Quota("one", limits), Quota("other", limits)
    one.parent = other.parent = network
    one.used_loop(0.5, 50.0)
    assert other.turn(50.0) >= 55.0


def test_what_a_network_has_is_so_many_times_what_an_address_has():
    one = Limits(2, 3, 5, 7, 11, loop_share=0.25, read_share=0.125, window_seconds=13)
    assert one.times(4) == Limits(8, 12, 20, 28, 44, loop_share=1.0, read_share=0.5, window_seconds=13)


def test_what_several_pay_for_together_is_spent_and_owed_by_each():
    small, large = Budget(2, 60), Budget(4, 60)
    both = Purse((large, small))
    both.spend(3, 0.0)
    assert (small.debt_seconds(0.0), large.debt_seconds(0.0)) == (30.0, -15.0)
    assert both.debt_seconds(0.0) == 30.0, "it waits for the one that owes most"
    assert both.excess(0.0).limit == 2, "and hears of the one that refuses"
    assert both.excess(200.0).limit == 4, "or of the first, where none does any more"


def test_work_is_charged_to_a_whole_network_and_whoever_owes_most_is_waited_for():
    part, whole = Quota("a", Limits(loop_share=0.5, read_share=0.5)), Quota("b", Limits(loop_share=0.1))
    part.parent = whole
    assert part.used_loop(20.0, 0.0) == max(part.loop.debt_seconds(0.0), whole.loop.debt_seconds(0.0)) > 0  # type: ignore[union-attr]
    assert whole.loop.debt_seconds(0.0) > part.loop.debt_seconds(0.0)  # type: ignore[union-attr]
    part.used_database(1.0, 0.0)
    assert part.read is not None and not part.read.is_full(0.0) and whole.read is None
    free = Quota("c")
    assert free.used_loop(20.0, 0.0) == 0.0
    free.used_database(20.0, 0.0)


def test_what_a_crowd_has_left_is_forgotten_some_at_a_time():
    quotas = Quotas(Limits(publishes=1, window_seconds=60))
    for number in range(100):
        quota = quotas.hold(str(number))
        assert taken(quota.publish, 0.0) == 1
        quotas.release(quota, 0.0)
    left = []
    while len(quotas):
        quotas.release(quotas.hold("another"), 61.0)
        left.append(len(quotas))
    assert left[0] > 50 and len(left) < 20


@pytest.mark.req("R-316")
def test_what_is_forgotten_first_is_what_was_left_first():
    quotas = Quotas(Limits(publishes=1, window_seconds=60), max_idle=2)
    for key in "abc":
        quota = quotas.hold(key)
        assert taken(quota.publish, 0.0) == 1
        quotas.release(quota, 0.0)
    assert [taken(quotas.hold(key).publish, 0.0) for key in "abc"] == [1, 0, 0]
