"""`python -m benches.pipeline_opening`: opening a lake of many batches, with and without summaries.

The manifests are synthetic: 8,640 per day, as from an archive that looks every ten seconds. Opening is
measured in a separate process: its CPU time, and the growth of its memory.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from strata.protocol.sequences import first_of_day
from strata_pipeline.lake.lake import Lake
from strata_pipeline.lake_format import GENESIS, Manifest, encode, seal

from relayd.store.archived import _read_lake

BATCHES_A_DAY = 8_640
_DAY = 20_000


def main() -> None:
    """Make a lake of `--manifests`, and measure."""
    parser = argparse.ArgumentParser(prog="benches.pipeline_opening", description=__doc__)
    parser.add_argument("--manifests", type=int, default=100_000)
    parser.add_argument("--folder", type=Path, help="where to make the lake; by default a temporary folder")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--open", choices=("pipeline", "relayd"), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.open:
        print(json.dumps(_open(asked.folder, asked.open)))
        return
    with tempfile.TemporaryDirectory(dir=asked.folder) as name:
        lake = Path(name)
        _make(lake, asked.manifests)
        results = {f"{who}, all manifests": _apart(lake, who) for who in ("pipeline", "relayd")}
        began = time.process_time()
        with Lake.replace(lake) as opened:
            days = opened.chain.seal()
        results["sealing"] = {"days": days, "cpu_seconds": round(time.process_time() - began, 2)}
        results |= {f"{who}, summaries": _apart(lake, who) for who in ("pipeline", "relayd")}
    if asked.json:
        print(json.dumps({"manifests": asked.manifests} | results))
        return
    print(f"{asked.manifests:,} manifests")
    for what, figures in results.items():
        print(f"{what:28}", ", ".join(f"{name} {value}" for name, value in figures.items()))


def _make(lake: Path, manifests: int) -> None:
    (lake / "_manifests").mkdir(parents=True)
    previous, after = GENESIS, 0
    for number in range(manifests):
        day, place = divmod(number, BATCHES_A_DAY)
        up_to = first_of_day(_DAY + day) + 10 * (place + 1)
        manifest = seal(
            Manifest(
                number=number,
                after=after,
                up_to=up_to,
                packets=10,
                quarantined=0,
                rows="ab" * 32,
                contents="cd" * 32,
                body_bytes=6_000,
                kinds={"POST": 6, "REACTION": 4},
                last_packet_id="ef" * 32,
                last_received_at=(_DAY + day) * 86_400 + 10 * place,
                written_at=0,
                previous=previous,
            )
        )
        (lake / "_manifests" / f"{number:010}.json").write_bytes(encode(manifest))
        previous, after = manifest.hash, up_to


def _apart(lake: Path, who: str) -> dict[str, float]:
    command = [sys.executable, "-m", "benches.pipeline_opening", "--folder", str(lake), "--open", who]
    told = subprocess.run(command, check=True, capture_output=True, text=True)
    figures: dict[str, float] = json.loads(told.stdout)
    return figures


def _open(lake: Path, who: str) -> dict[str, float]:
    before, began, clock = _peak(), time.process_time(), time.perf_counter()
    if who == "pipeline":
        assert Lake.open(lake).reached
    else:
        found = _read_lake(lake / "_manifests", frozenset({_DAY}), None)
        assert found.problem is None and len(found.batches[_DAY])
    return {
        "seconds": round(time.perf_counter() - clock, 2),
        "cpu_seconds": round(time.process_time() - began, 2),
        "mib": round(_peak() - before, 1),
    }


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    main()
