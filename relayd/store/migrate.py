"""Bring a database's schema up to this program's (R-308)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

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
from relayd.store.types import UnsafeDatabase

__all__ = ["check_revision", "current_revision", "latest_revision", "migrate"]

_LOCK = 0x72656C617964  # "relayd"; the key of the advisory lock under which one process migrates
_CONNECT_TIMEOUT = 10.0
_LOCK_TIMEOUT = "120s"


def latest_revision() -> str:
    """The revision this program needs."""
    revision = _scripts().get_current_head()
    assert revision is not None
    return revision


async def current_revision(url: str) -> str | None:
    """The database's revision, None for one that was never migrated. Raises `StoreUnavailable`."""
    engine = _engine(url)
    try:
        with translate_errors():
            async with engine.connect() as connection:
                return await connection.run_sync(_read_revision)
    finally:
        await engine.dispose()


async def check_revision(url: str) -> None:
    """Raise `UnsafeDatabase` unless the database is exactly at this program's revision."""
    revision = await current_revision(url)
    if revision is None or revision != latest_revision():
        _refuse_newer(revision)
        raise UnsafeDatabase(f"the database's schema is at {revision or 'no revision'}: run `relayd migrate`")


async def migrate(url: str) -> str:
    """Upgrade the schema, all of it or none, and return the revision; no work when it is up to date.

    Processes that start together take turns under an advisory lock. Raises `StoreUnavailable`, `StoreError`,
    and `UnsafeDatabase` for a database that a newer program has migrated. Cancelling changes nothing.
    """
    engine = _engine(url)
    try:
        with translate_errors():
            async with engine.begin() as connection:
                await connection.execute(sa.text(f"SET LOCAL lock_timeout = '{_LOCK_TIMEOUT}'"))
                await connection.execute(sa.text("SELECT pg_advisory_xact_lock(:key)"), {"key": _LOCK})
                await connection.run_sync(_upgrade)
    finally:
        await engine.dispose()
    return latest_revision()


def _upgrade(connection: sa.Connection) -> None:
    revision = _read_revision(connection)
    _refuse_newer(revision)
    if revision != latest_revision():
        config = _config()
        config.attributes["connection"] = connection
        command.upgrade(config, "head")


def _read_revision(connection: sa.Connection) -> str | None:
    return MigrationContext.configure(connection).get_current_revision()


def _refuse_newer(revision: str | None) -> None:
    known = {script.revision for script in _scripts().walk_revisions()}
    if revision is not None and revision not in known:
        raise UnsafeDatabase(f"the database's schema ({revision}) is newer than this program: upgrade relayd")


def _engine(url: str) -> AsyncEngine:
    async def open_connection() -> asyncpg.Connection[Any]:
        # Our own opener and not SQLAlchemy's: the URL keeps the meaning it has for every other connection.
        return await connect(url, name="relayd migrate", connect_timeout=_CONNECT_TIMEOUT)

    return create_async_engine("postgresql+asyncpg://", async_creator=open_connection, poolclass=NullPool)


def _scripts() -> ScriptDirectory:
    return ScriptDirectory.from_config(_config())


def _config() -> Config:
    package = Path(relayd.__file__).parent
    installed, source = package / "_migrations", package.parent / "migrations"
    config = Config()
    config.set_main_option("script_location", str(installed if installed.is_dir() else source).replace("%", "%%"))
    return config
