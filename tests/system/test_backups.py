"""A backup of a running relay: its content, what it lacks, and what readers learn after a restore."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from relayd import backups
from relayd.postgres import EmbeddedPostgres
from relayd.postgres.running import running_server
from relayd.store.migrate import migrate
from tests.support.bare_client import open_client
from tests.support.external_postgres import ExternalPostgres
from tests.support.forks import RELAYD, ForkedProcess, run_fork
from tests.support.made_packets import ids_of, make, new_identity
from tests.support.relay_process import RelayProcess, environment, running
from tests.support.standbys import Standby
from tests.support.waiting import wait_until

_OLDER = sorted(path for path in Path("/usr/lib/postgresql").glob("1[567]/bin") if (path / "psql").exists())
"""Programs of PostgreSQL that are older than those shipped with relayd, and not too old for it."""


def relayd(data_dir: Path, *arguments: str | Path, exit_code: int = 0) -> Any:
    """Run a command; returns its output as JSON, or its error text."""
    env = environment({"data_dir": data_dir})
    code, out, err = run_fork(RELAYD, [*map(str, arguments), "--json"], env=env)
    assert code == exit_code, err.decode()
    return json.loads(out) if out else err.decode()


@pytest.mark.req("R-155", "R-323")
async def test_a_backup_is_made_drilled_and_put_back_and_nothing_that_was_ruled_comes_undone(
    relay: RelayProcess, tmp_path: Path
):
    data_dir = Path(str(relay.settings["data_dir"]))
    author, banned = new_identity(), new_identity()
    packets = [make(author, f"post {n}") for n in range(12)]
    hidden, doomed = make(banned), make(author, "to be erased")
    async with open_client(relay.ws) as client:
        for answer in await client.publish_all([*packets, hidden, doomed]):
            assert answer["type"] == "OK"
        relayd(data_dir, "ban", banned.did, "--reason", "spam")
        relayd(data_dir, "erase", doomed.packet_id, "--reason", "asked for")
        backup = tmp_path / "backup"
        made = relayd(data_dir, "backup", "create", backup)
        assert "not empty" in relayd(data_dir, "backup", "create", backup, exit_code=3)
        later = [make(author, f"later {n}") for n in range(3)]
        for answer in await client.publish_all(later):
            assert answer["type"] == "OK"
        events, _ = await client.subscribe("s", {"authors": [author.did], "order": "asc"})
        assert ids_of(events) == [each.packet_id for each in [*packets, *later]]
    found = relayd(data_dir, "backup", "verify", backup)
    assert (found["packets"], found["erased"], found["behind"]) == (13, 1, 3)
    assert (found["missing"], found["damaged"], found["is_whole"]) == (0, 0, True)
    assert found["head"] >= made["head"]

    other = tmp_path / "other" / "data"
    restored = relayd(other, "backup", "restore", backup, "--verify")
    assert (restored["packets"], restored["is_whole"]) == (13, True)
    assert "there already" in relayd(other, "backup", "restore", backup, exit_code=3)
    with running(RelayProcess(tmp_path / "other", data_dir=other)) as again:
        async with open_client(again.ws) as reader:
            kept, _ = await reader.subscribe("s", {"authors": [author.did, banned.did], "order": "asc"})
            assert ids_of(kept) == [each.packet_id for each in packets], "banned and erased ones stay away"
            assert again.get(f"/packets/{doomed.packet_id}")[0] == 410
            # A reader that was ahead learns where to continue; one whose place is in the backup continues.
            _, lost = await reader.subscribe("lost", {"cursor": events[-1]["cursor"]}, gapless=True)
            assert (lost["code"], lost["detail"]) == ("invalid_cursor", "log_reset")
            went_on, _ = await reader.subscribe("kept", {"cursor": events[5]["cursor"]}, gapless=True)
            assert ids_of(went_on) == [each.packet_id for each in packets[6:]]
        assert not again.complaints()
        assert again.stop() == 0


@pytest.mark.req("R-155")
async def test_a_backup_that_lacks_something_says_what(relay: RelayProcess, tmp_path: Path):
    data_dir = Path(str(relay.settings["data_dir"]))
    packets = [make(new_identity()) for _ in range(3)]
    async with open_client(relay.ws) as client:
        for answer in await client.publish_all(packets):
            assert answer["type"] == "OK"
    with running_server(data_dir) as url:
        connection = await asyncpg.connect(url)
        try:
            await connection.execute("DELETE FROM packets WHERE packet_id = $1", packets[0].digest)
            await connection.execute(
                "UPDATE packets SET body = 'not it' WHERE packet_id = $1", packets[1].digest
            )
        finally:
            await connection.close()
    backup = tmp_path / "backup"
    relayd(data_dir, "backup", "create", backup)
    found = relayd(data_dir, "backup", "verify", backup, exit_code=1)
    assert (found["missing"], found["damaged"], found["is_whole"]) == (1, 1, False)
    # Damage by the disk is PostgreSQL's to find.
    (file,) = backup.glob("base/global/pg_control")
    file.write_bytes(bytes(file.stat().st_size))
    assert "pg_verifybackup" in relayd(data_dir, "backup", "verify", backup, exit_code=3)
    (backup / "relayd.json").unlink()
    assert "is not a backup" in relayd(
        data_dir, "backup", "restore", backup, "--data-dir", tmp_path / "x", exit_code=3
    )


@pytest.mark.req("R-155")
async def test_a_backup_that_is_followed_can_be_put_back_to_any_moment(tmp_path: Path):
    data_dir, backup = tmp_path / "data", tmp_path / "backup"
    with running(RelayProcess(tmp_path, data_dir=data_dir)) as relay:
        # Left behind, in the server to copy, by a point-in-time restore interrupted after its replay.
        with (data_dir / "postgres-18" / "postgresql.auto.conf").open("a") as file:
            file.write("recovery_target_time = '2026-01-01 00:00:00+00'\n")
        (data_dir / "postgres-18" / "restored_wal").mkdir()
        async with open_client(relay.ws) as client:
            assert (await client.publish(make(new_identity())))["type"] == "OK"
            relayd(data_dir, "backup", "create", backup)
            env = environment({"data_dir": data_dir})
            follower = ForkedProcess(
                RELAYD,
                ["backup", "follow", str(backup)],
                env=env,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            with running_server(data_dir) as url:
                connection = await asyncpg.connect(url)
                try:
                    for _ in range(2):
                        assert (await client.publish(make(new_identity())))["type"] == "OK"
                    moment = await connection.fetchval("SELECT clock_timestamp()")
                    for _ in range(3):
                        assert (await client.publish(make(new_identity())))["type"] == "OK"
                    end = await connection.fetchval("SELECT pg_current_wal_flush_lsn()")
                    while not await connection.fetchval(
                        "SELECT EXISTS (SELECT FROM pg_stat_replication WHERE flush_lsn >= $1)", end
                    ):
                        assert follower.poll() is None
                        await asyncio.sleep(0.05)
                finally:
                    await connection.close()
            follower.send_signal(signal.SIGTERM)
            assert follower.wait(60) == 0
        assert relay.stop() == 0
    until = moment.strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    found = relayd(tmp_path / "then", "backup", "restore", backup, "--verify", "--until", until)
    assert (found["packets"], found["is_whole"]) == (3, True)
    assert not (tmp_path / "then" / "postgres-18" / "restored_wal").exists()
    assert not (tmp_path / "then" / "relayd.restoring").exists()
    found = relayd(data_dir, "backup", "verify", backup)
    assert (found["packets"], found["is_whole"]) == (6, True)


async def test_a_backup_is_not_followed_with_the_wal_of_another_server(tmp_path: Path):
    """As after an upgrade or an import into a new one: none of it could ever be replayed."""
    backup = tmp_path / "backup"
    async with EmbeddedPostgres(tmp_path / "former") as server:
        await migrate(server.url)
        await backups.create(server.url, backup, data_dir=tmp_path / "former")
    async with EmbeddedPostgres(tmp_path / "new") as server:
        await migrate(server.url)
        await backups.create(server.url, tmp_path / "other", data_dir=tmp_path / "new")
        with pytest.raises(backups.BackupFailed, match="another server"):
            async with asyncio.timeout(30):
                await backups.follow(server.url, backup)
    assert not (backup / "wal").exists()


@pytest.mark.req("R-155")
async def test_a_backup_of_a_standby_is_put_back_with_all_that_the_standby_was_told_since(tmp_path: Path):
    async def execute(url: str, statement: str) -> Any:
        connection = await asyncpg.connect(url)
        try:
            return await connection.fetchval(statement)
        finally:
            await connection.close()

    backup = tmp_path / "backup"
    with tempfile.TemporaryDirectory(prefix="relayd-primary-") as folder:
        Path(folder).chmod(0o755)  # noqa: ASYNC240 - a folder of our own
        async with EmbeddedPostgres(folder) as server, Standby(server.url) as standby:
            await migrate(server.url)
            await execute(server.url, "CREATE TABLE marks (n int)")
            await wait_for_table(standby)
            # It ends in the middle of a WAL file: only a primary starts another one at the end of a backup.
            await backups.create(standby.url, backup, data_dir=None)
            following = asyncio.create_task(backups.follow(standby.url, backup))
            for n in range(3):
                await execute(server.url, f"INSERT INTO marks VALUES ({n})")
                await execute(server.url, "SELECT pg_switch_wal()")
            async with asyncio.timeout(60):
                while len([*backup.glob("wal/*")]) < 4:  # noqa: ASYNC110 - another process
                    await asyncio.sleep(0.1)
            following.cancel()
            await asyncio.wait([following])
    await backups.restore(backup, tmp_path / "again", verify=False)
    async with EmbeddedPostgres(tmp_path / "again") as server:
        assert await execute(server.url, "SELECT array_agg(n ORDER BY n) FROM marks") == [0, 1, 2]


async def wait_for_table(standby: Standby) -> None:
    """Wait until the standby has received the table."""
    async with asyncio.timeout(60):
        while await standby.execute("SELECT to_regclass('marks')") is None:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


@pytest.mark.req("R-155")
async def test_wal_that_is_there_and_cannot_be_replayed_ends_a_restore_with_an_error(tmp_path: Path):
    data_dir, backup = tmp_path / "data", tmp_path / "backup"
    with running(RelayProcess(tmp_path, data_dir=data_dir)) as relay:
        async with open_client(relay.ws) as client:
            assert (await client.publish(make(new_identity())))["type"] == "OK"
            relayd(data_dir, "backup", "create", backup)
            follower = ForkedProcess(
                RELAYD,
                ["backup", "follow", str(backup)],
                env=environment({"data_dir": data_dir}),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            with running_server(data_dir) as url:
                connection = await asyncpg.connect(url)
                try:
                    switched = set[str]()
                    for _ in range(5):
                        assert (await client.publish(make(new_identity())))["type"] == "OK"
                        switched.add(await connection.fetchval("SELECT pg_walfile_name(pg_switch_wal() - 1)"))
                    while not {path.name for path in (backup / "wal").glob("*")} >= switched:
                        assert follower.poll() is None
                        await asyncio.sleep(0.05)
                finally:
                    await connection.close()
            follower.send_signal(signal.SIGTERM)
            assert follower.wait(60) == 0
        assert relay.stop() == 0
    found = relayd(tmp_path / "all", "backup", "restore", backup, "--verify")
    assert (found["packets"], found["is_whole"]) == (6, True)
    middle = backup / "wal" / sorted(switched)[-2]
    middle.unlink()
    middle.mkdir()
    assert "did not start" in relayd(tmp_path / "then", "backup", "restore", backup, exit_code=3)
    assert "put it back again" in relayd(tmp_path / "then", "export", "--output", "log", exit_code=3)
    middle.rmdir()
    assert "is missing or damaged" in relayd(data_dir, "backup", "verify", backup, exit_code=3)


@pytest.mark.req("R-155")
@pytest.mark.parametrize("moment", ["copying", "started"])
def test_a_drill_that_is_told_to_stop_leaves_no_copy_of_the_database(
    relay: RelayProcess, tmp_path: Path, moment: str
):
    data_dir = Path(str(relay.settings["data_dir"]))
    backup, scratch = tmp_path / "backup", tmp_path / "scratch"
    relayd(data_dir, "backup", "create", backup)
    scratch.mkdir()
    env = environment({"data_dir": tmp_path / "none"}) | {"TMPDIR": str(scratch)}
    drill = subprocess.Popen(
        [sys.executable, "-m", "relayd", "backup", "verify", str(backup)],
        env=env,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    name = "data/postgres-18.new" if moment == "copying" else "data/postgres-18/postmaster.pid"
    wait_until(lambda: any(scratch.glob(f"relayd-drill-*/{name}")), "the drill to be under way")
    drill.terminate()
    _, said = drill.communicate(timeout=60)
    assert drill.returncode == 143, said.decode()
    assert not list(scratch.glob("relayd-drill-*"))


@pytest.mark.req("R-155")
async def test_of_a_server_of_another_version_all_is_checked_but_what_only_that_can_read(
    relay: RelayProcess, tmp_path: Path
):
    data_dir, backup = Path(str(relay.settings["data_dir"])), tmp_path / "backup"
    relayd(data_dir, "backup", "create", backup)
    for path in (backup / "base" / "pg_wal").iterdir():
        if path.is_file():
            path.write_bytes(bytes(path.stat().st_size))
    assert "pg_waldump" in relayd(data_dir, "backup", "verify", backup, exit_code=3)
    record = json.loads((backup / "relayd.json").read_text())
    (backup / "relayd.json").write_text(json.dumps({**record, "version": "17"}))
    assert "is of PostgreSQL 17" in relayd(data_dir, "backup", "verify", backup, exit_code=3)
    control = backup / "base" / "global" / "pg_control"
    control.write_bytes(bytes(control.stat().st_size))
    assert "pg_verifybackup" in relayd(data_dir, "backup", "verify", backup, exit_code=3)


@pytest.mark.skipif(not _OLDER, reason="no PostgreSQL of an older version on this machine")
@pytest.mark.req("R-155")
async def test_a_server_of_an_older_version_is_backed_up_and_put_back_by_its_own_tools(tmp_path: Path):
    author, backup = new_identity(), tmp_path / "backup"
    packets = [make(author, n=n) for n in range(5)]
    with ExternalPostgres(_OLDER[-1]) as server:
        settings: dict[str, Any] = {"database_url": server.url, "data_dir": tmp_path}
        with running(RelayProcess(tmp_path / "relay", **settings)) as relay:
            async with open_client(relay.ws) as client:
                await client.publish_all(packets)
            env = environment({"database_url": server.url})
            code, _, err = run_fork(RELAYD, ["backup", "create", str(backup)], env=env)
            assert code == 0, err.decode()
            assert relay.stop() == 0
        server.stop()
        server.put_back(backup / "base")
        server.start()
        with running(RelayProcess(tmp_path / "again", **settings)) as again:
            async with open_client(again.ws) as reader:
                kept, _ = await reader.subscribe("s", {"authors": [author.did], "order": "asc"})
                assert ids_of(kept) == [packet.packet_id for packet in packets]


@pytest.mark.req("R-155")
async def test_a_server_of_the_operators_own_is_backed_up_drilled_and_put_back_by_its_own_tools(
    tmp_path: Path,
):
    author = new_identity()
    packets = [make(author, n=n) for n in range(10)]
    backup = tmp_path / "backup"
    with ExternalPostgres() as server:
        # The commands get only the URL, in a file as the guide advises.
        (tmp_path / "url").write_text(server.url)

        def run(*arguments: str | Path) -> Any:
            env = environment({"database_url_file": tmp_path / "url"})
            code, out, err = run_fork(RELAYD, [*map(str, arguments), "--json"], env=env)
            assert code == 0, err.decode()
            return json.loads(out)

        with running(RelayProcess(tmp_path / "relay", database_url=server.url, data_dir=tmp_path)) as relay:
            async with open_client(relay.ws) as client:
                await client.publish_all(packets[:7])
                await asyncio.to_thread(run, "backup", "create", backup)
                assert {answer["type"] for answer in await client.publish_all(packets[7:])} == {"OK"}
                events, _ = await client.subscribe("s", {"authors": [author.did], "order": "asc"})
            found = await asyncio.to_thread(run, "backup", "verify", backup)
            assert (found["packets"], found["behind"], found["is_whole"]) == (7, 3, True)
            assert relay.stop() == 0
            server.stop()
            server.put_back(backup / "base")
            server.start()
            relay.start()
            async with open_client(relay.ws) as reader:
                kept, _ = await reader.subscribe("s", {"authors": [author.did], "order": "asc"})
                assert ids_of(kept) == [packet.packet_id for packet in packets[:7]]
                _, lost = await reader.subscribe("lost", {"cursor": events[-1]["cursor"]}, gapless=True)
                assert (lost["code"], lost["detail"]) == ("invalid_cursor", "log_reset")
            assert relay.logged("log_epoch_begins") == 1
    # If that server is gone permanently, the relay's own takes over.
    data_dir = tmp_path / "own" / "data"
    restored = relayd(data_dir, "backup", "restore", backup, "--verify")
    assert (restored["packets"], restored["is_whole"]) == (7, True)
    with running(RelayProcess(tmp_path / "own", data_dir=data_dir)) as again:
        async with open_client(again.ws) as reader:
            kept, _ = await reader.subscribe("s", {"authors": [author.did], "order": "asc"})
            assert ids_of(kept) == [packet.packet_id for packet in packets[:7]]
    record = json.loads((backup / "relayd.json").read_text())
    (backup / "relayd.json").write_text(json.dumps({**record, "owner": "strata@strata"}))
    elsewhere = tmp_path / "elsewhere"
    assert "the log of strata@strata" in relayd(elsewhere, "backup", "restore", backup, exit_code=3)
