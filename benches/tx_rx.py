"""`python -m benches.tx_rx`: channels between two processes, beside pyzmq, gRPC, bare asyncio, bare sockets.

    python -m benches.tx_rx [--json] [--seconds 1.0] [--rounds 3] [unix tcp tls codec local large latency]

Every contestant runs in each round, one after another, in a fresh pair of processes; the medians count. The
CPU cost of a message is shown beside the rates, since two processes on a busy machine share its cores.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benches.measures import Measure, as_json, percentile, print_table
from benches.peer import BenchError
from benches.tx_rx_ours import local_channel_rate, queue_rate
from benches.tx_rx_runs import Run, run

__all__ = ["NAMES", "main"]

NAMES = ("unix", "tcp", "tls", "codec", "local", "large", "latency")

_SIZES = {64: "64 B", 1024: "1 KiB", 65536: "64 KiB"}
_RATES = {
    "unix": {64: 1_000_000, 1024: 600_000, 65536: 35_000},
    "tcp": {64: 1_000_000, 1024: 600_000, 65536: 16_000},
    "tls": {64: 600_000},
}
_P50_US = {"unix": 40.0, "tcp": 55.0}
_LOCAL = 1_500_000
_LARGE, _LARGE_MS = 64 * 2**20, 60.0

_OURS, _TYPED = "channel", "channel of a Struct"
_FLOOR, _BARE = "blocking sockets, batched", "asyncio BufferedProtocol"
_CONTESTANTS = {
    _OURS: "benches.tx_rx_ours:Ours",
    _TYPED: "benches.tx_rx_ours:OursTyped",
    _FLOOR: "benches.tx_rx_floor:Raw",
    _BARE: "benches.tx_rx_floor:Asyncio",
    "pyzmq PUSH/PULL": "benches.tx_rx_peers:PushPull",
    "pyzmq DEALER/ROUTER": "benches.tx_rx_peers:DealerRouter",
    "grpc.aio stream": "benches.tx_rx_peers:Grpc",
}
_ALL = tuple(name for name in _CONTESTANTS if name != _TYPED)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program. 0: done, 1: a target was missed, or a measurement was void."""
    parser = argparse.ArgumentParser(prog="benches.tx_rx", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(NAMES)}; all by default")
    parser.add_argument("--seconds", type=float, default=1.0, help="how long each run lasts")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each contestant")
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args(arguments)
    names = chosen.names or list(NAMES)
    if unknown := sorted(set(names) - set(NAMES)):
        parser.error(f"no benchmark {', '.join(unknown)}; there are {', '.join(NAMES)}")
    _say(f"{os.cpu_count()} cores; load average {os.getloadavg()[0]:.1f}: best below 0.5")
    measures: list[Measure] = []
    void = False
    try:
        for name in NAMES:
            if name in names:
                measures += _BENCHES[name](name, chosen.rounds, chosen.seconds)
    except BenchError as error:
        void = True
        _say(f"void: {error}")
    if chosen.json:
        print(json.dumps({"measures": as_json(measures)}))
    else:
        print_table(measures)
    return int(void or any(measure.met is False for measure in measures))


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# Between two processes


def _rates(transport: str, rounds: int, seconds: float) -> list[Measure]:
    """Messages per second of each size. The bare sockets have no TLS; for TLS, an event loop is the floor."""
    contestants, floor = ((_OURS, _BARE), _BARE) if transport == "tls" else (_ALL, _FLOOR)
    measures = []
    for size, target in _RATES[transport].items():
        runs = _rounds(contestants, transport, size, rounds, seconds)
        measures.append(_rate(transport, _SIZES[size], runs, floor=floor, target=target))
        _say(f"{transport}, {_SIZES[size]}: {measures[-1].value:,.0f} messages/s")
    return measures


def _codec(name: str, rounds: int, seconds: float) -> list[Measure]:
    """The cost of a type: a Struct of 64 bytes on the wire, beside 64 bytes."""
    runs = _rounds((_TYPED, _OURS), "unix", 64, rounds, seconds)
    measure = _rate(name, "a small Struct over unix", runs, ours=_TYPED, floor=_OURS)
    _say(f"codec: {measure.value:,.0f} messages/s")
    return [measure]


def _large(name: str, rounds: int, seconds: float) -> list[Measure]:
    """One message of 64 MiB after another."""
    runs = _rounds(_ALL, "unix", _LARGE, rounds, seconds, one_by_one=True)
    measure = _duration(name, "64 MiB over unix, p50", runs, 0.5, "ms", _LARGE_MS)
    _say(f"large: {measure.value:,.1f} ms")
    return [measure]


