"""Run a relay under faults: `python -m tests.faults --seed 7 --minutes 60`.

The command ends with 0 when every promise was kept and everything was tried, else with 1.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from pathlib import Path

from tests.faults.run import Report, run
from tests.faults.schedule import KINDS


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--seed", type=int, help="which faults come when (default: drawn, and printed)")
    parser.add_argument("--minutes", type=float, default=5.0, help="how long the faults go on (default: 5)")
    parser.add_argument(
        "--only", action="append", choices=list(KINDS), help="only this kind; may be repeated"
    )
    parser.add_argument("--folder", type=Path, help="keep the relay's log and data here")
    parser.add_argument("--json", action="store_true", help="print the report as one line of JSON")
    options = parser.parse_args()
    seed = random.randrange(2**32) if options.seed is None else options.seed
    print(f"faults: --seed {seed} --minutes {options.minutes:g}", file=sys.stderr, flush=True)
    started = time.monotonic()

    def progress(line: str) -> None:
        print(f"{time.monotonic() - started:7.1f} s  {line}", file=sys.stderr, flush=True)

    report = asyncio.run(
        run(
            seed,
            options.minutes * 60.0,
            kinds=tuple(options.only or KINDS),
            folder=options.folder,
            progress=progress,
        )
    )
    print(report.as_json() if options.json else _table(report))
    return 0 if report.is_good else 1


def _table(report: Report) -> str:
    lines = [f"seed {report.seed}, {report.seconds:g} s of faults"]
    for title, counts in (
        ("faults fired", {kind: report.fired.get(kind, 0) for kind in report.kinds}),
        ("operations checked", report.checked),
        ("requests refused", report.refused),
    ):
        lines += ["", title, *(f"  {count:8}  {name}" for name, count in sorted(counts.items()))]
    lines += ["", f"the disk failed or delayed {report.disk_hits} calls"]
    lines += [f"restored backups lacked {report.lost} acknowledged packets"]
    if report.idle:
        lines += ["", "never happened: " + ", ".join(report.idle)]
    lines += ["", *(report.broken or ["every promise was kept"])]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
