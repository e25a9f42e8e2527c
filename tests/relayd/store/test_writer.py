"""Group commit: what goes into a batch, who is notified, and the effects of a lost database."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from typing import Any

import msgspec
import pytest
import structlog

from relayd.store import Appended, AppendOutcome, Disposition, StoreError, StoreUnavailable, Writer
from relayd.store import writer as writers
from relayd.store.types import IdentitiesMoved, NewPacket
from tests.support.virtual_time import virtually

NOW = 1_790_000_000


class FakeLog:
    """Appends when the test lets it, and fails when it is told to."""

    def __init__(self):
        self.batches: list[list[int]] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.failures: list[Exception] = []
        self.called = asyncio.Event()

    @staticmethod
    def number_of(packet: NewPacket) -> int:
        return int(packet.body.split(b":")[0])

    async def append(self, batch, now, followed=None, marks=()):
        self.followed = followed
        self.batches.append([self.number_of(packet) for packet in batch])
        self.called.set()
        await self.gate.wait()
        if self.failures:
            raise self.failures.pop(0)
        return Appended(0, [Disposition(AppendOutcome.STORED, n, now) for n in range(len(batch))])


@contextlib.asynccontextmanager
async def running(writer):
    task = asyncio.create_task(writer.run())
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.wait({task})


@pytest.fixture
def log():
    return FakeLog()


class RecordingWriter(Writer[Any]):
    """Records its reports: each commit and each ticket that failed."""

    def __init__(self, log: FakeLog, **options: Any) -> None:
        self.committed: list[tuple[Appended, list[tuple[NewPacket, Any]], float]] = []
        self.failed: list[Any] = []
        super().__init__(
            log,
            lambda appended, batch, seconds: self.committed.append((appended, batch, seconds)),
            self.failed.append,
            clock=lambda: NOW + 0.9,
            **options,
        )


@pytest.fixture
def make(log):
    return functools.partial(RecordingWriter, log)


def tickets(writer):
    return [ticket for _, batch, _ in writer.committed for _, ticket in batch]


async def test_a_lone_packet_is_committed_at_once(log, make, packet):
    writer = make()
    async with running(writer):
        writer.put(packet(1), "one")
        assert (writer.pending, writer.pending_bytes) == (1, 40)
        assert await writer.drain(5)
    [(appended, batch, seconds)] = writer.committed
    assert batch == [(packet(1), "one")]
    assert appended.dispositions[0].received_at == NOW
    assert seconds >= 0
    assert (writer.pending, writer.pending_bytes) == (0, 0)


@pytest.mark.req("R-189")
async def test_what_piles_up_during_a_commit_is_the_next_batch(log, make, packet):
    writer = make()
    log.gate.clear()
    async with running(writer):
        writer.put(packet(0), 0)
        await log.called.wait()
        for n in range(1, 100):
            writer.put(packet(n), n)
        assert writer.committed == []  # a packet is not reported before its commit
        assert not await writer.drain(0)
        log.gate.set()
        assert await writer.drain(5)
    assert log.batches == [[0], list(range(1, 100))]
    assert tickets(writer) == list(range(100))


@pytest.mark.parametrize(
    ("options", "sizes"),
    [
        ({"max_batch_packets": 3}, [3, 3, 1]),
        ({"max_batch_bytes": 81}, [3, 3, 1]),
        ({"max_batch_bytes": 1}, [1] * 7),
    ],
)
async def test_batches_are_bounded(log, make, packet, options, sizes):
    writer = make(**options)
    for n in range(7):
        writer.put(packet(n), n)
    async with running(writer):
        assert await writer.drain(5)
    assert [len(batch) for batch in log.batches] == sizes
    assert tickets(writer) == list(range(7))


@pytest.fixture
def large(packet):
    """Makes a packet of this number and size in bytes."""

    def made(number: int, size: int = 100_000) -> Any:
        return msgspec.structs.replace(packet(number), body=b"%d:" % number + b"x" * size)

    return made


async def test_small_packets_go_before_large_ones_and_a_batch_holds_few_of_those(log, make, packet, large):
    writer = make()
    for n in range(4):
        writer.put(large(n), n, "one who publishes much")
    for n in range(4, 7):
        writer.put(packet(n), n, f"another, {n}")
    async with running(writer):
        assert await writer.drain(5)
        writer.put(large(7, 200_000), 7, "one with a very large one")
        writer.put(packet(8), 8, "another")
        assert await writer.drain(5)
    assert log.batches == [[4, 5, 6, 0], [1], [2], [3], [8], [7]]


@pytest.fixture
def long_rests(monkeypatch):
    monkeypatch.setattr(writers, "_LARGE_REST", 1e9)  # a commit in a test takes no time
    monkeypatch.setattr(writers, "_LONGEST_REST", 60.0)


@virtually
async def test_after_a_commit_full_of_large_packets_the_next_of_them_wait_for_small_ones(
    log, make, packet, large, long_rests
):
    writer = make()

    async def appended(*packets: NewPacket, owner: str | None = None) -> list[list[int]]:
        log.batches.clear()
        for each in packets:
            number = log.number_of(each)
            own = msgspec.structs.replace(each, author_id=f"did:{number}")
            writer.put(own, number, owner or f"owner {number}")
        await asyncio.sleep(0.1)
        return list(log.batches)

    async with running(writer):
        assert await appended(large(0), large(1)) == [[0], [1]]  # nobody has published a small one
        assert await appended(packet(2), large(3), large(4)) == [[2, 3]]
        assert await appended(large(5), packet(6), owner="one") == []
        assert await appended(packet(7)) == [[7]]
        assert await appended(*(large(n, 5_000) for n in range(8, 12))) == [[8, 9, 10]]  # 16 KiB
        await asyncio.sleep(59)
        assert await appended() == []
        await asyncio.sleep(1)
        assert log.batches == [[11, 4], [5, 6]]


@virtually
async def test_after_a_commit_with_few_large_packets_nobody_waits(log, make, packet, large, long_rests):
    writer = make()
    async with running(writer):
        for number in (0, 2, 4):
            writer.put(packet(number), number)
            writer.put(large(number + 1, 10_000), number + 1)
            assert await writer.drain(5)


@pytest.mark.req("R-074")
async def test_what_changes_keys_is_stored_behind_what_was_admitted_under_them(log, make, packet):
    writer = make()
    for n in range(3):
        body = b"%d:" % n + b"x" * 10_000
        writer.put(msgspec.structs.replace(packet(n), author_id="did:a", body=body), n, f"session {n % 2}")
    keys = msgspec.structs.replace(packet(3), author_id="did:a", content_type="KEY_EVENT")
    writer.put(keys, 3, "another session")
    writer.put(msgspec.structs.replace(packet(4), author_id="did:b"), 4, "a third session")
    async with running(writer):
        assert await writer.drain(5)
    assert log.batches == [[4, 0, 1, 2, 3]]


async def test_the_queue_is_bounded(log, make, packet):
    writer = make(max_pending_bytes=100)
    for n in range(3):
        writer.put(packet(n), n)
    with pytest.raises(StoreUnavailable):
        writer.put(packet(3), 3)
    async with running(writer):
        assert await writer.drain(5)
        writer.put(packet(3), 3)
        assert await writer.drain(5)
    assert tickets(writer) == [0, 1, 2, 3]


async def test_a_packet_counts_with_the_memory_that_it_takes(log, make, packet):
    writer = make(max_pending_bytes=1000)
    writer.put(packet(1), 1, "one", 1000)
    assert writer.pending_bytes == 1000
    with pytest.raises(StoreUnavailable):
        writer.put(packet(2), 2)
    async with running(writer):
        assert await writer.drain(5)
    assert writer.pending_bytes == 0


async def test_a_lost_database_is_asked_again_with_the_same_batch(log, make, packet):
    writer = make()
    log.failures = [StoreUnavailable("away"), StoreUnavailable("away")]
    writer.put(packet(1), 1)
    writer.put(packet(2), 2)
    async with running(writer):
        assert await writer.drain(10)
    assert log.batches == [[1, 2]] * 3
    assert tickets(writer) == [1, 2]
    assert writer.failed == []


@pytest.mark.req("R-200")
async def test_who_has_waited_too_long_is_told_and_the_others_wait_on(log, make, packet):
    writer = make(publish_timeout=0)
    log.failures = [StoreUnavailable("away")]
    writer.put(packet(1), "late")
    writer._publish_timeout = 60
    writer.put(packet(2), "early")
    async with running(writer):
        assert await writer.drain(10)
    assert writer.failed == ["late"]
    assert tickets(writer) == ["early"]
    assert (writer.pending, writer.pending_bytes) == (0, 0)


async def test_our_log_says_once_why_nothing_is_stored_and_when_it_is_again(log, make, packet):
    """A database with a full disk still answers queries, and nothing else would report it."""
    writer = make(publish_timeout=0, max_batch_packets=1)
    log.failures = [StoreUnavailable("No space left on device"), StoreUnavailable("again")]
    with structlog.testing.capture_logs() as lines:
        async with running(writer):
            for number in range(4):
                writer.put(packet(number), number)
                assert await writer.drain(10)
    assert (writer.failed, tickets(writer)) == ([0, 1], [2, 3])
    assert [(line["log_level"], line["event"], line.get("problem")) for line in lines] == [
        ("error", "publishes_fail", "No space left on device"),
        ("info", "publishes_back", None),
    ]


async def test_a_database_that_was_away_for_a_moment_is_no_line(log, make, packet):
    writer = make()
    log.failures = [StoreUnavailable("away")]
    writer.put(packet(1), 1)
    with structlog.testing.capture_logs() as lines:
        async with running(writer):
            assert await writer.drain(10)
    assert (tickets(writer), lines) == ([1], [])


@pytest.mark.req("R-200")
async def test_a_batch_that_is_refused_as_a_whole_fails_and_the_next_is_tried(log, make, packet):
    writer = make(max_batch_packets=1)
    log.failures = [StoreError("a table is missing")]
    writer.put(packet(1), 1)
    writer.put(packet(2), 2)
    with structlog.testing.capture_logs() as lines:
        async with running(writer):
            assert await writer.drain(5)
    assert writer.failed == [1]
    assert tickets(writer) == [2]
    assert [(line["log_level"], line["event"]) for line in lines] == [
        ("error", "batch_failed"),
        ("info", "publishes_back"),
    ]


async def test_cancelling_keeps_what_was_not_committed(log, make, packet):
    writer = make()
    log.gate.clear()
    writer.put(packet(1), 1)
    async with running(writer):
        await log.called.wait()
        writer.put(packet(2), 2)
    assert (writer.pending, writer.committed, writer.failed) == (2, [], [])
    log.gate.set()
    async with running(writer):
        assert await writer.drain(5)
    assert tickets(writer) == [1, 2]


@pytest.mark.req("R-111", "R-189", "R-311")
async def test_a_database_that_keeps_killing_the_connection_loses_and_doubles_nothing(store, packet, sql):
    """Two writers submit the same packets while their connections are cut again and again."""
    committed: list[tuple[int, AppendOutcome, int]] = []

    def on_commit(appended, batch, seconds):
        committed.extend(
            (ticket, place.outcome, place.sequence)
            for (_, ticket), place in zip(batch, appended.dispositions, strict=True)
        )

    writers = [
        Writer(store, on_commit, lambda ticket: pytest.fail("given up"), publish_timeout=60) for _ in "ab"
    ]
    async with running(writers[0]), running(writers[1]):
        for n in range(400):
            writers[n % 2].put(packet(n), n)
            writers[1 - n % 2].put(packet(n), n)
            if n % 40 == 0:
                await sql.execute(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                    " WHERE application_name = 'relayd writer' AND datname = current_database()"
                )
        for writer in writers:
            assert await writer.drain(30)
    assert sorted(ticket for ticket, _, _ in committed) == sorted([*range(400), *range(400)])
    places = {ticket: sequence for ticket, _, sequence in committed}
    assert all(places[ticket] == sequence for ticket, _, sequence in committed)
    entries, after = [], 0
    while page := await store.tail(after, None, 100):
        entries += page
        after = page[-1].sequence
    assert sorted(entry.sequence for entry in entries) == sorted(places.values())
    assert len(entries) == 400


class FakeKeys:
    """Knows how far identities were followed, and whose packets it would no longer admit."""

    def __init__(self):
        self.position = 7
        self.unwanted: set[str] = set()
        self.answered: list[str] = []
        self.can_follow = asyncio.Event()
        self.can_follow.set()

    def followed(self):
        return self.position

    def still_admitted(self, ticket, now):
        if ticket in self.unwanted:
            self.answered.append(ticket)
            return False
        return True

    async def follow(self, sequence):
        await self.can_follow.wait()
        self.position = sequence


@pytest.mark.req("R-074")
async def test_identities_that_moved_are_followed_before_the_same_batch_is_appended(log, make, packet):
    keys = FakeKeys()
    log.failures = [IdentitiesMoved(42)]
    writer = make(keys=keys)
    async with running(writer):
        writer.put(packet(1), "first")
        writer.put(packet(2), "second")
        assert await writer.drain(5)
    assert log.batches == [[1, 2], [1, 2]] and log.followed == 42
    assert tickets(writer) == ["first", "second"] and writer.pending_bytes == 0


@pytest.mark.req("R-074")
async def test_what_no_longer_holds_is_left_out_and_the_rest_is_stored(log, make, packet):
    keys = FakeKeys()
    log.failures = [IdentitiesMoved(42)]
    log.gate.clear()
    writer = make(keys=keys)
    async with running(writer):
        writer.put(packet(1), "first")
        writer.put(packet(2), "second")
        await log.called.wait()
        keys.unwanted = {"first"}
        log.gate.set()
        assert await writer.drain(5)
    assert log.batches == [[1, 2], [2]] and tickets(writer) == ["second"]
    assert keys.answered == ["first"] and writer.failed == [] and writer.pending_bytes == 0


async def test_a_batch_that_others_are_always_ahead_of_fails_in_time(log, make, packet):
    log.failures = [IdentitiesMoved(42)] * 10**6
    writer = make(keys=FakeKeys(), publish_timeout=0.05)
    async with running(writer):
        writer.put(packet(1), "first")
        assert await writer.drain(30)
    assert writer.failed == ["first"] and log.failures


async def test_a_feed_that_cannot_follow_fails_the_publishes_that_wait_for_it(log, make, packet):
    keys = FakeKeys()
    keys.can_follow.clear()
    log.failures = [IdentitiesMoved(42)]
    writer = make(keys=keys, publish_timeout=0.05)
    async with running(writer):
        writer.put(packet(1), "first")
        assert await writer.drain(5)
    assert writer.failed == ["first"] and tickets(writer) == []
