"""What a database URL may say: several servers, and the members that providers print."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme

from relayd.config import load
from relayd.database_url import each_server
from relayd.store.connection import connect
from relayd.store.types import StoreError, StoreUnavailable
from tests.relayd.settings_files import problems


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


PRINTED = [
    "channel_binding=prefer&sslmode=disable",
    "connect_timeout=10&keepalives=1&keepalives_idle=30&tcp_user_timeout=5000",
    "gssencmode=disable&fallback_application_name=psql&application_name=mine",
    "client_encoding=utf8&sslsni=1&load_balance_hosts=random&options=-c%20geqo%3Doff",
    "target_session_attrs=read-write&channel_binding=disable&min_protocol_version=3.0",
    "require_auth=&ssl=&",
]


@pytest.mark.parametrize("members", PRINTED)
async def test_a_url_as_providers_print_it_is_used(database: str, members: str):
    url = f"{database}{'&' if '?' in database else '?'}{members}"
    assert load(None, {"RELAYD_DATABASE_URL": url}).database_url == url
    connection = await connect(url, name="test", connect_timeout=5.0)
    assert await connection.fetchval("SHOW application_name") == "test"
    assert await connection.fetchval("SHOW geqo") == ("off" if "geqo" in members else "on")
    await connection.close()


@pytest.mark.parametrize(
    ("members", "fault"),
    [
        (
            "sslmode=require&channel_binding=require",
            "here; sslmode=verify-full&sslrootcert=system proves the server",
        ),
        ("gssencmode=require", "gssencmode can only be prefer or disable here"),
        ("sslmode=verify_full", "sslmode can only be disable or "),
        ("target_session_attrs=primary-only", "target_session_attrs can only be any or "),
        ("sslmode=require&sslrootcert=system", "sslrootcert=system needs sslmode=verify-full"),
        ("require_auth=scram-sha-256", "require_auth is not possible here"),
        ("pgbouncer=true", "PostgreSQL's URLs have no pgbouncer; leave it out, or if it is a setting"),
        ("search_path=mine", r"options=-c%20search_path%3D"),
        ("ss@h=x", "not a URL; write characters of a password"),
        ("sslmode", "not a URL; write characters of a password"),
    ],
)
async def test_what_cannot_be_had_is_refused_by_name(members: str, fault: str):
    url = f"postgresql://u:1@h/d?{members}"
    for variable in ("DATABASE_URL", "READ_DATABASE_URL"):
        both = {"RELAYD_DATABASE_URL": "postgresql://h/d", f"RELAYD_{variable}": url}
        (said,) = problems(None, both)
        assert said.startswith(f"{variable.lower()}: ")
        assert fault in said
    with pytest.raises(StoreError, match="the database URL cannot be used") as raised:
        await connect(url, name="test", connect_timeout=5.0)
    assert fault in str(raised.value)
    assert "15 or newer" not in str(raised.value)


def test_ssl_is_written_as_jdbc_does_too():
    assert each_server("postgresql://h/d?ssl=true") == ("postgresql://h/d?sslmode=require",)
    assert each_server("postgresql://h/d?ssl=true&sslmode=verify-full") == (
        "postgresql://h/d?sslmode=verify-full",
    )


async def test_an_option_that_the_server_does_not_know_is_no_question_of_its_version(database: str):
    url = f"{database}{'&' if '?' in database else '?'}options=-c%20nonsense%3D1"
    with pytest.raises(StoreError, match=r'"nonsense"; the URL\'s options ask for it'):
        await connect(url, name="test", connect_timeout=5.0)


async def test_the_authorities_of_the_system_may_vouch_for_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    authority = trustme.CA()
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    started = asyncio.get_running_loop().create_future()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, EOFError):
            await reader.readexactly(8)  # SSLRequest
            writer.write(b"S")
            await writer.start_tls(context)
            started.set_result(await reader.read(1000))
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        url = f"postgresql://u@127.0.0.1:{server.sockets[0].getsockname()[1]}/d?sslrootcert=system"
        with pytest.raises(StoreUnavailable, match="certificate verify failed"):
            await connect(url, name="test", connect_timeout=5.0)
        authority.cert_pem.write_to_path(tmp_path / "ca.pem")
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
        with pytest.raises(StoreUnavailable):  # this server ends the connection after the greeting
            await connect(url, name="test", connect_timeout=5.0)
    assert b"application_name" in await started
