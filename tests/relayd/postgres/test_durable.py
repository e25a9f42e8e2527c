"""A database's folder is there after a power cut, with the rules by which it lets anybody in."""

from __future__ import annotations

import asyncio
import errno
import os
import sys
from pathlib import Path

import pytest

from relayd.postgres import EmbeddedPostgres
from relayd.postgres.durable import make_durable


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
