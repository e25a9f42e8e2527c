"""Signature checks on threads of their own, in batches, so that the event loop never waits for one.

The check releases the interpreter lock, so two threads nearly double what one does. A batch takes
whatever has piled up, up to `BATCH`, and costs one wake-up of the loop; a single check on an idle relay
starts at once.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

__all__ = ["BATCH", "VerifyPool"]

BATCH = 64

J = TypeVar("J")


class VerifyPool(Generic[J]):
    """Runs `check(job)` on threads and gives finished batches to `on_checked(jobs, seconds)` on the loop.

    `check` must not raise. The queue is bounded by its callers: they stop reading from their peers.
    """

    def __init__(
        self,
        check: Callable[[J], None],
        on_checked: Callable[[Sequence[J], float], None],
        *,
        threads: int,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._check = check
        self._on_checked = on_checked
        self._loop = loop
        self._jobs: deque[J] = deque()
        self._ready = threading.Condition()
        self._idle = 0
        self._closed = False
        self._threads = [
            threading.Thread(target=self._work, name=f"verify-{number}", daemon=True)
            for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def put(self, job: J) -> None:
        """Queue a job; it is checked in its turn."""
        with self._ready:
            self._jobs.append(job)
            # A busy thread looks at the queue again by itself, so only an idle one needs the bell.
            if self._idle:
                self._ready.notify()

    def close(self) -> None:
        """Stop the threads after what they are doing; queued jobs are dropped."""
        with self._ready:
            self._closed = True
            self._ready.notify_all()
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        while (batch := self._take()) is not None:
            started = time.perf_counter()
            for job in batch:
                self._check(job)
            seconds = time.perf_counter() - started
            try:
                self._loop.call_soon_threadsafe(self._on_checked, batch, seconds)
            except RuntimeError:  # the loop has ended, and with it everyone who waited
                return

    def _take(self) -> list[J] | None:
        jobs = self._jobs
        with self._ready:
            while not jobs and not self._closed:
                self._idle += 1
                self._ready.wait()
                self._idle -= 1
            if self._closed:
                return None
            batch: list[J] = []
            while jobs and len(batch) < BATCH:
                batch.append(jobs.popleft())
        return batch
