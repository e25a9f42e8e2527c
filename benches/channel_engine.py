"""`python -m benches.channel_engine`: two channel engines joined directly, as history grows.

One sends; the other receives, and acknowledges by its syncs. Each is driven as the shell drives it: after
every step its changes are taken, checked, and applied to a state in memory, as `MemoryPersistence` does. Time
is virtual, at a fixed number of messages per second. What is measured is the CPU of each side: the sender's
includes reading acknowledgements, the receiver's includes making them.

A faster sender has more messages unacknowledged; `--per-second` shows what this costs.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import random
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from strata.channels.persistence.interface import StoredState, check_changes
from strata.channels.rate_limit.limiter import RateLimiter
from strata.channels.reliable.config import ReliableChannelConfig, configure
from strata.channels.reliable.engine import ChannelEngine
from strata.channels.reliable.events import ReliableMessageDelivered
from strata.channels.reliable.outbox import Outbox

from benches.measures import Measure, Progress
from benches.peer import BenchError

__all__ = ["PER_SECOND", "SIZES", "as_measures", "main", "measure_engines"]

SIZES = (1_000, 10_000, 100_000)
PER_SECOND = 250
TARGET = 5_000.0
_TOPIC = "/bench/1/room/proto"
_START_MS = 1_760_000_000_000
_BATCH = 50
_WINDOW = 2_000
_HINT = b"\7" * 32
_PATIENCE_MS = 60_000
"""How long the last message may take to be acknowledged, in virtual time."""


class _Side:
    """An engine with its limiter and its store, and the CPU time that all three have used."""

    def __init__(self, name: str, config: ReliableChannelConfig) -> None:
        assert config.rate_limit is not None
        self.limiter = RateLimiter(config.rate_limit)
        self.engine = ChannelEngine(
            "room",
            name,
            _TOPIC,
            config,
            outbox=Outbox(self.limiter, name),
            now_ms=_START_MS,
            random=random.Random(1).random,
        )
        self.state = StoredState()
        self.seconds = 0.0
        self.received = 0
        self.delivered = 0
        self.most_outstanding = 0

    def send(self, first: int, payloads: Sequence[bytes], now: int) -> list[bytes]:
        """Send these payloads and return the outgoing data."""
        began_at = time.process_time()
        wire: list[bytes] = []
        for number, payload in enumerate(payloads, first):
            self.engine.sending.send(payload, f"{number:032x}", now)
            self._store()
            wire += self._take(now)
        self.seconds += time.process_time() - began_at
        self.most_outstanding = max(self.most_outstanding, len(self.engine.requests))
        return wire

    def receive(self, wire: Sequence[bytes], now: int) -> None:
        """Receive this data, and let the program take the messages."""
        began_at = time.process_time()
        inbox = self.engine.inbox
        for data in wire:
            self.engine.receive(data, now, hint=_HINT)
            self._store()
            while (first := inbox.first()) is not None:
                inbox.take(first)
                self.received += 1
                self._store()
        self.seconds += time.process_time() - began_at

    def tick(self, now: int) -> list[bytes]:
        """Do what is due and return the outgoing data."""
        began_at = time.process_time()
        wire: list[bytes] = []
        if self.engine.get_timer() <= now:
            self.engine.handle_timer(now)
            self._store()
            wire = self._take(now)
        self.seconds += time.process_time() - began_at
        return wire

    def _take(self, now: int) -> list[bytes]:
        wire: list[bytes] = []
        while (transmission := self.limiter.take(now)) is not None:
            data = self.engine.sending.data(transmission)
            if data is None:
                continue
            self.engine.sending.taken(transmission)
            self._store()
            wire.append(data)
            self.engine.sending.dispatched(transmission, now, _HINT)
            self._store()
        return wire

    def _store(self) -> None:
        """Do what `flush` does, once for each step."""
        changes = self.engine.changes()
        check_changes(changes)
        self.state.apply(changes)
        self.engine.sending.wrapped()
        for event in self.engine.events():
            self.delivered += isinstance(event, ReliableMessageDelivered)


class _Join:
    """Two engines, and their common time."""

    def __init__(self, most: int, per_second: int) -> None:
        config = configure(
            None, options={"max_history": most, "max_known_ids": most, "max_history_bytes": 1 << 40}
        )
        self.sender, self.receiver = _Side("alice", config), _Side("bob", config)
        self.done = 0
        self.message_bytes = 0
        self._step_ms = 1000 * _BATCH / per_second
        self._now = float(_START_MS)

    def run(self, until: int) -> None:
        """Send and receive until `until` messages have been transferred."""
        while self.done < until:
            end = min(self.done + _BATCH, until)
            payloads = [b"%08d" % number + b"." * 112 for number in range(self.done, end)]
            wire = self.sender.send(self.done, payloads, int(self._now))
            self.done, self.message_bytes = end, len(wire[-1])
            self.receiver.receive(wire, int(self._now))
            self._pass(self._step_ms)

    def settle(self) -> None:
        """Wait until everything is acknowledged; raise `BenchError` if any message was lost or sent twice."""
        last = self._now + _PATIENCE_MS
        while len(self.sender.engine.requests) and self._now < last:
            self._pass(100)
        statistics = self.sender.engine.sds.statistics
        if self.receiver.received != self.done or self.sender.delivered != self.done:
            raise BenchError(
                f"{self.done} sent, {self.receiver.received} received, {self.sender.delivered} acknowledged"
            )
        if statistics.retransmissions:
            raise BenchError(f"{statistics.retransmissions} messages were sent again where none was lost")

    def _pass(self, milliseconds: float) -> None:
        self._now += milliseconds
        now = int(self._now)
        self.receiver.receive(self.sender.tick(now), now)
        self.sender.receive(self.receiver.tick(now), now)


def measure_engines(sizes: Sequence[int], per_second: int = PER_SECOND) -> Iterator[dict[str, Any]]:
    """Rates of the last messages before each size of history. Raises `BenchError` if the run is void."""
    join = _Join(max(sizes), per_second)
    for size in sizes:
        window = min(_WINDOW, size // 2)
        join.run(size - window)
        pushed_from, received_from = join.sender.seconds, join.receiver.seconds
        join.run(size)
        yield {
            "messages": size,
            "pushed_per_second": window / (join.sender.seconds - pushed_from),
            "received_per_second": window / (join.receiver.seconds - received_from),
            "unacknowledged_at_most": join.sender.most_outstanding,
            "message_bytes": join.message_bytes,
        }
    join.settle()


def as_measures(sizes: Sequence[int], progress: Progress) -> list[Measure]:
    """The figures for the table of `python -m benches`, each side beside the other."""
    measures = []
    for figure in measure_engines(sizes):
        progress(f"engine: {figure['pushed_per_second']:,.0f} and {figure['received_per_second']:,.0f} /s")
        details = {name: figure[name] for name in ("unacknowledged_at_most", "message_bytes")}
        for key, other, what in (
            ("pushed_per_second", "received_per_second", "pushed"),
            ("received_per_second", "pushed_per_second", "received"),
        ):
            measures.append(
                Measure(
                    "engine",
                    f"{what}, history of {figure['messages']}",
                    figure[key],
                    "/s of CPU",
                    TARGET,
                    limit=figure[other],
                    limit_name="the other side",
                    details=details if what == "pushed" else {},
                )
            )
    return measures


def _profile(sizes: Sequence[int], per_second: int, lines: int) -> None:
    join = _Join(max(sizes), per_second)
    size = max(sizes)
    window = min(_WINDOW, size // 2)
    join.run(size - window)
    profile = cProfile.Profile()
    profile.enable()
    join.run(size)
    profile.disable()
    for order in ("tottime", "cumulative"):
        pstats.Stats(profile).sort_stats(order).print_stats(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print JSON lines. 0: done, 1: a measurement was void."""
    parser = argparse.ArgumentParser(prog="python -m benches.channel_engine", description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--per-second", type=int, default=PER_SECOND, help="messages a virtual second")
    parser.add_argument("--output", type=Path, help="file for the figures, as JSON")
    parser.add_argument("--profile", type=int, metavar="LINES", help="show where the last messages spend it")
    options = parser.parse_args(arguments)
    sizes = sorted(options.sizes)
    if options.profile is not None:
        _profile(sizes, options.per_second, options.profile)
        return 0
    figures = []
    try:
        for figure in measure_engines(sizes, options.per_second):
            figures.append(figure)
            print(json.dumps(figure), flush=True)
    except BenchError as error:
        print(f"void: {error}", file=sys.stderr)
        return 1
    if options.output is not None:
        options.output.write_text(json.dumps(figures, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
