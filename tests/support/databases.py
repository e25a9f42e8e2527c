"""Data folders of the embedded PostgreSQL, created once in a run, then copied in a twentieth of a second."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path

from tests.support.run_folder import run_folder, turn

__all__ = ["copy_of_empty", "copy_of_migrated", "copy_with_both", "fill_cluster"]

_ROOT = Path(__file__).resolve().parents[2]
_MAKE = """
import asyncio, sys
import asyncpg
from relayd.postgres.embedded import EmbeddedPostgres
from relayd.store.migrate import migrate
async def main():
    async with EmbeddedPostgres(sys.argv[1]) as server:
        if sys.argv[2] != "empty":
            await migrate(server.url)
        connection = await asyncpg.connect(server.url)
        for name in sys.argv[3:]:
            await connection.execute(f"ALTER DATABASE {name} IS_TEMPLATE false")
            await connection.execute(f"DROP DATABASE {name}")
        await connection.close()
asyncio.run(main())
"""
_LEFT_OUT = {"empty": ("template0",), "migrated": ("template1", "postgres"), "both": ()}
"""Databases that are not used, three hundred files each: in `empty` and `both`, tests create their own from
`template1`; a relay that has its database uses no other. Only a few copies are made of `both`."""


def copy_of_empty(data_dir: Path) -> None:
    """Make `data_dir` a data folder whose database has no tables yet, unless it already is a data folder."""
    _copy(_made("empty"), data_dir)


def copy_of_migrated(data_dir: Path) -> None:
    """Make `data_dir` the data folder of a migrated relay that has never served, unless it already is one."""
    _copy(_made("migrated"), data_dir)


def copy_with_both(data_dir: Path) -> None:
    """As `copy_of_migrated`, for tests that also create empty databases there, or need one of no relay."""
    _copy(_made("both"), data_dir)


def fill_cluster(fresh: Path) -> None:
    """Make `fresh` a cluster as `initdb` makes it, plus the database of a relay, without tables."""
    (cluster,) = _made("empty").glob("postgres-*")
    subprocess.run(["cp", "-a", cluster, fresh], check=True)


_SEGMENTS = 2
"""The segments of the log to keep: the last checkpoint is in the oldest, and may continue in the next."""


@functools.cache
def _made(kind: str) -> Path:
    folder = run_folder() / kind
    with turn(kind):
        if not folder.exists():
            fresh = folder.with_suffix(".new")
            if kind != "empty":
                _copy(_made("empty"), fresh)
            clean = {name: value for name, value in os.environ.items() if not name.startswith("RELAYD_")}
            paths = os.pathsep.join([str(_ROOT), str(_ROOT / "client")])
            subprocess.run(
                [sys.executable, "-c", _MAKE, str(fresh), kind, *_LEFT_OUT[kind]],
                check=True,
                env=clean | {"PYTHONPATH": paths},
            )
            _thin_out(fresh)
            fresh.rename(folder)
    return folder


def _thin_out(data_dir: Path) -> None:
    """Drop what copies carry in vain: log segments preallocated for later, and the empty ends of others."""
    segments = sorted(data_dir.glob("postgres-*/pg_wal/" + 24 * "[0-9A-F]"))
    for path in segments[_SEGMENTS:]:
        path.unlink()
    for path in segments[:_SEGMENTS]:
        data = path.read_bytes()
        os.truncate(path, len(data.rstrip(b"\0")))
        os.truncate(path, len(data))


def _copy(source: Path, target: Path) -> None:
    """Make `target` a copy of the data folder `source`, unless it already is a data folder."""
    if any(target.glob("postgres-*")):
        return  # a later start on the same folder: its content stays
    target.mkdir(mode=0o700, parents=True, exist_ok=True)
    # cp keeps the owner: if tests run as root, the server has its own user.
    subprocess.run(["cp", "-a", *source.glob("postgres-*"), target], check=True)
