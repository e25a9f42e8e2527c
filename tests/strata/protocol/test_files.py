"""Replacing a file atomically."""

from __future__ import annotations

import os
import stat

import pytest
from strata.protocol.files import replace_file


def test_a_file_is_replaced_and_nothing_is_left_beside_it(tmp_path):
    path = tmp_path / "file"
    for body in (b"longer than the next one", b"short"):
        replace_file(path, body)
        assert path.read_bytes() == body
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


def test_a_private_file_is_private_whatever_was_there(tmp_path):
    path = tmp_path / "file"
    path.write_text("everybody's")
    path.chmod(0o644)
    replace_file(path, b"mine", mode=0o600)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_link_stays_and_the_file_keeps_its_mode(tmp_path):
    real, link = tmp_path / "kept" / "real", tmp_path / "link"
    real.parent.mkdir()
    link.symlink_to(real)
    for body, mode in ((b"new", 0o640), (b"newer", 0o604)):
        replace_file(link, body)
        assert link.is_symlink() and real.read_bytes() == body
        real.chmod(mode)
    replace_file(link, b"newest")
    assert stat.S_IMODE(real.stat().st_mode) == 0o604
    assert sorted(each.name for each in tmp_path.rglob("*")) == ["kept", "link", "real"]


def test_a_failure_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        replace_file(path, b"new")
    assert path.read_bytes() == b"old"
    assert [each.name for each in tmp_path.iterdir()] == ["file"]
