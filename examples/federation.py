"""Three relays of different owners replicate while one is killed and one is cut off.

    make demo DEMO=federation
    python examples/federation.py --packets 60 --json

Each relay has its own database and identity, and reads from both others. Packets are published at all three,
in turn. After a third of the packets, one relay is killed with SIGKILL and stays down for a while. Another is
cut off from both others, although its publishers still reach it. At the end a table shows for each relay what
was published there, what it held while the others were away, what it holds now, and where that came from.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import strata
from demo import free_port
from rich.console import Console
from rich.table import Table
from strata.protocol import packets

NAMES = ("anna", "bert", "cleo")


class Wire:
    """A forwarder through which one relay reads another, and which can be cut."""

    def __init__(self, to_port: int) -> None:
        self.port = free_port()
        self.is_cut = False
        self._to_port = to_port
        self._open: set[asyncio.StreamWriter] = set()
        self._carrying: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Accept connections until `stop`."""
        self._server = await asyncio.start_server(self._accepted, "127.0.0.1", self.port)

    async def stop(self) -> None:
        """End the forwarder and all its connections."""
        self._server.close()
        self.cut()
        for task in self._carrying:
            task.cancel()
        await asyncio.gather(*self._carrying, return_exceptions=True)

    def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._carry(reader, writer))
        self._carrying.add(task)
        task.add_done_callback(self._carrying.discard)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            if self.is_cut:
                writer.close()
                return
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._to_port)
            self._open |= {writer, far_writer}
            await asyncio.gather(self._copy(reader, far_writer), self._copy(far_reader, writer))

    async def _copy(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(65_536):
                target.write(data)
                await target.drain()
        target.close()
        self._open.discard(target)

    def cut(self) -> None:
        """Let nothing through from now on, including bytes in transit."""
        self.is_cut = True
        for writer in self._open:
            writer.transport.abort()
        self._open.clear()


class Relay:
    """The `relayd serve` of one owner."""

    def __init__(self, folder: Path, number: int) -> None:
        self.seed = bytes([number + 1]) * 32
        self.did = strata.Identity.from_seed(self.seed).did
        self.port, self.metrics_port = free_port(), free_port()
        self.url = f"ws://127.0.0.1:{self.port}/strata"
        self.folder = folder
        self.process: subprocess.Popen[bytes] | None = None

    def configure(self, wires: dict[str, Wire], dids: dict[str, str]) -> None:
        """Write the settings: a URL and a DID for each relay to read from, and the DIDs of those that may
        read from this one."""
        self.folder.mkdir()
        lines = [
            f'[[peer]]\nurl = "ws://127.0.0.1:{wire.port}/strata"\n'
            f'relay_id = "{dids[name]}"\ngroup = "demo"\n'
            for name, wire in wires.items()
        ]
        (self.folder / "peers.toml").write_text("\n".join(lines))
        settings = {
            "port": self.port,
            "metrics_listen": f"127.0.0.1:{self.metrics_port}",
            "data_dir": str(self.folder / "data"),
            "identity_seed": self.seed.hex(),
            "peers_file": str(self.folder / "peers.toml"),
            "replication_peers": [dids[name] for name in wires],
        }
        text = "".join(f"{name} = {json.dumps(value)}\n" for name, value in settings.items())
        (self.folder / "relayd.toml").write_text(text)

    def start(self) -> None:
        """Start the relay, and wait until it accepts connections."""
        command = [sys.executable, "-m", "relayd", "serve", "--config", str(self.folder / "relayd.toml")]
        with (self.folder / "relay.log").open("ab") as log:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log)
        assert self.process.stdout is not None
        if not self.process.stdout.readline():
            sys.exit((self.folder / "relay.log").read_text())

    def kill(self) -> None:
        """End the process with SIGKILL."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            assert self.process.stdout is not None
            self.process.stdout.close()
            self.process = None

    async def holds(self, author: str) -> set[str]:
        """The ids of all packets of this author that the relay serves."""
        async with strata.connect(self.url) as relay:
            return {each.packet.packet_id async for each in relay.fetch(authors=[author])}

    def came(self) -> dict[str, int]:
        """The number of packets from the relay's peers since it was last started, by outcome."""
        counts: dict[str, int] = {}
        for line in self._figures("relayd_peer_packets_total"):
            outcome = line.split('outcome="')[1].split('"')[0]
            counts[outcome] = counts.get(outcome, 0) + int(float(line.rsplit(" ", 1)[1]))
        return counts

    async def reads_from(self, peers: int) -> None:
        """Wait until the relay reads from at least `peers` others."""
        async with asyncio.timeout(60):
            while not self._is_linked(peers):  # noqa: ASYNC110 - nothing announces it
                await asyncio.sleep(0.1)

    def _is_linked(self, peers: int) -> bool:
        return sum(line.endswith(" 1.0") for line in self._figures("relayd_peer_connected")) >= peers

    def _figures(self, name: str) -> list[str]:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics_port}/metrics") as answer:
            lines = answer.read().decode().splitlines()
        return [line for line in lines if line.startswith(name + "{")]


