"""The order in which packets are stored: fair by bytes, and each owner's own order."""

from __future__ import annotations

import random
from typing import TypeVar

from hypothesis import given
from hypothesis import strategies as st

from relayd.store.fair_queue import FairQueue

T = TypeVar("T")


def taken(queue: FairQueue[T]) -> list[T]:
    return [queue.take() for _ in range(len(queue))]


def test_items_of_one_owner_keep_their_order_whatever_their_size():
    queue: FairQueue[str] = FairQueue()
    for name, size in (("a", 10**6), ("b", 1), ("c", 500), ("d", 0)):
        queue.put(name, size, "owner")
    assert taken(queue) == ["a", "b", "c", "d"]


def test_small_items_do_not_wait_for_the_large_ones_of_others():
    queue: FairQueue[str] = FairQueue()
    for number in range(3):
        for owner in range(3):
            queue.put(f"large {number} of {owner}", 200_000, owner)
    assert queue.take() == "large 0 of 0"
    queue.put("small", 600, "another")
    assert taken(queue)[:4] == ["small", "large 0 of 1", "large 0 of 2", "large 1 of 0"]


def test_owners_share_the_bytes_and_not_the_items():
    queue: FairQueue[str] = FairQueue()
    for number in range(100):
        queue.put("small", 488, "small")  # plus 512 that each item costs
        if number < 10:
            queue.put("large", 9_488, "large")
    first = [queue.take() for _ in range(55)]
    assert first.count("large") == 5


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5_000)), max_size=60), st.randoms())
def test_everything_is_taken_once_and_nobody_waits_for_more_than_was_there(
    items: list[tuple[int, int]], draw: random.Random
):
    queue: FairQueue[tuple[int, int, int]] = FairQueue()
    out: list[tuple[int, int, int]] = []
    for number, (owner, size) in enumerate(items):
        queue.put((number, owner, size), size, owner)
        while len(queue) and draw.random() < 0.4:
            out.append(queue.take())
    out += [queue.take() for _ in range(len(queue))]
    assert sorted(number for number, _, _ in out) == list(range(len(items)))
    for one in range(4):
        numbers = [number for number, owner, _ in out if owner == one]
        assert numbers == sorted(numbers)


def test_a_patient_item_is_taken_though_small_ones_keep_coming():
    queue: FairQueue[str] = FairQueue()
    queue.put("large", 10_000, "large")
    out = []
    for number in range(100):
        queue.put("small", 100, number)  # each has its own owner
        out.append(queue.take())
    assert out.index("large") <= 2 * 10_512 // 612 + 1  # two owners at a time


def test_what_is_dropped_is_gone_and_the_rest_keeps_its_order():
    queue: FairQueue[str] = FairQueue()
    for number in range(6):
        queue.put(f"{number}", 10, number % 2)
    assert queue.drop(lambda item: int(item) % 3 == 0) == ["0", "3"]
    queue.put("6", 10, 0)
    out = taken(queue)
    assert [item for item in out if int(item) % 2 == 0] == ["2", "4", "6"]
    assert [item for item in out if int(item) % 2] == ["1", "5"]
    queue.put("of nobody else", 10, 0)
    assert taken(queue) == ["of nobody else"]


def test_what_is_put_behind_a_group_comes_after_all_of_it_whoever_owns_them():
    queue: FairQueue[str] = FairQueue()
    for number in range(3):
        queue.put(f"large {number}", 100_000, "one", "group")
        queue.put(f"other {number}", 100_000, "one more", "another group")
    queue.put("last of it", 100, "two", "group", behind_group=True)
    queue.put("small", 100, "three", "group")
    out = taken(queue)
    assert out[0] == "small"
    assert out.index("last of it") > out.index("large 2")
    queue.put("large", 100_000, "one", "group")
    queue.drop(lambda item: item == "large")
    queue.put("forgotten", 100_000, "one", "another group")
    queue.put("first", 100, "two", "group", behind_group=True)
    assert taken(queue) == ["first", "forgotten"]


def test_of_two_that_would_end_together_the_group_ends_with_the_second():
    queue: FairQueue[str] = FairQueue()
    queue.put("first", 1_500, "one", "group")
    queue.put("second", 1_500, "two", "group")
    for number in range(3):
        queue.put("beside", 50_000, f"another {number}")
    assert queue.take() == "first"
    queue.put("last of it", 100, "three", "group", behind_group=True)
    assert taken(queue)[:2] == ["second", "last of it"]


def test_whoever_has_nothing_left_is_forgotten_however_its_items_went():
    """Owners and groups are connections and identities: they come and go for months."""
    queue: FairQueue[int] = FairQueue()
    for number in range(6):
        queue.put(number, 100, f"owner {number % 3}", f"group {number % 2}")
    assert queue.drop(lambda item: item >= 4) == [4, 5]
    assert sorted(queue.take() for _ in range(4)) == [0, 1, 2, 3]
    assert (len(queue), queue._ends, queue._last_of_groups) == (0, {}, {})
    queue.put(7, 100, "owner 0", "group 0")
    assert queue.drop(lambda item: True) == [7]
    assert (len(queue), queue._ends, queue._last_of_groups) == (0, {}, {})


def test_an_item_behind_a_group_stays_behind_those_of_its_owner_too():
    queue: FairQueue[str] = FairQueue()
    queue.put("large", 100_000, "owner", "one")
    queue.put("behind", 1, "owner", "another", behind_group=True)
    queue.put("other", 1, "somebody")
    assert [queue.take() for _ in range(3)] == ["other", "large", "behind"]


def test_what_is_passed_over_keeps_its_place_and_all_that_must_come_behind_it():
    queue: FairQueue[str] = FairQueue()
    queue.put("large", 10_000, "one", "group")
    queue.put("of its owner", 1, "one", "another group")
    queue.put("behind its group", 1, "two", "group", behind_group=True)
    queue.put("other", 20_000, "three", "yet another group")
    assert queue.first() == "large"
    queue.pass_over()
    assert (queue.first(), queue.take(), queue.first(), len(queue)) == ("other", "other", None, 3)
    queue.put("new of its owner", 1, "one", "a new group")
    queue.put("new of its group", 1, "four", "group")
    assert queue.first() is None
    queue.put("new", 50_000, "five", "a group of its own")
    assert queue.first() == "new"
    queue.look_again()
    out = taken(queue)
    assert [name for name in out if name.endswith("owner")] == ["of its owner", "new of its owner"]
    assert out.index("large") < min(out.index("of its owner"), out.index("behind its group"))
    assert out[-1] == "new"
    assert (queue._ends, queue._last_of_groups) == ({}, {})


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5_000)), max_size=60), st.randoms())
def test_passing_over_loses_nothing_and_keeps_the_order_of_each_owner(
    items: list[tuple[int, int]], draw: random.Random
):
    queue: FairQueue[tuple[int, int]] = FairQueue()
    out: list[tuple[int, int]] = []
    for number, (owner, size) in enumerate(items):
        queue.put((number, owner), size, owner, number % 3, behind_group=draw.random() < 0.1)
        while draw.random() < 0.6 and queue.first() is not None:
            if draw.random() < 0.4:
                queue.pass_over()
            else:
                out.append(queue.take())
        if draw.random() < 0.2:
            assert queue.drop(lambda item: False) == []
    queue.look_again()
    out += taken(queue)
    assert sorted(number for number, _ in out) == list(range(len(items)))
    assert (queue._ends, queue._last_of_groups) == ({}, {})
    for one in range(4):
        numbers = [number for number, owner in out if owner == one]
        assert numbers == sorted(numbers)
