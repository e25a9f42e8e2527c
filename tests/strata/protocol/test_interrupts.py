"""Ctrl-C while a program is still loading."""

from __future__ import annotations

import signal
import subprocess
import sys
from typing import Any

import pytest
from strata.protocol.interrupts import EndsAtOnce

from tests.support.relay_process import ROOT

_PROGRAM = """
import signal, sys

class Slow:
    def find_spec(self, name, path=None, target=None):
        if name == {first!r}:
            print("loading", flush=True)
            while True:
                signal.pause()

signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Slow())
sys.path[:0] = [{root!r}, {root!r} + "/client", {root!r} + "/pipeline"]
from {name}.__main__ import main
main()
"""


@pytest.mark.parametrize(
    ("name", "first"),
    [("strata", "strata.tools.cli"), ("relayd", "relayd.cli"), ("strata_pipeline", "strata_pipeline.cli")],
)
def test_ctrl_c_amid_the_imports_of_a_program_ends_it_without_a_traceback(name: str, first: str):
    code = _PROGRAM.format(name=name, first=first, root=str(ROOT))
    with subprocess.Popen(
        [sys.executable, "-I", "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as program:
        assert program.stdout is not None and program.stdout.readline() == b"loading\n"
        program.send_signal(signal.SIGINT)
        _, said = program.communicate(timeout=30)
    assert (program.returncode, said) == (-signal.SIGINT, b"")


def test_afterwards_ctrl_c_means_what_it_meant():
    before = signal.getsignal(signal.SIGINT)
    try:
        cases: list[tuple[Any, signal.Handlers]] = [
            (signal.default_int_handler, signal.SIG_DFL),
            (signal.SIG_IGN, signal.SIG_IGN),  # a background job of a script
        ]
        for handler, meanwhile in cases:
            signal.signal(signal.SIGINT, handler)
            with EndsAtOnce():
                assert signal.getsignal(signal.SIGINT) is meanwhile
            assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, before)
