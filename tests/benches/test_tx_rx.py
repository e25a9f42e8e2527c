"""The bench of Tx/Rx, briefly: every contestant carries its messages, and the bench reports its results."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from benches import tx_rx_floor
from benches.tx_rx import NAMES, main
from benches.tx_rx_floor import Messages
from benches.tx_rx_ours import READING
from benches.tx_rx_runs import Job

ROOT = Path(__file__).parents[2]

PEERS = ["blocking sockets, batched", "asyncio BufferedProtocol"]
LIBRARIES = ["pyzmq PUSH/PULL", "pyzmq DEALER/ROUTER", "grpc.aio stream"]
SIZES = ["64 B", "1 KiB", "64 KiB"]
MEASURES = {
    "unix": SIZES,
    "tcp": SIZES,
    "tls": ["64 B"],
    "codec": ["a small Struct over unix"],
    "local": ["two tasks"],
    "large": ["64 MiB over unix, p50"],
    "latency": [
        f"64 B over {transport}, {where}, {share}"
        for transport in ("unix", "tcp")
        for where in (("one core", "two cores") if hasattr(os, "sched_setaffinity") else ("two cores",))
        for share in ("p50", "p99")
    ],
}
BESIDE = {
    "tls": PEERS[1:],
    "codec": ["channel"],
    "local": [],
}
"""The contestants that each bench measures beside ours; all of them if it is not listed."""


def run_bench(*arguments: str) -> int:
    return main(["--seconds", "0.01", "--rounds", "1", *arguments])


def test_each_name_is_known_here() -> None:
    assert tuple(MEASURES) == NAMES


@pytest.mark.parametrize("bench", MEASURES)
def test_each_benchmark_runs_and_reports(bench: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = run_bench("--json", bench)
    out, err = capsys.readouterr()
    assert "void" not in err, err
    measures = json.loads(out)["measures"]
    assert [measure["name"] for measure in measures] == MEASURES[bench]
    for measure in measures:
        assert measure["bench"] == bench
        assert measure["value"] > 0
        assert measure["limit"] > 0
        assert measure["limit_name"]
        for peer in BESIDE.get(bench, PEERS + LIBRARIES):
            assert len(measure["details"][f"{peer}, rounds"]) == 1
            assert measure["details"]["µs of CPU for each message, receiver"][peer] > 0
    # So brief a run may miss its targets, and then the program reports it.
    assert code == int(any(measure["met"] is False for measure in measures))


def test_an_unknown_benchmark_is_refused_with_the_known_ones() -> None:
    command = [sys.executable, "-m", "benches.tx_rx", "nothing"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110)
    assert done.returncode == 2
    assert "unix, tcp, tls, codec, local, large, latency" in done.stderr


def test_a_process_that_fails_makes_the_run_void() -> None:
    code = "from benches.tx_rx_runs import run; run('benches.tx_rx_floor:Missing', 'unix', 64, 0.01)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=110)
    theirs, _, ours = done.stderr.partition("has no attribute 'Missing'")
    assert done.returncode == 1
    assert "Traceback" in theirs
    assert "BenchError" in ours and "a process has failed" in ours


def test_the_window_is_bounded_in_messages_and_in_bytes() -> None:
    assert Job("", "unix", 64, 1.0).window == 4096
    assert Job("", "unix", 65536, 1.0).window * 65536 == 8 * 2**20
    assert Job("", "unix", 64 * 2**20, 1.0).batch == 1


def test_the_struct_is_as_large_as_the_bytes_beside_it() -> None:
    assert len(msgspec.msgpack.encode(READING)) == 64


@pytest.mark.parametrize("step", [1, 7, 1000, 10**6])
def test_the_floor_reads_messages_however_they_are_cut(step: int) -> None:
    sizes = [1, 70_000, 300_000, 3, tx_rx_floor.BUFFER_BYTES, 65_536]
    stream = b"".join(size.to_bytes(8, "big") + b"x" * size for size in sizes)
    messages = Messages()
    for at in range(0, len(stream), step):
        piece = stream[at : at + step]
        while piece:
            room = messages.get_buffer()
            taken = min(len(piece), len(room))
            room[:taken] = piece[:taken]
            messages.buffer_updated(taken)
            piece = piece[taken:]
    assert (messages.count, messages.size) == (len(sizes), sum(sizes))
    assert not messages.is_over
    messages.get_buffer()[:8] = bytes(8)
    assert not messages.buffer_updated(8)
    assert messages.is_over
