"""The embedded server: it lives and dies with its process, and never leaves a folder unusable."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import asyncpg
import pytest
import structlog

from relayd.postgres import EmbeddedPostgres, EmbeddedPostgresError, embedded
from relayd.postgres.binaries import Owner, is_reachable, server_owner
from relayd.postgres.embedded import is_abandoned
from relayd.postgres.process import ServerProcess
from relayd.postgres.running import running_server
from relayd.store import Store, migrate
from relayd.store.connection import connect
from tests.faults.disk import FaultyDisk
from tests.support.databases import copy_of_empty

NOW = 1_790_000_000

linux_tells = pytest.mark.skipif(
    sys.platform != "linux", reason="only Linux tells that the server has given up"
)

HOLDER = """
import asyncio, sys
from relayd.postgres import EmbeddedPostgres
async def main():
    async with EmbeddedPostgres(sys.argv[1]) as server:
        print(server.pid, server.url, flush=True)
        await asyncio.Event().wait()
asyncio.run(main())
"""


@pytest.fixture
def new_dir(tmp_path: Path) -> Path:
    """Where a server creates its folder itself."""
    return tmp_path / "new"


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    """A folder that `initdb` has already made."""
    copy_of_empty(tmp_path / "data")
    return tmp_path / "data"


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def holder(data_dir: Path):
    """Another process that runs a server on the folder: (process, pid of its server, url)."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(data_dir)], stdout=subprocess.PIPE, text=True, cwd=Path.cwd()
    )
    assert process.stdout is not None
    try:
        pid, url = process.stdout.readline().split()
        yield process, int(pid), url
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


async def one(url: str) -> int:
    connection = await asyncpg.connect(url)
    try:
        answer: int = await connection.fetchval("SELECT 1")
        return answer
    finally:
        await connection.close()


@pytest.mark.req("R-299")
async def test_it_is_a_database_that_keeps_what_was_stored(new_dir, packet):
    async with EmbeddedPostgres(new_dir) as server:
        assert server.is_alive()
        await migrate(server.url)
        async with await Store.open(server.url) as store:
            await store.append([packet(1)], NOW)
        pid = server.pid
        assert pid is not None
    assert not server.is_alive() and not alive(pid)
    async with EmbeddedPostgres(new_dir) as server, await Store.open(server.url) as store:
        assert (await store.find([packet(1).packet_id])) != {}
    assert (new_dir / "postgres-18").stat().st_mode & 0o777 == 0o700


async def test_it_listens_on_tcp_only_when_asked_and_with_a_password(data_dir, unused_tcp_port):
    async with EmbeddedPostgres(data_dir) as server:
        with pytest.raises(EmbeddedPostgresError):
            _ = server.tcp_url
        with pytest.raises(OSError):
            await asyncio.open_connection("127.0.0.1", unused_tcp_port)
    async with EmbeddedPostgres(data_dir, tcp_port=unused_tcp_port) as server:
        assert await one(server.tcp_url) == 1
        assert await one(server.url) == 1
        with pytest.raises(asyncpg.InvalidPasswordError):
            await asyncpg.connect(server.tcp_url, password="wrong")
        # A dead machine holds its locks no longer than this.
        connection = await connect(server.tcp_url, name="test", connect_timeout=10.0)
        try:
            names = ("idle", "interval", "count")
            idle, interval, count = [
                int((await connection.fetchval(f"SHOW tcp_keepalives_{name}")).rstrip("s")) for name in names
            ]
            assert idle + interval * count <= 60
        finally:
            await connection.close()


