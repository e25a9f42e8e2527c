"""The process that commits asks the kernel for short turns."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Iterator

import pytest

from relayd.postgres import scheduling
from relayd.postgres.scheduling import SHORT_TURN_SECONDS, ask_for_short_turns

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or tuple(map(int, platform.release().split(".")[:2])) < (6, 12),
    reason="Linux knows turns of a chosen length since 6.12",
)


def turn_seconds(pid: int) -> float:
    told = scheduling._attributes(pid)
    assert told is not None
    return told[scheduling._RUNTIME] / 1e9


@pytest.fixture
def sleeper() -> Iterator[int]:
    """An idle process, nicer than we are."""
    with subprocess.Popen(["sleep", "60"]) as process:
        os.setpriority(os.PRIO_PROCESS, process.pid, min(19, os.getpriority(os.PRIO_PROCESS, 0) + 3))
        yield process.pid
        process.kill()


def test_its_turns_become_short_and_nothing_else_changes(sleeper):
    before, nice = turn_seconds(sleeper), os.getpriority(os.PRIO_PROCESS, sleeper)
    assert ask_for_short_turns(sleeper)
    assert turn_seconds(sleeper) == SHORT_TURN_SECONDS < before
    assert os.getpriority(os.PRIO_PROCESS, sleeper) == nice
    assert os.sched_getscheduler(sleeper) == os.SCHED_OTHER


def test_a_policy_that_an_operator_chose_stays(sleeper):
    os.sched_setscheduler(sleeper, os.SCHED_IDLE, os.sched_param(0))
    assert not ask_for_short_turns(sleeper)
    assert os.sched_getscheduler(sleeper) == os.SCHED_IDLE


def test_a_process_that_is_gone_is_no_failure():
    process = subprocess.Popen(["true"])
    process.wait()
    assert not ask_for_short_turns(process.pid)
