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
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import asyncpg
import pyarrow.dataset as pads
import pytest
import strata
from strata_pipeline.cli.app import app
from strata_pipeline.lake.lake import Lake
from strata_pipeline.spark_home import quick_home
from typer.testing import CliRunner

from relayd.store.migrate import migrate
from tests.support.publishing import publish
from tests.support.quick_spark import QUICK_JAVA
from tests.support.relay_process import PostgresHost, RelayProcess, running

PACKETS = 3_000
KILLS = int(os.environ.get("STRATA_TEST_ARCHIVE_KILLS", "2"))
PORTION = 300
AHEAD = 900
BATCH_ROWS = 150

# A killed archive does not live long enough to profit from a better compiler.
QUICK = (f"spark.driver.extraJavaOptions={QUICK_JAVA}", "spark.sql.codegen.wholeStage=false")


def pipeline(*arguments: str) -> list[str]:
    settings = [word for setting in QUICK for word in ("--conf", setting)]
    return [sys.executable, "-m", "strata_pipeline", *arguments, "--master", "local[2]", "--json", *settings]


def last_line(*arguments: str) -> Any:
    """The last line of output of a command that runs in this process, in the Spark session of the tests."""
    done = CliRunner().invoke(app, [*arguments, "--json"])
    assert done.exit_code == 0, done.output[-2000:] + repr(done.exception)
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture
def own_signals() -> Iterator[None]:
    """An archive handles these signals; this process gets them back."""
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)


async def history(url: str, types: list[str]) -> list[tuple[str, int]]:
    """A relay's history: ids and times of arrival, in its order."""
    async with strata.connect(url) as relay:
        return [(event.packet.packet_id, event.received_at) async for event in relay.fetch(types=types)]


@pytest.mark.timeout(1500)
def test_a_lake_made_under_kills_agrees_with_its_log_and_restores_the_relay(
    spark, own_signals, tmp_path: Path
):
    lake = str(tmp_path / "lake")
    chance = random.Random(20)
    host = PostgresHost(tmp_path / "postgres")
    try:
        with running(RelayProcess(tmp_path / "relay", database_url=host.url)) as relay:
            archive = ["archive", "--database-url", host.url, "--lake", lake]
            follow = [*archive, "--batch-rows", str(BATCH_ROWS), "--continuous", "--interval", "0.2"]
            killed_all = asyncio.Event()
            with asyncio.Runner() as runner:
                publishing = runner.get_loop().create_task(
                    publish_before(relay.ws, Path(lake), until=killed_all)
                )
                for _ in range(KILLS):
                    wait = chance.uniform(0, 1)
                    killed = asyncio.to_thread(killed_after_progress, pipeline(*follow), Path(lake), wait)
                    runner.run(killed)
                    assert not publishing.done()  # so every kill hit a relay under load
                killed_all.set()
                acknowledged = runner.run(wait_for(publishing))
            assert len(set(acknowledged)) == PACKETS
            assert batches(Path(lake)) >= 2 * KILLS
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


async def publish_before(url: str, lake: Path, *, until: asyncio.Event) -> list[str]:
    """Publish `PACKETS`, always a little ahead of the lake; as fast as possible once `until` is set."""
    acknowledged: list[str] = []
    while len(acknowledged) < PACKETS:
        if until.is_set() or len(acknowledged) < archived_in(lake) + AHEAD:
            acknowledged += await publish(url, PORTION)
        else:
            await asyncio.sleep(0.2)
    return acknowledged


def archived_in(lake: Path) -> int:
    return sum(manifest.packets for manifest in Lake.open(lake).manifests) if batches(lake) else 0


async def wait_for(task: asyncio.Task[list[str]]) -> list[str]:
    return await task


def killed_after_progress(command: list[str], lake: Path, wait: float) -> None:
    """Let an archive write some batches; `wait` seconds later SIGKILL it and all processes it has started."""
    # Otherwise it would leave behind its own home of Spark.
    home = {"SPARK_HOME": shared} if (shared := quick_home()) else {}
    process = subprocess.Popen(
        command, start_new_session=True, stdout=subprocess.DEVNULL, env=os.environ | home
    )
    begun, deadline = batches(lake), time.monotonic() + 400
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
