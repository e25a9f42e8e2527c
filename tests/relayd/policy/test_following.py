"""A process follows the operators' rulings: when notified, when not, and when only time changes them."""

from __future__ import annotations

import asyncio

import pytest

from relayd.faults import FaultLog
from relayd.moderation import Ban, Bans, LastRuling, RulingsRead, SubjectKind
from relayd.policy import BanFollower
from relayd.store.types import StoreUnavailable
from tests.support.waiting import until

NOW = 1_790_000_000


class Rulings:
    """The table, in memory."""

    def __init__(self) -> None:
        self.number = 0
        self.timeline = 1
        self.rows: list[Ban] = []
        self.erased_at = -1
        self.closings: list[tuple[int, str]] = []
        self.is_away = False
        self.reads = 0

    def rule(self, *rows: Ban) -> None:
        self.number += 1
        self.rows = list(rows)

    async def last(self) -> LastRuling:
        if self.is_away:
            raise StoreUnavailable("away")
        return LastRuling(self.number, bytes([self.timeline]))

    async def read(self, since: LastRuling) -> RulingsRead:
        self.reads += 1
        after = since.number if since.digest == bytes([self.timeline]) else -1
        closed = [session for number, session in self.closings if number > after]
        return RulingsRead(await self.last(), self.rows, self.erased_at > after, closed)

    def close(self, session: str) -> None:
        self.number += 1
        self.closings.append((self.number, session))


def ban(subject: str, expires_at: int | None = None) -> Ban:
    return Ban(SubjectKind.AUTHOR, subject, "because", "root", expires_at, NOW)


class Rig:
    def __init__(self) -> None:
        self.now = NOW
        self.rulings = Rulings()
        self.changes: list[tuple[set[str], bool]] = []
        self.closed: list[list[str]] = []
        self.follower = BanFollower(
            self.rulings,
            clock=lambda: self.now,
            on_change=lambda erased: self.changes.append((set(self.follower.bans.authors), erased)),
            on_close=self.closed.append,
            faults=FaultLog(),
        )


async def test_it_reads_when_something_was_ruled_and_not_otherwise():
    rig = Rig()
    await rig.follower.look()
    await rig.follower.look()
    assert (rig.rulings.reads, rig.changes) == (1, [])
    rig.rulings.rule(ban("a"))
    await rig.follower.look()
    assert rig.changes == [({"a"}, False)]
    rig.rulings.rule(ban("a"))  # for another reason, for example
    await rig.follower.look()
    assert len(rig.changes) == 1
    rig.rulings.rule()
    await rig.follower.look()
    assert rig.changes[1:] == [(set(), False)]


async def test_sessions_are_to_be_closed_once_and_none_of_the_time_before():
    rig = Rig()
    rig.rulings.close("before-1")
    await rig.follower.look()
    rig.rulings.close("one-1")
    rig.rulings.close("one-2")
    await rig.follower.look()
    await rig.follower.look()
    rig.rulings.close("one-3")
    await rig.follower.look()
    assert rig.closed == [["one-1", "one-2"], ["one-3"]]
    assert rig.changes == []


async def test_what_could_not_be_put_into_force_is_put_into_force_at_the_next_look():
    rig = Rig()
    await rig.follower.look()
    tries: list[tuple[set[str], bool]] = []

    def fails_once(erased: bool) -> None:
        tries.append((set(rig.follower.bans.authors), erased))
        if len(tries) == 1:
            raise RuntimeError("in the midst of it")

    rig.follower._on_change = fails_once
    rig.rulings.rule(ban("a"))
    rig.rulings.erased_at = rig.rulings.number
    rig.rulings.close("one-1")
    with pytest.raises(RuntimeError):
        await rig.follower.look()
    assert rig.follower.bans.authors == {"a"}  # for all other checks meanwhile
    await rig.follower.look()
    await rig.follower.look()
    assert tries == [({"a"}, True)] * 2
    assert rig.closed == [["one-1"]]
    # The same holds for an expiry.
    tries.clear()
    rig.rulings.rule(ban("b", NOW + 5))
    rig.rulings.erased_at = -1
    rig.follower._on_change = lambda erased: None
    await rig.follower.look()
    rig.follower._on_change = fails_once
    rig.now = NOW + 6
    with pytest.raises(RuntimeError):
        await rig.follower.look()
    await rig.follower.look()
    await rig.follower.look()
    assert tries == [(set(), False)] * 2


