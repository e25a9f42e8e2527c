"""Each fuzzing harness, in a separate process: the good inputs first, then those that the fuzzer derives from
them.

A run uses the same inputs each time. With `RELAYD_TEST_FUZZ_SECONDS` each harness runs new ones for this
time. Skipped only where the fuzzer itself has no wheel.
"""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path

import pytest

from tests.support.forks import FUZZERS, ForkedProcess
from tests.support.fuzz_seeds import seeds_of

INPUTS = {
    "canonical": 20_000,
    "packet": 20_000,
    "message": 60_000,
    "session": 2_500,
    "frames": 2_000,
    "cursor": 100_000,
    "negentropy": 1_000,
}
"""The number of inputs for each harness: a few seconds' worth."""
SECONDS = int(os.environ.get("RELAYD_TEST_FUZZ_SECONDS", "0"))

needs_atheris = pytest.mark.skipif(
    importlib.util.find_spec("atheris") is None,
    reason="FUZZING SKIPPED: atheris has no wheel for this platform and Python; run it where it has",
)


@needs_atheris
@pytest.mark.timeout(SECONDS + 300)
@pytest.mark.parametrize("name", INPUTS)
def test_fuzz(name: str, tmp_path: Path):
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for number, seed in enumerate(seeds_of(name)):
        (corpus / f"seed{number}").write_bytes(seed)
    length = [f"-max_total_time={SECONDS}"] if SECONDS else [f"-runs={INPUTS[name]}", "-seed=1"]
    # Instrumenting the programs takes about as long as the inputs do: it is done once.
    run = ForkedProcess(FUZZERS, [name, *length, "-max_len=4096", str(corpus)], env=os.environ, cwd=tmp_path)
    out, err = (text.decode(errors="replace") for text in run.communicate(timeout=SECONDS + 300.0))
    assert run.returncode == 0, out[-2000:] + err[-4000:]
    done = re.search(r"Done (\d+) (?:runs )?in", err)
    assert done is not None, err[-2000:]
    print(f"{name}: {done[1]} inputs")
    assert int(done[1]) >= (101 if SECONDS else INPUTS[name]), "an empty run proves nothing"
