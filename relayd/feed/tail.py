"""Keeps the live feed in step with the log: own batches as they commit, others' through the doorbell.

The feed passes through the log strictly in sequence. A batch of this process goes straight in if it follows
the feed's position without a gap (`Appended.previous` says so). Otherwise another process has committed in
between, and everything from the position on is read from the log. Either way, an entry at or below the
position is skipped, so an entry goes through once, whichever path brings it first.

Entries go through in pieces, in each turn of the loop as many as take a few milliseconds: a batch may be
wanted by thousands of filters, or hold keys that cost signature checks.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from relayd import failpoints
from relayd.faults import FaultLog
from relayd.feed.fanout import Fanout
from relayd.logs import get_logger, problem_of
from relayd.pauses import Pauses
from relayd.slices import SLICE_SECONDS
from relayd.store.types import LogEntry, StoreError

__all__ = ["LogReader", "Tail"]

_log = get_logger("relayd.feed")

_TAIL_ROWS = 500
_FEWEST_ROWS: Final = 16
_RETRY_SECONDS = (0.05, 2.0)
_MOST_COMING_BYTES: Final = 8 * 2**20
"""If more bytes wait for their turn, the next batch is read from the log when the feed comes to it: commits
may be faster than thousands of subscribers can be served, and the store is the buffer."""
_FIRST_PIECE: Final = 32
_LONGEST_PIECE: Final = 512
"""The entries that go through between two looks at the clock: at first, and at most."""


class LogReader(Protocol):
    """The part of the store that this module needs."""

    async def head(self) -> int: ...

    async def tail(self, after: int, up_to: int | None, limit: int) -> list[LogEntry]: ...


class Tail:
    """Drives a `Fanout` along the log.

    `on_entries(entries)` gets the log's next entries as they are forwarded, each once and in sequence.
    `on_dispatch(delivered)` is called after each piece, for writing. An entry that is expensive for the
    takers of `on_entries`, as `is_dear` says, ends its piece.
    """

    def __init__(
        self,
        fanout: Fanout,
        store: LogReader,
        *,
        clock: Callable[[], int],
        on_dispatch: Callable[[int], None],
        on_entries: Callable[[Sequence[LogEntry]], None] = lambda entries: None,
        is_dear: Callable[[LogEntry], bool] = lambda entry: False,
        faults: FaultLog | None = None,
    ) -> None:
        self._fanout = fanout
        self._store = store
        self._clock = clock
        self._on_dispatch = on_dispatch
        self._on_entries = on_entries
        self._is_dear = is_dear
        self._coming: deque[LogEntry] = deque()
        """The entries that follow the feed's position in the log without a gap, and wait for their turn."""
        self._coming_bytes = 0
        self._readings = 0
        """How often `read_again` was called."""
        self._rows = _TAIL_ROWS
        """The most rows of a read: few after one in vain, or one erasure after another would end them all."""
        self._faults = faults or FaultLog()
        self._piece_length = _FIRST_PIECE
        self._target = fanout.position
        self._behind_since: float | None = None
        self._behind = self._target
        """The end of the log that the feed was behind at that time."""
        self._wake = asyncio.Event()
        self._waiters: list[tuple[int, asyncio.Future[None]]] = []

    def committed(self, previous: int, entries: Sequence[LogEntry]) -> None:
        """Take a batch of this process, right after its commit."""
        if not entries:
            return
        # A batch that the store had to split may have another process's packets in the middle.
        in_one_piece = entries[-1].sequence - entries[0].sequence == len(entries) - 1
        if previous == self._end and in_one_piece and self._coming_bytes <= _MOST_COMING_BYTES:
            self._take(entries)
        else:
            self.ring(entries[-1].sequence)

    @property
    def _end(self) -> int:
        """The sequence up to which the log is at hand."""
        return self._coming[-1].sequence if self._coming else self._fanout.position

    def _take(self, entries: Sequence[LogEntry]) -> None:
        """Pass these entries on, in their turn; entries for which this turn has no time are left to `run`."""
        is_idle = not self._coming
        self._target = max(self._target, entries[-1].sequence)
        self._look_behind()
        self._coming.extend(entries)
        self._coming_bytes += sum(len(entry.packet.body) for entry in entries)
        if is_idle:
            try:
                self._go_on()
            finally:
                if self._fanout.position < self._target:
                    self._wake.set()

    def _go_on(self) -> None:
        began = time.monotonic()
        until = began + SLICE_SECONDS
        while self._coming:
            try:
                piece = self._piece()
                self._dispatch(piece)
            except Exception:
                self._drop_coming()  # they are read again from the log
                raise
            now = time.monotonic()
            # The cost of an entry depends on how many filters may want it, which is not known beforehand.
            if now - began > SLICE_SECONDS:
                self._piece_length = max(1, int(len(piece) * SLICE_SECONDS / (now - began)))
            elif self._piece_length < _LONGEST_PIECE:
                self._piece_length *= 2
            began = now
            if now >= until:
                return

    def _piece(self) -> list[LogEntry]:
        piece: list[LogEntry] = []
        while self._coming and len(piece) < self._piece_length:
            piece.append(self._coming.popleft())
            self._coming_bytes -= len(piece[-1].packet.body)
            if self._is_dear(piece[-1]):
                break
        return piece

    def _drop_coming(self) -> None:
        self._coming.clear()
        self._coming_bytes = 0

    def ring(self, sequence: int) -> None:
        """The log reaches up to `sequence` (the doorbell): read what is missing."""
        if sequence > self._target:
            self._target = sequence
            self._look_behind()
        if self._target > self._fanout.position:
            self._wake.set()

    def read_again(self) -> None:
        """Drop entries that wait for their turn, and any that are being read: they may have been erased. They
        come again from the log."""
        self._drop_coming()
        self._readings += 1
        if self._target > self._fanout.position:
            self._wake.set()

    async def reach(self, sequence: int) -> None:
        """Wait until the feed has passed `sequence`. Cancelling it forgets the wait."""
        if self._fanout.position >= sequence:
            return
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append((sequence, waiter))
        self.ring(sequence)
        await waiter

    async def run(self) -> None:
        """Read what other processes commit, until cancelled; outlasts any loss of the database."""
        pauses = Pauses(*_RETRY_SECONDS)
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._fanout.position < self._target:
                try:
                    if self._coming:
                        self._go_on()
                        await asyncio.sleep(0)
                    else:
                        await self._read()
                except StoreError as error:
                    _log.debug("tail_read_failed", error=problem_of(error), retry_in=pauses.next)
                except Exception as error:
                    self._faults.caught("feed", error)
                else:
                    pauses.reset()
                    continue
                await pauses.wait()

    async def _read(self) -> None:
        if failpoints.ARMED:
            await failpoints.reached("feed.tail.read")
        target = self._target  # a sequence rung during the read may be in the log by now, but was not found
        reading = self._readings
        entries = await self._store.tail(self._fanout.position, None, self._rows)
        if reading != self._readings:
            self._rows = max(_FEWEST_ROWS, self._rows // 8)
            return
        self._rows = min(_TAIL_ROWS, self._rows * 2)
        # Commits of this process may have moved the feed during the read.
        end = self._end
        fresh = [entry for entry in entries if entry.sequence > end]
        if fresh:
            self._take(fresh)
        elif not entries and not self._coming:
            await self._pass_over(target)

    async def _pass_over(self, target: int) -> None:
        """The doorbell rang for a sequence that the log does not hold. Retention may have removed the row;
        or the server that rang is gone with it, and its successor gives the number out once more."""
        # Before the rows: if these are another server's, it is found to lack this head.
        head = await self._store.head()
        if self._coming or await self._store.tail(self._fanout.position, None, 1):
            return
        self._skip_to(min(target, head))
        if head < target == self._target:
            self._target = max(head, self._fanout.position)
            self._release(target)

    def _dispatch(self, entries: Sequence[LogEntry]) -> None:
        delivered, before = 0, self._fanout.position
        try:
            if failpoints.ARMED:
                failpoints.hit("feed.dispatch")
            delivered = self._fanout.dispatch(entries, self._clock())
        except Exception as error:
            if self._fanout.position == before:
                raise  # nothing was delivered: the entries come again
            self._faults.caught("feed", error)
        # After the position has moved, because a caller notified here may append behind these entries at
        # once. These entries do not come again, so a fault in one of the three calls must not keep them from
        # the others.
        try:
            self._on_entries(entries)
        except Exception as error:
            self._faults.caught("feed", error)
        self._release()
        self._on_dispatch(delivered)

    def _skip_to(self, sequence: int) -> None:
        self._fanout.skip_to(sequence)
        self._release()

    def lag(self, now: float) -> float:
        """How long the log has held something that subscribers have not been handed, in seconds."""
        return 0.0 if self._behind_since is None else max(0.0, now - self._behind_since)

    def _look_behind(self) -> None:
        position = self._fanout.position
        if position >= self._target:
            self._behind_since = None
        elif self._behind_since is None or position >= self._behind:
            self._behind_since, self._behind = time.monotonic(), self._target

    def _release(self, lacking: int = 0) -> None:
        """Release those that wait for a sequence passed, or for one up to `lacking`, which will not come."""
        self._look_behind()
        position = max(self._fanout.position, lacking)
        if not self._waiters:
            return
        waiting = self._waiters
        self._waiters = [(sequence, waiter) for sequence, waiter in waiting if sequence > position]
        for sequence, waiter in waiting:
            if sequence <= position and not waiter.done():
                waiter.set_result(None)
