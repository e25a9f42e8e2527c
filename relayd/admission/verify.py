"""Signature checks on threads of their own, in batches, so that the event loop never waits for one.

The check releases the interpreter lock, so two threads nearly double what one does. Jobs gather during a step
of the loop and are handed over at its end, shared out among the threads; a thread takes the jobs that have
gathered, up to `BATCH`, and wakes the loop once for all of them.

A lone job while nothing else is being checked is done on the loop: waking a thread and being woken by it
takes longer than the check, and nobody waits.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

__all__ = ["BATCH", "VerifyPool"]

BATCH = 64
_DEAR_SECONDS = 0.001
"""Of the processor: ten times what an ordinary packet takes."""

J = TypeVar("J")


class _Checked(NamedTuple, Generic[J]):
    """A batch that a thread is through with."""

    passed: list[J]
    failed: list[tuple[J, BaseException]]
    dear: list[tuple[J, float]]
    """What each took of the processor that took much, in seconds."""
    seconds: float


class VerifyPool(Generic[J]):
    """Runs `check(job)` on threads and gives finished batches to `on_checked(jobs, seconds)` on the loop.

    A job whose check raises goes to `on_failed(job, error)` on the loop instead. `is_quick` tells a job that
    the loop may do itself when it is the only one. `on_dear(job, seconds)` hears of each that took much of
    the processor. The queue is bounded by its callers: they stop reading from their peers.
    """

    def __init__(
        self,
        check: Callable[[J], None],
        on_checked: Callable[[Sequence[J], float], None],
        on_failed: Callable[[J, BaseException], None],
        *,
        threads: int,
        loop: asyncio.AbstractEventLoop,
        is_quick: Callable[[J], bool] = lambda job: False,
        on_dear: Callable[[J, float], None] = lambda job, seconds: None,
    ) -> None:
        self._is_quick = is_quick
        self._on_dear = on_dear
        self._under_way = 0
        self._check = check
        self._on_checked = on_checked
        self._on_failed = on_failed
        self._loop = loop
        self._gathered: list[J] = []
        # Batches for the threads; an empty one tells a thread to end.
        self._batches: queue.SimpleQueue[list[J]] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._work, name=f"verify-{number}", daemon=True)
            for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def put(self, job: J) -> None:
        """Queue a job; call it on the loop."""
        if not self._gathered:
            self._loop.call_soon(self._hand_over)
        self._gathered.append(job)

    def _hand_over(self) -> None:
        """Give what this step of the loop has gathered to the threads."""
        jobs, self._gathered = self._gathered, []
        try:
            self._share_out(jobs)
        except Exception as error:
            self._tell(_Checked([], [(job, error) for job in jobs], [], 0.0))

    def _share_out(self, jobs: list[J]) -> None:
        if len(jobs) == 1 and not self._under_way and self._is_quick(jobs[0]):
            self._tell(self._checked(jobs))
            return
        self._under_way += len(jobs)
        share = min(BATCH, -(-len(jobs) // len(self._threads)))
        for start in range(0, len(jobs), share):
            self._batches.put(jobs[start : start + share])

    def _checked(self, jobs: Sequence[J]) -> _Checked[J]:
        """Check these jobs. Never raises."""
        worked, begun = time.thread_time(), [time.perf_counter()]
        passed: list[J] = []
        failed: list[tuple[J, BaseException]] = []
        for job in jobs:
            try:
                self._check(job)
                passed.append(job)
            except BaseException as error:  # the thread has other jobs to do
                failed.append((job, error))
            begun.append(time.perf_counter())
        seconds = begun[-1] - begun[0]
        # A thread also waits for the interpreter, and that costs nobody: each job has its part of its work.
        part = (time.thread_time() - worked) / seconds if seconds else 0.0
        taken = [(job, part * (begun[n + 1] - begun[n])) for n, job in enumerate(jobs)]
        return _Checked(passed, failed, [each for each in taken if each[1] > _DEAR_SECONDS], seconds)

    def _returned(self, checked: _Checked[J]) -> None:
        self._under_way -= len(checked.passed) + len(checked.failed)
        self._tell(checked)

    def _tell(self, checked: _Checked[J]) -> None:
        passed, failed, dear, seconds = checked
        for job, worked in dear:
            self._on_dear(job, worked)
        dear.clear()
        for job, error in failed:
            self._on_failed(job, error)
        failed.clear()  # errors hold their frames, and those this list
        try:
            self._on_checked(passed, seconds)
        except Exception as error:
            for job in passed:
                self._on_failed(job, error)

    def close(self) -> None:
        """Stop the threads after what they are doing; queued jobs are dropped."""
        while not self._batches.empty():
            try:
                self._batches.get_nowait()
            except queue.Empty:
                break
        for _ in self._threads:
            self._batches.put([])
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        while self._work_once():
            pass  # nothing of a batch is kept while the thread waits for the next

    def _work_once(self) -> bool:
        batch = self._take()
        if batch:
            try:
                self._loop.call_soon_threadsafe(self._returned, self._checked(batch))
            except RuntimeError:  # the loop has ended, and with it everyone who waited
                return False
        return bool(batch)

    def _take(self) -> list[J]:
        batch = self._batches.get()
        while batch and len(batch) < BATCH:
            try:
                more = self._batches.get_nowait()
            except queue.Empty:
                break
            if not more:
                self._batches.put(more)  # the end is for the next look
                break
            batch += more
        return batch