async def test_a_deep_folder_does_not_make_the_socket_path_too_long(tmp_path, monkeypatch, eventually):
    data_dir = tmp_path / ("deep" * 30) / ("deeper" * 20)
    copy_of_empty(data_dir)
    async with EmbeddedPostgres(data_dir) as server:
        assert await one(server.url) == 1
        alias = server._alias
        assert alias is not None
        monkeypatch.setattr(embedded, "_CHECK_INTERVAL", 0.05)
        supervisor = asyncio.create_task(server.supervise())
        shutil.rmtree(alias.parent)  # as a system removes old files from its temporary folder
        await eventually(alias.exists)
        assert await one(server.url) == 1
        supervisor.cancel()
        with pytest.raises(asyncio.CancelledError):
            await supervisor
    assert not alias.parent.exists()
    assert not (data_dir / "relayd.link").exists()

    # A killed relay has left its link: the next one takes over that link, and no other.
    left, foreign = (Path(tempfile.mkdtemp(prefix="relayd-")) / "pg" for _ in range(2))
    left.symlink_to(data_dir / "postgres-18")
    foreign.symlink_to(tmp_path)
    for link, is_taken in ((left, True), (foreign, False), (tmp_path / "none", False)):
        (data_dir / "relayd.link").write_text(str(link))
        async with EmbeddedPostgres(data_dir) as server:
            assert await one(server.url) == 1
            assert (server._alias == link) is is_taken
        assert link.parent.exists() is not is_taken
    shutil.rmtree(foreign.parent)


async def test_two_on_one_folder_is_refused_at_once(data_dir):
    async with EmbeddedPostgres(data_dir) as server:
        with pytest.raises(EmbeddedPostgresError, match="another relay uses"):
            await EmbeddedPostgres(data_dir).start()
        assert await one(server.url) == 1


