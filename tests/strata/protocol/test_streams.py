"""The standard streams, each case in a separate process."""

import os
import subprocess
import sys

import pytest

_BEGIN = "from strata.protocol.streams import open_standard_streams; open_standard_streams(); "


def run(program, *closed, stdout=subprocess.PIPE):
    def close():
        for number in closed:
            os.close(number)

    return subprocess.run(
        [sys.executable, "-c", _BEGIN + program],
        stdout=stdout,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        preexec_fn=close,
        check=False,
    )


@pytest.mark.parametrize("closed", [(0,), (1,), (2,), (0, 1, 2)])
def test_no_file_takes_the_place_of_a_stream_that_is_missing(closed):
    program = "import os, sys; print(sys.stdin.read(), end=''); sys.exit(os.open('/', os.O_RDONLY) > 2)"
    done = run(program, *closed)
    assert (done.returncode, done.stdout) == (1, b"") and not done.stderr


def test_a_locale_that_lacks_a_character_ends_no_program(monkeypatch):
    monkeypatch.setenv("PYTHONIOENCODING", "latin-1")
    done = run("print('\u2713 \xe9')")
    assert (done.returncode, done.stdout) == (0, b"\\u2713 \xe9\n")


def test_a_program_that_forgets_a_full_stdout_ends_in_peace():
    program = (
        "import sys; from strata.protocol.streams import forget_stdout\n"
        "try: print('x', flush=True)\nexcept OSError: forget_stdout(); sys.exit(7)"
    )
    with open("/dev/full", "wb") as full:
        done = run(program, stdout=full)
    assert (done.returncode, done.stderr) == (7, b"")
