"""`relayd serve` as a process: what is wrong is said before anything is begun."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.waiting import wait_until


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


def children_of(pid: int) -> Iterator[str]:
    """The names of the programs that a process has started."""
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in path.read_text().split():
            with contextlib.suppress(OSError):
                yield Path(f"/proc/{child}/comm").read_text().strip()


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="this system has no /proc")
def test_ctrl_c_while_the_first_database_is_made_is_a_clean_stop(tmp_path: Path) -> None:
    """A terminal sends the signal to every program in the foreground."""
    command = [sys.executable, "-m", "relayd", "serve", "--port", "0", "--data-dir", str(tmp_path / "data")]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        wait_until(lambda: "initdb" in children_of(process.pid), timeout=60)
        os.killpg(process.pid, signal.SIGINT)
        _, told = process.communicate(timeout=100)
    assert process.returncode == 0, told
    assert "cannot_serve" not in told