async def test_a_data_folder_that_is_none_is_a_sentence(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(EmbeddedPostgresError, match=r"the data folder .* cannot be used: .*File exists"):
        await EmbeddedPostgres(tmp_path / "file").start()


async def test_a_folder_of_another_version_is_not_touched(new_dir):
    (new_dir / "postgres-17").mkdir(parents=True)
    with pytest.raises(EmbeddedPostgresError, match="another version"):
        await EmbeddedPostgres(new_dir).start()
    assert [path.name for path in new_dir.iterdir() if path.is_dir()] == ["postgres-17"]


async def test_an_interrupted_first_start_leaves_no_half_of_a_cluster(new_dir):
    (new_dir / "postgres-18.new" / "base").mkdir(parents=True)
    async with EmbeddedPostgres(new_dir) as server:
        assert await one(server.url) == 1
    assert not (new_dir / "postgres-18.new").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
async def test_killing_the_relay_takes_the_server_down_and_the_next_start_works(data_dir, eventually):
    with holder(data_dir) as (process, pid, _):
        process.kill()
        process.wait()
        async with EmbeddedPostgres(data_dir) as server:  # at once: it waits for the old one to end
            assert not alive(pid)
            assert await one(server.url) == 1


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.req("R-189")
async def test_killing_both_loses_nothing_and_the_next_start_works(data_dir, packet, eventually):
    with holder(data_dir) as (process, pid, url):
        await migrate(url)
        store = await Store.open(url)
        await store.append([packet(n) for n in range(50)], NOW)
        os.kill(process.pid, signal.SIGSTOP)  # so that it cannot shut the server down first
        os.kill(pid, signal.SIGKILL)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        await store.close()
    assert (data_dir / "postgres-18" / "postmaster.pid").exists()
    async with EmbeddedPostgres(data_dir) as server, await Store.open(server.url) as store:
        assert len(await store.tail(0, None, 100)) == 50


@pytest.mark.parametrize("name", [b"a,b", b"caf\xe9", b"n\xc3\xa4h, e\xff%20"])
async def test_a_folder_may_have_any_name(tmp_path, name):
    data_dir = tmp_path / os.fsdecode(name)
    async with EmbeddedPostgres(data_dir) as server:
        assert await one(server.url) == 1
        with running_server(data_dir) as url:
            assert url is not None and await one(url) == 1
    async with EmbeddedPostgres(data_dir) as server:
        assert await one(server.url) == 1


async def test_a_stale_pid_file_with_the_number_of_another_server_harms_neither(data_dir, tmp_path):
    async with EmbeddedPostgres(data_dir):
        stale = (data_dir / "postgres-18" / "postmaster.pid").read_text().split("\n")
    async with EmbeddedPostgres(tmp_path / "other") as other:
        (data_dir / "postgres-18" / "postmaster.pid").write_text("\n".join([str(other.pid), *stale[1:]]))
        with running_server(data_dir) as url:
            assert url is None
        with running_server(tmp_path / "other") as url:
            assert url is not None
        async with EmbeddedPostgres(data_dir, start_timeout=20) as server:
            assert await one(server.url) == await one(other.url) == 1


async def test_a_stale_pid_file_with_somebody_elses_number_is_cleared(data_dir):
    async with EmbeddedPostgres(data_dir):
        stale = (data_dir / "postgres-18" / "postmaster.pid").read_text().split("\n")
    # In a container the first process ids are reused again and again, also for processes of the same user.
    user = server_owner(data_dir / "postgres-18")
    sleeper = await asyncio.create_subprocess_exec("sleep", "600", user=None if user is None else user.uid)
    try:
        stale[0] = str(sleeper.pid)
        for name in ("postmaster.pid", ".s.PGSQL.5432.lock"):  # a killed server leaves both
            (data_dir / "postgres-18" / name).write_text("\n".join(stale))
        async with EmbeddedPostgres(data_dir) as server:
            assert await one(server.url) == 1
    finally:
        sleeper.kill()
        await sleeper.wait()


@pytest.mark.parametrize("text", ["", str(2**31), "-1", "9" * 5000, "x"])
async def test_a_pid_file_without_a_number_of_a_process_is_cleared(data_dir, text):
    async with EmbeddedPostgres(data_dir):
        pass
    (data_dir / "postgres-18" / "postmaster.pid").write_text(text)
    with running_server(data_dir) as url:
        assert url is None and is_abandoned(data_dir)
    async with EmbeddedPostgres(data_dir) as server:
        assert await one(server.url) == 1


async def test_a_server_that_dies_is_started_again(data_dir, eventually):
    async with EmbeddedPostgres(data_dir) as server:
        supervisor = asyncio.create_task(server.supervise())
        first = server.pid
        assert first is not None
        os.kill(first, signal.SIGKILL)

        async def back() -> bool:
            try:
                return server.pid not in (None, first) and await one(server.url) == 1
            except (OSError, asyncpg.PostgresError):
                return False

        await eventually(back)
        supervisor.cancel()
        with pytest.raises(asyncio.CancelledError):
            await supervisor


async def test_a_server_that_cannot_come_back_yet_comes_back_later(data_dir, eventually, monkeypatch):
    monkeypatch.setattr(embedded, "_BACKOFF_SECONDS", (0.01, 0.02))
    async with EmbeddedPostgres(data_dir) as server:
        configuration = data_dir / "postgres-18" / "postgresql.conf"
        configuration.write_text("nonsense = 1\n")
        with structlog.testing.capture_logs() as logged:
            supervisor = asyncio.create_task(server.supervise())
            assert server.pid is not None
            os.kill(server.pid, signal.SIGKILL)

            async def tried_often() -> bool:
                return len(logged) > 6

            await eventually(tried_often)
            configuration.write_text("")

            async def back() -> bool:
                try:
                    return await one(server.url) == 1
                except (OSError, asyncpg.PostgresError):
                    return False

            await eventually(back)
        assert {entry["event"] for entry in logged} == {"embedded_postgres_down"}
        assert "nonsense" in logged[0]["problem"]
        supervisor.cancel()
        with pytest.raises(asyncio.CancelledError):
            await supervisor


async def test_a_state_that_cannot_be_read_ends_nothing(tmp_path, monkeypatch):
    """A relay checks every two seconds, and there may be no file just then."""
    monkeypatch.setattr(embedded, "_CHECK_INTERVAL", 0.01)
    (tmp_path / "postgres-18/postmaster.pid").mkdir(parents=True)
    server = EmbeddedPostgres(tmp_path)
    server._server = ServerProcess()
    monkeypatch.setattr(ServerProcess, "has_given_up", lambda self: False)
    supervisor = asyncio.create_task(server.supervise())
    await asyncio.sleep(0.1)
    assert not supervisor.done()
    supervisor.cancel()
    with pytest.raises(asyncio.CancelledError):
        await supervisor


async def test_the_log_of_a_server_that_runs_for_long_is_cut(data_dir, eventually, monkeypatch):
    """Clients that subscribe and leave, again and again, write a line to it each time."""
    monkeypatch.setattr(embedded, "_CHECK_INTERVAL", 0.05)
    monkeypatch.setattr(embedded, "_MAX_LOG_BYTES", 10_000)
    log, former = data_dir / "postgres.log", data_dir / "postgres.log.1"
    async with EmbeddedPostgres(data_dir) as server:
        supervisor = asyncio.create_task(server.supervise())
        connection = await asyncpg.connect(server.url)

        async def say(word: str) -> None:
            with pytest.raises(asyncpg.PostgresError):
                await connection.execute(f"SELECT {word}")

        for n in range(100):
            await say(f"first_{n}_{'x' * 100}")
        await eventually(lambda: former.exists() and log.stat().st_size <= 10_000)
        assert "first_99_" in former.read_text() + log.read_text()
        await say("second")
        await eventually(lambda: "second" in log.read_text())
        assert "\0" not in log.read_text()
        former.unlink()
        former.mkdir()  # nothing can be copied there
        for n in range(100):
            await say(f"third_{n}_{'x' * 100}")
        await eventually(lambda: log.stat().st_size <= 10_000)
        await connection.close()
        supervisor.cancel()
        with pytest.raises(asyncio.CancelledError):
            await supervisor


@linux_tells
async def test_a_server_that_gave_up_its_recovery_is_started_again(data_dir, eventually, monkeypatch):
    """PostgreSQL 18 stays up and refuses all connections if its recovery from a failed sync fails to sync."""
    monkeypatch.setattr(embedded, "_CHECK_INTERVAL", 0.2)
    with FaultyDisk() as disk:
        for name, value in disk.environ.items():
            monkeypatch.setenv(name, value)
        async with EmbeddedPostgres(data_dir) as server:
            supervisor = asyncio.create_task(server.supervise())
            connection = await asyncpg.connect(server.url)
            await connection.execute("CREATE TABLE kept (value int)")
            disk.fail(failing=True)
            with pytest.raises((asyncpg.PostgresError, OSError)):
                await connection.execute("INSERT INTO kept VALUES (1)")
            await eventually(lambda: "pg_control" in (data_dir / "postgres.log").read_text())
            disk.fail(failing=False)

            async def back() -> bool:
                try:
                    return await one(server.url) == 1
                except (OSError, asyncpg.PostgresError):
                    return False

            await eventually(back, timeout=60.0)
            supervisor.cancel()
            with pytest.raises(asyncio.CancelledError):
                await supervisor


async def give_up(url: str, disk: FaultyDisk, data_dir: Path, eventually) -> None:
    """Bring a server into the state in which it refuses all connections: its recovery failed to sync."""
    connection = await asyncpg.connect(url)
    disk.fail(failing=True)
    with pytest.raises((asyncpg.PostgresError, OSError)):
        await connection.execute("CREATE TABLE lost (value int)")
    await eventually(lambda: "pg_control" in (data_dir / "postgres.log").read_text())
    disk.fail(failing=False)


@linux_tells
async def test_a_server_that_has_given_up_and_is_told_to_shut_down_is_started_again(
    data_dir, eventually, monkeypatch
):
    """It reports that it stops and never does."""
    monkeypatch.setattr(embedded, "_CHECK_INTERVAL", 0.2)
    with FaultyDisk() as disk:
        for name, value in disk.environ.items():
            monkeypatch.setenv(name, value)
        async with EmbeddedPostgres(data_dir) as server:
            first = server.pid
            await give_up(server.url, disk, data_dir, eventually)
            assert first is not None
            os.kill(first, signal.SIGINT)
            supervisor = asyncio.create_task(server.supervise())

            async def back() -> bool:
                try:
                    return server.pid not in (None, first) and await one(server.url) == 1
                except (OSError, asyncpg.PostgresError):
                    return False

            await eventually(back, timeout=60.0)
            supervisor.cancel()
            with pytest.raises(asyncio.CancelledError):
                await supervisor
    assert "received fast shutdown request" in (data_dir / "postgres.log").read_text()


@linux_tells
async def test_a_server_that_has_given_up_is_stopped_at_once(data_dir, monkeypatch, eventually):
    with FaultyDisk() as disk:
        for name, value in disk.environ.items():
            monkeypatch.setenv(name, value)
        async with EmbeddedPostgres(data_dir) as server:
            await give_up(server.url, disk, data_dir, eventually)
        assert not server.is_alive()
    said = (data_dir / "postgres.log").read_text()
    assert "received immediate shutdown request" in said
    assert "received fast shutdown request" not in said


async def test_a_server_that_has_given_up_outlives_no_relay_for_long(data_dir, monkeypatch, eventually):
    with FaultyDisk() as disk:
        for name, value in disk.environ.items():
            monkeypatch.setenv(name, value)
        with holder(data_dir) as (process, pid, url):
            await give_up(url, disk, data_dir, eventually)
            process.kill()
            process.wait()
            assert alive(pid)
            async with EmbeddedPostgres(data_dir, start_timeout=60.0) as server:
                assert not alive(pid)
                assert await one(server.url) == 1


async def test_a_server_that_cannot_start_says_why(data_dir):
    async with EmbeddedPostgres(data_dir):
        pass
    (data_dir / "postgres-18" / "postgresql.conf").write_text("nonsense = 1\n")
    with pytest.raises(EmbeddedPostgresError, match="nonsense"):
        await EmbeddedPostgres(data_dir).start()
    (data_dir / "postgres-18" / "postgresql.conf").write_text("")
    async with EmbeddedPostgres(data_dir) as server:
        assert await one(server.url) == 1


def test_of_a_first_start_that_fails_the_reason_is_told_alone():
    output = """creating configuration files ... ok
running bootstrap script ... 2026-11-26 22:49:30 UTC [1] FATAL:  could not write: No space left on device
child process exited with exit code 1
initdb: removing contents of data directory "/proc/self/fd/14"
"""
    said = embedded._reasons(output)
    assert "No space left on device" in said and "ok" not in said.split() and "\n" not in said
    assert embedded._reasons("initdb: error: invalid locale\n") == "initdb: error: invalid locale"
    assert embedded._reasons("one\ntwo\n") == "one | two"
    assert embedded._reasons("") == ""


async def test_stopping_twice_is_fine(data_dir):
    server = EmbeddedPostgres(data_dir)
    await server.start()
    await server.stop()
    await server.stop()
    assert not server.is_alive()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root runs the server as somebody else")
async def test_for_root_it_runs_as_somebody_else_even_below_a_closed_folder(tmp_path):
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    async with EmbeddedPostgres(closed / "data") as server:
        assert os.stat(f"/proc/{server.pid}").st_uid != 0
        assert await one(server.url) == 1
    assert closed.stat().st_mode & 0o777 == 0o700


def test_reachable_means_every_folder_on_the_way(tmp_path):
    folder = tmp_path / "a" / "b"
    folder.mkdir(parents=True)
    stranger = Owner(54_321, 54_321)
    for path in (folder, folder.parent, tmp_path):
        path.chmod(0o711)
    # The folders above are not ours to open: take them as they are.
    closed_above = [path for path in tmp_path.parents if not path.stat().st_mode & 0o001]
    assert is_reachable(folder, stranger) is not bool(closed_above)
    folder.parent.chmod(0o700)
    assert not is_reachable(folder, stranger)
    assert is_reachable(folder, None)


async def test_a_server_that_recovers_takes_as_long_as_it_goes_on(new_dir, monkeypatch):
    programs, cluster = new_dir / "bin", new_dir / "postgres-18"
    programs.mkdir(parents=True)
    cluster.mkdir()
    (cluster / "PG_VERSION").write_text("18\n")
    server = programs / "postgres"
    server.write_text("#!/bin/sh\nfor n in $(seq 20); do echo redo $n; sleep 0.3; done; echo redone\n")
    server.chmod(0o755)
    monkeypatch.setattr(embedded, "find_binaries", lambda owner: programs)
    monkeypatch.setattr(embedded, "server_owner", lambda folder: None)
    with pytest.raises(EmbeddedPostgresError, match=r"did not start; .*redone"):
        await EmbeddedPostgres(new_dir, start_timeout=4.0).start()
    server.write_text("#!/bin/sh\necho starts\nexec sleep 60\n")
    with pytest.raises(EmbeddedPostgresError, match="did not start in time"):
        await EmbeddedPostgres(new_dir, start_timeout=0.3).start()
