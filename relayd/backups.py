"""Base backups of a relay's PostgreSQL, and the drill that reports what a backup contains.

    DIR/base/          the output of pg_basebackup, with the WAL needed to start it, and its manifest
    DIR/wal/           the WAL that pg_receivewal has written since, while `follow` ran
    DIR/relayd.json    how far the log had come when the backup began: at least this much must come back

PostgreSQL's own programs do the work: pg_basebackup copies, and pg_verifybackup checks every file. They
cannot say whether the log is whole. So the drill starts the copy in a separate folder, counts each day's
places, recomputes every packet's id, and compares the result with what was acknowledged.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

import msgspec

from relayd.database_url import authority_of, each_server
from relayd.left_folders import remove_left
from relayd.postgres import EmbeddedPostgres, EmbeddedPostgresError
from relayd.postgres.binaries import find_binaries, server_owner
from relayd.postgres.durable import make_durable
from relayd.postgres.embedded import is_abandoned
from relayd.store import Store
from relayd.store.counting import count_log, log_end, packets_beyond, reload_server, system_identifier
from relayd.store.migrate import migrate
from relayd.store.types import StoreError

__all__ = ["BackupFailed", "Drilled", "create", "drill", "follow", "restore"]

_WAL: Final = "wal"
_KEPT_WAL: Final = "restored_wal"
"""The folder of the WAL in a cluster that is being restored: the only place that the server can certainly
enter."""
_RESTORE: Final = (
    'for f in {wal}/%f {wal}/%f.partial; do [ ! -e $f ] || {{ cp $f "%p" || exit 255; exit; }}; done; exit 1'
)
"""PostgreSQL takes exit code 1 for the end of all WAL, and starts serving. So a file that exists but cannot
be copied, for example to a full disk, ends with 255, which stops the server."""
_RECOVERY: Final = f"""
restore_command = '{_RESTORE}'
recovery_target = ''
recovery_target_lsn = ''
recovery_target_name = ''
recovery_target_xid = ''
recovery_target_time = '{{until}}'
recovery_target_action = 'promote'
recovery_target_timeline = 'latest'
hot_standby = off
"""
"""With `hot_standby` off nobody can connect, to count or to write, before the replay has ended. Every target
is set: a server that was itself restored to a moment has that moment in its settings, and so has its
backup."""
_NOT_REACHED: Final = "recovery ended before configured recovery target was reached"
"""PostgreSQL's message if nothing was committed after the moment to stop at: it cannot know whether WAL is
missing."""
_SIGNAL: Final = "recovery.signal"
"""PostgreSQL removes this file once it has replayed all WAL."""
_RECORD: Final = "relayd.json"
_BASE: Final = "base"
_DRILL: Final = "relayd-drill-"
_DATA: Final = "data"
_RECOVERY_TIMEOUT: Final = 3600.0
_MAJOR: Final = "18"
"""The version of PostgreSQL that this program can start itself."""
_OF_THE_OTHER_SERVER: Final = shutil.ignore_patterns(
    ".s.PGSQL.*", "postmaster.pid", "postmaster.opts", "standby.signal", _SIGNAL, _KEPT_WAL
)
"""What must not be copied from the other server. Its sockets and lock files: its socket folder is the
cluster. The file that made it a standby: the copy would wait for its primary forever. And the WAL of its own
restore, if that was interrupted."""
_HBA_LINE: Final = "local replication all trust\n"
"""Only the owner of the folder and root can reach the socket, and they may do everything anyway."""
_HBA: Final = f"local all all trust\nhost all all 127.0.0.1/32 scram-sha-256\n{_HBA_LINE}"
_OURS: Final = "relayd@relayd"
"""The role and database of the servers that this program starts itself."""
_HBA_TRIES: Final = 50
_SEGMENT: Final = re.compile(r"[0-9A-F]{24}(\.partial)?")
_PARTIAL: Final = ".partial"
"""The suffix of a WAL file that is being received: filled with zeros at first, renamed when it is full."""
_WAL_PAGE: Final = 8192
_PAGE_HEADERS: Final = (24, 40)
"""The length of a WAL page's header, and of the header of a file's first page."""
_VERSION: Final = re.compile(r"\(PostgreSQL\) (\d+)")


class BackupFailed(StoreError):
    """A backup could not be made, checked or restored; the message says why."""


class _Record(msgspec.Struct):
    taken_at: int
    head: int
    epoch: int
    version: str
    owner: str | None = None
    """`role@database` of the operator's own server; None for an embedded one."""


