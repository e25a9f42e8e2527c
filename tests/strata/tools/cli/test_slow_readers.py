"""`strata` before a reader of its output that pauses: nothing is lost, and nothing is reported falsely."""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
import sys
import termios
from pathlib import Path
from typing import Any

import pytest
import strata
from strata.protocol import packets
from strata.tools.cli.position import PositionFile

SOURCES = str(Path(strata.__file__).parent.parent)
PIPE_BYTES = 65_536


class Piped:
    """The command, with a pipe as its stdout that is read only when the test says so."""

    _out: Any = None
    process: Any = None

    def __init__(self, url, key_file):
        self._env = {
            **os.environ,
            "PYTHONPATH": SOURCES,
            "STRATA_RELAY": url,
            "STRATA_IDENTITY": str(key_file),
        }

    async def start(self, *arguments, stdin=b""):
        self._out, write = os.pipe()
        self.process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "strata.tools.cli",
            *map(str, arguments),
            env=self._env,
            stdin=asyncio.subprocess.PIPE,
            stdout=write,
            stderr=asyncio.subprocess.PIPE,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        os.close(write)
        self.process.stdin.write(stdin)
        self.process.stdin.close()

    async def is_full(self):
        """Wait until the pipe takes nothing more."""
        before, size = -1, 0
        while size < PIPE_BYTES / 2 or size != before:
            await asyncio.sleep(0.2)
            before, size = (
                size,
                int.from_bytes(fcntl.ioctl(self._out, termios.FIONREAD, bytes(4)), sys.byteorder),
            )

    def close(self):
        if self._out is not None:
            os.close(self._out)
            self._out = None

    async def rest(self):
        """Read all that is left. Returns the lines, the exit code and stderr."""

        def read():
            pieces = []
            while piece := os.read(self._out, PIPE_BYTES):
                pieces.append(piece)
            return b"".join(pieces).splitlines()

        lines = await asyncio.to_thread(read)
        return lines, await self.process.wait(), (await self.process.stderr.read()).decode()


@pytest.fixture
async def piped(extended, key_file):
    piped = Piped(extended.url, key_file)
    yield piped
    piped.close()
    if piped.process.returncode is None:
        piped.process.kill()
        await piped.process.wait()


async def test_publishing_goes_on_beside_a_reader_that_pauses_and_reports_nothing_falsely(piped, extended):
    """The pause is longer than the timeout of the command, during which its packets are answered."""
    count = 2000
    await piped.start(
        "publish", "--stdin", "--timeout", "4", stdin=b"".join(b"%d\n" % n for n in range(count))
    )
    await piped.is_full()
    await asyncio.sleep(6)
    lines, code, err = await piped.rest()
    assert (code, err) == (0, "")
    assert [line.decode() for line in lines] == [packet.packet_id for packet, _ in extended.model.log]
    assert len(lines) == count


async def test_the_relay_is_served_while_the_reader_pauses(piped, extended, make):
    """A command that waits for its reader answers pings: it is not dropped as dead."""
    await extended.append(*map(make, range(600)))
    await piped.start("subscribe", "--json")
    await piped.is_full()
    (socket,) = extended._open
    for _ in range(3):
        await asyncio.wait_for(await socket.ping(), 20)


async def test_all_that_is_stored_is_printed_once_a_reader_goes_on(piped, extended, make):
    await extended.append(*map(make, range(900)))
    await piped.start("subscribe", "--json", "--no-live")
    await piped.is_full()
    lines, code, err = await piped.rest()
    assert (len(lines), code, err) == (900, 0, "")


async def test_a_live_subscription_that_keeps_its_position_goes_on_after_a_stall(
    piped, extended, make, tmp_path
):
    await extended.append(*map(make, range(600)))
    await piped.start("subscribe", "--state", tmp_path / "state")
    await piped.is_full()
    await extended.append(*map(make, range(600, 900)))
    text = b""
    while text.count(b"\n") < 900:
        text += await asyncio.to_thread(os.read, piped._out, PIPE_BYTES)
    await extended.append(make(900))
    text += await asyncio.to_thread(os.read, piped._out, PIPE_BYTES)
    piped.process.send_signal(signal.SIGINT)
    assert await asyncio.wait_for(piped.process.wait(), 20) == 130
    assert [line.split()[-1].decode() for line in text.splitlines()] == [
        packet.packet_id for packet, _ in extended.model.log
    ]
    position = PositionFile(tmp_path / "state").load()
    assert position is not None and position.cursor.endswith(":900")


async def test_an_interrupt_ends_a_command_whose_reader_is_stuck(piped, extended, make, tmp_path):
    """The position is that of the last packet that stdout took."""
    await extended.append(*map(make, range(900)))
    await piped.start("subscribe", "--state", tmp_path / "state")
    await piped.is_full()
    piped.process.send_signal(signal.SIGINT)
    assert await asyncio.wait_for(piped.process.wait(), 20) == 130
    lines, _, err = await piped.rest()
    position = PositionFile(tmp_path / "state").load()
    assert position is not None and err == ""
    taken = int(position.cursor.partition(":")[2]) + 1
    assert taken in (len(lines), len(lines) - 1)  # the pipe may have taken the last line and not said so yet


async def test_a_reader_that_goes_away_while_it_is_waited_for_ends_the_command(piped, extended, make):
    await extended.append(*map(make, range(900)))
    await piped.start("subscribe", "--json")
    await piped.is_full()
    piped.close()
    assert await asyncio.wait_for(piped.process.wait(), 20) == 141
    assert await piped.process.stderr.read() == b""


async def test_a_line_longer_than_a_pipe_takes_at_once_is_written_whole(piped, extended, identities):
    packet = packets.build(identities[0], {"type": "POST", "text": "x" * 200_000}, timestamp=1)
    await extended.append(packet)
    await piped.start("get", packet.packet_id)
    lines, code, _ = await piped.rest()
    assert code == 0 and len(lines) == 1 and len(lines[0]) > 200_000
