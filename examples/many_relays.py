"""Publish to several relays and read from several, while one of them dies.

    python examples/many_relays.py                     starts three relays in a temporary folder
    python examples/many_relays.py ws://… ws://… …     uses your relays; none is killed

A hundred packets are published to two relays each and read from two. Halfway through, one relay is killed
with SIGKILL and not started again. At the end the acknowledged packets and the received ones are compared.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import strata
from strata.protocol import packets
from strata.relays.pool import PoolOptions

PACKETS = 100
# Shorter than the defaults, so that the example need not wait a minute for the next checks.
OPTIONS = PoolOptions(sweep_interval=2.0, replace_after=0.5)


@contextmanager
def own_relay(folder: Path) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Run `relayd serve` with its own PostgreSQL; gives its URL and its process."""
    command = [sys.executable, "-m", "relayd", "serve", "--port", "0", "--data-dir", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        try:
            yield json.loads(process.stdout.readline())["ws"], process
        finally:
            process.kill()


async def run(urls: Sequence[str], victim: subprocess.Popen[bytes] | None) -> dict[str, int]:
    """Publish, kill, read, and compare."""
    me = strata.Identity.generate()
    acknowledged: set[str] = set()
    received: list[str] = []
    async with strata.connect_pool(urls, options=OPTIONS) as relays:

        async def read() -> None:
            async for delivery in relays.subscribe(authors=[me.did]):
                received.append(delivery.packet.packet_id)
                if len(received) == PACKETS:
                    return

        async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
            tasks.create_task(read())
            for number in range(PACKETS):
                if victim is not None and number == PACKETS // 2:
                    victim.kill()
                content = {"type": "POST", "text": f"packet {number}"}
                packet = packets.build(me, content, timestamp=int(time.time()))
                acknowledged.add((await relays.publish(packet)).packet_id)
        for view in relays.relays:
            print(f"{view.url}  {view.standing}  {view.score:.2f}", file=sys.stderr)
    return {
        "acknowledged": len(acknowledged),
        "received": len(received),
        "lost": len(acknowledged - set(received)),
        "doubled": len(received) - len(set(received)),
    }


def main() -> int:
    """Return the exit code: 0 if nothing was lost or duplicated, else 1."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("urls", nargs="*", metavar="URL", help="relays to use instead of own ones")
    urls = parser.parse_args().urls
    if urls:
        counts = asyncio.run(run(urls, None))
    else:
        with (
            tempfile.TemporaryDirectory(prefix="many-relays-", ignore_cleanup_errors=True) as folder,
            own_relay(Path(folder, "a")) as (a, victim),
            own_relay(Path(folder, "b")) as (b, _),
            own_relay(Path(folder, "c")) as (c, _),
        ):
            counts = asyncio.run(run([a, b, c], victim))
    print(json.dumps(counts))
    return 1 if counts["lost"] or counts["doubled"] else 0


if __name__ == "__main__":
    sys.exit(main())
