"""The turns of the event loop: a slice of work in each, and the rest in line."""

from __future__ import annotations

import asyncio
import functools
import itertools
import time

import pytest

from relayd.faults import FaultLog
from relayd.slices import Slices


async def turn() -> None:
    """Let the loop run one turn."""
    await asyncio.sleep(0)


async def test_each_turn_has_a_slice_and_jobs_go_on_where_the_last_ended() -> None:
    slices, done = Slices(seconds=0.0), list[int]()
    for number in range(5):
        slices.later(functools.partial(done.append, number))
    counts = []
    while len(done) < 5:
        await turn()
        counts.append(len(done))
    assert done == list(range(5))
    assert len(counts) >= 5  # a slice of zero length holds one job


async def test_a_slice_is_over_until_the_next_turn() -> None:
    slices = Slices(seconds=0.0)
    assert not slices.is_over()  # the first to ask in this turn begins it
    assert slices.is_over()
    await turn()
    assert not slices.is_over()


async def test_jobs_that_come_again_wait_for_the_next_turn_behind_the_others() -> None:
    slices, done = Slices(seconds=3600.0), list[str]()

    def again(name: str, left: int) -> None:
        done.append(name)
        if left:
            slices.later(functools.partial(again, name, left - 1))

    slices.later(functools.partial(again, "a", 2))
    slices.later(functools.partial(again, "b", 1))
    await turn()
    assert done == ["a", "b"]
    await turn()
    assert done == ["a", "b", "a", "b"]
    await turn()
    assert done == ["a", "b", "a", "b", "a"]


class Clock:
    """A clock that the test moves."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


async def test_who_has_had_much_has_a_shorter_slice() -> None:
    clock = Clock()
    slices = Slices(seconds=4.0, clock=clock)
    assert not slices.is_over()
    clock.now += 2.0
    assert not slices.is_over()
    assert not slices.is_over(place=clock.now)
    assert slices.is_over(place=clock.now + 1.0)
    clock.now += 2.0
    assert slices.is_over(place=clock.now)


async def test_where_many_wait_every_slice_is_short() -> None:
    clock, done = Clock(), list[int]()
    slices = Slices(seconds=4.0, clock=clock)

    def work(number: int) -> None:
        clock.now += 0.4
        done.append(number)

    for number in range(30):
        slices.later(functools.partial(work, number), place=clock.now)
    counts = [0]
    while len(done) < 30:
        await turn()
        counts.append(len(done))
    each = [after - before for before, after in itertools.pairwise(counts)]
    # A slice has room for ten of them, a fourth of it for three.
    assert each == [3] * 7 + [9], "until eight wait and one is asked about"
    assert done == list(range(30))


async def test_what_takes_long_has_a_turn_of_its_own() -> None:
    clock, done = Clock(), list[str]()
    slices = Slices(seconds=4.0, clock=clock)

    def work(name: str, seconds: float) -> None:
        clock.now += seconds
        done.append(name)

    for name, seconds in (("a", 0.5), ("b", 0.4), ("long", 1.5), ("c", 0.5), ("d", 0.5)):
        slices.later(functools.partial(work, name, seconds))
    await turn()
    assert done == ["a", "b", "long"]
    assert slices.is_over()
    await turn()
    assert done == ["a", "b", "long", "c", "d"]


async def test_tasks_that_wait_for_a_turn_go_on_one_in_each() -> None:
    slices, steps = Slices(seconds=3600.0), list[int]()
    now = time.monotonic()

    async def work(number: int, place: float) -> None:
        await slices.next(place)
        steps.append(number)

    tasks = [asyncio.create_task(work(number, now - number)) for number in range(5)]
    await turn()
    counts = [0]
    while len(steps) < 5:
        await turn()
        counts.append(len(steps))
    await asyncio.gather(*tasks)
    assert steps == [4, 3, 2, 1, 0], "by their places"
    assert all(after - before <= 1 for before, after in itertools.pairwise(counts))


@pytest.mark.req("R-321")
async def test_whose_job_raises_is_told_where_he_wants_to_be() -> None:
    caught, told = list[str](), list[Exception]()
    slices = Slices(FaultLog(caught.append), seconds=3600.0)
    error = ValueError("job")

    def fails() -> None:
        raise error

    slices.later(fails, lost=told.append)
    await turn()
    assert (told, caught) == ([error], [])


async def test_a_job_that_raises_is_counted_and_the_others_are_done() -> None:
    caught, done = list[str](), list[int]()
    slices = Slices(FaultLog(caught.append), seconds=3600.0)
    slices.later(lambda: 1 / 0)
    slices.later(functools.partial(done.append, 1))
    await turn()
    assert (caught, done) == (["background"], [1])


async def test_whoever_has_had_little_goes_before_those_who_have_had_much() -> None:
    slices, done = Slices(seconds=3600.0), list[str]()
    now = time.monotonic()
    for name, place in (
        ("much", now + 60.0),
        ("some", now + 30.0),
        ("little", now),
        ("some too", now + 30.0),
    ):
        slices.later(functools.partial(done.append, name), place)
    slices.later(functools.partial(done.append, "no place"))
    await turn()
    assert done == ["little", "no place", "some", "some too", "much"]
