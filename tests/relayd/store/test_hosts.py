"""The servers that a URL names, and how the time is shared among them."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from relayd.store.connection import connect
from relayd.store.hosts import each_server
from relayd.store.types import StoreUnavailable


@pytest.mark.parametrize(
    ("url", "servers"),
    [
        ("postgresql://u:p@h/d", ["postgresql://u:p@h/d"]),
        ("postgresql:///d?host=/a&port=1", ["postgresql:///d?host=/a&port=1"]),
        ("postgresql:///d", ["postgresql:///d"]),
        (
            "postgresql://h/d?target_session_attrs=read-write",
            ["postgresql://h/d?target_session_attrs=primary"],
        ),
        ("postgresql://u:p@h:1,[::1]:2/d", ["postgresql://u:p@h:1/d", "postgresql://u:p@[::1]:2/d"]),
        (
            "postgresql://u@/d?host=/a%20b,/c&port=1,2&target_session_attrs=read-write",
            [
                "postgresql://u@/d?host=/a%20b&port=1&target_session_attrs=primary",
                "postgresql://u@/d?host=/c&port=2&target_session_attrs=primary",
            ],
        ),
        (
            "postgresql:///d?host=/a,/b&port=7",
            ["postgresql:///d?host=/a&port=7", "postgresql:///d?host=/b&port=7"],
        ),
        ("postgresql:///d?host=/a,/b", ["postgresql:///d?host=/a", "postgresql:///d?host=/b"]),
        (
            "postgresql://a,b/d?target_session_attrs=prefer-standby",
            [
                "postgresql://a/d?target_session_attrs=standby",
                "postgresql://b/d?target_session_attrs=standby",
                "postgresql://a/d?target_session_attrs=any",
                "postgresql://b/d?target_session_attrs=any",
            ],
        ),
        # Nonsense is left unchanged: the driver reports what is wrong with it.
        ("postgresql:///d?host=/a,/b,/c&port=1,2", ["postgresql:///d?host=/a,/b,/c&port=1,2"]),
    ],
)
def test_each_server_is_a_url_of_its_own(url: str, servers: list[str]):
    assert list(each_server(url)) == servers


@pytest.fixture
def silent_port() -> Iterator[int]:
    """A port that accepts connections and never answers, like a machine that is gone."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.mark.req("R-311")
async def test_a_machine_that_is_gone_leaves_time_for_the_next(database: str, silent_port: int):
    path = database.partition("://")[2]
    folder = path.partition("host=")[2].partition("&")[0]
    name = path.partition("?")[0].rpartition("/")[2]
    port = path.partition("port=")[2].partition("&")[0] or "5432"
    url = (
        f"postgresql://relayd@/{name}?host=127.0.0.1,{folder}&port={silent_port},{port}"
        "&target_session_attrs=read-write"
    )
    reading = {"default_transaction_read_only": "on"}  # like the relay's own read-only sessions
    connection = await connect(url, name="test", connect_timeout=6.0, settings=reading)
    assert await connection.fetchval("SELECT NOT pg_is_in_recovery()")
    await connection.close()


async def test_where_none_is_as_wanted_the_database_is_unavailable(database: str):
    join = "&" if "?" in database else "?"
    with pytest.raises(StoreUnavailable):
        await connect(f"{database}{join}target_session_attrs=standby", name="test", connect_timeout=5.0)


def test_members_without_a_value_stay():
    assert each_server("postgresql://a,b/relay?options=&user=x") == (
        "postgresql://a/relay?options=&user=x",
        "postgresql://b/relay?options=&user=x",
    )