async def test_a_ban_ends_by_time_without_any_reading():
    rig = Rig()
    rig.rulings.rule(ban("a", NOW + 5), ban("b"))
    await rig.follower.look()
    rig.now = NOW + 5
    await rig.follower.look()
    assert rig.changes == [({"a", "b"}, False)]
    rig.now = NOW + 6
    await rig.follower.look()
    assert rig.changes[1:] == [({"b"}, False)]
    assert rig.rulings.reads == 1


async def test_an_erasure_is_told_of_once_whatever_the_bans():
    rig = Rig()
    rig.rulings.rule()
    rig.rulings.erased_at = 1
    await rig.follower.look()
    await rig.follower.look()
    assert rig.changes == [(set(), True)]
    rig.rulings.rule()
    await rig.follower.look()
    assert len(rig.changes) == 1


async def test_a_backup_that_is_put_back_brings_its_bans_with_it():
    rig = Rig()
    rig.rulings.rule(ban("a"))
    rig.rulings.rule(ban("b"))
    await rig.follower.look()
    rig.rulings.number, rig.rulings.rows = 1, [ban("a")]
    await rig.follower.look()
    assert rig.changes == [({"b"}, False), ({"a"}, False)]


async def test_a_ruling_of_the_same_number_after_a_failover_is_followed():
    rig = Rig()
    rig.rulings.rule(ban("lost"))
    await rig.follower.look()
    rig.rulings.timeline, rig.rulings.rows = 2, [ban("a")]
    rig.rulings.erased_at = rig.rulings.number
    rig.rulings.closings = [(rig.rulings.number, "one-1")]
    await rig.follower.look()
    await rig.follower.look()
    assert rig.changes == [({"lost"}, False), ({"a"}, True)]
    assert rig.closed == [["one-1"]]


@pytest.mark.slow
async def test_it_follows_without_being_told_and_while_the_database_was_away():
    rig = Rig()
    running = asyncio.create_task(rig.follower.run())
    try:
        rig.rulings.rule(ban("a"))
        await until(lambda: rig.follower.bans.authors)
        rig.rulings.is_away = True
        rig.follower.ring()
        await asyncio.sleep(0)
        assert rig.follower.bans == Bans(frozenset({"a"}))
        rig.rulings.rule()
        rig.rulings.is_away = False
        await until(lambda: not rig.follower.bans.authors)
    finally:
        running.cancel()


async def test_it_ends_in_whichever_step_of_a_ring_it_is_told_to():
    """A process that ends waits for all its tasks, so this one must end."""
    for steps in range(6):
        rig = Rig()
        following = asyncio.create_task(rig.follower.run())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        rig.follower.ring()
        for _ in range(steps):
            await asyncio.sleep(0)
        following.cancel()
        await asyncio.wait({following}, timeout=5)
        assert following.cancelled(), steps


async def test_a_ban_that_ended_by_a_clock_that_was_ahead_holds_again():
    rig = Rig()
    rig.rulings.rule(ban("a", expires_at=NOW + 60), ban("b"))
    await rig.follower.look()
    rig.now = NOW + 7200
    await rig.follower.look()
    rig.now = NOW + 1
    await rig.follower.look()
    await rig.follower.look()
    rig.now = NOW + 61
    await rig.follower.look()
    assert rig.changes == [({"a", "b"}, False), ({"b"}, False), ({"a", "b"}, False), ({"b"}, False)]
    assert rig.rulings.reads == 1
