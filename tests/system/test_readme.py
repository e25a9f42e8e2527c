"""The README's tour, run as written against a relay started as the README says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.relay_process import RelayProcess

ROOT = Path(__file__).resolve().parents[2]
BLOCKS = re.findall(r"^```(sh|python) tour\n(.*?)^```$", (ROOT / "README.md").read_text(), re.M | re.S)


@pytest.mark.timeout(400)
def test_the_tour_works_as_written(relay: RelayProcess, tmp_path: Path) -> None:
    assert [language for language, _ in BLOCKS] == ["sh", "sh", "python", "python", "python"]
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / "bin").symlink_to(Path(sys.executable).parent)
    environment = {
        **os.environ,
        "HOME": str(tmp_path),
        "STRATA_RELAY": relay.ws,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    environment.pop("XDG_CONFIG_HOME", None)
    printed = []
    for language, text in BLOCKS:
        command = (
            ["bash", "-euo", "pipefail", "-c", text] if language == "sh" else [sys.executable, "-c", text]
        )
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stderr
        printed.append(done.stdout)
    first, second, third, fourth, fifth = printed
    assert "did:strata:z6Mk" in first
    assert first.count("hello relay") == 1
    assert [int(line) for line in second.split()[-2:]] == [1001, 0]
    assert third.startswith("from Python ")
    assert re.fullmatch(r"b'hello'\ndelivered: [0-9a-f]{32}\n", fourth)
    assert [line.split(":")[0] for line in fifth.splitlines()] == ["local", "unix", "tcp"]
    assert fifth.count("Reading(sensor='roof', celsius=21.5)") == 3


def test_the_example_of_the_channels_guide_works() -> None:
    [text] = re.findall(r"^```python\n(.*?)^```$", (ROOT / "docs/guides/tx-rx.md").read_text(), re.M | re.S)
    done = subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "Reading(sensor='roof', celsius=21.5, image=b'') cellar\n"
