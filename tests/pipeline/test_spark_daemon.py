"""Workers of Spark look for garbage among what a task made, and not among what was imported."""

from __future__ import annotations

import gc
import socket
import sys
import types
from collections.abc import Iterator

import pyarrow as pa
from strata_pipeline.spark_daemon import Calm


def test_what_a_task_imports_is_left_out_once_and_its_result_is_told(monkeypatch):
    calls = []

    def run(task: socket.socket, authenticated: bool) -> int:
        calls.append(authenticated)
        if len(calls) == 3:
            monkeypatch.setitem(sys.modules, "imported_by_the_third_task", types.ModuleType("third"))
        return len(calls)

    calm = Calm(run)
    near, far = socket.socketpair()
    with near, far:
        assert calm(near, False) == 1
        first = gc.get_freeze_count()
        kept: list[list[int]] = [[] for _ in range(1000)]
        assert calm(near, True) == 2
        assert 0 < gc.get_freeze_count() <= first
        assert calm(near, True) == 3
        assert gc.get_freeze_count() >= first + len(kept) // 2
    assert calls == [False, True, True]


def test_workers_on_this_machine_are_calm(spark):
    def frozen(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for _ in batches:
            yield pa.RecordBatch.from_pydict({"frozen": [gc.get_freeze_count()]})

    def most() -> int:
        rows = spark.range(2, numPartitions=2).mapInArrow(frozen, "frozen long").collect()
        return max(int(row.frozen) for row in rows)

    most()  # by now some worker has had a task
    assert most() > 10_000
