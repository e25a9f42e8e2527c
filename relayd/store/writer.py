"""Group commit: one loop that takes the packets that have gathered, commits them, and answers.

While a batch is being committed the next one gathers, so batches grow with the load, and an idle relay
commits a single packet at once. A batch of large packets is short, and small packets go before large ones
(`FairQueue`): nobody waits for the bytes of one busy publisher. Only large packets are delayed on purpose,
after a commit that was full of them: while others publish small packets, those get most of the time.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Hashable, Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

from strata.protocol.keys import IDENTITY_TYPES

from relayd.faults import FaultLog
from relayd.logs import get_logger, problem_of
from relayd.store.fair_queue import FairQueue
from relayd.store.types import (
    Appended,
    IdentitiesMoved,
    NewPacket,
    PeerMark,
    StoreError,
    StoreTimeout,
    StoreUnavailable,
    TimeMoved,
)

__all__ = ["KeyWatch", "Writer"]

Ticket = TypeVar("Ticket")
_Watched = TypeVar("_Watched", contravariant=True)

_log = get_logger("relayd.store")

_BACKOFF_SECONDS = (0.05, 2.0)
_SMALL_BYTES = 4096
"""Up to this size, the cost of a commit is in the rows, and above it in the bytes."""
_LATELY = 1.0
"""Seconds after a commit of a small packet during which another one is expected."""
_LARGE_REST = 2.0
"""How long large packets rest after a commit full of them, as a multiple of the time that commit took."""
_LESS_WHILE_RESTING = 8
"""The divisor of `max_large_bytes` during the rest: packets of a few kilobytes continue."""
_LONGEST_REST = 0.02
"""The longest rest, in seconds: a database that is slow just then must not delay large packets for long."""


class _Appender(Protocol):
    async def append(
        self, batch: Sequence[NewPacket], now: int, followed: int | None, marks: Sequence[PeerMark] = ()
    ) -> Appended: ...


class KeyWatch(Protocol[_Watched]):
    """Knows under which keys packets were admitted, and how current that knowledge is (R-074)."""

    def followed(self) -> int:
        """The sequence up to which identity packets have been applied, and acts of trust counted."""

    def still_admitted(self, ticket: _Watched, now: int, /) -> bool:
        """Whether the packet would be admitted when the clock says `now`. If False, it has been answered."""

    def follow(self, sequence: int, /) -> Awaitable[None]:
        """Apply identity packets up to `sequence`."""


class _Waiting(NamedTuple, Generic[Ticket]):
    packet: NewPacket
    ticket: Ticket
    give_up_at: float
    held_bytes: int


class Writer(Generic[Ticket]):
    """Queues admitted packets and appends them in batches, those of one owner in the order they were put.

    `on_commit(appended, batch, seconds)` is called once for each committed batch, before anything else is
    committed: `batch` holds (packet, ticket) in the order of `appended.dispositions`, and `seconds` is how
    long the commit took. `on_failed(ticket)` is called for a packet that could not be stored within
    `publish_timeout` seconds; after `StoreUnavailable` it may nevertheless be stored, and publishing it again
    is safe. Each ticket goes to exactly one of the two, unless `run` is cancelled or `keys` no longer admits
    it. Neither may block or raise. A fault of ours fails the batch that met it, and the next one is tried.

    `marks(tickets)` returns how far peers will have been read once these are in; it is stored with them.

    A batch ends at the packet with which it reaches `max_batch_packets` or `max_batch_bytes`, and before the
    one with which the bytes of large packets would exceed `max_large_bytes`: every publisher in the batch, or
    with packets behind it, waits for the whole commit. After a batch with half of that, very large packets,
    and those that their owners have put behind them, stay queued for a moment while small ones are published
    (decision 122).

    The queue is bounded by `max_pending_bytes`: `put` refuses beyond it, and the publisher may try again.
    """

    def __init__(
        self,
        store: _Appender,
        on_commit: Callable[[Appended, list[tuple[NewPacket, Ticket]], float], None],
        on_failed: Callable[[Ticket], None],
        *,
        max_batch_packets: int = 512,
        max_batch_bytes: int = 512 * 2**10,
        max_large_bytes: int = 128 * 2**10,
        max_pending_bytes: int = 64 * 2**20,
        publish_timeout: float = 10.0,
        clock: Callable[[], float] = time.time,
        keys: KeyWatch[Ticket] | None = None,
        marks: Callable[[Sequence[Ticket]], Sequence[PeerMark]] = lambda tickets: (),
        faults: FaultLog | None = None,
    ) -> None:
        self._store = store
        self._marks = marks
        self._keys = keys
        self._faults = faults or FaultLog()
        self._on_commit = on_commit
        self._on_failed = on_failed
        self._max_batch_packets = max_batch_packets
        self._max_batch_bytes = max_batch_bytes
        self._max_large_bytes = max_large_bytes
        self._max_pending_bytes = max_pending_bytes
        self._publish_timeout = publish_timeout
        self._clock = clock
        self._queue: FairQueue[_Waiting[Ticket]] = FairQueue()
        self._batch: list[_Waiting[Ticket]] = []
        self._pending_bytes = 0
        self._large_from = self._small_until = float("-inf")
        self._is_failing = False
        """Whether a packet has failed since the last commit."""
        self._filled = asyncio.Event()
        self._empty = asyncio.Event()
        self._empty.set()

    @property
    def pending(self) -> int:
        """The number of packets that wait, including those being committed."""
        return len(self._queue) + len(self._batch)

    @property
    def pending_bytes(self) -> int:
        """The memory that they take."""
        return self._pending_bytes

    @property
    def is_failing(self) -> bool:
        """Whether packets could not be stored, and none has been since."""
        return self._is_failing

    def put(
        self, packet: NewPacket, ticket: Ticket, owner: Hashable = None, held_bytes: int | None = None
    ) -> None:
        """Queue a packet behind its owner's others. It takes this much memory, by default that of its body.

        Raises `StoreUnavailable` when the queue is full.
        """
        if self._pending_bytes >= self._max_pending_bytes:
            raise StoreUnavailable("too many packets wait to be stored")
        give_up_at = asyncio.get_running_loop().time() + self._publish_timeout
        held = len(packet.body) if held_bytes is None else held_bytes
        # Packets admitted under an author's keys come before a change of those keys in the log.
        self._queue.put(
            _Waiting(packet, ticket, give_up_at, held),
            len(packet.body),
            owner,
            packet.author_id,
            behind_group=packet.content_type in IDENTITY_TYPES,
        )
        self._pending_bytes += held
        self._filled.set()
        self._empty.clear()

    async def run(self) -> None:
        """Commit batches until cancelled; uncommitted packets then stay queued, their tickets unanswered."""
        while True:
            try:
                await self._filled.wait()
                self._take()
                if not self._batch:
                    self._rest()
                    continue
                await self._commit()
                self._look_for_more()
            except Exception as error:
                self._faults.caught("writer", error)
                self._fail_batch()

    async def drain(self, timeout: float) -> bool:
        """Wait until nothing is pending; False if that takes longer than `timeout` seconds."""
        try:
            async with asyncio.timeout(timeout):
                await self._empty.wait()
        except TimeoutError:
            return False
        return True

    def _look_for_more(self) -> None:
        if not self._queue:
            self._filled.clear()
            self._empty.set()

    def _rest(self) -> None:
        """Continue when large packets may be stored again, or with the next packet that is put."""
        self._filled.clear()
        if self._queue:
            asyncio.get_running_loop().call_at(self._large_from, self._filled.set)

    def _take(self) -> None:
        is_resting = asyncio.get_running_loop().time() < self._large_from
        if not is_resting:
            self._queue.look_again()
        most_large = self._max_large_bytes // (_LESS_WHILE_RESTING if is_resting else 1)
        taken_bytes = large_bytes = 0
        while len(self._batch) < self._max_batch_packets and taken_bytes < self._max_batch_bytes:
            if (waiting := self._queue.first()) is None:
                return
            size = len(waiting.packet.body)
            if size > _SMALL_BYTES:
                if large_bytes + size > most_large and is_resting:
                    self._queue.pass_over()
                    continue
                if large_bytes + size > most_large and self._batch:
                    return
                large_bytes += size
            taken_bytes += size
            self._batch.append(self._queue.take())

    async def _commit(self) -> None:
        delay = _BACKOFF_SECONDS[0]
        while self._batch:
            now = int(self._clock())
            self._recheck(now)
            if not self._batch:
                return
            started_at = time.perf_counter()
            try:
                marks = self._marks([waiting.ticket for waiting in self._batch])
                appended = await self._store.append(
                    [waiting.packet for waiting in self._batch],
                    now,
                    None if self._keys is None else self._keys.followed(),
                    *((marks,) if marks else ()),
                )
            except IdentitiesMoved as moved:
                await self._follow(moved.sequence)
            except TimeMoved:
                pass  # the packets are judged again, as of the time that the log gives
            except (StoreUnavailable, StoreTimeout) as error:
                # Append the same again: rows of the lost attempt come back as DUPLICATE, at their place.
                await asyncio.sleep(delay * random.uniform(0.5, 1.0))
                delay = min(delay * 2, _BACKOFF_SECONDS[1])
                self._give_up(problem_of(error))
            except StoreError:
                _log.exception("batch_failed")  # no row is to blame: our bug, or a damaged schema
                self._is_failing = True
                self._fail_batch()
            else:
                self._committed(appended, time.perf_counter() - started_at)

    def _committed(self, appended: Appended, seconds: float) -> None:
        done, self._batch = self._batch, []
        self._forget(done)
        if self._is_failing:
            _log.info("publishes_back")
            self._is_failing = False
        try:
            self._on_commit(appended, [(waiting.packet, waiting.ticket) for waiting in done], seconds)
            self._give_way(done, seconds)
        except Exception as error:
            self._faults.caught("writer", error)
            self._tell_failed(done)  # tickets that were answered before ignore this

    def _give_way(self, done: Sequence[_Waiting[Ticket]], seconds: float) -> None:
        """After a commit full of large packets, delay the next of them if small ones are being published."""
        now = asyncio.get_running_loop().time()
        sizes = [len(waiting.packet.body) for waiting in done]
        large_bytes = sum(size for size in sizes if size > _SMALL_BYTES)
        if min(sizes) <= _SMALL_BYTES:
            self._small_until = now + _LATELY
        if 2 * large_bytes >= self._max_large_bytes and now < self._small_until:
            self._large_from = now + min(_LARGE_REST * seconds, _LONGEST_REST)

    def _recheck(self, now: int) -> None:
        """Drop packets that are not admitted any more: keys have changed since, or time has passed."""
        if self._keys is None:
            return
        dropped = [waiting for waiting in self._batch if not self._keys.still_admitted(waiting.ticket, now)]
        if dropped:
            gone = {id(waiting) for waiting in dropped}
            self._batch = [waiting for waiting in self._batch if id(waiting) not in gone]
            self._forget(dropped)

    async def _follow(self, sequence: int) -> None:
        assert self._keys is not None
        problem = "other processes keep changing what packets are judged by"
        try:
            async with asyncio.timeout(self._publish_timeout):
                await self._keys.follow(sequence)
        except TimeoutError:
            problem = "the keys of the log were not read in time"
        self._give_up(problem)

    def _fail_batch(self) -> None:
        failed, self._batch = self._batch, []
        self._forget(failed)
        self._tell_failed(failed)

    def _give_up(self, problem: str) -> None:
        """Fail the packets that have waited too long, in the batch and behind it.

        This is logged once until there is a commit again: a database that answers, but stores nothing because
        its disk is full, shows nowhere else.
        """
        now = asyncio.get_running_loop().time()
        late = [waiting for waiting in self._batch if waiting.give_up_at <= now]
        late += self._queue.drop(lambda waiting: waiting.give_up_at <= now)
        if late:
            if not self._is_failing:
                _log.error("publishes_fail", problem=problem)
                self._is_failing = True
            self._batch = [waiting for waiting in self._batch if waiting.give_up_at > now]
            self._forget(late)
            self._tell_failed(late)

    def _tell_failed(self, failed: list[_Waiting[Ticket]]) -> None:
        for waiting in failed:
            try:
                self._on_failed(waiting.ticket)
            except Exception as error:
                self._faults.caught("writer", error)

    def _forget(self, done: list[_Waiting[Ticket]]) -> None:
        self._pending_bytes -= sum(waiting.held_bytes for waiting in done)
