"""Data folders of the embedded PostgreSQL, made once in a run and copied, in a twentieth of a second."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path

from tests.support.run_folder import run_folder, turn

__all__ = ["copy_of", "copy_of_empty", "copy_of_migrated", "migrated_folder"]

_ROOT = Path(__file__).resolve().parents[2]
_MAKE = """
import asyncio, sys
from relayd.postgres.embedded import EmbeddedPostgres
from relayd.store.migrate import migrate
async def main():
    async with EmbeddedPostgres(sys.argv[1]) as server:
        if sys.argv[2] == "migrated":
            await migrate(server.url)
asyncio.run(main())
"""


def copy_of_empty(data_dir: Path) -> None:
    """Make `data_dir` a data folder whose database has no tables yet, unless it is a data folder already."""
    copy_of(_made("empty"), data_dir)


def copy_of_migrated(data_dir: Path) -> None:
    """Make `data_dir` the data folder of a migrated relay that has never served, unless it is one already."""
    copy_of(migrated_folder(), data_dir)


def migrated_folder() -> Path:
    """The data folder of a migrated relay that has never served; for copies only."""
    return _made("migrated")


@functools.cache
def _made(kind: str) -> Path:
    folder = run_folder() / kind
    with turn(kind):
        if not folder.exists():
            fresh = folder.with_suffix(".new")
            if kind != "empty":
                copy_of(_made("empty"), fresh)
            clean = {name: value for name, value in os.environ.items() if not name.startswith("RELAYD_")}
            paths = os.pathsep.join([str(_ROOT), str(_ROOT / "client")])
            subprocess.run(
                [sys.executable, "-c", _MAKE, str(fresh), kind], check=True, env=clean | {"PYTHONPATH": paths}
            )
            _leave_out_zeros(fresh)
            fresh.rename(folder)
    return folder


def _leave_out_zeros(data_dir: Path) -> None:
    """Let the end of each log segment, where nothing was written yet, take no memory, here and in copies."""
    for path in data_dir.glob("postgres-*/pg_wal/" + 24 * "[0-9A-F]"):
        data = path.read_bytes()
        os.truncate(path, len(data.rstrip(b"\0")))
        os.truncate(path, len(data))


def copy_of(source: Path, target: Path) -> None:
    """Make `target` a copy of the data folder `source`, unless it is a data folder already."""
    if any(target.glob("postgres-*")):
        return  # a later start on the same folder: what is there stays
    target.mkdir(mode=0o700, parents=True, exist_ok=True)
    # cp keeps the owner: as root, the server has a user of its own.
    subprocess.run(["cp", "-a", *source.glob("postgres-*"), target], check=True)