@dataclass(frozen=True, slots=True)
class Drilled:
    """The contents of a backup, as counted."""

    head: int
    """The last sequence."""
    last_received_at: int
    packets: int
    erased: int
    missing: int
    """Places of the log without a row: acknowledged packets that are missing. 0 in a whole log."""
    damaged: int
    """Packets whose bytes do not hash to their id."""
    short_of_record: bool
    """Whether the log ends before the place that it had reached when the backup began."""
    behind: int | None = None
    """How many packets the live database has beyond the backup; None without a live database."""

    @property
    def is_whole(self) -> bool:
        """Whether everything acknowledged before the backup began is there."""
        return not (self.missing or self.damaged or self.short_of_record)


async def create(url: str, target: Path, *, data_dir: Path | None) -> int:
    """Make a base backup of the server at `url` in the new folder `target`, and check its files.

    Returns the sequence up to which the backup certainly contains the log. `data_dir` is given for an
    embedded server. Raises `BackupFailed` and `StoreUnavailable`. If it is interrupted, it leaves a folder
    without `relayd.json`, which is not a backup.
    """
    _make_empty(target)
    log = await log_end(url)
    if data_dir is not None and await asyncio.to_thread(_allow_replication, data_dir):
        await reload_server(url)
    taken_at = int(time.time())
    plain, password = _without_password(url)
    base = target / _BASE
    arguments = ("-d", plain, "-D", str(base), "-X", "stream", "-c", "fast", "--no-password")
    for attempt in range(_HBA_TRIES):
        try:
            await _run("pg_basebackup", *arguments, password=password)
            break
        except BackupFailed as error:
            if data_dir is None or "pg_hba.conf" not in str(error) or attempt + 1 == _HBA_TRIES:
                raise
            await asyncio.sleep(0.1)  # the server has not reloaded its file yet
    await _verify(base, str(log.major))
    owner = _owner(url) if data_dir is None else None
    record = _Record(taken_at, log.head, log.epoch, str(log.major), owner)
    await asyncio.to_thread(_write_record, target, record)
    return record.head


async def follow(url: str, backup: Path) -> None:
    """Write the WAL of the server at `url` into a backup continuously, so that every moment can be restored.

    Continues where it stopped before. It ends only with an error: `BackupFailed` if the server has stopped,
    is not the one that was backed up, or has removed WAL that is not here yet (then make a new backup).
    Cancelling stops it; what was written is kept.
    """
    _read_record(backup)
    if await system_identifier(url) not in (None, _copied_identifier(backup)):
        # pg_receivewal does not look, and none of that WAL could be replayed.
        raise BackupFailed(f"{backup} is of another server than this one: make a new backup")
    await asyncio.to_thread(_begin_wal, backup)
    plain, password = _without_password(url)
    await _run(
        "pg_receivewal", "-d", plain, "-D", str(backup / _WAL), "--no-loop", "--synchronous", "--no-password",
        password=password,
    )  # fmt: skip
    raise BackupFailed("pg_receivewal has ended: the server has stopped")


def _copied_identifier(backup: Path) -> int:
    """The system identifier of the server that was backed up, with which PostgreSQL's control file begins."""
    try:
        with (backup / _BASE / "global" / "pg_control").open("rb") as file:
            return int.from_bytes(file.read(8), sys.byteorder, signed=True)
    except OSError as error:
        raise BackupFailed(f"the backup is damaged: {error}") from None


def _begin_wal(backup: Path) -> None:
    """Put the WAL of the base backup first, so that the received WAL continues it without a gap.

    The last file of the base backup is received again: a backup of a standby may end within a file.
    """
    wal = backup / _WAL
    if wal.is_dir():
        for begun in wal.glob(f"*{_PARTIAL}"):
            # pg_receivewal refuses a file that a full disk or a kill has left half filled with zeros.
            if not _received(begun.read_bytes()):
                os.truncate(begun, 0)
    else:
        fresh = backup / f"{_WAL}.new"
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir(mode=0o700)
        files = sorted(path for path in (backup / _BASE / "pg_wal").iterdir() if len(path.name) == 24)
        for path in files:
            name = f"{path.name}{_PARTIAL}" if path is files[-1] else path.name
            make_durable(Path(shutil.copyfile(path, fresh / name)))
        make_durable(fresh)
        fresh.rename(wal)
        make_durable(backup)


