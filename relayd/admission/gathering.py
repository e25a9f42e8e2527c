"""Requests that wait for one read of the database, and share it.

One read is under way at a time. Requests that arrive meanwhile gather for the next one, so that reads grow
with the load but never multiply.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Generic, Protocol, TypeVar

__all__ = ["Gathering", "WaitingJobs"]

J = TypeVar("J")


class WaitingJobs(Protocol[J]):
    """The jobs that wait for the next batch."""

    def append(self, job: J, /) -> None: ...

    def take(self) -> list[J]:
        """Remove and return the jobs of the next batch, if any. If this raises, none was removed."""

    def drain(self) -> list[J]:
        """Remove and return all jobs."""


class _All(list[J]):
    """All jobs that wait go together."""

    def drain(self) -> list[J]:
        jobs = list(self)
        self.clear()
        return jobs

    take = drain


class Gathering(Generic[J]):
    """Gives jobs to `work(jobs)` in batches, which `waiting` chooses. An error raised by `work` goes to
    `on_lost(job, error)` for each job; `on_lost` must not raise."""

    def __init__(
        self,
        name: str,
        work: Callable[[list[J]], Coroutine[object, object, None]],
        on_lost: Callable[[J, BaseException], None],
        waiting: WaitingJobs[J] | None = None,
    ) -> None:
        self._name = name
        self._work = work
        self._on_lost = on_lost
        self._waiting: WaitingJobs[J] = _All() if waiting is None else waiting
        self._task: asyncio.Task[None] | None = None

    def put(self, job: J) -> None:
        """Add a job to the next batch. If this raises, the job was not taken."""
        if self._task is None:
            self._begin([job])
        else:
            self._waiting.append(job)

    async def close(self) -> None:
        """End the work under way; waiting jobs are forgotten."""
        self._waiting.drain()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    def _begin(self, jobs: list[J]) -> None:
        self._task = asyncio.create_task(self._work(jobs), name=self._name)
        self._task.add_done_callback(functools.partial(self._ended, jobs))

    def _ended(self, jobs: list[J], task: asyncio.Task[None]) -> None:
        self._task = None
        if task.cancelled():
            return  # closed
        if (error := task.exception()) is not None:
            self._lose(jobs, error)
        taken: list[J] = []
        try:
            # What was lost just now may have begun another batch.
            taken = self._waiting.take() if self._task is None else []
            if taken:
                self._begin(taken)
        except Exception as error:
            self._lose([*taken, *self._waiting.drain()], error)

    def _lose(self, jobs: list[J], error: BaseException) -> None:
        for job in jobs:
            self._on_lost(job, error)
