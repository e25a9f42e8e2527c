"""Off by default: no part of a relay is changed, and OpenTelemetry is not even imported."""

from __future__ import annotations

import subprocess
import sys

import pytest

from relayd.config import Settings
from relayd.tracing.traces import open_target


def test_without_a_collector_there_is_nothing_to_trace_with():
    assert open_target(Settings(), "did:strata:relay", lambda what, n: None) is None


@pytest.mark.slow
def test_the_daemon_starts_without_opentelemetry():
    program = (
        "import sys, relayd.process.daemon, relayd.cli;"
        "print([name for name in sys.modules if name.startswith('opentelemetry')])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
