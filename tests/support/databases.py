"""Data folders of the embedded PostgreSQL, made once in a run and copied, in a twentieth of a second."""

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
"""Databases that nobody comes to, three hundred files each: in `empty` and `both`, tests make their own
from `template1`; a relay that has its database goes to no other. `both` is copied a few times alone."""


def copy_of_empty(data_dir: Path) -> None:
    """Make `data_dir` a data folder whose database has no tables yet, unless it is a data folder already."""
    _copy(_made("empty"), data_dir)


def copy_of_migrated(data_dir: Path) -> None:
    """Make `data_dir` the data folder of a migrated relay that has never served, unless it is one already."""
    _copy(_made("migrated"), data_dir)


def copy_with_both(data_dir: Path) -> None:
    """As `copy_of_migrated`, for whoever makes empty databases there too, or needs one that is no relay's."""
    _copy(_made("both"), data_dir)


def fill_cluster(fresh: Path) -> None:
    """Make `fresh` what `initdb` makes, and the database of a relay in it, without tables."""
    (cluster,) = _made("empty").glob("postgres-*")
    subprocess.run(["cp", "-a", cluster, fresh], check=True)


_SEGMENTS = 2
"""Of the log: the last checkpoint stands in the oldest, and may go on in the one after it."""


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
    """Leave out what copies carry for nothing: segments of the log for later, and the empty end of others."""
    segments = sorted(data_dir.glob("postgres-*/pg_wal/" + 24 * "[0-9A-F]"))
    for path in segments[_SEGMENTS:]:
        path.unlink()
    for path in segments[:_SEGMENTS]:
        data = path.read_bytes()
        os.truncate(path, len(data.rstrip(b"\0")))
        os.truncate(path, len(data))


def _copy(source: Path, target: Path) -> None:
    """Make `target` a copy of the data folder `source`, unless it is a data folder already."""
    if any(target.glob("postgres-*")):
        return  # a later start on the same folder: what is there stays
    target.mkdir(mode=0o700, parents=True, exist_ok=True)
    # cp keeps the owner: as root, the server has a user of its own.
    subprocess.run(["cp", "-a", *source.glob("postgres-*"), target], check=True)