async def drill(backup: Path, *, live_url: str | None = None) -> Drilled:
    """Check the files of a backup, start a copy of it, and count what is in its log.

    The copy is made in a temporary folder and removed, as are the copies of drills that were killed. Raises
    `BackupFailed`.
    """
    record = _read_record(backup)
    await _verify(backup / _BASE, record.version)
    await asyncio.to_thread(_remove_abandoned_drills)
    with tempfile.TemporaryDirectory(prefix=_DRILL) as folder:
        os.chmod(folder, 0o711)  # the server's user must be able to pass through
        async with _started(backup, record, Path(folder) / _DATA) as url:
            found = await _count(url, record)
    if live_url is None:
        return found
    return dataclasses.replace(found, behind=await packets_beyond(live_url, found.head))


def _remove_abandoned_drills() -> None:
    """Remove what this user's killed drills have left: each is a copy of a whole database."""
    remove_left(_DRILL, lambda folder: is_abandoned(folder / _DATA))


async def restore(
    backup: Path, data_dir: Path, *, verify: bool, until: datetime | None = None
) -> Drilled | None:
    """Restore a backup to a data folder that has no database yet, and begin an epoch of the log there.

    If the backup was followed, its WAL is replayed, either all of it or up to the commits of `until`. With
    `verify`, its files are checked and its log is counted first. Raises `BackupFailed`. If it is interrupted
    or fails, it leaves a folder that no relay takes for a database or for the place of a new one.
    """
    record = _read_record(backup)
    if verify:
        await _verify(backup / _BASE, record.version)
    found: Drilled | None = None
    async with _started(backup, record, data_dir, until) as url:
        if verify:
            found = await _count(url, record)
        await migrate(url)
        async with await Store.open(url, allow_unsafe=True) as store:
            # Readers may have come further in the lost log: they must be told.
            await store.begin_epoch("operator")
    return found


@contextlib.asynccontextmanager
async def _started(
    backup: Path, record: _Record, data_dir: Path, until: datetime | None = None
) -> AsyncIterator[str]:
    """A server on a copy of the backup, which stays in `data_dir`."""
    _check_startable(backup, record, until)
    cluster = data_dir / f"postgres-{_MAJOR}"
    owner = server_owner(cluster)
    is_copied = False

    def copy(fresh: Path, is_stopped: Callable[[], bool]) -> None:
        nonlocal is_copied

        def copy_file(source: str, target: str) -> str:
            if is_stopped():
                raise BackupFailed("the copy was stopped")
            return shutil.copy2(source, target)

        def copy_wal(source: str, target: str) -> None:
            _copy_received(source, target, copy_file)

        shutil.copytree(
            backup / _BASE, fresh, symlinks=True, ignore=_OF_THE_OTHER_SERVER, copy_function=copy_file
        )
        if record.owner is not None:
            _adopt(fresh)
        if (backup / _WAL).is_dir():
            shutil.copytree(backup / _WAL, fresh / _KEPT_WAL, copy_function=copy_wal)
            _replay(fresh, until)
        for folder, _, files in os.walk(fresh):
            os.chmod(folder, 0o700)
            if owner is not None:
                for name in (folder, *(os.path.join(folder, file) for file in files)):
                    os.chown(name, owner.uid, owner.gid, follow_symlinks=False)
        is_copied = True  # the server makes all of this durable as it recovers

    try:
        async with EmbeddedPostgres(data_dir, start_timeout=_RECOVERY_TIMEOUT, fill=copy) as server:
            if until is None and (cluster / _KEPT_WAL).is_dir():
                await asyncio.to_thread(_check_replayed, cluster)
            yield server.url
            server.accept()
    except EmbeddedPostgresError as error:
        if until is None or _NOT_REACHED not in str(error):
            raise
        raise BackupFailed(
            f"the WAL has no commit after {until:%Y-%m-%dT%H:%M:%SZ}: without --until all of it is put back"
        ) from None
    finally:
        # If the signal file is left, the server continues with that WAL when it is next started.
        if is_copied and not (cluster / _SIGNAL).exists():
            await asyncio.to_thread(shutil.rmtree, cluster / _KEPT_WAL, True)


