"""Files that hold a secret."""

from __future__ import annotations

import os
import stat
import sys

import pytest
from strata.protocol.secret_files import read_secret, write_secret


@pytest.mark.skipif(sys.platform == "win32", reason="a folder cannot be flushed there")
def test_the_name_of_a_secret_is_durable_too(tmp_path, monkeypatch):
    """Next, a relay learns of the key: a power cut must not leave it with a key that nobody holds."""
    synced = []
    fsync = os.fsync

    def watched(descriptor: int) -> None:
        synced.append(stat.S_IFMT(os.fstat(descriptor).st_mode))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", watched)
    write_secret(tmp_path / "key", {"seed": "0x00"})
    assert synced == [stat.S_IFREG, stat.S_IFDIR]


def test_a_folder_that_cannot_be_flushed_costs_no_secret(tmp_path, monkeypatch):
    fsync = os.fsync

    def files_alone(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(22, "Invalid argument")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", files_alone)
    write_secret(tmp_path / "key", {"seed": "0x00"})
    assert b"seed" in read_secret(tmp_path / "key")
