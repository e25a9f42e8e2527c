"""The feed's progress along the log: own batches, others' batches, and the turns of the loop they take."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from relayd.faults import FaultLog
from relayd.feed.fanout import Fanout
from relayd.feed.tail import Tail
from relayd.store.types import LogEntry, NewPacket


class Passed:
    """Stands in for the fan-out: remembers what passed, and how long it takes."""

    def __init__(self, clock: SimpleNamespace) -> None:
        self.position = 0
        self.pieces: list[list[int]] = []
        self.types: list[str] = []
        self.seconds = 0.0
        self.fails = 0
        self._clock = clock

    def dispatch(self, entries: Sequence[LogEntry], now: int) -> int:
        if self.fails:
            self.fails -= 1
            raise RuntimeError("a fault of ours")
        self.pieces.append([entry.sequence for entry in entries])
        self.types += [entry.packet.content_type for entry in entries]
        self.position = entries[-1].sequence
        self._clock.now += self.seconds * len(entries)
        return 0

    def skip_to(self, sequence: int) -> None:
        self.position = max(self.position, sequence)

    @property
    def sequences(self) -> list[int]:
        return [sequence for piece in self.pieces for sequence in piece]


class Log:
    """A log to which other processes also append."""

    def __init__(self) -> None:
        self.entries: list[LogEntry] = []
        self.gone: set[int] = set()
        """The sequences that retention has dropped."""
        self.meanwhile: Callable[[], None] | None = None
        """Called once, while somebody reads."""
        self.limits: list[int] = []

    def append(self, count: int, type_: str = "POST") -> list[LogEntry]:
        start = len(self.entries) + 1
        packet = cast(NewPacket, SimpleNamespace(content_type=type_, body=bytes(100)))
        made = [LogEntry(sequence, 0, packet) for sequence in range(start, start + count)]
        self.entries += made
        return made

    async def head(self) -> int:
        return len(self.entries)

    async def tail(self, after: int, up_to: int | None, limit: int) -> list[LogEntry]:
        self.limits.append(limit)
        await asyncio.sleep(0)
        found = [entry for entry in self.entries[after : after + limit] if entry.sequence not in self.gone]
        if self.meanwhile is not None:
            happens, self.meanwhile = self.meanwhile, None
            happens()
        return found


class Feed:
    def __init__(self, clock: SimpleNamespace) -> None:
        self.fanout, self.log = Passed(clock), Log()
        self.faults: list[str] = []
        self.heard: list[int] = []
        self.tail = Tail(
            cast(Fanout, self.fanout),
            self.log,
            clock=lambda: 0,
            on_dispatch=lambda delivered: None,
            on_entries=lambda entries: self.heard.extend(entry.sequence for entry in entries),
            is_dear=lambda entry: entry.packet.content_type == "KEY_EVENT",
            faults=FaultLog(self.faults.append),
        )

    def commit(self, count: int, **options: Any) -> None:
        previous = len(self.log.entries)
        self.tail.committed(previous, self.log.append(count, **options))


@pytest.fixture
async def feed(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Feed]:
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr("relayd.feed.tail.time", SimpleNamespace(monotonic=lambda: clock.now))
    feed = Feed(clock)
    running = asyncio.create_task(feed.tail.run())
    yield feed
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    there = [entry.sequence for entry in feed.log.entries if entry.sequence not in feed.log.gone]
    assert feed.heard == feed.fanout.sequences == there


async def until_through(feed: Feed) -> int:
    """The number of turns of the loop until the feed has reached the end of the log."""
    turns = 0
    async with asyncio.timeout(10):
        while feed.fanout.position < len(feed.log.entries):
            await asyncio.sleep(0)
            turns += 1
    return turns


@pytest.mark.req("R-321")
async def test_a_batch_that_costs_much_goes_through_in_many_turns_of_the_loop(feed: Feed):
    feed.fanout.seconds = 0.001
    feed.commit(512)
    feed.commit(100)  # behind the waiting ones, without querying the database
    assert await until_through(feed) > 20


async def test_a_batch_that_costs_little_goes_through_at_once(feed: Feed):
    for _ in range(12):
        feed.commit(50)
        assert feed.fanout.position == len(feed.log.entries)
    assert len(feed.fanout.pieces[-1]) == 50


@pytest.mark.req("R-074", "R-321")
async def test_commits_faster_than_the_feed_wait_in_the_log_and_not_in_memory(
    feed: Feed, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("relayd.feed.tail._MOST_COMING_BYTES", 2000)
    feed.fanout.seconds = 0.001
    for _ in range(50):
        feed.commit(20)
        assert len(feed.tail._coming) <= 2 * 20 + 20
    feed.fanout.seconds = 0.0
    await until_through(feed)
    assert feed.tail._coming_bytes == 0 and max(feed.log.limits) <= 500
    read = len(feed.log.limits)
    feed.commit(20)
    assert len(feed.log.limits) == read and feed.fanout.position == len(feed.log.entries)


async def test_what_others_are_judged_by_ends_its_piece(feed: Feed):
    feed.fanout.seconds = 0.003
    feed.commit(2, type_="KEY_EVENT")
    feed.commit(6, type_="KEY_EVENT")
    await until_through(feed)
    assert all(len(piece) == 1 for piece in feed.fanout.pieces)


@pytest.mark.req("R-167")
async def test_what_others_commit_in_between_goes_through_once_and_in_its_place(feed: Feed):
    feed.fanout.seconds = 0.001
    feed.commit(100)
    feed.log.append(7)  # another process's, rung later
    feed.commit(100)
    feed.tail.ring(207)
    feed.commit(5)
    await asyncio.wait_for(feed.tail.reach(212), 10)
    assert feed.fanout.position == 212


@pytest.mark.req("R-167")
async def test_what_a_fault_kept_from_going_through_comes_again_from_the_log(feed: Feed):
    feed.commit(3)
    feed.fanout.fails = 1
    with pytest.raises(RuntimeError):
        feed.commit(3)
    await until_through(feed)
    # The same in a later turn, when there is no caller to raise to.
    feed.fanout.seconds = 0.01
    feed.commit(600)
    feed.fanout.fails = 1
    await until_through(feed)
    assert feed.faults == ["feed"]


@pytest.mark.req("R-323")
@pytest.mark.parametrize("is_read", [False, True])
async def test_what_waits_for_its_turn_while_it_is_erased_comes_again_from_the_log(feed: Feed, is_read):
    def erase() -> None:
        empty = cast(NewPacket, SimpleNamespace(content_type="", body=b""))
        feed.log.entries = [LogEntry(entry.sequence, 0, empty) for entry in feed.log.entries]
        feed.tail.read_again()

    feed.fanout.seconds = 0.001
    if is_read:
        feed.log.append(100)
        feed.log.meanwhile = erase
        feed.tail.ring(100)
    else:
        feed.commit(100)
        erase()
    passed = feed.fanout.position
    await until_through(feed)
    assert passed < 100 and set(feed.fanout.types[passed:]) == {""}
    # After a read in vain few rows, because erasures may follow each other quickly.
    assert feed.log.limits[:2] == ([500, 62] if is_read else [500])


@pytest.mark.req("R-167")
async def test_a_batch_that_has_anothers_packet_in_its_midst_waits_for_that(feed: Feed):
    first, _, third = feed.log.append(3)
    feed.tail.committed(0, [first, third])
    assert await until_through(feed)


@pytest.mark.req("R-155", "R-167")
async def test_what_was_committed_while_the_feed_read_goes_through_once(feed: Feed):
    mine = feed.log.append(3)
    feed.log.meanwhile = lambda: feed.tail.committed(0, mine)
    feed.tail.ring(3)
    await until_through(feed)
    await asyncio.sleep(0)


@pytest.mark.req("R-167")
async def test_a_read_that_brings_nothing_new_is_not_the_end_of_the_log(feed: Feed):
    mine = feed.log.append(3)

    def happens() -> None:
        feed.tail.committed(0, mine)
        feed.log.append(2)
        feed.tail.ring(5)

    feed.log.meanwhile = happens
    feed.tail.ring(3)
    async with asyncio.timeout(10):
        await feed.tail.reach(5)


async def test_what_is_committed_while_a_reading_finds_nothing_is_not_passed_over(feed):
    """A ring for a row that retention has dropped, and during the read for it a ring from another process."""
    feed.log.append(1)
    feed.log.gone.add(1)
    feed.log.meanwhile = lambda: feed.tail.ring(feed.log.append(1)[-1].sequence)
    feed.tail.ring(1)
    await until_through(feed)
    assert feed.heard == [2]


@pytest.mark.req("R-167")
async def test_who_waits_for_what_retention_has_taken_waits_no_longer_than_for_a_reading(feed: Feed):
    feed.log.append(2)
    feed.log.gone |= {1, 2}
    async with asyncio.timeout(10):
        await feed.tail.reach(2)
        await feed.tail.reach(1)  # already passed
    assert feed.fanout.position == 2


@pytest.mark.req("R-167")
async def test_a_ring_for_what_a_failover_has_lost_passes_nothing_over(feed: Feed):
    """The server that rang is gone, and its replacement assigns the lost numbers again."""
    feed.log.append(1)
    async with asyncio.timeout(10):
        await feed.tail.reach(3)  # it will not come: a caller that waits must ask again
    assert feed.fanout.position == 1
    feed.tail.ring(feed.log.append(3)[-1].sequence)
    await until_through(feed)
    assert feed.heard == [1, 2, 3, 4]


@pytest.mark.req("R-155")
async def test_the_lag_is_that_of_what_subscribers_lack(feed: Feed, monkeypatch: pytest.MonkeyPatch):
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr("relayd.feed.tail.time", SimpleNamespace(monotonic=lambda: clock.now))
    assert feed.tail.lag(100.0) == 0

    def happens() -> None:  # during the read of the first two, which takes five seconds
        assert feed.tail.lag(105.0) == 5
        clock.now = 105.0
        feed.log.append(1)
        feed.tail.ring(3)
        assert feed.tail.lag(105.0) == 5, "the first two are still lacking"
        feed.log.meanwhile = lambda: lags.append(feed.tail.lag(107.0))

    lags: list[float] = []
    feed.log.append(2)
    feed.log.meanwhile = happens
    feed.tail.ring(2)
    await until_through(feed)
    assert lags == [2], "the third has been lacking since it came"
    assert feed.tail.lag(200.0) == 0