def _check_startable(backup: Path, record: _Record, until: datetime | None) -> None:
    """Raise `BackupFailed` unless this program can start a server on the backup, as it was at `until`."""
    if record.version != _MAJOR:
        raise BackupFailed(
            f"the backup is of PostgreSQL {record.version}, and this program can start {_MAJOR} alone:"
            f" copy {backup / _BASE} to your server's data folder and start that"
        )
    if record.owner not in (None, _OURS):
        raise BackupFailed(
            f"the backup has the log of {record.owner}, and a server of this program has that of {_OURS}:"
            f" copy {backup / _BASE} to your server's data folder and start that"
        )
    if until is not None and not (backup / _WAL).is_dir():
        raise BackupFailed(f"{backup} was not followed: it has no moments to choose from")


def _copy_received(source: str, target: str, copy: Callable[[str, str], object]) -> None:
    """Copy a WAL file while `follow` may be running; a file that is still empty is left out.

    The last file is written from its beginning, so it is read twice: up to the last byte that the first read
    found, the second read finds everything. A copy with a hole in it would be damaged.
    """
    if not source.endswith(_PARTIAL):
        copy(source, target)
        return
    try:
        with open(source, "rb") as file:
            found = file.read()
            end = len(_received(found))
            file.seek(0)
            received = file.read(end)
    except FileNotFoundError:  # it is full by now and has its final name
        copy(source.removesuffix(_PARTIAL), target.removesuffix(_PARTIAL))
    else:
        if received:
            Path(target).write_bytes(received.ljust(len(found), b"\0"))


def _received(data: bytes) -> bytes:
    """The contents of a WAL file before the zeros that it was filled with."""
    return data.rstrip(b"\0")


def _adopt(cluster: Path) -> None:
    """Clear the copied server's own configuration: passwords, certificates, libraries, and everything else
    that its settings name and that is not here."""
    (cluster / "pg_hba.conf").write_text(_HBA)
    for name in ("postgresql.conf", "postgresql.auto.conf", "pg_ident.conf"):
        (cluster / name).write_text("")


def _owner(url: str) -> str:
    parts = urlsplit(each_server(url)[0])  # the user and the database are the same for all of them
    role = unquote(parts.username or "")
    return f"{role}@{unquote(parts.path.lstrip('/')) or role}"


def _replay(cluster: Path, until: datetime | None) -> None:
    """Make the server replay the WAL of the backup when it starts, and then become a primary."""
    moment = "" if until is None else f"{until.astimezone(UTC):%Y-%m-%d %H:%M:%S.%f+00}"
    lines = _RECOVERY.format(wal=_KEPT_WAL, until=moment)
    with (cluster / "postgresql.auto.conf").open("a") as file:
        file.write(lines)
    (cluster / _SIGNAL).touch()


