"""Wheels of the library and the daemon are all that a relay needs; the console is in them, without Node."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import select
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.databases import copy_of_migrated
from tests.support.relay_process import ROOT, START_TIMEOUT, STOP_TIMEOUT, http_get

SITE = Path(sysconfig.get_path("purelib"))


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment with the tools of a plain system, and no Node."""
    tools = tmp_path_factory.mktemp("tools")
    for name in ("sh", "env", "uname", "ldd", "ps", "git", "su", "setpriv"):
        if found := shutil.which(name):
            (tools / name).symlink_to(found)
    clean = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("RELAYD_", "PYTHON", "NODE"))
    }
    return clean | {"PATH": str(tools)}


def run(command: Sequence[str | Path], environ: dict[str, str], folder: Path = ROOT) -> str:
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def installed(folder: Path, environ: dict[str, str]) -> Path:
    """A fresh environment of Python with our two wheels in it; their dependencies are found in this one."""
    for source in ("client", "relayd"):
        build: list[str | Path] = [
            sys.executable,
            "-m",
            "hatchling",
            "build",
            "--target",
            "wheel",
            "--directory",
            folder,
        ]
        run(build, environ, ROOT / source)
    wheels = sorted(folder.glob("*.whl"))
    run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], environ)
    python = folder / "venv/bin/python"
    command: list[str | Path]
    uv = Path(sys.executable).with_name("uv")
    if uv.exists():
        command = [uv, "pip", "install", "--python", python]
    elif importlib.util.find_spec("pip") is not None:
        command = [sys.executable, "-m", "pip", "--python", python, "install"]
    else:
        pytest.skip("there is neither uv nor pip beside this Python")
    run([*command, "--quiet", "--no-deps", "--no-index", *wheels], environ)
    (packages,) = (folder / "venv").glob("lib/python*/site-packages")
    # A path in a .pth file is searched after the environment's own, and .pth files in it are not read: the
    # checkout, which is installed there in place, stays invisible.
    (packages / "others.pth").write_text(f"{SITE}\n")
    return folder / "venv"


def test_a_wheel_installed_without_node_serves_the_console(tmp_path: Path, bare: dict[str, str]) -> None:
    assert shutil.which("node", path=bare["PATH"]) is None
    venv = installed(tmp_path, bare)
    where = run([venv / "bin/python", "-P", "-c", "import relayd; print(relayd.__file__)"], bare)
    assert Path(where.strip()).is_relative_to(venv)
    copy_of_migrated(tmp_path / "data")
    command: list[str | Path] = [venv / "bin/relayd", "serve", "--port", "0", "--data-dir", tmp_path / "data"]
    with (tmp_path / "log").open("w") as log:
        relay = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, env=bare, cwd=tmp_path)
    try:
        assert relay.stdout is not None
        readable, _, _ = select.select([relay.stdout], [], [], START_TIMEOUT)
        line = relay.stdout.readline() if readable else b""
        assert line, (tmp_path / "log").read_text()
        http = json.loads(line)["http"]
        manifest = next(venv.glob("lib/python*/site-packages/relayd/console/manifest.json"))
        assert manifest.read_bytes() == (ROOT / "relayd/console/manifest.json").read_bytes()
        for name, expected in json.loads(manifest.read_text())["files"].items():
            status, _, body = http_get(f"{http}/{'' if name == 'index.html' else name}")
            assert status == 200, name
            # The page gets the path of its WebSocket; every other file is served as it was built.
            if name == "index.html":
                assert b'<meta name="strata-socket" content="strata">' in body
            else:
                assert hashlib.sha256(body).hexdigest() == expected, name
    finally:
        relay.terminate()
        relay.wait(STOP_TIMEOUT)
        assert relay.stdout is not None
        relay.stdout.close()
    assert relay.returncode == 0, (tmp_path / "log").read_text()
