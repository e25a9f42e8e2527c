"""What every test shares: the list of which test stands for which requirement row."""

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


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--req-report", metavar="FILE", type=Path, help="write which tests carry which requirement rows"
    )


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
