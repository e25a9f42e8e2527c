"""Send inputs from a grammar to a live relay: `python -m tests.fuzz --seed 7 --minutes 60`.

The command ends with 0 when every promise was kept, else with 1. Inputs that broke one join the corpus.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import random
import sys
import tempfile
import time
from pathlib import Path

from tests.fuzz.live import CORPUS, Report, fuzz, keep, read_corpus
from tests.fuzz.test_live import SETTINGS
from tests.support.relay_process import RelayProcess, running


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seed", type=int, help="which inputs are drawn (default: drawn, and printed)")
    parser.add_argument("--minutes", type=float, default=5.0, help="how long (default: 5)")
    options = parser.parse_args()
    seed = random.randrange(2**32) if options.seed is None else options.seed
    print(f"fuzz: --seed {seed} --minutes {options.minutes:g}", file=sys.stderr, flush=True)
    started = time.monotonic()

    def progress(line: str) -> None:
        print(f"{time.monotonic() - started:7.1f} s  {line}", file=sys.stderr, flush=True)

    with (
        tempfile.TemporaryDirectory(prefix="relayd-fuzz-") as folder,
        running(RelayProcess(Path(folder), **SETTINGS)) as relay,
    ):
        report = asyncio.run(
            fuzz(
                relay,
                seed,
                seconds=options.minutes * 60,
                first=read_corpus(CORPUS),
                guilty=functools.partial(keep, CORPUS),
                progress=progress,
            )
        )
    print(_table(report))
    return 1 if report.broken else 0


def _table(report: Report) -> str:
    lines = [
        f"{report.inputs} inputs, {report.acknowledged} packets acknowledged, {report.read_again} read again,"
        f" the canary served {report.canary} times"
    ]
    for title, counts in (
        ("requests", report.requests),
        ("spoiled in", report.levels),
        ("answers", report.answers),
        ("closed with", {str(code): count for code, count in report.closed.items()}),
    ):
        lines += ["", title, *(f"  {count:8}  {name}" for name, count in sorted(counts.items()))]
    return "\n".join([*lines, "", *(report.broken or ["every promise was kept"])])


if __name__ == "__main__":
    sys.exit(main())
