"""What every test shares: bytecode, the order of the run, a Spark session, the mark `unit`, the list of
requirement rows."""

from __future__ import annotations

import asyncio
import functools
import gc
import inspect
import json
import os
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import typer.main
import typer.testing
from hypothesis import HealthCheck, given, settings
from hypothesis.strategies import integers

from tests.support.quick_spark import QUICK_SPARK
from tests.support.run_folder import make_run_folder, turn
from tests.support.scratch import keep_files_in_memory

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# The run starts hundreds of Python processes, and each worker rewrites the assertions of every test file:
# bytecode is kept even where the environment asks not to.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
keep_files_in_memory()

# Typer makes a program's commands from their signatures each time that a test runs one: a tenth of a second.
typer.testing._get_command = functools.cache(typer.main.get_command)  # type: ignore[attr-defined]

# How fast the machine makes examples is nothing a test of ours claims. A run takes the same examples each
# time, so that what fails was broken by the change under test and fails again; `--hypothesis-profile explore`
# takes new ones, and `daily` takes fewer where a test names no number of its own.
settings.register_profile("explore", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("relayd", settings.get_profile("explore"), derandomize=True)
settings.register_profile("daily", settings.get_profile("relayd"), max_examples=25)
settings.load_profile("relayd")

TESTS = Path(__file__).parent
DEFAULT_TIMEOUT = 300.0
"""As in pyproject.toml; for whoever hangs, and not to hurry a machine that is slow."""
SPARK_TIMEOUT = 900.0
"""A signal amid a question to the JVM leaves its answer to whoever asks next: all later tests would fail."""
OWN_SHARE = 0.9
"""The part of its time after which a coroutine is cancelled, before the signal comes."""

# What the daily loop runs: the library and the daemon, without what takes its time.
UNITS = ("strata", "relayd", "test_layout.py")
SLOW_FOLDERS = ("strata/tools",)
SLOW_FILES = ("crashes.py", "embedded.py", "hostile.py", "hostile_relay.py", "model.py", "simulation.py")
DATABASES = frozenset({"server"})
"""Fixtures that start PostgreSQL."""

GIVING_WAY = 5
"""How much nicer the others are than the worker of the tests of Spark, which gets three times their share."""
PLACED = pytest.StashKey[bool]()
"""Whether this worker has decided how nice it is."""

COLLECTOR_THRESHOLDS = (10_000, 10, 10)
"""Python looks for garbage after 700 new objects, and tests make many that stay for a while."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--req-report", metavar="FILE", type=Path, help="write which tests carry which requirement rows"
    )


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        make_run_folder()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection() -> Iterator[None]:
    """As many workers collect at a time as there are cores: the others then find the bytecode of the first.

    From a fresh clone six that begin together compile everything six times, and rewrite all assertions. What
    collection makes stays, so the garbage collector would look through it for nothing.
    """
    number = os.environ.get("PYTEST_XDIST_WORKER", "").removeprefix("gw")
    gc.disable()
    try:
        with turn(f"collect-{int(number) % (os.cpu_count() or 1)}") if number else nullcontext():
            return (yield)
    finally:
        gc.set_threshold(*COLLECTOR_THRESHOLDS)
        gc.enable()


@settings(max_examples=200, database=None)
@given(integers())
def _draw(number: int) -> None:
    """Enough for Hypothesis to look for the constants of what is imported."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of the daily loop; keep the tests of Spark together, and start the longest tests first.

    Each worker of a parallel run begins with a share of the list, one after the other, and takes over from
    the end of another share when it is done. The tests of Spark head the first share: one worker alone
    starts a session and warms it up. The longest of the others head the second share, so no worker ends the
    run with a long test that was begun last. A test says itself how long it may take: the mark `timeout`.
    """
    for item in items:
        if _is_unit(item):
            item.add_marker("unit")
        if _needs_spark(item) and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(SPARK_TIMEOUT))
        if isinstance(item, pytest.Function) and inspect.iscoroutinefunction(item.obj):
            item.obj = _bounded(item.obj, OWN_SHARE * _own_timeout(item))
    together = [item for item in items if _needs_spark(item)]
    others = sorted((item for item in items if not _needs_spark(item)), key=_marked, reverse=True)
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    elsewhere = len(items) // workers * (workers - 1)
    items[:] = together + others[elsewhere:] + others[:elsewhere]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> None:
    """Let the worker that begins with the tests of Spark go first, as its row is the longest.

    With an equal share it may still be at it when the others have nothing left to do. They take over the rest
    of its tests then, and each starts and warms up a Spark session for the last of the run.
    """
    stash = item.config.stash
    if stash.get(PLACED, False) or "PYTEST_XDIST_WORKER" not in os.environ:
        return
    stash[PLACED] = True
    if not _needs_spark(item) and any(map(_needs_spark, item.session.items)):
        os.nice(GIVING_WAY)


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """A Spark session for all tests of a worker."""
    from strata_pipeline.session import open_session

    conf = {**QUICK_SPARK, "spark.local.dir": str(tmp_path_factory.mktemp("sorted"))}
    with open_session("tests", master="local[2]", conf=conf) as session:
        yield session


def _needs_spark(item: pytest.Item) -> bool:
    return not {"spark", "new_log"}.isdisjoint(getattr(item, "fixturenames", ()))


def _is_unit(item: pytest.Item) -> bool:
    return _may_be_unit(item.path) and DATABASES.isdisjoint(getattr(item, "fixturenames", ()))


@functools.cache
def _may_be_unit(file: Path) -> bool:
    path = file.relative_to(TESTS).as_posix()
    return path.startswith(UNITS) and not path.startswith(SLOW_FOLDERS) and not path.endswith(SLOW_FILES)


def _marked(item: pytest.Item) -> float:
    mark = item.get_closest_marker("timeout")
    return float(mark.args[0]) if mark and mark.args else 0.0


def _own_timeout(item: pytest.Item) -> float:
    if item.get_closest_marker("timeout"):
        return _marked(item)
    asked_for = item.config.getoption("timeout", None)
    return DEFAULT_TIMEOUT if asked_for is None else float(asked_for)


def _bounded(test: Callable[..., Awaitable[Any]], seconds: float) -> Callable[..., Awaitable[Any]]:
    """A test that is cancelled after so many seconds: never with 0.

    A signal may come amid a callback or another task of the loop, which take its error for their own: the
    test would then run for ever.
    """

    @functools.wraps(test)
    async def bounded(*arguments: Any, **named: Any) -> None:
        async with asyncio.timeout(seconds or None):
            await test(*arguments, **named)

    return bounded


def pytest_collection_finish(session: pytest.Session) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:
        # Hypothesis parses each of our modules, and keeps what it has found for other processes: from a fresh
        # clone six that begin together would parse all of them six times.
        with turn("constants"):
            _draw()
    gc.freeze()  # what collection has made stays to the end: no need to look through it again and again
    target: Path | None = session.config.getoption("--req-report")
    if target is None:
        return
    rows: dict[str, list[str]] = {}
    for item in session.items:
        # One test function is one claim, however many parameters it runs with.
        name = item.nodeid.partition("[")[0]
        for mark in item.iter_markers("req"):
            for row in mark.args:
                tests = rows.setdefault(row, [])
                if name not in tests:
                    tests.append(name)
    target.write_text(json.dumps(rows), encoding="utf-8")
