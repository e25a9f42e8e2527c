"""Run the migrations with Alembic. Loading this takes half a second, so it is loaded only if needed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import asyncpg
import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from sqlalchemy.pool import NullPool

import relayd
from relayd.store.connection import connect, translate_errors
from relayd.store.types import SERVES, UnsafeDatabase

__all__ = ["alembic_config", "run_sync", "upgrade"]

T = TypeVar("T")

_LOCK = 0x72656C617964  # "relayd": the key of the advisory lock under which one process migrates
_LOCK_TIMEOUT = "120s"
_CONNECT_TIMEOUT = 10.0
_BEFORE_0_2 = {f"000{number}" for number in range(1, 9)}


def upgrade(url: str) -> None:
    """Run the missing migrations, in one transaction. Not for use in a running loop; raises as `migrate`."""
    run_sync(url, _upgrade)


def run_sync(url: str, function: Callable[[sa.Connection], T]) -> T:
    """Call a function with an SQLAlchemy connection, inside a transaction and under our lock."""
    with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
        return runner.run(_run(url, function))


async def _run(url: str, function: Callable[[sa.Connection], T]) -> T:
    engine = _engine(url)
    try:
        with translate_errors(), _driver_errors():
            async with engine.begin() as connection:
                await connection.exec_driver_sql(f"SET LOCAL lock_timeout = '{_LOCK_TIMEOUT}'")
                await connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({_LOCK})")
                return await connection.run_sync(function)
    finally:
        await engine.dispose()


def alembic_config() -> Config:
    """The configuration with the folder of the migrations: beside the package in a checkout, inside it in a
    wheel."""
    package = Path(relayd.__file__).parent
    installed, source = package / "_migrations", package.parent / "migrations"
    folder = str(installed if installed.is_dir() else source)
    config = Config()
    config.set_main_option("script_location", folder.replace("%", "%%"))
    return config


@contextlib.contextmanager
def _driver_errors() -> Iterator[None]:
    """Raise the driver's error in place of SQLAlchemy's."""
    try:
        yield
    except sa.exc.DBAPIError as error:
        cause = error.orig.__cause__ if error.orig is not None else None
        raise (cause or error) from None


def _upgrade(connection: sa.Connection) -> None:
    config = alembic_config()
    scripts = ScriptDirectory.from_config(config)
    known = {script.revision for script in scripts.walk_revisions()}
    context = MigrationContext.configure(connection)
    revision = context.get_current_revision()
    if revision in _BEFORE_0_2:
        raise UnsafeDatabase(
            "this database was made by a relayd before 0.2: `relayd export` its log with that program, and"
            " `relayd import` it into a new database"
        )
    if revision is not None and revision not in known:
        raise UnsafeDatabase(f"the database's schema ({revision}) is newer than this program: upgrade relayd")
    config.attributes["connection"] = connection
    command.upgrade(config, "head")
    served = " ".join(served_revisions(scripts))
    connection.exec_driver_sql(f"COMMENT ON TABLE alembic_version IS '{SERVES}{served}'")


def served_revisions(scripts: ScriptDirectory) -> list[str]:
    """The revisions of the programs that work with the newest schema, the newest first.

    Each migration with `keeps_older_programs = True` keeps what programs of the revision before need.
    """
    served = []
    for script in scripts.walk_revisions():
        served.append(script.revision)
        if not getattr(script.module, "keeps_older_programs", False):
            break
    return served


def _engine(url: str) -> AsyncEngine:
    async def open_connection() -> asyncpg.Connection:
        # Our own opener, not SQLAlchemy's, so that the URL means the same as for every other connection.
        return await connect(url, name="relayd migrate", connect_timeout=_CONNECT_TIMEOUT)

    return create_async_engine("postgresql+asyncpg://", async_creator=open_connection, poolclass=NullPool)