async def run(folder: Path, count: int, say: Console) -> dict[str, Any]:
    """Publish, kill, cut, reconnect, and compare."""
    relays = {name: Relay(folder / name, number) for number, name in enumerate(NAMES)}
    dids = {name: relay.did for name, relay in relays.items()}
    wires = {(one, other): Wire(relays[other].port) for one in NAMES for other in NAMES if one != other}
    for wire in wires.values():
        await wire.start()
    for name, relay in relays.items():
        relay.configure({other: wires[one, other] for one, other in wires if one == name}, dids)
    try:
        say.print(f"starting three relays that read from each other: {', '.join(NAMES)}")
        await asyncio.gather(*(asyncio.to_thread(relay.start) for relay in relays.values()))
        for relay in relays.values():
            await relay.reads_from(len(NAMES) - 1)
        return await _story(relays, wires, count, say)
    finally:
        for relay in relays.values():
            relay.kill()
        for wire in wires.values():
            await wire.stop()


async def _story(
    relays: dict[str, Relay], wires: dict[tuple[str, str], Wire], count: int, say: Console
) -> dict[str, Any]:
    me = strata.Identity.generate()
    acknowledged: set[str] = set()
    published, meanwhile = dict.fromkeys(NAMES, 0), dict.fromkeys(NAMES, 0)
    say.print(f"publishing {count} packets, at each relay in turn")
    killed, alone = NAMES[1], NAMES[2]
    for number in range(count):
        if number == count // 3:
            say.print(f"after {number}: kill -9 {killed}, and {alone} is cut off from both others")
            relays[killed].kill()
            for ends, wire in wires.items():
                if alone in ends:
                    wire.cut()
        if number == 2 * count // 3:
            meanwhile = {
                name: len(await relay.holds(me.did)) for name, relay in relays.items() if relay.process
            }
            say.print(f"after {number}: {killed} is started again, and {alone} is connected again")
            await asyncio.to_thread(relays[killed].start)
            for wire in wires.values():
                wire.is_cut = False
        name = NAMES[number % 3]
        if relays[name].process is None:
            name = NAMES[0]
        packet = packets.build(
            me, {"type": "POST", "text": f"number {number}"}, timestamp=int(time.time()), nonce=str(number)
        )
        async with strata.connect(relays[name].url) as relay:
            acknowledged.add((await relay.publish(packet)).packet_id)
        published[name] += 1
    say.print(f"{len(acknowledged)} packets acknowledged; waiting until all relays hold them")
    held: dict[str, set[str]] = {}
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(120):
            while held != dict.fromkeys(NAMES, acknowledged):
                await asyncio.sleep(0.3)
                held = {name: await relay.holds(me.did) for name, relay in relays.items()}
    return {
        "acknowledged": len(acknowledged),
        "published": published,
        "meanwhile": meanwhile,
        "held": {name: len(some) for name, some in held.items()},
        "missing": sum(len(acknowledged - some) for some in held.values()),
        "came": {name: relay.came() for name, relay in relays.items()},
    }


def show(counts: dict[str, Any], say: Console) -> None:
    """Print the table and its explanation."""
    fates = dict(zip(NAMES, ("went on", "killed", "cut off"), strict=True))
    table = Table("relay", "", "published", "held then", "holds now", "came from peers")
    for name in NAMES:
        meanwhile, came = counts["meanwhile"].get(name, "(away)"), counts["came"][name]
        table.add_row(
            name,
            fates[name],
            str(counts["published"][name]),
            str(meanwhile),
            str(counts["held"].get(name)),
            ", ".join(f"{count} {outcome}" for outcome, count in came.items() if count),
        )
    say.print(table)
    say.print("held then: before they were back; came: since the relay was last started")
    if counts["missing"]:
        say.print(f"{counts['missing']} of {counts['acknowledged']} packets are still missing somewhere")
    else:
        say.print(f"Nothing is lost: each relay holds all {counts['acknowledged']} packets, once each.")


def main() -> None:
    """The entry point of the example."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--packets", type=int, default=90, help="how many packets are published")
    parser.add_argument("--json", action="store_true", help="print the counts as JSON")
    arguments = parser.parse_args()
    say = Console(quiet=arguments.json)
    with tempfile.TemporaryDirectory(prefix="strata-federation-") as folder:
        counts = asyncio.run(run(Path(folder), arguments.packets, say))
    if arguments.json:
        print(json.dumps(counts))
    else:
        show(counts, say)
    sys.exit(1 if counts["missing"] else 0)


if __name__ == "__main__":
    main()
