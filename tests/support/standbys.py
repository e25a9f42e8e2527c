"""A physical standby of a test's PostgreSQL server, for replicas that lag and failovers that lose commits."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, urlsplit

import asyncpg

from relayd.postgres.binaries import find_binaries, server_owner

__all__ = ["Standby"]

_PORT = 5433  # it only names the socket


class Standby:
    """A standby of the embedded server at `url`, as an asynchronous context manager.

    The folder of the primary must be open to the user that the servers run as.
    """

    def __init__(self, url: str) -> None:
        self._primary_url = url
        self._primary = parse_qs(urlsplit(url).query)["host"][0]
        self._database = urlsplit(url).path
        self._user = server_owner(Path(self._primary))
        self._bin = find_binaries(self._user)
        self._folder = Path(tempfile.mkdtemp(prefix="relayd-standby-"))
        if self._user is not None:
            os.chown(self._folder, self._user.uid, self._user.gid)
        self._server: subprocess.Popen[bytes] | None = None
        self.url = f"postgresql://relayd@{self._database}?host={quote(str(self._folder))}&port={_PORT}"

    async def __aenter__(self) -> Standby:
        try:
            with (Path(self._primary) / "pg_hba.conf").open("a") as file:
                file.write("local replication all trust\n")
            primary = await asyncpg.connect(self._primary_url)
            await primary.execute("SELECT pg_reload_conf()")
            await primary.close()
            await asyncio.to_thread(self._start)
            async with asyncio.timeout(30):
                while not await self._answers():  # noqa: ASYNC110 - another process
                    await asyncio.sleep(0.05)
        except BaseException:
            self._stop()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self._stop)

    @property
    def pid(self) -> int:
        """The process id of the server."""
        assert self._server is not None
        return self._server.pid

    async def execute(self, statement: str) -> Any:
        """Run a statement; returns its one value."""
        connection = await asyncpg.connect(self.url)
        try:
            return await connection.fetchval(statement)
        finally:
            await connection.close()

    async def lose_contact(self) -> None:
        """Receive nothing more from the primary."""
        await self.execute("ALTER SYSTEM SET primary_conninfo = ''")
        await self.execute("SELECT pg_reload_conf()")
        async with asyncio.timeout(30):
            while await self.execute("SELECT count(*) FROM pg_stat_wal_receiver"):  # noqa: ASYNC110
                await asyncio.sleep(0.05)

    async def promote(self) -> None:
        """Become a primary, with the data received so far."""
        assert await self.execute("SELECT pg_promote()")

    def _start(self) -> None:
        data = self._folder / "data"
        self._run("pg_basebackup", "-h", self._primary, "-U", "relayd", "-D", str(data), "-R", "-c", "fast")
        with (self._folder / "log").open("wb") as log:
            self._server = subprocess.Popen(
                [str(self._bin / "postgres"), "-D", str(data), f"--port={_PORT}",
                 f"--unix_socket_directories={self._folder}", "--listen_addresses=", "--fsync=on"],
                stdout=log, stderr=log, **self._as_user(),
            )  # fmt: skip

    def _run(self, program: str, *arguments: str) -> None:
        done = subprocess.run(
            [str(self._bin / program), *arguments], capture_output=True, text=True, timeout=60, check=False,
            **self._as_user(),
        )  # fmt: skip
        assert done.returncode == 0, done.stderr

    def _as_user(self) -> dict[str, Any]:
        as_user: dict[str, Any] = {"cwd": self._folder}
        if self._user is not None:
            as_user |= {"user": self._user.uid, "group": self._user.gid, "extra_groups": []}
        return as_user

    async def _answers(self) -> bool:
        try:
            return bool(await self.execute("SELECT true"))
        except (OSError, asyncpg.PostgresError):
            return False

    def _stop(self) -> None:
        if self._server is not None:
            self._server.terminate()
            try:
                self._server.wait(10)
            except subprocess.TimeoutExpired:
                self._server.kill()
                self._server.wait()
        shutil.rmtree(self._folder, ignore_errors=True)
