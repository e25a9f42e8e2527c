"""The effects of a backup on the server that is copied."""

from __future__ import annotations

import asyncio
import fcntl
import os
import shutil
import sys
import tempfile
import threading
from datetime import UTC, datetime
from pathlib import Path

import pytest

from relayd import backups
from relayd.backups import (
    _NOT_REACHED,
    BackupFailed,
    _allow_replication,
    _begin_wal,
    _check_replayed,
    _copy_received,
    _has_record,
    _read_record,
    _Record,
    _remove_abandoned_drills,
    _write_record,
    restore,
)
from relayd.postgres import EmbeddedPostgres, EmbeddedPostgresError

RULES = "local all all trust\nhost all all 127.0.0.1/32 scram-sha-256"


@pytest.mark.parametrize("end", ["\n", ""])
def test_the_rules_of_a_server_are_never_away_while_one_is_added(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
):
    path = tmp_path / "postgres-18" / "pg_hba.conf"
    path.parent.mkdir()
    path.write_text(RULES + end)
    seen = []
    opened = Path.open

    def watched(self: Path, *arguments: object, **options: object) -> object:
        file = opened(self, *arguments, **options)  # type: ignore[call-overload]
        with open(path, "rb") as there:  # the state if the process is killed now, or the disk is full
            seen.append(there.read())
        return file

    monkeypatch.setattr(Path, "open", watched)
    assert _allow_replication(tmp_path)
    monkeypatch.undo()
    assert {found.decode() for found in seen} == {RULES + end}
    assert path.read_text() == f"{RULES}\nlocal replication all trust\n"
    assert not _allow_replication(tmp_path)


