"""An embedded PostgreSQL: a real server on a folder of ours that lives and dies with this process.

    <data_dir>/relayd.lock            held while a relay uses the folder
    <data_dir>/relayd.link            the place of the short link to a cluster with a long path, while in use
    <data_dir>/postgres.log           the log of the server; older lines are in postgres.log.1
    <data_dir>/relayd.restoring       there until the restore of a backup is complete
    <data_dir>/postgres-18/           the cluster, mode 0700; its socket is inside, so only its owner connects

The server is a child that the kernel (or a watchdog, see `launcher`) shuts down when we die, however that
happens. A folder of another major version is never touched: it would need pg_upgrade.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from relayd import failpoints
from relayd.left_folders import is_held
from relayd.logs import get_logger, problem_of
from relayd.postgres.binaries import EmbeddedPostgresError, Owner, find_binaries, open_to, server_owner
from relayd.postgres.durable import make_durable
from relayd.postgres.process import ServerProcess, is_postgres
from relayd.postgres.running import fits_url, url_of
from relayd.store.provision import provision

__all__ = ["EmbeddedPostgres", "EmbeddedPostgresError", "is_abandoned", "is_used"]

_logger = get_logger(__name__)

_MAJOR = 18
_USER = "relayd"
_PORT = 5432
_LOCK = "relayd.lock"
_LINK_NOTE = "relayd.link"
_UNFINISHED = "relayd.restoring"
_MAX_LOG_BYTES = 16 * 2**20
_POLL_INTERVAL = 0.01
_BACKOFF_SECONDS = (0.1, 5.0)
"""The wait between two attempts to restart a dead server: at first, and at most."""
_CHECK_INTERVAL = 2.0
_LOOKS = 2
"""How many times in a row a server must seem to have given up before it is ended: a single look may fall
between two processes."""
_LOOKS_WHILE_STOPPING = 15
"""The same while it shuts down: a server that writes its last checkpoint looks the same."""
_LOOKED_AT = 2000
_REASON = re.compile(r"\b(error|ERROR|FATAL|PANIC): ")
_LAUNCHER = Path(__file__).with_name("launcher.py")

_SETTINGS = {
    "unix_socket_directories": ".",  # the cluster itself: private, and short however deep the folder is
    "unix_socket_permissions": "0700",
    "max_connections": "100",
    "shared_buffers": "128MB",
    "max_wal_size": "2GB",
    "wal_compression": "off",
    "jit": "off",
    "log_line_prefix": "%m [%p] ",
    "log_checkpoints": "off",
    "timezone": "UTC",
    "log_timezone": "UTC",
}


class EmbeddedPostgres:
    """A PostgreSQL server as an async context manager; `url` is valid inside it.

    A start is given up after `start_timeout` if the server has logged nothing new for half of that time.

    `tcp_port` makes the server also listen on 127.0.0.1 (0 is not accepted: choose one), with the password
    that `tcp_url` contains; Spark and JDBC need that. Children of this process may also use `url`.

    `left` tells how many seconds this process has left to live, once that is known: stopping the server takes
    no longer.

    `fill` is called in a thread to make a cluster in place of `initdb`, with a folder that does not exist yet
    and a function that says whether to stop. Then `start` refuses a folder that has a cluster. Until `accept`
    is called, however this ends, the folder is refused to every start without `fill`.
    """

    def __init__(
        self,
        data_dir: Path | str,
        *,
        tcp_port: int | None = None,
        start_timeout: float = 120.0,
        fill: Callable[[Path, Callable[[], bool]], None] | None = None,
        left: Callable[[], float] | None = None,
    ) -> None:
        self._data_dir = Path(data_dir).resolve()
        self._cluster = self._data_dir / f"postgres-{_MAJOR}"
        self._log = self._data_dir / "postgres.log"
        self._tcp_port = tcp_port
        self._port = tcp_port or _PORT  # it names the socket even if nothing listens on TCP
        self._start_timeout = start_timeout
        self._fill = fill
        self._left = left or (lambda: float("inf"))
        self._is_new = False
        self._owner: Owner | None = None
        self._lock_fd: int | None = None
        self._alias: Path | None = None
        self._server: ServerProcess | None = None
        self._stopping = False

    async def __aenter__(self) -> EmbeddedPostgres:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    @property
    def url(self) -> str:
        """The URL of the database, for processes of this machine that run as root or as the server's user."""
        folder = self._alias or self._cluster
        return url_of(folder, self._port)

    @property
    def tcp_url(self) -> str:
        """The URL over TCP, including the password. Raises `EmbeddedPostgresError` without `tcp_port`."""
        if self._tcp_port is None:
            raise EmbeddedPostgresError("the embedded PostgreSQL was not asked to listen on TCP")
        return f"postgresql://{_USER}:{self._password()}@127.0.0.1:{self._tcp_port}/{_USER}"

    @property
    def pid(self) -> int | None:
        """The server's process id; None while it does not run."""
        return self._server.pid if self._server is not None and self._server.is_alive() else None

    def is_alive(self) -> bool:
        """Whether the server's process runs."""
        return self.pid is not None

    async def start(self) -> None:
        """Make the cluster if there is none, and start the server.

        Raises `EmbeddedPostgresError` if the folder is in use, belongs to another version or cannot be
        written, or if the server does not start. Exceptions of `fill` pass, except that an `OSError` becomes
        an `EmbeddedPostgresError`. Cancelling stops what was started.
        """
        self._stopping = False
        try:
            await self._prepared()
            await self._start_server()
            # `initdb` makes neither our database nor the password for TCP.
            await provision(
                self.url,
                _USER,
                is_new=self._is_new,
                password=None if self._tcp_port is None else self._password(),
                timeout=self._start_timeout,
            )
        except BaseException as error:
            await asyncio.shield(self.stop())
            if isinstance(error, OSError):
                problem = f"the data folder {self._data_dir} cannot be used: {problem_of(error)}"
                raise EmbeddedPostgresError(problem) from error
            raise

    async def stop(self) -> None:
        """Shut the server down and release the folder. Idempotent; after cancelling, it still shuts down."""
        self._stopping = True
        if self._server is not None:
            await self._server.stop(self._left)
        self._release()

    def accept(self) -> None:
        """Confirm that the cluster made by `fill` is as it should be."""
        (self._data_dir / _UNFINISHED).unlink(missing_ok=True)
        make_durable(self._data_dir)

    async def supervise(self) -> None:
        """Restart the server whenever it dies or gives up, until `stop` or cancellation.

        It retries without limit: what keeps a server down, such as a full disk, is repaired from outside.
        Each failure is logged with the last lines of the server's log.
        """
        while not self._stopping:
            assert self._server is not None, "start() comes first"
            await self._until_down(self._server)
            if failpoints.ARMED:
                await failpoints.reached("postgres.supervise")
            delay, longest = _BACKOFF_SECONDS
            while not self._stopping:
                try:
                    await self._start_server()
                    break
                except (EmbeddedPostgresError, OSError, RuntimeError) as error:  # the last: no thread
                    _logger.error("embedded_postgres_down", problem=problem_of(error), retry_in=delay)
                    await asyncio.sleep(delay)
                    delay = min(delay * 2, longest)

    async def _until_down(self, server: ServerProcess) -> None:
        """Wait until the server has died; end one that has given up and would refuse everybody forever."""
        suspicions = 0
        while not server.exited.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_CHECK_INTERVAL):
                    await server.exited.wait()
            with contextlib.suppress(RuntimeError):  # the system allows no new thread: try next time
                await asyncio.to_thread(self._tend_files)
            suspicions = suspicions + 1 if server.has_given_up() else 0
            # A server that has given up keeps refusing everybody and never ends, even when told to shut down.
            if suspicions >= (_LOOKS_WHILE_STOPPING if self._state() == "stopping" else _LOOKS):
                _logger.error("embedded_postgres_gave_up", problem=self._last_words())
                await server.stop(lambda: 4.0)

    async def _prepared(self) -> None:
        preparing = asyncio.ensure_future(asyncio.to_thread(self._prepare))
        try:
            await asyncio.shield(preparing)
        except asyncio.CancelledError:
            # The thread works in the folder: neither its lock nor its contents may be removed before it ends.
            self._stopping = True
            await asyncio.gather(preparing, return_exceptions=True)
            raise

    def _prepare(self) -> None:
        self._is_new = False
        self._data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock()
        unfinished = self._data_dir / _UNFINISHED
        if self._fill is None and unfinished.exists():
            raise EmbeddedPostgresError(
                f"a backup was being put back into {self._data_dir}, and not to the end: remove"
                f" {self._cluster}, if it is there, and put it back again; or remove {unfinished} to use what"
                " is there, as it is"
            )
        self._owner = server_owner(self._cluster)
        others = [path for path in self._data_dir.glob("postgres-*") if path.name[9:].isdecimal()]
        if not self._cluster.exists():
            if others:
                raise EmbeddedPostgresError(
                    f"{others[0]} was written by another version of PostgreSQL than {_MAJOR}; "
                    "move its data with pg_upgrade or relayd export, or choose another folder"
                )
            self._make_cluster()
        elif self._fill is not None:
            raise EmbeddedPostgresError(
                f"{self._cluster} is there already: move it away, or choose another --data-dir"
            )
        version = (self._cluster / "PG_VERSION").read_text().strip()
        if version != str(_MAJOR):
            raise EmbeddedPostgresError(f"{self._cluster} holds data of PostgreSQL {version}, not {_MAJOR}")
        self._clear_stale_pid()
        if not fits_url(self._cluster, self._port):
            # The server binds a relative path; clients connect through a short link to the same folder.
            self._alias = self._short_link()

    def _short_link(self) -> Path:
        """A link to the cluster with a short path. The link of a relay that was killed is reused."""
        note = self._data_dir / _LINK_NOTE
        with contextlib.suppress(OSError, ValueError):
            link = Path(note.read_text())
            # In a folder where anybody may write, only our own link counts.
            owners = {link.lstat().st_uid, link.parent.lstat().st_uid}
            if owners == {os.geteuid()} and link.readlink() == self._cluster:
                return link
        link = Path(tempfile.mkdtemp(prefix="relayd-")) / "pg"
        link.symlink_to(self._cluster)
        note.write_text(str(link))
        return link

    def _keep_link(self) -> None:
        """Make the link again if it is gone, as temporary folders are cleaned of old files: without it no new
        connection to the server is possible."""
        link = self._alias
        if link is None or self._stopping or os.path.lexists(link):
            return
        with contextlib.suppress(OSError):
            link.parent.mkdir(mode=0o700, exist_ok=True)
            if link.parent.lstat().st_uid == os.geteuid():  # anybody may write there
                link.symlink_to(self._cluster)

    def _lock(self) -> None:
        self._lock_fd = os.open(self._data_dir / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise EmbeddedPostgresError(
                f"another relay uses {self._data_dir}; stop it, choose another --data-dir, "
                "or give both a --database-url"
            ) from None

    def _make_cluster(self) -> None:
        """Make the cluster under another name, and rename it when complete: no partial one is ever used."""
        fresh = self._cluster.with_name(f"{self._cluster.name}.new")
        shutil.rmtree(fresh, ignore_errors=True)
        if self._fill is None:
            self._initialise(fresh)
            self._is_new = True
        else:
            (self._data_dir / _UNFINISHED).touch()
            make_durable(self._data_dir)
            self._fill(fresh, lambda: self._stopping)
        fresh.rename(self._cluster)
        # The names of the folders above may not be on the disk yet, whoever made them.
        make_durable(self._data_dir, *self._data_dir.parents)

    def _initialise(self, fresh: Path) -> None:
        fresh.mkdir(mode=0o700)
        if self._owner is not None:
            os.chown(fresh, self._owner.uid, self._owner.gid)
        command = [
            str(find_binaries(self._owner) / "initdb"), f"--username={_USER}", "--auth=trust",
            # A commit at the end of a WAL file waits until the next file is made and filled with zeros: some
            # 2 ms for a megabyte, and 30 for the usual sixteen.
            "--wal-segsize=1",
            "--data-checksums", "--encoding=UTF8",
            "--locale=C", "--locale-provider=builtin", "--builtin-locale=C.UTF-8",
        ]  # fmt: skip
        with open_to(fresh, self._owner) as (folder, fds):
            process = subprocess.run(
                self._launch([*command, f"--pgdata={folder}"]),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=fds,
                start_new_session=True,  # Ctrl-C is for the relay, which stops once this is done
                timeout=self._start_timeout,
                check=False,
            )
        if process.returncode:
            raise EmbeddedPostgresError(f"initdb failed: {_reasons(process.stdout.decode(errors='replace'))}")
        # Only the owner of the folder and root can reach the socket; TCP asks for the password.
        rules, password = fresh / "pg_hba.conf", fresh / "password"
        rules.write_text("local all all trust\nhost all all 127.0.0.1/32 scram-sha-256\n")
        self._write_private(password, secrets.token_urlsafe(24))
        # A packet that the server has on the disk is lost if the name of its folder is.
        make_durable(rules, password, fresh)

    def _write_private(self, path: Path, text: str) -> None:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(fd, "w") as file:
            file.write(text)
        if self._owner is not None:
            os.chown(path, self._owner.uid, self._owner.gid)

    def _clear_stale_pid(self) -> None:
        """Wait for the server of a relay that was killed, and clear up after a server that was killed itself.

        We hold the folder's lock, so a server that is still there is shutting down. One that has given up
        never ends: after a quarter of the time it is told to shut down at once. A pid file that names a
        process that is not a server of this folder is left over from before a reboot or from another
        container, and so is the lock of the socket; PostgreSQL would refuse to start as long as an unrelated
        process has that number. (Processes that outlive their server keep the next one away without these
        files.)
        """
        pid_file = self._cluster / "postmaster.pid"
        deadline = time.monotonic() + self._start_timeout
        patience = deadline - 0.75 * self._start_timeout
        while True:
            try:
                pid = int(pid_file.read_text().split("\n", 1)[0])
            except FileNotFoundError:
                break
            except ValueError:  # half written: PostgreSQL takes that for a server that is starting
                pid = 0
            if not pid or not is_postgres(pid, self._cluster):
                pid_file.unlink(missing_ok=True)
                break
            if self._stopping or time.monotonic() > deadline:
                raise EmbeddedPostgresError(
                    f"a PostgreSQL server (process {pid}) still runs on {self._cluster}"
                )
            if time.monotonic() > patience:
                _logger.warning("embedded_postgres_left_over", pid=pid, problem="it is told to end at once")
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGQUIT)
                patience = deadline
            time.sleep(0.05)
        for path in self._cluster.glob(".s.PGSQL.*.lock"):
            path.unlink(missing_ok=True)

    def _launch(self, command: list[str]) -> list[str]:
        uid, gid = (self._owner.uid, self._owner.gid) if self._owner is not None else (-1, -1)
        python = [sys.executable, "-I", "-S", str(_LAUNCHER), str(uid), str(gid), str(os.getpid()), "--"]
        return [*python, *command]

    async def _start_server(self) -> None:
        listen = "" if self._tcp_port is None else "127.0.0.1"
        settings = _SETTINGS | {"listen_addresses": listen, "port": str(self._port)}
        with contextlib.suppress(FileNotFoundError):
            if self._log.stat().st_size > _MAX_LOG_BYTES:
                self._log.replace(self._log.with_suffix(".log.1"))
        server = ServerProcess()
        with open_to(self._cluster, self._owner) as (folder, fds):
            command = [str(find_binaries(self._owner) / "postgres"), "-D", folder]
            command += [f"--{name}={value}" for name, value in settings.items()]
            server.start(self._launch(command), self._log, fds)
        self._server = server
        said = None
        try:
            while not await self._comes_up(server):
                # The time to recover depends on the disk. The server logs its progress every ten seconds, and
                # if it is ended, it must start over.
                if said == self._last_words():
                    raise EmbeddedPostgresError(f"PostgreSQL did not start in time; {said}")
                said = self._last_words()
        except BaseException:
            await asyncio.shield(server.stop(self._left))
            raise

    def _tend_files(self) -> None:
        self._keep_link()
        self._cut_log()

    def _cut_log(self) -> None:
        """Keep the log of a server that runs for months from filling the disk: each read that a reader
        abandons in the middle of a page adds a line and a statement. The server continues at the end of the
        same file."""
        with contextlib.suppress(OSError):
            if self._log.stat().st_size <= _MAX_LOG_BYTES:
                return
            former = self._log.with_suffix(".log.1")
            try:
                shutil.copyfile(self._log, former)
            except OSError:  # no room for both
                with contextlib.suppress(OSError):
                    former.unlink(missing_ok=True)
            os.truncate(self._log, 0)

    async def _comes_up(self, server: ServerProcess) -> bool:
        """Wait until a server is ready; False after half of `start_timeout`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._start_timeout / 2):
                while not self._is_ready(server.pid):
                    if not server.is_alive():
                        raise EmbeddedPostgresError(f"PostgreSQL did not start; {self._last_words()}")
                    await asyncio.sleep(_POLL_INTERVAL)
                return True
        return False

    def _password(self) -> str:
        return (self._cluster / "password").read_text()

    def _is_ready(self, pid: int) -> bool:
        return self._pid_file()[:1] == [str(pid)] and self._state() == "ready"

    def _state(self) -> str | None:
        """The state in the server's pid file: `starting`, `ready`, `stopping`; None before there is one."""
        lines = self._pid_file()
        return lines[7].strip() if len(lines) > 7 else None

    def _pid_file(self) -> list[str]:
        try:
            return (self._cluster / "postmaster.pid").read_text().split("\n")
        except OSError:  # it is not there, or cannot be read just now, for example for lack of a descriptor
            return []

    def _last_words(self) -> str:
        try:
            lines = self._log.read_text(errors="replace").strip().splitlines()
        except OSError:
            lines = []
        # While the database is down, there is such a line for each client, which would hide the reason.
        telling = [line for line in lines[-_LOOKED_AT:] if "FATAL:  the database system is" not in line]
        return f"the end of {self._log}: " + " | ".join(telling[-5:])

    def _release(self) -> None:
        if self._alias is not None:
            shutil.rmtree(self._alias.parent, ignore_errors=True)
            with contextlib.suppress(OSError):
                (self._data_dir / _LINK_NOTE).unlink()
            self._alias = None
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None


def is_used(data_dir: Path) -> bool:
    """Whether this folder has, or may have, a server's data, of any version and in any state. A folder that
    may not be read counts: opening it will show the error."""
    try:
        names = os.listdir(data_dir)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return _UNFINISHED in names or any(name.startswith("postgres-") for name in names)


def is_abandoned(data_dir: Path) -> bool:
    """Whether the process that used this folder has ended, and its server too. Raises `OSError`, also for a
    folder that no process has used yet."""
    if is_held(data_dir / _LOCK):
        return False
    cluster = data_dir / f"postgres-{_MAJOR}"
    try:
        return not is_postgres(int((cluster / "postmaster.pid").read_text().split("\n", 1)[0]), cluster)
    except (FileNotFoundError, ValueError):
        return True


def _reasons(output: str) -> str:
    """The errors in the output of a program of PostgreSQL, without its messages about progress."""
    lines = [line.strip() for line in output.strip().splitlines()]
    return " | ".join([line for line in lines if _REASON.search(line)] or lines[-5:])
