"""Writes changes to a store: in order, in batches, and again after a failure (C-255, C-256).

The engine changes its memory first and passes the changes to this module. They are kept until the store has
confirmed them, and applied again if it fails. Because changes are idempotent, a batch that took effect before
its failure was reported does no harm. The engine's memory is right whatever the disk does; anything that must
not happen before a change is durable waits on `written`.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass

from strata.channels.awaiting import answer_of
from strata.channels.persistence.interface import (
    Change,
    ParticipantKey,
    Persistence,
    PersistenceClosed,
    PersistenceError,
    check_changes,
)

__all__ = ["ChangeWriter", "Steps", "WriterHealth", "last_words"]

_log = logging.getLogger(__name__)

_MAX_BATCH = 1024
_MAX_UNSTORED = 20_000
"""The most unconfirmed changes of a store that keeps up; with more it is far behind."""
_MAX_TICKETS = 1_024
_NEVER = 2**63
_MAX_DOUBLINGS = 32
"""A store may fail for days, and the number of failures, as an exponent, soon exceeds what a float holds."""


_closing: dict[tuple[int, ParticipantKey], asyncio.Task[None]] = {}
"""The tasks of closed writers that still write, by the store's `id()`: the task keeps the store alive."""


async def last_words(persistence: Persistence, participant: ParticipantKey) -> None:
    """Wait until a writer of this participant that was closed on this event loop has finished writing.

    A cancelled `close` leaves its task writing. Loading or purging before it ends would act on older state.
    """
    task = _closing.get((id(persistence), participant))
    if task is not None and task.get_loop() is asyncio.get_running_loop():
        await asyncio.wait([task])


@dataclass(frozen=True, slots=True)
class WriterHealth:
    """The health of a writer."""

    pending: int
    """The number of changes that the store has not confirmed."""
    failures: int
    """The number of failed attempts since the last success; 0 means healthy."""
    error: PersistenceError | None
    """The error of the last attempt; None means healthy."""


class ChangeWriter:
    """Writes the changes of one participant, as its only writer.

    `submit` never waits; it refuses changes in excess of `max_pending`, so that a store that fails for hours
    does not fill the memory. Use as an asynchronous context manager, or call `close`.
    """

    def __init__(
        self,
        persistence: Persistence,
        participant: ParticipantKey,
        *,
        max_pending: int = 100_000,
        retry_interval: float = 0.5,
        retry_interval_max: float = 30.0,
        on_health: Callable[[WriterHealth], None] | None = None,
        on_written: Callable[[], None] | None = None,
        on_fault: Callable[[Exception], None] | None = None,
        sleep: Callable[[float], Coroutine[None, None, object]] = asyncio.sleep,
    ) -> None:
        """`retry_interval` (seconds) is the wait after a first failure; it doubles up to the maximum.

        `on_health` is called on each failure and on recovery, `on_written` whenever `confirmed` rises; they
        must not raise. `on_fault` is called if this object itself fails, or one of these callbacks; nothing
        more is written then. `sleep` is for simulators.
        """
        self._persistence = persistence
        self._participant = participant
        self._max_pending = max_pending
        self._interval = retry_interval
        self._interval_max = retry_interval_max
        self._on_health = on_health
        self._on_written = on_written
        self._on_fault = on_fault
        self._sleep = sleep
        self._pending: deque[Sequence[Change]] = deque()
        self._pending_changes = 0
        self._confirmed = 0  # counts submissions, as does the number beside each waiter
        self._waiters: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._failures = 0
        self._error: PersistenceError | None = None
        self._task: asyncio.Task[None] | None = None
        self._pause: asyncio.Task[object] | None = None
        self._closed = False

    async def __aenter__(self) -> ChangeWriter:
        return self

    async def __aexit__(self, *_exception: object) -> None:
        await self.close()

    @property
    def health(self) -> WriterHealth:
        """The current health of the writer."""
        return WriterHealth(self._pending_changes, self._failures, self._error)

    @property
    def pending(self) -> int:
        """The number of changes that the store has not confirmed."""
        return self._pending_changes

    @property
    def has_failed(self) -> bool:
        """Whether the store failed permanently, so that nothing more will be written."""
        return self._error is not None and not self._error.retry

    @property
    def submitted(self) -> int:
        """The number of the last submission."""
        return self._confirmed + len(self._pending)

    @property
    def confirmed(self) -> int:
        """The number of durable submissions; `submit` numbers them from 1."""
        return self._confirmed

    def submit(self, changes: Sequence[Change]) -> int:
        """Accept changes, to be applied after all earlier ones and never split. Needs a running event loop.

        Returns the number of this submission; without changes, that of the previous one.

        Raises `PersistenceError` if too many changes wait already or the store failed permanently, and
        `ValueError` for a change that no store can hold. In these cases no change is accepted.
        """
        if self._closed:
            raise PersistenceClosed("the writer is closed")
        if self._error is not None and not self._error.retry:
            raise self._error
        if not changes:
            return self.submitted
        if self._pending_changes + len(changes) > self._max_pending:
            raise PersistenceError(f"{self._pending_changes} changes wait for the store already")
        check_changes(changes)
        self._pending.append(tuple(changes))
        self._pending_changes += len(changes)
        if self._task is None:
            self._begin()
        return self.submitted

    def _begin(self) -> None:
        name = f"strata-writer {self._participant.channel_id}"
        self._task = asyncio.create_task(self._write(), name=name)
        self._task.add_done_callback(self._ended)

    async def written(self) -> None:
        """Wait until everything submitted so far is durable, however long the store fails.

        Raises `PersistenceError` if the store failed permanently or the writer was closed before. Cancelling
        stops the wait but not the writing.
        """
        if not self._pending:
            return
        if self._task is None:
            raise self._error or PersistenceClosed("the writer is closed")
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append((self.submitted, waiter))
        await waiter

    async def close(self) -> None:
        """Write the waiting changes, with one last attempt if the store is failing, and accept no more.

        Raises the `PersistenceError` of that attempt; its changes were not written. Cancelling leaves the
        last attempt running: see `last_words`.
        """
        self._closed = True
        if self._pause is not None:
            self._pause.cancel()
        if self._pending and self._task is None and not self.has_failed:
            self._begin()  # the task was cancelled, for example by a program that cancels all its tasks
        if (task := self._task) is not None:
            key = id(self._persistence), self._participant
            _closing[key] = task
            task.add_done_callback(lambda ended: _closing.pop(key) if _closing.get(key) is ended else None)
            await asyncio.shield(task)
        if self._pending and self._error is not None:
            raise self._error

    async def _write(self) -> None:
        try:
            while self._pending:
                batch = self._next_batch()
                try:
                    changes = [change for submitted in batch for change in submitted]
                    await answer_of(self._persistence.apply, self._participant, changes)
                except Exception as error:
                    if not await self._again(error):
                        return
                else:
                    self._settle(len(batch))
        except Exception as error:
            _log.exception("%s: the writer failed", self._participant.channel_id)
            self._error = PersistenceClosed(f"the writer failed: {error!r}")
            if self._on_fault is not None:
                self._on_fault(error)
        finally:
            self._ended(self._task)

    def _ended(self, task: asyncio.Task[None] | None) -> None:
        """The task has ended, or was cancelled before its first step and ran no `finally`."""
        if task is self._task:
            self._task = None
            self.release(self._error or PersistenceClosed("the writer was stopped"))

    def _next_batch(self) -> list[Sequence[Change]]:
        batch: list[Sequence[Change]] = []
        size = 0
        for changes in self._pending:
            if batch and size + len(changes) > _MAX_BATCH:
                break
            batch.append(changes)
            size += len(changes)
        return batch

    def _settle(self, submissions: int) -> None:
        for _ in range(submissions):
            self._pending_changes -= len(self._pending.popleft())
        self._confirmed += submissions
        while self._waiters and self._waiters[0][0] <= self._confirmed:
            _, waiter = self._waiters.popleft()
            if not waiter.done():  # its task may have been cancelled
                waiter.set_result(None)
        if self._on_written is not None:
            self._on_written()
        if self._failures:
            _log.warning("%s: the store works again", self._participant.channel_id)
            self._failures, self._error = 0, None
            self._report()

    async def _again(self, error: Exception) -> bool:
        """Note a failure and wait for the next attempt; False if there should be none."""
        if not isinstance(error, PersistenceError):  # from another author's backend
            error = PersistenceError(f"the store failed: {error!r}")
        wait = min(self._interval * 2 ** min(self._failures, _MAX_DOUBLINGS), self._interval_max)
        self._failures += 1
        self._error = error
        _log.error("%s: state could not be written: %s", self._participant.channel_id, error)
        self._report()
        if not error.retry or self._closed:
            return False
        self._pause = asyncio.ensure_future(self._sleep(wait))
        await asyncio.wait([self._pause])  # `close` cancels the pause, not this task
        self._pause = None
        return True

    def release(self, error: Exception) -> None:
        """Make all calls of `written` raise this error. Waiting changes are still written."""
        while self._waiters:
            _, waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_exception(error)

    def _report(self) -> None:
        if self._on_health is not None:
            self._on_health(self.health)


