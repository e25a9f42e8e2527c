"""The TypeScript client as its users get it: packed, installed into an empty folder, run by node."""

from __future__ import annotations

import fcntl
import functools
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.relay_process import ROOT
from tests.support.run_folder import run_folder, turn

__all__ = [
    "Agent",
    "alone",
    "node_command",
    "node_modules_with",
    "pack_and_install",
    "require_node",
    "run_node",
]

WEB = ROOT / "web"
REQUIRED = "RELAYD_REQUIRE_NODE"
"""If this is set and not 0, a machine without node fails the tests instead of skipping them."""


def node_modules_with(package: str, variable: str) -> Path:
    """A folder `node_modules` that has this package: in the folder named by the variable, or in web/.

    Skips the test if there is none, or no node.
    """
    found = Path(os.environ.get(variable) or WEB) / "node_modules"
    if shutil.which("node") is None or not (found / package).is_dir():
        pytest.skip(f"needs node, and {package} from `npm ci` in web/ or in the folder ${variable}")
    return found


def require_node() -> None:
    """Skip, or fail if node is required, unless the tools of web/ are installed."""
    missing = _missing()
    if missing is None:
        return
    if os.environ.get(REQUIRED, "0") not in ("", "0"):
        pytest.fail(f"{REQUIRED} is set, and {missing}")
    pytest.skip(f"{missing} ({REQUIRED}=1 makes this a failure)")


@functools.cache
def _missing() -> str | None:
    if shutil.which("node") is None or shutil.which("npm") is None:
        return "there is no node with npm on the PATH"
    if _version() < (20, 10):
        return f"node is {'.'.join(map(str, _version()))}, and the client needs 22"
    if not (WEB / "node_modules").is_dir():
        return "the tools of web/ are not installed: `make web`"
    return None


@functools.cache
def _version() -> tuple[int, int]:
    said = subprocess.run(["node", "--version"], capture_output=True, text=True, check=True).stdout
    found = re.match(r"v(\d+)\.(\d+)", said)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def node_command(*arguments: str) -> list[str]:
    """The command line for node; versions 20 and 21 have WebSocket only behind a flag."""
    return ["node", *(["--experimental-websocket"] if _version() < (22, 0) else []), *arguments]


def run_node(
    *arguments: str, cwd: Path, timeout: float = 120, environ: Mapping[str, str] | None = None
) -> str:
    """The output of a node program that must end successfully."""
    done = subprocess.run(
        node_command(*arguments),
        cwd=cwd,
        env={**os.environ, "NODE_NO_WARNINGS": "1", **(environ or {})},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def pack_and_install(folder: Path) -> Path:
    """Install the packed client into an empty folder, and return that folder."""
    shutil.copytree(_installed(), folder, symlinks=True)
    return folder


@functools.cache
def _installed() -> Path:
    """A folder with the installed client, made once for all workers of a run; to be copied only."""
    folder = run_folder() / "package"
    with turn("package"):
        if not folder.exists():
            _install(folder.with_suffix(".new")).rename(folder)
    return folder


def _install(folder: Path) -> Path:
    folder.mkdir(parents=True)
    with alone():
        _npm("pack", "--pack-destination", str(folder), cwd=WEB)
    (tarball,) = folder.glob("*.tgz")
    (folder / "package.json").write_text('{"private": true, "type": "module"}')
    _npm("install", "--no-save", "--ignore-scripts", "--prefer-offline", tarball.name, cwd=folder)
    return folder


def _npm(*arguments: str, cwd: Path) -> None:
    done = subprocess.run(
        ["npm", *arguments, "--no-audit", "--no-fund", "--loglevel", "error"],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@contextmanager
def alone() -> Iterator[None]:
    """Let one process at a time build, as building is done in place."""
    (WEB / "build").mkdir(exist_ok=True)
    with (WEB / "build/.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


class Agent:
    """A node program that uses the client and reports events, one JSON line each (web/tests/agent.mjs)."""

    def __init__(self, package: Path, act: str, **options: object) -> None:
        shutil.copy(WEB / "tests/agent.mjs", package)
        self._errors = (package / "agent.log").open("a+")
        self.process = subprocess.Popen(
            node_command("agent.mjs", act, json.dumps(options)),
            cwd=package,
            env={**os.environ, "NODE_NO_WARNINGS": "1"},
            text=True,
            stdout=subprocess.PIPE,
            stderr=self._errors,
        )

    def lines(self) -> Iterator[dict[str, object]]:
        """The reports of the program, as they come, until its end."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            yield json.loads(line)

    def next(self) -> dict[str, object]:
        """The next report."""
        for said in self.lines():
            return said
        self._errors.seek(0)
        raise AssertionError(f"the agent has ended with {self.process.wait(30)}: {self._errors.read()}")

    def take(self, count: int) -> list[dict[str, object]]:
        """The next `count` reports."""
        return [self.next() for _ in range(count)]

    def kill(self) -> None:
        """Send SIGKILL."""
        self.process.kill()
        self.process.wait(30)

    def __enter__(self) -> Agent:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        assert self.process.stdout is not None
        self.process.stdout.close()
        self._errors.close()
