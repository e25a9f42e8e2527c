"""The folder that the processes of a relay share, and what a killed one leaves in it."""

from __future__ import annotations

import subprocess
import sys
import tempfile

import pytest

from relayd.process.shared_folder import shared_folder


@pytest.fixture(autouse=True)
def own_root(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def test_a_folder_is_gone_with_its_owner(tmp_path):
    with shared_folder() as folder:
        assert folder.parent == tmp_path and folder.stat().st_mode & 0o777 == 0o700
    assert not list(tmp_path.iterdir())


def test_what_a_killed_relay_has_left_is_removed_and_what_lives_is_not(tmp_path):
    program = (
        "import os, tempfile; from relayd.process.shared_folder import shared_folder\n"
        f"tempfile.tempdir = {str(tmp_path)!r}\n"
        "with shared_folder() as folder: (folder / 'kept').touch(); os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == -9
    (left,) = tmp_path.iterdir()
    others = [tmp_path / "relayd-metrics-without-an-owner", tmp_path / "else"]
    for other in others:
        other.mkdir()
    with shared_folder() as folder:
        assert not left.exists()
        with shared_folder() as second:
            assert folder.exists() and second.exists()
        assert all(other.exists() for other in others)
