"""`relayd serve` as a process: what is wrong is said before anything is begun."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("workers", [1, 2])
def test_files_that_settings_name_are_checked_before_a_database_is_made(tmp_path: Path, workers: int) -> None:
    (tmp_path / "peers.toml").write_text("[[peer]]\n")
    (tmp_path / "relayd.toml").write_text(
        f'peers_file = "{tmp_path}/peers.toml"\ntls_cert = "nowhere.pem"\ntls_key = "nowhere.key"\n'
    )
    arguments = ["--config", tmp_path / "relayd.toml", "--data-dir", tmp_path / "data", "--workers", workers]
    done = subprocess.run(
        [sys.executable, "-m", "relayd", "serve", "--port", "0", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=tmp_path,
    )
    [line] = map(json.loads, done.stderr.splitlines())
    assert (done.returncode, done.stdout) == (2, "")
    assert line["event"] == "cannot_serve" and line["what"] == "configuration"
    assert "nowhere.pem: No such file or directory" in line["problem"]
    assert "peers.toml" in line["problem"], "everything that is wrong is said at once"
    assert not (tmp_path / "data").exists()
