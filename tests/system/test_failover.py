"""A standby that is promoted while publishers are at work: the procedure of the operator's guide.

Two relays share a primary; one reads history from a standby of it. The primary's machine dies, the standby is
promoted, and the relays switch to it by themselves.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import asyncpg
import psutil
import pytest

from tests.support.backups import Copied
from tests.support.patient_clients import (
    DEADLINE,
    Ledger,
    follow,
    grown,
    opened,
    page_of,
    publish,
    settle,
    until,
    whole_log,
)
from tests.support.relay_process import ROOT, PostgresHost, RelayProcess, running
from tests.support.standbys import Standby

GUIDE = ROOT / "docs" / "guides" / "scaling.md"


def guide(beginning: str) -> str:
    """The line of the guide that begins so: the test runs the guide's commands."""
    (line,) = {line.strip() for line in GUIDE.read_text().splitlines() if line.strip().startswith(beginning)}
    return line


class Site:
    """A primary and its standby, and the URL by which relays find the one that takes writes."""

    def __init__(self, folder: Path, host: PostgresHost, database: Copied, standby: Standby) -> None:
        self._folder = folder
        self._host = host
        self.primary = database
        self.standby = standby
        one, two = (parse_qs(urlsplit(url).query) for url in (database.url, standby.url))
        ports = [server.get("port", ["5432"])[0] for server in (one, two)]
        hosts = f"host={one['host'][0]},{two['host'][0]}&port={','.join(ports)}"
        asked = parse_qs(urlsplit(guide('database_url = "').split('"')[1]).query)
        (target,) = asked["target_session_attrs"]
        self.url = f"postgresql://relayd@{urlsplit(database.url).path}?{hosts}&target_session_attrs={target}"

    async def execute(self, statement: str) -> Any:
        connection = await asyncpg.connect(self.primary.url)
        try:
            return await connection.fetchval(statement)
        finally:
            await connection.close()

    def kill_primary(self) -> None:
        """Kill all its processes at once, as when a machine dies."""
        (pidfile,) = self._folder.glob("postgres-*/postmaster.pid")
        server = psutil.Process(int(pidfile.read_text().split("\n", 1)[0]))
        for process in [server, *server.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs([server], 30)

    async def held(self) -> set[str]:
        """The packets of the standby, when no more can come."""
        connection = await asyncpg.connect(self.standby.url)
        try:
            return {
                "0x" + bytes(row[0]).hex() for row in await connection.fetch("SELECT packet_id FROM packets")
            }
        finally:
            await connection.close()

    async def promote(self) -> None:
        assert await self.standby.execute(guide("SELECT pg_promote").rstrip(";"))


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    with tempfile.TemporaryDirectory(prefix="relayd-primary-") as folder:
        Path(folder).chmod(0o755)  # noqa: ASYNC240 - a folder of our own
        host = PostgresHost(Path(folder))
        try:
            database = await Copied(host.url).make()
            async with Standby(database.url) as standby:
                yield Site(Path(folder), host, database, standby)
        finally:
            host.close()


@contextlib.contextmanager
def relays(folder: Path, site: Site, **settings: Any) -> Iterator[tuple[RelayProcess, RelayProcess]]:
    one = RelayProcess(folder / "one", database_url=site.url, **settings)
    two = RelayProcess(folder / "two", database_url=site.url, read_database_url=site.standby.url, **settings)
    with running(one), running(two):
        yield one, two


@contextlib.asynccontextmanager
async def at_work(one: RelayProcess, two: RelayProcess, ledger: Ledger) -> AsyncIterator[None]:
    """Publishers at both relays, and a reader at the second."""
    async with asyncio.TaskGroup() as group:
        publishers = [group.create_task(publish(relay, ledger)) for relay in (one, two, one)]
        reader = group.create_task(follow(two, ledger))
        yield
        for task in publishers:
            task.cancel()
        await asyncio.wait(publishers)
        await settle(one, ledger)
        log = set(await whole_log(one, ledger))
        await until(lambda: log <= set(ledger.seen), "the reader has everything")
        reader.cancel()


@pytest.mark.req("R-154", "R-157", "R-159", "R-311")
async def test_an_asynchronous_standby_takes_over_and_readers_are_told_of_what_it_lacked(
    tmp_path: Path, site: Site
):
    ledger = Ledger()
    with relays(tmp_path, site) as (one, two):
        async with at_work(one, two, ledger):
            await grown(ledger, 300)
            await site.standby.lose_contact()
            await grown(ledger, 200)
            await until(lambda: len(ledger.seen) >= 400, "the reader is beyond what the standby has")
            site.kill_primary()
            held = await site.held()
            lost_by_then = ledger.acknowledged - held
            await site.promote()
            await grown(ledger, 200)
        log = await whole_log(one, ledger)
        assert len(set(log)) == len(log)
        # No acknowledged packet that the standby had is lost, and none that it lacked is reported as present.
        assert held <= set(log)
        lost = ledger.acknowledged - set(log)
        assert lost and lost <= lost_by_then
        # The reader was notified once, and has the present log: each packet once, in its order.
        assert len(ledger.resets) == 1
        assert ledger.seen == log
        for relay in (one, two):
            assert relay.metric("relayd_log_epoch") == 2
            async with opened(relay) as socket:  # and so are later clients with that place, at any relay
                await socket.send(json.dumps(page_of(ledger, ledger.resets[0])))
                refused = json.loads(await socket.recv())
                assert (refused["code"], refused["detail"]) == ("invalid_cursor", "log_reset")
        assert two.metric("relayd_replica_reads_total", outcome="served") > 0


@pytest.mark.req("R-189", "R-311")
async def test_with_a_synchronous_standby_nothing_acknowledged_is_lost(tmp_path: Path, site: Site):
    """The standby is out of reach for a while first. PostgreSQL ends the wait of a commit that is given up,
    and the rows are there: they must not be acknowledged as known when they are published again."""
    await site.execute(guide("ALTER SYSTEM SET synchronous_standby_names").rstrip(";"))
    await site.execute("SELECT pg_reload_conf()")
    async with asyncio.timeout(DEADLINE):
        while await site.execute("SELECT sync_state FROM pg_stat_replication") not in ("sync", "quorum"):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    ledger = Ledger()
    with relays(tmp_path, site, publish_timeout=3) as (one, two):
        async with at_work(one, two, ledger):
            await grown(ledger, 200)
            await site.standby.lose_contact()
            await until(lambda: ledger.refused, "a publish is refused")
            acknowledged = set(ledger.acknowledged)
            await until(lambda: max(ledger.refused.values()) >= 2, "one is refused twice")
            assert ledger.acknowledged == acknowledged
            site.kill_primary()
            await site.promote()
            await grown(ledger, 200)
        log = await whole_log(one, ledger)
        assert len(set(log)) == len(log)
        assert ledger.acknowledged == set(log)
        assert ledger.seen == log
