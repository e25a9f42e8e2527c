"""`python -m benches.sds`: one sender and one receiver of a channel, without a network, as history grows.

With `--peer FOLDER` the JavaScript package does the same, in a folder where it is installed (`npm install
@waku/sds@0.0.8`). Both name two messages in each history and carry the default filter; nothing is
acknowledged. The figures are those of the last messages before each size.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from strata.channels.sds import Participant, SdsConfig

from benches.sds_plot import plot

__all__ = ["main", "measure", "measure_peer"]

SIZES = (1_000, 3_000, 10_000, 30_000, 100_000)
PEER_SIZES = (1_000, 3_000, 10_000, 30_000)
_WINDOW = 500
_START_MS = 1_760_000_000_000
_PEER_SCRIPT = Path(__file__).with_name("sds_peer.mjs")


def measure(sizes: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Rates, memory per message at one participant, and the size of a message, at each history size."""
    largest = max(sizes)
    config = SdsConfig(
        max_history=largest,
        max_known_ids=largest,
        max_unacknowledged=largest,
        max_history_bytes=1 << 40,
    )
    sender, receiver = (
        Participant(
            "room", name, config, now_ms=_START_MS, random=random.Random(1).random, track_changes=False
        )
        for name in ("alice", "bob")
    )
    before = _memory()
    done = 0
    for size in sizes:
        while done < size - _WINDOW:
            end = min(done + _WINDOW, size - _WINDOW)
            _receive(receiver, _wrap(sender, done, end), end)
            done = end
        started_at = time.perf_counter()
        wire = _wrap(sender, done, size)
        wrapped_at = time.perf_counter()
        _receive(receiver, wire, size)
        received_at = time.perf_counter()
        count, done = len(wire), size
        yield {
            "messages": size,
            "wraps_per_second": count / (wrapped_at - started_at),
            "receives_per_second": count / (received_at - wrapped_at),
            "bytes_per_message": (_memory() - before) / size / 2,
            "message_bytes": len(wire[-1]),
        }


def _wrap(sender: Participant, start: int, end: int) -> list[bytes]:
    wire = []
    for number in range(start, end):
        message = sender.wrap(b"%08d" % number + b"." * 112, _START_MS + number, number)
        sender.dispatched(message.message_id, _START_MS + number, b"\7" * 32)
        wire.append(message.encode())
    return wire


def _receive(receiver: Participant, wire: list[bytes], now: int) -> None:
    for data in wire:
        receiver.receive(data, _START_MS + now, b"\7" * 32)
        receiver.events()


def _memory() -> int:
    gc.collect()
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition("VmRSS:")[2].split()[0])


def measure_peer(folder: Path, sizes: Sequence[int], seconds: float) -> list[dict[str, Any]]:
    """The same figures for the JavaScript package, except sizes that it does not reach within `seconds`."""
    shutil.copy(_PEER_SCRIPT, folder)
    command = ["node", "--expose-gc", "--max-old-space-size=8000", _PEER_SCRIPT.name, *map(str, sizes)]
    result = subprocess.run(
        [*command, str(seconds)], cwd=folder, capture_output=True, text=True, check=True, timeout=10 * seconds
    )
    return [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]


def main() -> int:
    """Measure, print JSON lines, and draw."""
    parser = argparse.ArgumentParser(prog="python -m benches.sds", description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--peer", type=Path, help="folder with node_modules/@waku/sds")
    parser.add_argument("--peer-sizes", type=int, nargs="+", default=PEER_SIZES)
    parser.add_argument("--peer-seconds", type=float, default=240.0)
    parser.add_argument("--output", type=Path, help="file for the figures, as JSON")
    parser.add_argument("--plot", type=Path, help="file for the curves, as SVG")
    arguments = parser.parse_args()
    figures: dict[str, list[dict[str, Any]]] = {"strata.sds": []}
    for figure in measure(sorted(arguments.sizes)):
        figures["strata.sds"].append(figure)
        print(json.dumps({"of": "strata.sds", **figure}), flush=True)
    if arguments.peer is not None:
        figures["@waku/sds 0.0.8"] = measure_peer(
            arguments.peer, sorted(arguments.peer_sizes), arguments.peer_seconds
        )
        for figure in figures["@waku/sds 0.0.8"]:
            print(json.dumps({"of": "@waku/sds 0.0.8", **figure}), flush=True)
    if arguments.output is not None:
        arguments.output.write_text(json.dumps(figures, indent=1) + "\n")
    if arguments.plot is not None:
        arguments.plot.write_text(plot(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
