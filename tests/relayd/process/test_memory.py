"""The system's reports about memory."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from relayd.process import memory
from relayd.process.memory import default_limit, give_back, resident_bytes


def test_resident_memory_is_what_the_system_says():
    give_back()
    assert resident_bytes() == pytest.approx(psutil.Process().memory_info().rss, rel=0.2)


def test_the_limit_is_a_part_of_what_there_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(memory, "_CGROUPS", tmp_path)
    whole = psutil.virtual_memory().total * 0.6
    assert default_limit(1) == pytest.approx(whole, rel=0.01)
    assert default_limit(4) == pytest.approx(whole / 4, rel=0.01)
    (tmp_path / "memory.max").write_text("max\n")
    assert default_limit(1) == pytest.approx(whole, rel=0.01)
    (tmp_path / "memory.max").write_text("100000000\n")
    assert default_limit(2) == 30_000_000
