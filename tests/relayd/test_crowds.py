"""Work for a crowd is done for some at a time, and nobody is left behind."""

from __future__ import annotations

import asyncio

from relayd.crowds import CrowdWork
from relayd.faults import FaultLog
from relayd.slices import Slices


async def some_turns() -> None:
    for _ in range(100):
        await asyncio.sleep(0)


def one_a_turn() -> Slices:
    return Slices(seconds=0.0)


async def test_a_turn_has_time_for_some_and_the_rest_follow_in_order():
    done: list[int] = []
    after: list[int] = []
    crowd = CrowdWork(one_a_turn(), done.append, FaultLog(), after=lambda: after.append(len(done)))
    crowd.members = dict.fromkeys(range(20))
    crowd.go_on()
    crowd.go_on()
    assert len(done) <= 2
    await some_turns()
    assert done == list(range(20)) and after[-1] == 20 and len(after) >= 10


async def test_they_stop_where_they_may_not_go_on_and_continue_when_they_may():
    done: list[int] = []
    room = 5
    crowd = CrowdWork(one_a_turn(), done.append, FaultLog(), may_go_on=lambda: len(done) < room)
    crowd.members = dict.fromkeys(range(10))
    crowd.go_on()
    await some_turns()
    assert done == list(range(5))
    room = 20
    crowd.go_on()
    await some_turns()
    assert done == list(range(10))


async def test_a_fault_leaves_nobody_behind(monkeypatch):
    caught: list[str] = []
    done: list[int] = []

    def work(member: int) -> None:
        if member == 1:
            raise ValueError("this one")
        done.append(member)

    slices = one_a_turn()
    crowd = CrowdWork(slices, work, FaultLog(caught.append))
    monkeypatch.setattr(slices, "later", lambda *_: 1 / 0)
    crowd.members = dict.fromkeys(range(5))
    crowd.go_on()
    await some_turns()
    assert done == [0, 2, 3, 4] and len(caught) >= 2
    crowd.members = {7: None}
    crowd.go_on()
    assert done[-1] == 7
