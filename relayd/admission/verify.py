"""Signature checks on separate threads, in batches, so that the event loop never waits for one.

A check releases the interpreter lock, so two threads do nearly twice as much as one. Jobs gather during a
step of the loop, and at its end are shared out among the threads. A thread takes the jobs that have
gathered, up to `BATCH`, and wakes the loop once for all of them.

A job is either quick, or expensive: a packet that takes milliseconds to parse. Expensive jobs have a
separate queue, ordered so that senders who have had little come first, and the queue never takes precedence
over quick jobs. If there is more than one thread, one of them runs no expensive jobs. So a sender of
expensive packets delays nobody else.

A few quick jobs are done on the loop: all of them if no other is being checked, and otherwise those whose
senders have had little. Waking a thread and being woken by it takes longer than the checks, all the more if
the thread is in the middle of a batch, and asks a busy loop for the interpreter lock after each check.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

__all__ = ["BATCH", "VerifyPool"]

BATCH = 64
_FEW = 4
"""This many quick checks take less of the loop than waking threads and giving them the interpreter."""
_SOON_SECONDS = 0.02
"""A sender whose place is this near has had little: one request alone is owed for some milliseconds."""
_DEAR_SECONDS = 0.001
"""Processor time, in seconds: ten times that of an ordinary packet."""

J = TypeVar("J")


class _Checked(NamedTuple, Generic[J]):
    """A batch that a thread has finished."""

    passed: list[J]
    failed: list[tuple[J, BaseException]]
    dear: list[tuple[J, float]]
    """The expensive jobs, with the processor time of each, in seconds."""
    seconds: float


class VerifyPool(Generic[J]):
    """Runs `check(job)` on threads and gives finished batches to `on_checked(jobs, seconds)` on the loop.

    A check returns the processor time that it used outside its thread, in seconds. A job whose check raises
    goes to `on_failed(job, error)` on the loop instead. `is_quick` says which jobs are quick, and
    `place(job)` when the job's sender owes nothing, by `time.monotonic`: the lowest is first. `on_dear(job,
    seconds)` is called for each job that took much processor time. The queues are bounded by the callers,
    who stop reading from their peers.
    """

    def __init__(
        self,
        check: Callable[[J], float],
        on_checked: Callable[[Sequence[J], float], None],
        on_failed: Callable[[J, BaseException], None],
        *,
        threads: int,
        loop: asyncio.AbstractEventLoop,
        is_quick: Callable[[J], bool] = lambda job: True,
        place: Callable[[J], float] = lambda job: math.inf,
        on_dear: Callable[[J, float], None] = lambda job, seconds: None,
    ) -> None:
        self._is_quick = is_quick
        self._place = place
        self._on_dear = on_dear
        self._quick_under_way = self._dear_under_way = 0
        self._check = check
        self._on_checked = on_checked
        self._on_failed = on_failed
        self._loop = loop
        self._gathered: list[J] = []
        self._dear: list[tuple[float, int, J]] = []  # waiting jobs: place, number, job
        self._numbers = itertools.count()
        self._dear_at_once = max(1, threads - 1)
        # Work for the threads: a batch, or one expensive job and True; an empty batch tells a thread to end.
        self._batches: queue.SimpleQueue[tuple[list[J], bool]] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._work, name=f"verify-{number}", daemon=True)
            for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def put(self, job: J) -> None:
        """Queue a job; called on the loop."""
        if not self._gathered:
            self._loop.call_soon(self._hand_over)
        self._gathered.append(job)

    def _hand_over(self) -> None:
        """Give the jobs gathered in this step of the loop to the threads."""
        jobs, self._gathered = self._gathered, []
        try:
            self._share_out(jobs)
        except Exception as error:
            self._tell(_Checked([], [(job, error) for job in jobs], [], 0.0))

    def _share_out(self, jobs: list[J]) -> None:
        quick = []
        for job in jobs:
            if self._is_quick(job):
                quick.append(job)
            else:
                heapq.heappush(self._dear, (self._place(job), next(self._numbers), job))
        self._begin_dear()
        if 0 < len(quick) <= _FEW and not self._quick_under_way:
            self._tell(self._checked(quick))
            return
        placed = sorted((self._place(job), number, job) for number, job in enumerate(quick))
        soon = time.monotonic() + _SOON_SECONDS
        first = [job for place, _, job in placed[:_FEW] if place <= soon]
        quick = [job for _, _, job in placed[len(first) :]]
        self._quick_under_way += len(quick)
        share = min(BATCH, -(-len(quick) // len(self._threads)))
        for start in range(0, len(quick), share or 1):
            self._batches.put((quick[start : start + share], False))
        if first:
            self._tell(self._checked(first))

    def _begin_dear(self) -> None:
        while self._dear and self._dear_under_way < self._dear_at_once:
            self._dear_under_way += 1
            self._batches.put(([heapq.heappop(self._dear)[2]], True))

    def _checked(self, jobs: Sequence[J]) -> _Checked[J]:
        """Check these jobs. Never raises."""
        worked, begun = time.thread_time(), [time.perf_counter()]
        passed: list[J] = []
        failed: list[tuple[J, BaseException]] = []
        elsewhere: list[float] = []
        for job in jobs:
            besides = 0.0
            try:
                besides = self._check(job)
                passed.append(job)
            except BaseException as error:  # the thread has other jobs to do
                failed.append((job, error))
            elsewhere.append(besides)
            begun.append(time.perf_counter())
        seconds = begun[-1] - begun[0]
        # A thread also waits for the interpreter, which costs nobody: each job gets its part of the work.
        part = (time.thread_time() - worked) / seconds if seconds else 0.0
        taken = [(job, part * (begun[n + 1] - begun[n]) + elsewhere[n]) for n, job in enumerate(jobs)]
        return _Checked(passed, failed, [each for each in taken if each[1] > _DEAR_SECONDS], seconds)

    def _returned(self, checked: _Checked[J], is_dear: bool) -> None:
        if is_dear:
            self._dear_under_way -= 1
            self._begin_dear()
        else:
            self._quick_under_way -= len(checked.passed) + len(checked.failed)
        self._tell(checked)

    def _tell(self, checked: _Checked[J]) -> None:
        passed, failed, dear, seconds = checked
        for job, worked in dear:
            self._on_dear(job, worked)
        dear.clear()
        for job, error in failed:
            self._on_failed(job, error)
        failed.clear()  # errors hold their frames, and those hold this list
        try:
            self._on_checked(passed, seconds)
        except Exception as error:
            for job in passed:
                self._on_failed(job, error)

    def close(self) -> None:
        """Stop the threads after their current work; queued jobs are dropped."""
        self._dear.clear()
        while not self._batches.empty():
            try:
                self._batches.get_nowait()
            except queue.Empty:
                break
        for _ in self._threads:
            self._batches.put(([], False))
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        while self._work_once():
            pass  # nothing of a batch is kept while the thread waits for the next

    def _work_once(self) -> bool:
        batch, is_dear = self._take()
        if batch:
            try:
                self._loop.call_soon_threadsafe(self._returned, self._checked(batch), is_dear)
            except RuntimeError:  # the loop has ended, and with it all waiting callers
                return False
        return bool(batch)

    def _take(self) -> tuple[list[J], bool]:
        """Wait for work, and take other quick jobs along."""
        batch, is_dear = self._batches.get()
        while batch and not is_dear and len(batch) < BATCH:
            try:
                more = self._batches.get_nowait()
            except queue.Empty:
                break
            if more[1] or not more[0] or len(batch) + len(more[0]) > BATCH:
                self._batches.put(more)  # for the next look
                break
            batch += more[0]
        return batch, is_dear