def _latency(name: str, rounds: int, seconds: float) -> list[Measure]:
    """The time from the call of `send` to its return, when the acknowledgement has arrived."""
    measures = []
    for transport, target in _P50_US.items():
        for one_core in (True, False) if hasattr(os, "sched_setaffinity") else (False,):
            runs = _rounds(_ALL, transport, 64, rounds, seconds, one_by_one=True, one_core=one_core)
            where = f"64 B over {transport}, {'one core' if one_core else 'two cores'}"
            measures += [
                _duration(name, f"{where}, p50", runs, 0.5, "µs", target if one_core else None),
                _duration(name, f"{where}, p99", runs, 0.99, "µs"),
            ]
            _say(f"latency, {where}: {measures[-2].value:.1f} µs, p99 {measures[-1].value:.1f} µs")
    return measures


def _rounds(
    contestants: Sequence[str],
    transport: str,
    size: int,
    rounds: int,
    seconds: float,
    *,
    one_by_one: bool = False,
    one_core: bool = False,
) -> dict[str, list[Run]]:
    """All contestants in turn, so that a busy moment of the machine does not hit only one."""
    runs: dict[str, list[Run]] = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, found in runs.items():
            who = _CONTESTANTS[name]
            found.append(run(who, transport, size, seconds, one_by_one=one_by_one, one_core=one_core))
    return runs


def _rate(
    bench: str,
    name: str,
    runs: Mapping[str, Sequence[Run]],
    *,
    ours: str = _OURS,
    floor: str,
    target: float | None = None,
) -> Measure:
    rates = {who: [one.rate for one in found] for who, found in runs.items()}
    return _measure(bench, name, rates, runs, "messages/s", ours=ours, floor=floor, target=target)


def _duration(
    bench: str,
    name: str,
    runs: Mapping[str, Sequence[Run]],
    share: float,
    unit: str,
    target: float | None = None,
) -> Measure:
    scale = {"ms": 1e3, "µs": 1e6}[unit]
    times = {who: [percentile(one.sent.times, share) * scale for one in found] for who, found in runs.items()}
    return _measure(bench, name, times, runs, unit, floor=_FLOOR, target=target, at_most=True)


def _measure(
    bench: str,
    name: str,
    values: Mapping[str, Sequence[float]],
    runs: Mapping[str, Sequence[Run]],
    unit: str,
    *,
    ours: str = _OURS,
    floor: str,
    target: float | None = None,
    at_most: bool = False,
) -> Measure:
    """The median of our rounds, with the medians, spreads and CPU of all contestants in the details."""
    medians = {who: statistics.median(found) for who, found in values.items()}
    details: dict[str, Any] = {
        f"{ours} to {who}": medians[ours] / median for who, median in medians.items() if who != ours
    }
    details |= {f"{who}, rounds": list(found) for who, found in values.items()}
    details[f"median, {unit}"] = medians
    details["spread, % of the median"] = {
        who: 100 * (max(found) - min(found)) / medians[who] for who, found in values.items()
    }
    for end in ("sender", "receiver"):
        details[f"µs of CPU for each message, {end}"] = {
            who: statistics.median(getattr(one, f"{end}_cpu") for one in found) * 1e6
            for who, found in runs.items()
        }
    return Measure(bench, name, medians[ours], unit, target, at_most, medians[floor], floor, details)


# Within one process


def _local(name: str, rounds: int, seconds: float) -> list[Measure]:
    """Two tasks, and a channel or a queue between them."""
    channel, queue = [], []
    for _ in range(rounds):
        channel.append(local_channel_rate(64, seconds))
        queue.append(queue_rate(64, seconds))
    rate, limit = statistics.median(channel), statistics.median(queue)
    _say(f"local: {rate:,.0f} messages/s, asyncio.Queue {limit:,.0f}")
    details = {"rounds": channel, "asyncio.Queue, rounds": queue}
    return [
        Measure(
            name,
            "two tasks",
            rate,
            "messages/s",
            _LOCAL,
            limit=limit,
            limit_name="asyncio.Queue",
            details=details,
        )
    ]


_BENCHES: dict[str, Callable[[str, int, float], list[Measure]]] = {
    "unix": _rates,
    "tcp": _rates,
    "tls": _rates,
    "codec": _codec,
    "local": _local,
    "large": _large,
    "latency": _latency,
}


if __name__ == "__main__":
    sys.exit(main())
