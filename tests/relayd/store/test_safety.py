"""A database that could lose acknowledged packets is not used."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

import asyncpg
import pytest
import structlog

from relayd.store import Store, StoreUnavailable, UnsafeDatabase
from relayd.store.safety import check_safety

NOW = 1_790_000_000


class FakeConnection:
    """Answers the one query of `check_safety`."""

    def __init__(self, **settings: Any) -> None:
        self.row = {
            "version": 150_004,
            "standby": False,
            "read_only": "off",
            "fsync": "on",
            "full_page_writes": "on",
            "synchronous_commit": "on",
            "encoding": "UTF8",
        } | settings

    async def fetch(self, query: str) -> list[dict[str, Any]]:
        return [self.row]


@pytest.mark.parametrize("level", ["on", "local", "remote_write", "remote_apply"])
async def test_every_level_that_waits_for_the_disk_is_fine(level):
    await check_safety(FakeConnection(synchronous_commit=level))


@pytest.mark.req("R-189")
@pytest.mark.parametrize("setting", ["fsync", "full_page_writes", "synchronous_commit"])
async def test_settings_that_lose_commits_are_refused_by_name(setting):
    with pytest.raises(UnsafeDatabase, match=rf"{setting} is off.*allow_unsafe_database"):
        await check_safety(FakeConnection(**{setting: "off"}))
    await check_safety(FakeConnection(**{setting: "off"}), allow_unsafe=True)


@pytest.mark.parametrize(
    ("setting", "value", "sentence"),
    [
        ("version", 140_011, "PostgreSQL 15 .*: upgrade"),
        ("standby", True, "standby"),
        ("read_only", "on", "RESET default_transaction_read_only"),
        ("encoding", "SQL_ASCII", "CREATE DATABASE … ENCODING 'UTF8'"),
    ],
)
async def test_what_cannot_work_is_refused_in_any_case(setting, value, sentence):
    with pytest.raises(UnsafeDatabase, match=sentence):
        await check_safety(FakeConnection(**{setting: value}), allow_unsafe=True)


@pytest.mark.req("R-189")
@pytest.mark.parametrize("setting", ["synchronous_commit", "default_transaction_read_only"])
async def test_a_real_server_is_asked(database, setting):
    value = "off" if setting == "synchronous_commit" else "on"
    connection = await asyncpg.connect(database)
    name = urlsplit(database).path[1:]
    try:
        await connection.execute(f"ALTER DATABASE {name} SET {setting} = {value}")
        with pytest.raises(UnsafeDatabase, match=setting):
            await Store.open(database)
        if setting == "synchronous_commit":
            await (await Store.open(database, allow_unsafe=True)).close()
    finally:
        await connection.close()


@pytest.mark.req("R-189")
async def test_a_server_that_became_unsafe_meanwhile_is_given_nothing(database, packet):
    """As after a failover to a server with other settings: publishers get no OK."""
    name = urlsplit(database).path[1:]
    async with await Store.open(database) as store:
        await store.append([packet(0)], NOW)
        connection = await asyncpg.connect(database)
        try:
            await connection.execute(f"ALTER DATABASE {name} SET synchronous_commit = off")
            with structlog.testing.capture_logs() as lines:
                for _ in range(2):
                    await connection.execute("SELECT pg_terminate_backend($1, 5000)", store._log.backend_pid)
                    with pytest.raises(StoreUnavailable):
                        for _ in range(3):  # the first may fail because the connection is lost
                            await store.append([packet(1)], NOW)
                    with pytest.raises(StoreUnavailable, match="synchronous_commit is off"):
                        await store.append([packet(1)], NOW)
            assert await connection.fetchval("SELECT count(*) FROM packets") == 1
            assert [line["event"] for line in lines].count("database_unsafe") == 1
            await connection.execute(f"ALTER DATABASE {name} RESET synchronous_commit")
            await store.append([packet(1)], NOW)
        finally:
            await connection.close()
