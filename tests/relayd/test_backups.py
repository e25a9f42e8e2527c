"""What a backup does to the server that is copied."""

from __future__ import annotations

import asyncio
import fcntl
import os
import shutil
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from relayd.backups import (
    BackupFailed,
    _allow_replication,
    _begin_wal,
    _check_replayed,
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
        with open(path, "rb") as there:  # what there is if the process is killed now, or the disk is full
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
    first, last = segment, f"{following}.partial"  # the last one is received once more
    copied = [f"new/backup/wal.new/{name}" for name in (first, last)]
    assert synced == [*copied, "new/backup/wal.new", "new/backup"]
    assert sorted(path.name for path in (backup / "wal").iterdir()) == [first, last]


def test_a_record_that_is_damaged_makes_no_backup(tmp_path: Path):
    (tmp_path / "relayd.json").write_bytes(b'{"taken_at":1,"head":0,"epoch":1,"version":"\xff"}')
    with pytest.raises(BackupFailed, match="is no backup"):
        _read_record(tmp_path)


MEGABYTE = 2**20


@pytest.mark.parametrize(
    ("segments", "end", "is_whole"),
    [
        (["1", "2", "3"], 4 * MEGABYTE, True),
        (["1", "2", "3"], 4 * MEGABYTE - 100, True),  # a record goes on in what has not come
        (["1", "2", "3", "4.partial"], 4 * MEGABYTE + 100, True),
        (["1", "2", "3"], 3 * MEGABYTE - 100, False),  # the second or the third is damaged
        (["1", "3"], 2 * MEGABYTE, False),
        (["1", "2", "4.partial"], 3 * MEGABYTE, False),
        (["FFF", "1000"], 0x1001 * MEGABYTE, True),  # from one of the logs of 4 GiB to the next
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
    # The number of a process that is no server of this folder.
    (killed / "data" / "postgres-18" / "postmaster.pid").write_text(f"{os.getpid()}\n")
    with (busy / "data" / "relayd.lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        _remove_abandoned_drills()
    assert sorted(tmp_path.iterdir()) == [busy, new, link]
