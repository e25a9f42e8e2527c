"""Workers of Spark collect the garbage of tasks, not what was imported, and end quietly."""

from __future__ import annotations

import gc
import socket
import sys
import time
import types
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
from pyspark import SparkContext
from strata_pipeline.log.source import RelayLog
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
        far.sendall(b"tasks")
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


def test_a_worker_ends_without_a_word_when_there_are_no_more_tasks():
    tasks: list[bytes] = []
    near, far = socket.socketpair()

    def run(task: socket.socket, authenticated: bool) -> int:
        tasks.append(task.recv(4))
        far.close()
        task.sendall(b"result")
        raise AssertionError("nobody can have received the result")

    calm = Calm(run)
    with near, far:
        far.sendall(b"task")
        assert calm(near, True) != 0, "the next task would be waited for"
        assert calm(near, True) != 0
    assert tasks == [b"task"]


def test_workers_that_spark_ends_write_nothing(spark, log_url, monkeypatch):
    context = spark.sparkContext
    java = _java(context)
    before, readers, factories = _processes(java), _readers(java), _factories(context)
    written = java.io.ByteArrayOutputStream()
    usual = java.lang.System.err
    java.lang.System.setErr(java.io.PrintStream(written, True))
    try:
        with monkeypatch.context() as patch:
            patch.setitem(context.environment, "OF_THIS_TEST", "1")  # a worker of another test lacks this
            assert spark.range(2).mapInArrow(lambda batches: batches, "id long").count() == 2
            RelayLog.register(spark)
            log = spark.read.format("relay_log").option("url", log_url).load()
            assert log.where("sequence > 5").count() == 0
    finally:
        java.lang.System.setErr(usual)
        RelayLog.register(spark)
    mine = [one for code, one in _factories(context).items() if code not in factories]
    assert len(mine) >= 3, "for tasks, for a data source, and for a plan"
    workers = _processes(java, workers=True) - before
    assert len(workers) >= len(mine)
    for factory in mine:
        getattr(factory, f"{_FACTORY}$$cleanupIdleWorkers")()  # as after a minute
    _until(lambda: not workers & _processes(java))
    for factory in mine:
        factory.stop()
    _until(lambda: _readers(java) <= readers)
    assert written.toString() == ""


_FACTORY = "org$apache$spark$api$python$PythonWorkerFactory"


def _java(context: SparkContext) -> Any:
    virtual_machine: Any = context._jvm
    return virtual_machine.java


def _factories(context: SparkContext) -> dict[int, Any]:
    """The factories that start and end workers, by hash codes of the objects."""
    java = _java(context)
    kept = java.lang.Class.forName("org.apache.spark.SparkEnv").getDeclaredField("pythonWorkers")
    kept.setAccessible(True)
    each = kept.get(context._jsc.sc().env()).valuesIterator()
    found = []
    while each.hasNext():
        found.append(each.next())
    return {java.lang.System.identityHashCode(one): one for one in found}


def _processes(java: Any, *, workers: bool = False) -> set[int]:
    """The processes that Spark has started, or only those forked by them."""
    spark = java.lang.ProcessHandle.current()
    below = spark.descendants().toArray()
    return {one.pid() for one in below if not workers or one.parent().get().pid() != spark.pid()}


def _readers(java: Any) -> set[int]:
    """The threads that pass on the output of processes."""
    threads = java.lang.Thread.getAllStackTraces().keySet().toArray()
    return {one.getId() for one in threads if one.getName().startswith("stderr reader")}


def _until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)
