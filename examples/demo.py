"""Kill a relay under load with SIGKILL, again and again, and count lost and duplicate packets.

    make demo                        ten seconds, a kill about every second
    python examples/demo.py --kills 20 --json

A relay with its own PostgreSQL runs in a temporary folder. Eight publishers send as fast as they get answers,
and one subscriber reads. All of them keep their single `strata.connect` through every kill. At the end the
acknowledged packets, the received packets and the relay's log are compared.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import strata
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from strata.protocol import packets

PUBLISHERS = 8


@dataclass
class Tally:
    """The counts so far."""

    acknowledged: list[str] = field(default_factory=list)
    received: list[str] = field(default_factory=list)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    kills: int = 0


def free_port() -> int:
    """A port that is not in use, below those that the system gives to connections."""
    while True:
        port = 12_000 + secrets.randbelow(20_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


class Relay:
    """`relayd serve` in a folder, always on the same port."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        self.url = f"ws://127.0.0.1:{self.port}/strata"
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None

    async def start(self) -> None:
        """Start the relay, and wait until it accepts connections."""
        command = [sys.executable, "-m", "relayd", "serve", "--port", str(self.port)]
        await asyncio.to_thread(self._spawn, [*command, "--data-dir", str(self._folder / "data")])

    def _spawn(self, command: list[str]) -> None:
        with (self._folder / "relay.log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log)
        assert self._process.stdout is not None
        if not self._process.stdout.readline():
            sys.exit((self._folder / "relay.log").read_text())

    def kill(self, number: int = signal.SIGKILL) -> None:
        """End the process with a signal; SIGKILL leaves it no time to clean up."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, number)
            self._process.wait()
            assert self._process.stdout is not None
            self._process.stdout.close()


async def publish(relay: strata.Relay, me: strata.Identity, lane: int, tally: Tally) -> None:
    """Publish until cancelled; a packet counts when the relay has answered OK."""
    number = 0
    while True:
        number += 1
        content = {"type": "POST", "text": f"{lane}:{number}"}
        packet = packets.build(me, content, timestamp=int(time.time()))
        await relay.publish(packet)
        tally.acknowledged.append(packet.packet_id)


async def read(relay: strata.Relay, me: strata.Identity, tally: Tally) -> None:
    """Read all packets, from the first one on."""
    async for delivery in relay.subscribe(authors=[me.did]):
        tally.received.append(delivery.packet.packet_id)
        tally.arrived.set()


async def run(kills: int, console: Console) -> dict[str, int]:
    """Run the whole demonstration and return its counts."""
    tally, me = Tally(), strata.Identity.generate()
    options = strata.Options(publish_timeout=120.0, backoff_cap=0.5)
    with tempfile.TemporaryDirectory(prefix="relayd-demo-") as folder, _progress(console) as progress:
        relay = Relay(Path(folder))
        bar = progress.add_task("kills", total=kills, acknowledged=0, received=0)
        try:
            await relay.start()
            async with (
                strata.connect(relay.url, options=options) as writing,
                strata.connect(relay.url, options=options) as reading,
            ):
                reader = asyncio.create_task(read(reading, me, tally))
                writers = [asyncio.create_task(publish(writing, me, n, tally)) for n in range(PUBLISHERS)]
                while tally.kills < kills:
                    until = time.monotonic() + random.uniform(0.3, 1.0)
                    while time.monotonic() < until:
                        await asyncio.sleep(0.05)
                        progress.update(
                            bar, acknowledged=len(tally.acknowledged), received=len(tally.received)
                        )
                    relay.kill()
                    tally.kills += 1
                    progress.update(bar, advance=1)
                    await relay.start()
                for writer in writers:
                    writer.cancel()
                await asyncio.gather(*writers, return_exceptions=True)
                log = [found.packet.packet_id async for found in reading.fetch(authors=[me.did])]
                async with asyncio.timeout(60):
                    while len(tally.received) < len(log):
                        tally.arrived.clear()
                        await tally.arrived.wait()
                reader.cancel()
                return _compare(tally, log)
        finally:
            relay.kill()


def _compare(tally: Tally, log: list[str]) -> dict[str, int]:
    return {
        "kills": tally.kills,
        "acknowledged": len(tally.acknowledged),
        "received": len(tally.received),
        "lost": len(set(tally.acknowledged) - set(log)),
        "doubled": len(tally.received) - len(set(tally.received)),
        "out_of_order": sum(a != b for a, b in zip(tally.received, log, strict=True)),
    }


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("kill -9"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[acknowledged]} acknowledged, {task.fields[received]} received"),
        console=console,
    )


def main() -> int:
    """Return the exit code: 0 if nothing was lost, duplicated or out of order, else 1."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--kills", type=int, default=8, help="how often (default 8)")
    parser.add_argument("--json", action="store_true", help="print the counts as one line of JSON")
    arguments = parser.parse_args()
    counts = asyncio.run(run(arguments.kills, Console(stderr=True)))
    if arguments.json:
        print(json.dumps(counts))
    else:
        print(", ".join(f"{count} {name.replace('_', ' ')}" for name, count in counts.items()))
    return 1 if counts["lost"] or counts["doubled"] or counts["out_of_order"] else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
