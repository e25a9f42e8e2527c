"""How short memory is, and which clients are refused first."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relayd.access.memory import HOLDS_MUCH, MemoryCeiling, Pressure, dearest


@pytest.mark.req("R-321")
def test_pressure_rises_at_once_and_falls_with_some_room():
    ceiling = MemoryCeiling(1000)
    seen = [
        ceiling.update(resident) for resident in (0, 799, 800, 899, 950, 945, 921, 880, 865, 771, 769, 100)
    ]
    assert seen == [
        Pressure.FINE,
        Pressure.FINE,
        Pressure.TIGHT,
        Pressure.TIGHT,
        Pressure.FULL,
        Pressure.FULL,
        Pressure.FULL,
        Pressure.SHORT,
        Pressure.TIGHT,
        Pressure.TIGHT,
        Pressure.FINE,
        Pressure.FINE,
    ]


@pytest.mark.req("R-321")
def test_many_connections_of_one_account_are_one():
    held = [("crowd", HOLDS_MUCH // 4)] * 40 + [("large", HOLDS_MUCH)] + [("small", 10)] * 3
    assert dearest(held) == {"crowd"}
    assert dearest([("small", 10)] * 100) == set()
    assert dearest([]) == set()


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 4 * HOLDS_MUCH))))
def test_the_dearest_hold_half_unless_nobody_holds_much(held):
    totals: dict[object, int] = {}
    for account, size in held:
        totals[account] = totals.get(account, 0) + size
    found = dearest(held)
    assert all(totals[account] >= HOLDS_MUCH for account in found)
    rest = [size for account, size in totals.items() if account not in found]
    assert all(size <= min(totals[account] for account in found) for size in rest if found)
    enough = sum(totals[account] for account in found) * 2 >= sum(totals.values())
    assert enough or all(size < HOLDS_MUCH for size in rest)
