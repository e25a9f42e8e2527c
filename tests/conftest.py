"""What every test shares: bytecode, the order of the run, the mark `unit`, the list of requirement rows."""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# The run starts hundreds of Python processes, and each worker rewrites the assertions of every test file:
# bytecode is kept even where the environment asks not to.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# How fast the machine makes examples is nothing a test of ours claims.
settings.register_profile("relayd", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("relayd")

TESTS = Path(__file__).parent
DEFAULT_TIMEOUT = 120.0

# What the daily loop runs: the library and the daemon, without what takes its time.
UNITS = ("strata", "relayd", "test_layout.py")
SLOW_FOLDERS = ("strata/tools",)
SLOW_FILES = ("crashes.py", "embedded.py", "hostile.py", "hostile_relay.py", "model.py", "simulation.py")
DATABASES = frozenset({"server"})
"""Fixtures that start PostgreSQL."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--req-report", metavar="FILE", type=Path, help="write which tests carry which requirement rows"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of the daily loop, and let the longest tests start first.

    A test says itself how long it may take: the mark `timeout`. The workers of a parallel run then end
    together, and none waits for a long test that another worker has begun last.
    """
    for item in items:
        if _is_unit(item):
            item.add_marker("unit")
    items.sort(key=_timeout, reverse=True)


def _is_unit(item: pytest.Item) -> bool:
    path = item.path.relative_to(TESTS).as_posix()
    return (
        path.startswith(UNITS)
        and not path.startswith(SLOW_FOLDERS)
        and not path.endswith(SLOW_FILES)
        and DATABASES.isdisjoint(getattr(item, "fixturenames", ()))
    )


def _timeout(item: pytest.Item) -> float:
    mark = item.get_closest_marker("timeout")
    return max(float(mark.args[0]), DEFAULT_TIMEOUT) if mark and mark.args else DEFAULT_TIMEOUT


def pytest_collection_finish(session: pytest.Session) -> None:
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
