"""What all tests share: bytecode, the order of the run, a Spark session, the mark `unit`, the list of
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
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import typer.main
import typer.testing
from hypothesis import HealthCheck, given, settings
from hypothesis.strategies import integers

from tests.support.forks import RELAYD, STRATA, start_servers
from tests.support.quick_spark import QUICK_SPARK
from tests.support.run_folder import make_run_folder
from tests.support.scratch import keep_files_in_memory
from tests.support.workers import Groups, add_option, run_in_workers

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# The run starts hundreds of Python processes, and each worker rewrites the assertions of every test file:
# bytecode is kept even if the environment says not to.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
keep_files_in_memory()

# Typer builds a program's commands from their signatures each time a test runs one: a tenth of a second.
typer.testing._get_command = functools.cache(typer.main.get_command)  # type: ignore[attr-defined]

# No test makes a claim about how fast the machine generates examples. Each run uses the same examples, so
# that a failure was caused by the change under test and can be repeated; `--hypothesis-profile explore` uses
# new ones, and `daily` uses fewer where a test sets no number itself.
settings.register_profile("explore", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("relayd", settings.get_profile("explore"), derandomize=True)
settings.register_profile("daily", settings.get_profile("relayd"), max_examples=25)
settings.load_profile("relayd")

TESTS = Path(__file__).parent
DEFAULT_TIMEOUT = 300.0
"""As in pyproject.toml: it ends tests that hang, and does not hurry a slow machine."""
SPARK_TIMEOUT = 900.0
"""A signal during a call to the JVM leaves its answer to the next caller: all later tests would fail."""
OWN_SHARE = 0.9
"""The fraction of its timeout after which a coroutine is cancelled, before the signal comes."""

# What the daily loop runs: the library and the daemon, without the slow tests.
UNITS = ("strata", "relayd", "test_layout.py")
SLOW_FOLDERS = ("strata/tools",)
SLOW_FILES = (
    "bad_input.py", "bus.py", "crashes.py", "embedded.py", "hostile.py", "hostile_relay.py", "left_behind.py",
    "model.py", "otel.py", "parsing_apart.py", "simulation.py", "workers.py", "worlds.py",
)  # fmt: skip
DATABASES = frozenset({"server"})
"""Fixtures that start PostgreSQL."""

GIVING_WAY = 8
"""The niceness of the other workers: the worker with the Spark tests gets six times their share."""

COLLECTOR_THRESHOLDS = (10_000, 10, 10)
"""By default Python looks for garbage after 700 new objects, and tests make many that stay for a while."""


def pytest_addoption(parser: pytest.Parser) -> None:
    add_option(parser)
    parser.addoption(
        "--req-report", metavar="FILE", type=Path, help="write which tests carry which requirement rows"
    )


def pytest_configure(config: pytest.Config) -> None:
    make_run_folder()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection() -> Iterator[None]:
    """What collection makes stays, so the garbage collector would look through it in vain."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.set_threshold(*COLLECTOR_THRESHOLDS)
        gc.enable()


@settings(max_examples=200, database=None)
@given(integers())
def _draw(number: int) -> None:
    """Draws enough examples to make Hypothesis look for the constants in imported modules."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of the daily loop; keep the Spark tests together, and put the tests in order.

    One worker then starts a Spark session and warms it up. The longest of the others come first, and the
    quick ones last, so that no worker ends the run with a long test: a test states with the mark `timeout`
    how long it may take.
    """
    for item in items:
        if _is_unit(item):
            item.add_marker("unit")
        if _needs_spark(item) and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(SPARK_TIMEOUT))
        if isinstance(item, pytest.Function) and inspect.iscoroutinefunction(item.obj):
            item.obj = _bounded(item.obj, OWN_SHARE * _own_timeout(item))
    together = [item for item in items if _needs_spark(item)]
    others = [item for item in items if not _needs_spark(item)]
    others.sort(key=lambda item: (-_marked(item), _is_unit(item)))
    items[:] = together + others


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Run the tests in several workers, if asked to."""
    workers = session.config.getoption("workers")
    if workers < 2 or session.testsfailed or session.config.option.collectonly:
        return None
    # Once, for all workers: Hypothesis looks through all imported modules, and our programs are imported.
    _draw()
    if not all(map(_is_unit, session.items)):
        start_servers(RELAYD, STRATA)
    gc.freeze()
    keys = ["spark" if _needs_spark(item) else item.path for item in session.items]
    run_in_workers(session, workers, Groups(keys, is_whole=lambda key: key == "spark"), _give_way)
    return True


def _give_way(first: pytest.Item) -> None:
    """Leave most of the processor to the worker that begins with the Spark tests: its share is the longest,
    and no other takes over a part, as each would start and warm up a session of its own."""
    if not _needs_spark(first) and any(map(_needs_spark, first.session.items)):
        os.nice(GIVING_WAY)


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """The Spark session for all tests of a worker."""
    from strata_pipeline.session import open_session

    conf = {**QUICK_SPARK, "spark.local.dir": str(tmp_path_factory.mktemp("sorted"))}
    with open_session("tests", master="local[2]", conf=conf) as session:
        yield session


def _needs_spark(item: pytest.Item) -> bool:
    return not {"spark", "new_log"}.isdisjoint(getattr(item, "fixturenames", ()))


def _is_unit(item: pytest.Item) -> bool:
    if not _may_be_unit(item.path) or item.get_closest_marker("slow"):
        return False
    return DATABASES.isdisjoint(getattr(item, "fixturenames", ()))


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
    """The test, cancelled after this many seconds; never if 0.

    A signal may arrive in the middle of a callback or another task of the loop, which take its error for
    their own: the test would then run for ever.
    """

    @functools.wraps(test)
    async def bounded(*arguments: Any, **named: Any) -> None:
        async with asyncio.timeout(seconds or None):
            await test(*arguments, **named)

    return bounded


def pytest_collection_finish(session: pytest.Session) -> None:
    gc.freeze()  # what collection has made stays to the end: no need to look through it again
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
