"""A PostgreSQL server as operators run one: over TCP, with passwords; the relay's role is not a superuser."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from relayd.postgres.binaries import find_binaries, server_owner
from tests.support.ports import free_port

__all__ = ["ExternalPostgres"]

_HBA = """
local all all scram-sha-256
host all all 127.0.0.1/32 scram-sha-256
host replication all 127.0.0.1/32 scram-sha-256
"""


class ExternalPostgres:
    """The server, as a context manager. `url` is the relay's, whose role is not a superuser.

    `binaries` is the folder of another version's programs; by default it is the one that relayd ships.
    """

    def __init__(self, binaries: Path | None = None) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="external-postgres-"))
        self._user = server_owner(self._folder / "data")
        self._bin = binaries or find_binaries(self._user)
        self.data = self._folder / "data"
        self.port = free_port()
        self.url = f"postgresql://relayd:a%20secret@127.0.0.1:{self.port}/relayd"

    def __enter__(self) -> ExternalPostgres:
        if self._user is not None:
            os.chown(self._folder, self._user.uid, self._user.gid)
        password = self._folder / "password"
        password.write_text("of the owner\n")
        password.chmod(0o644)
        self._run(
            "initdb", "-U", "owner", "-A", "scram-sha-256", "--pwfile", str(password), "-D", str(self.data)
        )
        (self.data / "pg_hba.conf").write_text(_HBA)
        self.start()
        self._run(
            "psql", "-X", "-q", "-d", f"postgresql://owner:of%20the%20owner@127.0.0.1:{self.port}/postgres",
            "-c", "CREATE ROLE relayd LOGIN REPLICATION PASSWORD 'a secret'",
            "-c", "CREATE DATABASE relayd OWNER relayd",
        )  # fmt: skip
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        shutil.rmtree(self._folder, ignore_errors=True)

    def start(self) -> None:
        """Start it, and wait until it answers."""
        options = f"-p {self.port} -c listen_addresses=127.0.0.1 -c unix_socket_directories={self._folder}"
        log = str(self._folder / "log")
        self._run("pg_ctl", "-w", "-s", "-D", str(self.data), "-l", log, "-o", options, "start")

    def stop(self) -> None:
        """Stop it, if it is running."""
        self._run("pg_ctl", "-w", "-s", "-D", str(self.data), "-m", "immediate", "stop", may_fail=True)

    def put_back(self, base: Path) -> None:
        """Replace its data by a base backup, as PostgreSQL's documentation says."""
        shutil.rmtree(self.data)
        shutil.copytree(base, self.data, symlinks=True)
        if self._user is not None:
            for folder, _, files in os.walk(self.data):
                for name in (folder, *(os.path.join(folder, file) for file in files)):
                    os.chown(name, self._user.uid, self._user.gid, follow_symlinks=False)

    def _run(self, program: str, *arguments: str, may_fail: bool = False) -> None:
        as_user: dict[str, Any] = {"cwd": self._folder}
        if self._user is not None:
            as_user |= {"user": self._user.uid, "group": self._user.gid, "extra_groups": []}
        done = subprocess.run(
            [str(self._bin / program), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            **as_user,
        )
        assert may_fail or done.returncode == 0, done.stderr