async def test_where_a_backup_is_being_put_back_nobody_begins_a_new_database(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    backup, data_dir = tmp_path / "backup", tmp_path / "data"
    (backup / "base").mkdir(parents=True)
    for name in ("PG_VERSION", "postgresql.conf"):
        (backup / "base" / name).write_text("18\n")
    (backup / "relayd.json").write_text('{"taken_at":1,"head":0,"epoch":1,"version":"18"}')
    begun, go_on = threading.Event(), threading.Event()
    copied = shutil.copy2

    def slowly(source: str, target: str) -> str:
        begun.set()
        go_on.wait(30)
        return copied(source, target)

    monkeypatch.setattr(shutil, "copy2", slowly)
    restoring = asyncio.create_task(restore(backup, data_dir, verify=False))
    assert await asyncio.to_thread(begun.wait, 30)
    with pytest.raises(EmbeddedPostgresError, match="another relay uses"):
        await EmbeddedPostgres(data_dir).start()
    restoring.cancel()
    await asyncio.sleep(0)
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await restoring
    assert sorted(os.listdir(data_dir)) == ["postgres-18.new", "relayd.lock", "relayd.restoring"]
    with pytest.raises(EmbeddedPostgresError, match="put it back again"):
        await EmbeddedPostgres(data_dir).start()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells what is synced")
def test_what_a_backup_promises_is_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    backup = tmp_path / "new" / "backup"
    (backup / "base" / "pg_wal" / "archive_status").mkdir(parents=True)
    segment, following = "000000010000000000000001", "000000010000000000000002"
    for name in (segment, following):
        (backup / "base" / "pg_wal" / name).write_text("WAL")
    synced: list[str] = []
    sync = os.fsync

    def fsync(fd: int) -> None:
        synced.append(os.path.relpath(os.readlink(f"/proc/self/fd/{fd}"), tmp_path))
        sync(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    _write_record(backup, _Record(1, 2, 3, "18"))
    assert synced[:4] == ["new/backup/relayd.json.new", "new/backup", "new", "."]
    synced.clear()
    _begin_wal(backup)
    first, last = segment, f"{following}.partial"  # the last one is received again
    copied = [f"new/backup/wal.new/{name}" for name in (first, last)]
    assert synced == [*copied, "new/backup/wal.new", "new/backup"]
    assert sorted(path.name for path in (backup / "wal").iterdir()) == [first, last]


def test_a_record_that_is_damaged_makes_no_backup(tmp_path: Path):
    (tmp_path / "relayd.json").write_bytes(b'{"taken_at":1,"head":0,"epoch":1,"version":"\xff"}')
    with pytest.raises(BackupFailed, match="is not a backup"):
        _read_record(tmp_path)


MEGABYTE = 2**20


@pytest.mark.parametrize(
    ("segments", "end", "is_whole"),
    [
        (["1", "2", "3"], 4 * MEGABYTE, True),
        (["1", "2", "3"], 4 * MEGABYTE - 100, True),  # a record continues in what has not arrived
        (["1", "2", "3", "4.partial"], 4 * MEGABYTE + 100, True),
        (["1", "2", "3"], 3 * MEGABYTE - 100, False),  # the second or the third is damaged
        (["1", "3"], 2 * MEGABYTE, False),
        (["1", "2", "4.partial"], 3 * MEGABYTE, False),
        (["FFF", "1000"], 0x1001 * MEGABYTE, True),  # from one log of 4 GiB to the next
        (["FFF", "1001"], 0x1000 * MEGABYTE, False),
    ],
)
def test_wal_that_lacks_something_is_not_taken_for_replayed(
    tmp_path: Path, segments: list[str], end: int, is_whole: bool
):
    kept, own = tmp_path / "restored_wal", tmp_path / "pg_wal"
    kept.mkdir()
    own.mkdir()
    for segment in segments:
        number, _, partial = segment.partition(".")
        log, within = divmod(int(number, 16), 4096)
        name = f"00000001{log:08X}{within:08X}" + (f".{partial}" if partial else "")
        with (kept / name).open("wb") as file:
            file.truncate(MEGABYTE)
    (kept / "00000001.history").touch()
    (own / "00000002.history").write_text(f"1\t{end >> 32:X}/{end & 0xFFFFFFFF:08X}\tno recovery target\n")
    if is_whole:
        _check_replayed(tmp_path)
    else:
        with pytest.raises(BackupFailed, match="missing or damaged"):
            _check_replayed(tmp_path)


async def test_of_a_moment_after_the_last_commit_it_is_said_how_that_is_put_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    class Server:
        def __init__(self, *arguments: object, **options: object) -> None: ...

        async def __aenter__(self) -> None:
            raise EmbeddedPostgresError(f"did not start: FATAL:  {_NOT_REACHED} | LOG:  shut down")

        async def __aexit__(self, *_: object) -> None: ...

    (tmp_path / "wal").mkdir()
    (tmp_path / "relayd.json").write_text('{"taken_at":1,"head":0,"epoch":1,"version":"18"}')
    monkeypatch.setattr(backups, "EmbeddedPostgres", Server)
    with pytest.raises(BackupFailed, match=r"no commit after 2026-11-22T21:00:00Z: without --until"):
        await restore(tmp_path, tmp_path / "data", verify=False, until=datetime(2026, 11, 22, 21, tzinfo=UTC))


PAGE = 8192
HEADER = 24


def record_across_pages(at: int, length: int) -> tuple[bytes, int]:
    """A WAL file with a record at `at`, and the place where the record ends."""
    segment = bytearray(b"\1" * at).ljust(MEGABYTE, b"\0")
    segment[at : at + 4] = length.to_bytes(4, sys.byteorder)
    left, end = length, at
    while left > (room := PAGE - end % PAGE):
        left -= room
        end += room + HEADER
    end += left
    segment[at + 4 : end] = b"\1" * (len(segment[at + 4 : end]))
    return bytes(segment[:MEGABYTE]), end


@pytest.mark.parametrize(
    ("at", "length", "lacks", "is_there"),
    [
        (PAGE + HEADER, 100, 0, True),
        (PAGE + HEADER, 100, 1, False),
        (PAGE - 8, 3 * PAGE, 0, True),  # it continues in other pages, after their headers
        (PAGE - 8, 3 * PAGE, 1, False),
        (MEGABYTE - 8, 100, 0, False),  # it continues in another file
        (PAGE - 8, 0, 0, False),
    ],
)
def test_a_record_that_is_there_to_its_end_is_told_from_one_of_which_more_had_to_come(
    at: int, length: int, lacks: int, is_there: bool
):
    segment, end = record_across_pages(at, length)
    assert _has_record(segment[: end - lacks] if length else segment[:at], at) is is_there


def test_wal_that_is_damaged_within_the_last_whole_file_is_not_taken_for_replayed(tmp_path: Path):
    kept, own = tmp_path / "restored_wal", tmp_path / "pg_wal"
    kept.mkdir()
    own.mkdir()
    at = 2 * PAGE + HEADER
    (kept / "000000010000000000000001").write_bytes(b"\1" * MEGABYTE)
    (kept / "000000010000000000000002.partial").write_bytes(b"\1" * PAGE + bytes(MEGABYTE - PAGE))
    for length in (100, 0):  # a missing page has no length either
        segment = bytearray(b"\1" * MEGABYTE)
        segment[at : at + 4] = length.to_bytes(4, sys.byteorder)
        (kept / "000000010000000000000001").write_bytes(segment)
        (own / "00000002.history").write_text(f"1\t0/{MEGABYTE + at:08X}\tno recovery target\n")
        with pytest.raises(BackupFailed, match="missing or damaged"):
            _check_replayed(tmp_path)


def test_wal_is_copied_while_it_is_received(tmp_path: Path):
    wal, copied = tmp_path / "wal", tmp_path / "copied"
    wal.mkdir()
    copied.mkdir()
    full, received, begun = (f"00000001000000000000000{n}" for n in (1, 2, 3))
    (wal / full).write_bytes(b"WAL")  # it was listed as the one being received
    (wal / f"{received}.partial").write_bytes(b"WA\0\0")
    (wal / f"{begun}.partial").write_bytes(b"\0\0")
    for name in (full, received, begun):
        source, target = str(wal / f"{name}.partial"), str(copied / f"{name}.partial")
        _copy_received(source, target, shutil.copy2)
    assert {path.name: path.read_bytes() for path in copied.iterdir()} == {
        full: b"WAL",
        f"{received}.partial": b"WA\0\0",
    }


def test_a_file_of_wal_that_a_full_disk_has_left_half_filled_is_begun_anew(tmp_path: Path):
    wal = tmp_path / "wal"
    wal.mkdir()
    received, begun = (f"00000001000000000000000{n}.partial" for n in (1, 2))
    (wal / received).write_bytes(b"WA\0\0")
    (wal / begun).write_bytes(b"\0\0")
    _begin_wal(tmp_path)
    assert {path.name: path.read_bytes() for path in wal.iterdir()} == {received: b"WA\0\0", begun: b""}


def test_only_the_copies_of_drills_that_were_killed_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    killed, busy, new, link = (tmp_path / f"relayd-drill-{name}" for name in ("1", "2", "3", "4"))
    for folder in (killed, busy):
        (folder / "data" / "postgres-18").mkdir(parents=True)
        (folder / "data" / "relayd.lock").touch()
    new.mkdir()
    link.symlink_to(killed)
    # The process id of a process that is not a server of this folder.
    (killed / "data" / "postgres-18" / "postmaster.pid").write_text(f"{os.getpid()}\n")
    with (busy / "data" / "relayd.lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        _remove_abandoned_drills()
    assert sorted(tmp_path.iterdir()) == [busy, new, link]
