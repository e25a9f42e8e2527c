"""A worker process, as the parent sees it."""

from __future__ import annotations

import multiprocessing
import signal
import time

from relayd.process.workers import _Worker


async def test_a_worker_that_does_not_end_is_killed():
    worker = object.__new__(_Worker)
    process = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(600,))
    process.start()
    worker._process = process
    await worker.ended(patience=0.1)
    assert worker.exit_code == -signal.SIGKILL


async def test_a_worker_that_ends_by_itself_is_not():
    worker = object.__new__(_Worker)
    process = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(0,))
    process.start()
    worker._process = process
    await worker.ended(patience=60.0)
    assert worker.exit_code == 0