class Steps:
    """The steps of an engine on their way to its store, and the messages that each step has made.

    Nothing that a step has made may go out before the step is durable. A step that the writer does not accept
    waits for the next one.
    """

    def __init__(self, writer: ChangeWriter) -> None:
        self._writer = writer
        self._changes: list[Change] = []
        self._made: list[str] = []
        """The names of messages made by steps whose changes the writer has not accepted."""
        self._tickets: dict[str, int] = {}
        """For each message made: the submission that must be durable before it goes out."""

    def store(self, changes: Sequence[Change], made: Sequence[str]) -> int:
        """Store a step and any waiting earlier steps. Returns the number of the submission to wait for.

        Raises as `ChangeWriter.submit` does; then the step waits too.
        """
        self._changes += changes
        self._made += made
        if not self._changes:
            return self._writer.submitted
        self._tickets |= dict.fromkeys(self._made, _NEVER)
        ticket = self._writer.submit(self._changes)
        self._tickets |= dict.fromkeys(self._made, ticket)
        self._changes, self._made = [], []
        return ticket

    def is_stored(self, name: str) -> bool:
        """Whether the step that made this message is durable."""
        return self._tickets.get(name, 0) <= self._writer.confirmed

    def forget(self, name: str) -> None:
        """This message has gone out, or never will."""
        self._tickets.pop(name, None)

    def written(self) -> None:
        """The store has confirmed more."""
        if len(self._tickets) > _MAX_TICKETS:
            confirmed = self._writer.confirmed
            self._tickets = {name: at for name, at in self._tickets.items() if at > confirmed}

    @property
    def is_behind(self) -> bool:
        """Whether the store has too much to write, or nothing can be written any more."""
        return bool(self._changes) or self._writer.pending > _MAX_UNSTORED or self._writer.has_failed

    def check(self) -> None:
        """Raise the `PersistenceError` of a store that fails or is far behind."""
        if (error := self._writer.health.error) is not None:
            raise error
        if self.is_behind:
            raise PersistenceError("the store is far behind")
