"""The schema: created once by the first process, refused if it is not ours."""

from __future__ import annotations

import asyncio
from pathlib import Path
from urllib.parse import urlsplit

import asyncpg
import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory

from relayd.store import Store, StoreError, StoreUnavailable, UnsafeDatabase, migrate
from relayd.store.migrate import REVISION, current_revision, latest_revision
from relayd.store.schema import METADATA, is_ours
from relayd.store.types import SERVES
from relayd.store.upgrade import alembic_config, run_sync, served_revisions, upgrade


async def execute(url: str, statement: str) -> None:
    connection = await asyncpg.connect(url)
    try:
        await connection.execute(statement)
    finally:
        await connection.close()


def test_the_revision_we_ask_for_is_the_newest_migration():
    assert ScriptDirectory.from_config(alembic_config()).get_current_head() == REVISION == latest_revision()


def script_location() -> Path:
    location = alembic_config().get_main_option("script_location")
    assert location is not None
    return Path(location)


def test_the_migrations_are_found_in_an_installed_wheel_first(tmp_path, monkeypatch):
    import relayd

    package = tmp_path / "relayd"
    package.mkdir()
    monkeypatch.setattr(relayd, "__file__", str(package / "__init__.py"))
    assert script_location() == tmp_path / "migrations"
    (package / "_migrations").mkdir()
    assert script_location() == package / "_migrations"


@pytest.mark.req("R-308")
async def test_processes_that_start_together_migrate_once(empty_database):
    assert await current_revision(empty_database) is None
    assert await asyncio.gather(*(migrate(empty_database) for _ in range(3))) == [REVISION] * 3
    assert await current_revision(empty_database) == REVISION
    await asyncio.to_thread(upgrade, empty_database)
    async with await Store.open(empty_database) as store:
        assert await store.head() == 0


@pytest.mark.req("R-308")
async def test_a_schema_that_is_not_ours_is_refused(empty_database):
    with pytest.raises(UnsafeDatabase, match="relayd migrate"):
        await Store.open(empty_database)
    await migrate(empty_database)
    await execute(empty_database, "UPDATE alembic_version SET version_num = '9999'")
    with pytest.raises(UnsafeDatabase, match="newer"):
        await migrate(empty_database)
    with pytest.raises(UnsafeDatabase, match="9999"):
        await Store.open(empty_database)


async def test_nothing_is_made_in_a_database_that_no_program_of_ours_can_use(empty_database, monkeypatch):
    monkeypatch.setattr("relayd.store.safety.MIN_SERVER_VERSION", 9_999_999)
    with pytest.raises(UnsafeDatabase, match="newer is needed"):
        await migrate(empty_database)
    assert await current_revision(empty_database) is None


@pytest.mark.req("R-308")
async def test_a_search_path_that_leads_nowhere_is_named(empty_database):
    name = urlsplit(empty_database).path[1:]
    await execute(empty_database, f"ALTER DATABASE {name} SET search_path = nowhere")
    with pytest.raises(StoreError, match="search_path names no schema"):
        await migrate(empty_database)


@pytest.mark.req("R-189")
async def test_no_second_log_is_made_beside_one_that_the_search_path_does_not_lead_to(empty_database):
    await migrate(empty_database)
    name = urlsplit(empty_database).path[1:]
    await execute(empty_database, f"CREATE SCHEMA other; ALTER DATABASE {name} SET search_path = other")
    with pytest.raises(UnsafeDatabase, match=r"in the schema public, which is not in the search_path"):
        await migrate(empty_database)
    await execute(empty_database, f"ALTER DATABASE {name} SET search_path = other, public")
    assert await migrate(empty_database) == REVISION


async def test_a_migration_that_fails_leaves_nothing(empty_database):
    await execute(empty_database, "CREATE TABLE packet_ids (mine int)")
    with pytest.raises(StoreError, match="already exists"):
        await migrate(empty_database)
    assert await current_revision(empty_database) is None
    await execute(empty_database, "DROP TABLE packet_ids")
    assert await migrate(empty_database) == REVISION


async def test_the_metadata_describes_what_the_migrations_make(database):
    def differences(connection: sa.Connection) -> list[object]:
        options = {"include_object": is_ours, "compare_type": True}
        found: list[object] = compare_metadata(MigrationContext.configure(connection, opts=options), METADATA)
        return found

    assert await asyncio.to_thread(run_sync, database, differences) == []


@pytest.mark.parametrize(
    ("url", "error"),
    [
        ("postgresql://127.0.0.1:1/none", StoreUnavailable),
        ("postgresql://nobody@/none?host=/nonexistent", StoreUnavailable),
        ("http://127.0.0.1", StoreError),
    ],
)
async def test_a_database_that_cannot_be_reached(url, error):
    with pytest.raises(error):
        await migrate(url)
    with pytest.raises(error):
        await Store.open(url, connect_timeout=1)


async def test_secrets_are_made_once_and_shared(store, second_store, database):
    assert store.secrets == second_store.secrets
    assert len(store.secrets.identity_seed) == len(store.secrets.cursor_key) == 32
    assert store.secrets.identity_seed != store.secrets.cursor_key
    assert store.secrets.identity_seed.hex() not in repr(store.secrets)
    assert repr(store.secrets.cursor_key) not in repr(store.secrets)


@pytest.mark.req("R-308")
async def test_a_database_of_before_0_2_is_refused_in_words_that_name_the_way(empty_database):
    await migrate(empty_database)
    await execute(empty_database, "UPDATE alembic_version SET version_num = '0008'")
    with pytest.raises(UnsafeDatabase, match="`relayd export` its log with that program"):
        await migrate(empty_database)
    assert await current_revision(empty_database) == "0008"


async def test_a_program_works_on_a_newer_schema_that_serves_it(empty_database, packet):
    await migrate(empty_database)
    await execute(empty_database, "UPDATE alembic_version SET version_num = '9999'")
    await execute(empty_database, f"COMMENT ON TABLE alembic_version IS '{SERVES}9999 {REVISION}'")
    await migrate(empty_database)
    assert await current_revision(empty_database) == "9999"
    async with await Store.open(empty_database) as store:
        await store.append([packet(1)], 1_790_000_000)
    await execute(empty_database, f"COMMENT ON TABLE alembic_version IS '{SERVES}9999 9998'")
    with pytest.raises(UnsafeDatabase, match="9999"):
        await Store.open(empty_database)
    with pytest.raises(UnsafeDatabase, match="newer"):
        await migrate(empty_database)


async def test_the_schema_names_the_programs_that_it_serves(empty_database):
    await migrate(empty_database)
    connection = await asyncpg.connect(empty_database)
    try:
        said = await connection.fetchval("SELECT obj_description('alembic_version'::regclass, 'pg_class')")
    finally:
        await connection.close()
    scripts = ScriptDirectory.from_config(alembic_config())
    assert said.removeprefix(SERVES).split() == served_revisions(scripts)
    assert served_revisions(scripts)[0] == REVISION
    for script in scripts.walk_revisions():
        vars(script.module)["keeps_older_programs"] = True
    assert served_revisions(scripts) == [script.revision for script in scripts.walk_revisions()]
