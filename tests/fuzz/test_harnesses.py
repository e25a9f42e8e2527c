"""Each fuzzing harness, for a short while, in a process of its own.

`RELAYD_TEST_FUZZ_SECONDS` sets how long each runs; 20 without it. Skipped only where the fuzzer itself
has no wheel.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.fuzz_seeds import seeds_of

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
NAMES = ("canonical", "packet", "message", "session", "frames", "cursor")
SECONDS = int(os.environ.get("RELAYD_TEST_FUZZ_SECONDS", "20"))

needs_atheris = pytest.mark.skipif(
    importlib.util.find_spec("atheris") is None,
    reason="FUZZING SKIPPED: atheris has no wheel for this platform and Python; run it where it has",
)


@needs_atheris
@pytest.mark.timeout(SECONDS + 60)
@pytest.mark.parametrize("name", NAMES)
def test_fuzz(name: str, tmp_path: Path):
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for number, seed in enumerate(seeds_of(name)):
        (corpus / f"seed{number}").write_bytes(seed)
    paths = os.pathsep.join([str(ROOT), str(ROOT / "client")])
    run = subprocess.run(
        [
            sys.executable,
            FOLDER / "harnesses.py",
            name,
            f"-max_total_time={SECONDS}",
            "-max_len=4096",
            corpus,
        ],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        errors="replace",
    )
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-4000:]
    done = re.search(r"Done (\d+) (?:runs )?in", run.stderr)
    assert done is not None, run.stderr[-2000:]
    print(f"{name}: {done[1]} inputs in {SECONDS} s")
    assert int(done[1]) > 100, "an empty run proves nothing"
