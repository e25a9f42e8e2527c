"""Renew the workers of a relay under load, one at a time, and count the effects on publishers and readers.

    make demo DEMO=upgrade
    python examples/upgrade.py --rounds 3 --json

An upgrade renews the workers in the same way: install the new version, then send SIGHUP. Here there is no new
version, so the signal is SIGUSR2. A relay with two workers runs in a temporary folder. Publishers send as
fast as they get answers, and a subscriber reads. All of them keep their single `strata.connect`. At the end
the acknowledged packets, the received packets and the relay's log are compared.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import strata
from demo import Tally, free_port, read
from rich.console import Console
from strata.protocol import packets

PUBLISHERS = 4


class Relay:
    """`relayd serve` with two workers, in a folder."""

    def __init__(self, folder: Path) -> None:
        port = free_port()
        self.url = f"ws://127.0.0.1:{port}/strata"
        self.log = folder / "relay.log"
        command = [sys.executable, "-m", "relayd", "serve", "--port", str(port), "--workers", "2"]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [*command, "--data-dir", str(folder / "data")], stdout=subprocess.PIPE, stderr=log
            )

    async def ready(self) -> None:
        """Wait until the relay accepts connections."""
        assert self._process.stdout is not None
        if not await asyncio.to_thread(self._process.stdout.readline):
            sys.exit(self.log.read_text())

    async def renew(self, round_number: int) -> None:
        """Have all workers renewed, and wait until that is done."""
        os.kill(self._process.pid, signal.SIGUSR2)
        async with asyncio.timeout(120):
            while self.log.read_text().count("workers_renewed") < round_number:  # noqa: ASYNC110 - a file
                await asyncio.sleep(0.1)

    def stop(self) -> None:
        """Stop the relay cleanly."""
        self._process.terminate()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


async def publish(
    relay: strata.Relay, me: strata.Identity, lane: int, tally: Tally, waited: list[float]
) -> None:
    """Publish until cancelled; a packet counts when the relay has answered OK."""
    number = 0
    while True:
        number += 1
        content = {"type": "POST", "text": f"{lane}:{number}"}
        packet = packets.build(me, content, timestamp=int(time.time()))
        began = time.monotonic()
        await relay.publish(packet)
        waited.append(time.monotonic() - began)
        tally.acknowledged.append(packet.packet_id)


async def run(rounds: int, console: Console) -> dict[str, float]:
    """Run the whole demonstration and return its counts."""
    tally, me, waited = Tally(), strata.Identity.generate(), list[float]()
    options = strata.Options(publish_timeout=120.0)
    with tempfile.TemporaryDirectory(prefix="relayd-upgrade-") as folder:
        relay = Relay(Path(folder))
        try:
            await relay.ready()
            async with (
                strata.connect(relay.url, options=options) as writing,
                strata.connect(relay.url, options=options) as reading,
            ):
                reader = asyncio.create_task(read(reading, me, tally))
                lanes = [publish(writing, me, n, tally, waited) for n in range(PUBLISHERS)]
                writers = [asyncio.create_task(lane) for lane in lanes]
                for number in range(1, rounds + 1):
                    await relay.renew(number)
                    console.print(f"renewed {number}: {len(tally.acknowledged)} acknowledged")
                for writer in writers:
                    writer.cancel()
                await asyncio.gather(*writers, return_exceptions=True)
                log = [found.packet.packet_id async for found in reading.fetch(authors=[me.did])]
                async with asyncio.timeout(60):
                    while len(tally.received) < len(log):
                        tally.arrived.clear()
                        await tally.arrived.wait()
                reader.cancel()
                return {
                    "workers_renewed": 2 * rounds,
                    "acknowledged": len(tally.acknowledged),
                    "lost": len(set(tally.acknowledged) - set(log)),
                    "doubled": len(tally.received) - len(set(tally.received)),
                    "out_of_order": sum(a != b for a, b in zip(tally.received, log, strict=True)),
                    "longest_publish_seconds": round(max(waited), 3),
                }
        finally:
            relay.stop()


def main() -> int:
    """Return the exit code: 0 if nothing was lost, duplicated or out of order, else 1."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2, help="how often all workers are renewed (default 2)")
    parser.add_argument("--json", action="store_true", help="print the counts as one line of JSON")
    arguments = parser.parse_args()
    counts = asyncio.run(run(arguments.rounds, Console(stderr=True)))
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
