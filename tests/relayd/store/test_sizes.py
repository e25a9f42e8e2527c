"""The database's reports about itself."""

from __future__ import annotations

import os
from urllib.parse import urlsplit

import pytest

from relayd.cli.explain import explain, read_filter
from relayd.config import Settings
from relayd.store.connection import connect
from relayd.store.sizes import read_replica, read_server, read_sizes

NOW = 1_790_000_000


async def test_sizes_and_connections_are_read(database, store, packet):
    before = await read_sizes(database)
    assert 0 < before.log_bytes < before.database_bytes
    assert 0 < before.connections < before.max_connections
    await store.append([packet(number) for number in range(100)], NOW)
    assert (await store.sizes()).log_bytes > before.log_bytes


async def test_connections_of_everybody_count_for_a_role_that_may_not_look_into_them(database, sql):
    role = f"plain_{os.getpid()}"
    await sql.execute(f"CREATE ROLE {role}")
    plain = f"{database}{'&' if '?' in database else '?'}options=-c%20role%3D{role}"
    others = [await connect(database, name="others", connect_timeout=5) for _ in range(3)]
    try:
        seen = await read_sizes(plain)
        assert seen.connections >= len(others) + 2, "theirs, the test's and its own"
        assert seen.connections <= await sql.fetchval("SELECT count(*) FROM pg_stat_activity")
        assert seen.max_connections == (await read_sizes(database)).max_connections
    finally:
        for each in others:
            await each.close()
        await sql.execute(f"DROP ROLE {role}")


async def test_limits_of_connections_are_those_of_role_and_database(database, sql):
    role, name = f"limited_{os.getpid()}", urlsplit(database).path[1:]
    assert (await read_server(database)).limits == (), "nobody has set one, and superusers have none"
    await sql.execute(f"CREATE ROLE {role} CONNECTION LIMIT 7")
    await sql.execute(f"ALTER DATABASE {name} CONNECTION LIMIT 50")
    try:
        url = f"{database}{'&' if '?' in database else '?'}options=-c%20role%3D{role}"
        limits = (await read_server(url)).limits
        assert [(limit.of, limit.most) for limit in limits] == [("role", 7), ("database", 50)]
        assert limits[1].used >= 2, "the test's connection and the look's own"
        assert (await read_server(database)).limits == ()
    finally:
        await sql.execute(f"DROP ROLE {role}")


async def test_a_server_without_a_pooler_and_with_whole_indexes(database, sql):
    server = await read_server(database)
    assert (server.invalid_indexes, server.is_pooled) == ((), False)
    await sql.execute("UPDATE pg_index SET indisvalid = false WHERE indexrelid = 'abuse_pkey'::regclass")
    assert (await read_server(database)).invalid_indexes == ("abuse_pkey",)
    assert (await read_replica(database)).is_replica is False


async def test_a_filter_is_explained_by_running_it(database, store, packet):
    await store.append([packet(number) for number in range(50)], NOW)
    author = packet(1).author_id
    query, limit = read_filter(f'{{"authors": ["{author}"], "types": ["POST"], "limit": 5}}', Settings())
    assert (query.authors, limit) == (frozenset({author}), 5)
    first, second = await explain(database, query, limit)
    assert (first.way, second.way) == ("author_id", "content_type")
    assert first.rows <= limit + 1
    assert first.milliseconds > 0 and first.cost > 0 and first.blocks > 0
    assert first.plan
    query, limit = read_filter("{}", Settings(default_limit=7))
    [whole] = await explain(database, query, limit)
    assert (whole.way, whole.rows) == ("sequence", 7)
    assert whole.indexes


@pytest.mark.parametrize("text", ["", "[]", '{"packet_ids": ["0x1"]}', '{"limit": -1}'])
def test_what_is_no_filter_is_said_to_be_none(text):
    with pytest.raises(ValueError, match="not the filters"):
        read_filter(text, Settings())
