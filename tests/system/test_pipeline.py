"""From a relay into a lake and back: a real relay under load, and an archive that is killed."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import asyncpg
import pyarrow.dataset as pads
import pytest
import strata

from relayd.store.migrate import migrate
from tests.support.publishing import publish
from tests.support.relay_process import PostgresHost, RelayProcess, running

PACKETS = 100_000
KILLS = 4


def pipeline(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "strata_pipeline", *arguments, "--master", "local[2]", "--json"]


def last_line(*arguments: str) -> Any:
    done = subprocess.run(pipeline(*arguments), capture_output=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout.decode()[-2000:] + done.stderr.decode()[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


async def history(url: str, types: list[str]) -> list[tuple[str, int]]:
    """What a relay's history says: ids and times of arrival, in its order."""
    async with strata.connect(url) as relay:
        return [(event.packet.packet_id, event.received_at) async for event in relay.fetch(types=types)]


@pytest.mark.timeout(600)
def test_a_lake_made_under_kills_agrees_with_its_log_and_restores_the_relay(tmp_path: Path):
    lake = str(tmp_path / "lake")
    chance = random.Random(20)
    host = PostgresHost(tmp_path / "postgres")
    try:
        with running(RelayProcess(tmp_path / "relay", database_url=host.url)) as relay:
            archive = ["archive", "--database-url", host.url, "--lake", lake, "--batch-rows", "5000"]
            follow = [*archive, "--continuous", "--interval", "0.2"]
            with asyncio.Runner() as runner:
                publishing = runner.get_loop().create_task(publish(relay.ws, PACKETS))
                for _ in range(KILLS):
                    wait = chance.uniform(0, 1)
                    killed = asyncio.to_thread(killed_after_progress, pipeline(*follow), Path(lake), wait)
                    runner.run(killed)
                acknowledged = runner.run(wait_for(publishing))
            assert len(set(acknowledged)) == PACKETS
            archived = last_line(*archive)
            assert archived["event"] == "done" and archived["behind"] == 0

            audited = last_line("audit", "--lake", lake, "--database-url", host.url)
            assert audited["holds"] and audited["packets"] == PACKETS and audited["behind"] == 0

            rows = pads.dataset(f"{lake}/packets", format="parquet").to_table(
                columns=["sequence", "packet_id"]
            )
            found = [f"0x{packet_id.hex()}" for packet_id in rows["packet_id"].to_pylist()]
            assert len(found) == PACKETS and set(found) == set(acknowledged)

            restored = urlunsplit(urlsplit(host.url)._replace(path="/restored"))
            asyncio.run(prepare(host.url, restored))
            assert last_line("restore", "--lake", lake, "--database-url", restored)["event"]
            with running(RelayProcess(tmp_path / "second", database_url=restored)) as second:
                for types in (["POST"], ["NOTE", "/chat/1/room/proto"]):
                    one, other = asyncio.run(both(relay.ws, second.ws, types))
                    assert one == other and len(one) >= PACKETS // 3
    finally:
        host.close()


async def wait_for(task: asyncio.Task[list[str]]) -> list[str]:
    return await task


def killed_after_progress(command: list[str], lake: Path, wait: float) -> None:
    """Let an archive write some batches, then SIGKILL it and all it has started, `wait` seconds later."""
    process = subprocess.Popen(command, start_new_session=True, stdout=subprocess.DEVNULL)
    begun, deadline = batches(lake), time.monotonic() + 120
    try:
        while batches(lake) < begun + 2 and time.monotonic() < deadline:
            assert process.poll() is None, "the archive ended by itself"
            time.sleep(0.05)
        time.sleep(wait)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert batches(lake) > begun


def batches(lake: Path) -> int:
    return len(list(lake.glob("_manifests/0*.json")))


async def prepare(server: str, restored: str) -> None:
    connection = await asyncpg.connect(server)
    try:
        await connection.execute("CREATE DATABASE restored")
    finally:
        await connection.close()
    await migrate(restored)


async def both(one: str, other: str, types: list[str]) -> tuple[list, list]:
    return await history(one, types), await history(other, types)