def _check_replayed(cluster: Path) -> None:
    """Raise `BackupFailed` unless the replay has reached the end of the WAL: at a missing or damaged file
    PostgreSQL stops just as it does at the end."""
    names = sorted(path.name for path in (cluster / _KEPT_WAL).iterdir() if _SEGMENT.fullmatch(path.name))
    histories = sorted((cluster / "pg_wal").glob("*.history"))
    whole = [name for name in names if len(name) == 24]
    if not whole or not histories:
        return
    last = (cluster / _KEPT_WAL / whole[-1]).read_bytes()
    size = len(last)
    high, low = histories[-1].read_text().strip().splitlines()[-1].split("\t")[1].split("/")
    reached, within = divmod(int(high, 16) << 32 | int(low, 16), size)
    there = [int(name[8:16], 16) * (2**32 // size) + int(name[16:24], 16) for name in names]
    ended = there[names.index(whole[-1])]
    # It may end within the last whole file: that file's last record may continue in one not yet received.
    is_short = reached < ended or (reached == ended and _has_record(last, within))
    if is_short or any(b > a + 1 for a, b in itertools.pairwise(there)):
        raise BackupFailed(
            f"the WAL can be read up to {high}/{low} and no further, and there is more, up to {names[-1]}: a"
            " file of it is missing or damaged. With --until a moment before can be had"
        )


def _has_record(segment: bytes, start: int) -> bool:
    """Whether a WAL file contains, to its end, the record that begins at `start`, where another one ends.

    Only the length at a record's beginning shows whether the record is complete. If the length is 0, there is
    no record, and nothing follows.
    """
    there = len(_received(segment))
    at = start if start % _WAL_PAGE else start + _PAGE_HEADERS[start == 0]
    left = int.from_bytes(segment[at : at + 4], sys.byteorder)
    while left > (room := _WAL_PAGE - at % _WAL_PAGE):
        left -= room
        at += room + _PAGE_HEADERS[False]
    return there > start and there >= at + left


async def _count(url: str, record: _Record) -> Drilled:
    counted = await count_log(url)
    return Drilled(**counted._asdict(), short_of_record=counted.head < record.head)


def _allow_replication(data_dir: Path) -> bool:
    """Allow pg_basebackup to copy the server of an older data folder. Returns whether this was a change."""
    path = data_dir / f"postgres-{_MAJOR}" / "pg_hba.conf"
    text = path.read_text()
    if _HBA_LINE in text:
        return False
    # Appended, not rewritten: without its rules the server would not start again.
    with path.open("a") as file:
        file.write(_HBA_LINE if text.endswith("\n") else f"\n{_HBA_LINE}")
    return True


def _make_empty(target: Path) -> None:
    if target.exists() and any(target.iterdir()):
        raise BackupFailed(f"{target} is not empty: each backup has a folder of its own")
    target.mkdir(mode=0o700, parents=True, exist_ok=True)


def _write_record(target: Path, record: _Record) -> None:
    """Write the record, last of all and durably: this file makes the folder a backup."""
    temporary = target / f"{_RECORD}.new"
    with temporary.open("wb") as file:
        file.write(msgspec.json.encode(record))
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(target / _RECORD)
    # pg_basebackup has already flushed `base`.
    make_durable(target.resolve(), *target.resolve().parents)


async def _verify(base: Path, version: str) -> None:
    """Check every file of a base backup against its manifest, and read its WAL. Raises `BackupFailed`.

    The program can read only WAL of its own version: with another version, it checks the other files.
    """
    own = _VERSION.search(await _run("pg_verifybackup", "--version"))
    reads_wal = own is not None and own[1] == version
    await _run("pg_verifybackup", *(() if reads_wal else ("--no-parse-wal",)), str(base))


async def _run(program: str, *arguments: str, password: str | None = None) -> str:
    """Run one of PostgreSQL's programs and return its output. Raises `BackupFailed` with its last lines of
    error output; cancelling ends the program."""
    path = await asyncio.to_thread(_find, program)
    environment = os.environ | ({} if password is None else {"PGPASSWORD": password})
    process = await asyncio.create_subprocess_exec(
        path,
        *arguments,
        env=environment,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        printed, said = await process.communicate()
    except BaseException:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await process.wait()
        raise
    if process.returncode:
        lines = said.decode(errors="replace").strip().splitlines()[-3:]
        raise BackupFailed(f"{program} failed: {' | '.join(lines)}")
    return printed.decode(errors="replace")


def _find(program: str) -> str:
    """The program of the embedded PostgreSQL, or else the one on the path."""
    with contextlib.suppress(StoreError):
        path = find_binaries(None) / program
        if path.is_file():
            return str(path)
    found = shutil.which(program)
    if found is None:
        raise BackupFailed(f"{program} is not installed: it comes with PostgreSQL, or with relayd")
    return found


def _without_password(url: str) -> tuple[str, str | None]:
    """The URL for a command line, which everybody on the machine can read, and its password."""
    scheme, _, rest = url.partition("://")
    user, _, _ = authority_of(url).rpartition("@")
    name, colon, password = user.partition(":")
    return (f"{scheme}://{name}{rest[len(user) :]}", unquote(password)) if colon else (url, None)


def _read_record(backup: Path) -> _Record:
    try:
        return msgspec.json.decode((backup / _RECORD).read_bytes(), type=_Record)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        raise BackupFailed(f"{backup} is not a backup that `relayd backup create` has finished") from None
