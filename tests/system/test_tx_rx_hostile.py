"""Peers that break the rules: each harms only itself, and errors say what was wrong."""

from __future__ import annotations

import asyncio
import datetime
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from struct import pack, unpack
from typing import Any

import msgspec
import psutil
import pytest
import trustme
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)
from strata.txrx import (
    Address,
    DeliveryStatus,
    DeliveryTimeout,
    ProtocolViolation,
    Rx,
    SendError,
    TcpAddress,
    TlsAddress,
    Tx,
    TxRxClosed,
    TxRxIOError,
    TxRxSettings,
    dial,
    serve,
)
from strata.txrx.serving import NetRx

from tests.support.tx_rx_proxy import TxRxProxy
from tests.support.waiting import until

Answer = tuple[str, int | str]


# The wire format, written down a second time


def header(session: int, *, magic: bytes = b"STRX", version: int = 1) -> bytes:
    return magic + pack(">Q", session) + bytes([version])


def frame(*parts: bytes) -> bytes:
    payload = b"".join(pack(">Q", len(part)) + part for part in parts)
    return pack(">Q", len(payload)) + payload


def message(sequence: int, body: bytes = b"x", *parts: bytes) -> bytes:
    return frame(pack(">Q", sequence) + body, *parts)


def ack(sequence: int) -> bytes:
    return frame(b"\0" + pack(">Q", sequence))


async def read_answer(reader: asyncio.StreamReader) -> Answer | None:
    """The server's next answer; None at the end of the connection."""
    async with asyncio.timeout(20):
        try:
            length, size = unpack(">QQ", await reader.readexactly(16))
            body = await reader.readexactly(size)
        except (asyncio.IncompleteReadError, ConnectionError):
            return None
    assert length == size + 8 and body[0] in (0, 1, 2)
    if body[0] == 0:
        return "ack", unpack(">Q", body[1:])[0]
    return ("reject", "closed")[body[0] - 1], body[1:].decode()


async def read_answers(reader: asyncio.StreamReader) -> list[Answer]:
    """All answers up to the end of the connection."""
    answers = []
    while (answer := await read_answer(reader)) is not None:
        answers.append(answer)
    return answers


@asynccontextmanager
async def raw(rx: Rx[Any]) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection to a receiver on which a test sends arbitrary bytes."""
    address: Any = rx.addr()
    reader, writer = await asyncio.open_connection(address.host, address.port)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


@asynccontextmanager
async def served(message_type: Any = bytes, **changes: Any) -> AsyncIterator[Rx[Any]]:
    """A receiver with a separate sender, which must notice nothing of what happens beside it."""
    address, rx = await serve("tcp:127.0.0.1:0", message_type, settings=TxRxSettings(**changes))
    async with rx, await dial(address, message_type) as bystander:
        await bystander.send(b"before" if message_type is bytes else 1)
        await rx.recv()
        yield rx
        await bystander.send(b"after" if message_type is bytes else 2)
        assert await rx.recv() in (b"after", 2)
        assert bystander.statistics().connections == 1


# Dialers that break the rules


@pytest.mark.req("T-082")
@pytest.mark.parametrize(
    "opening",
    [
        pytest.param(header(1, magic=b"STRZ"), id="wrong magic"),
        pytest.param(header(1, version=2), id="newer version"),
        pytest.param(header(1, version=0), id="older version"),
        pytest.param(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", id="HTTP"),
        pytest.param(bytes(range(256)) * 400, id="garbage"),
        pytest.param(bytes(13), id="zeros"),
    ],
)
async def test_a_connection_that_begins_otherwise_is_closed_without_an_answer(opening: bytes) -> None:
    async with served() as rx, raw(rx) as (reader, writer):
        writer.write(opening + message(0))
        assert await read_answers(reader) == []
        assert rx.unread == 0
        assert rx.statistics().sessions == 1 and rx.statistics().broken_connections == 1


@pytest.mark.req("T-072", "T-075", "T-078", "T-031", "T-048")
@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        pytest.param(pack(">Q", 2**63), "oversized frame (9223372036854775808, 67108864)", id="2^63"),
        pytest.param(pack(">Q", 2**64 - 1), "oversized frame", id="2^64-1"),
        pytest.param(pack(">Q", 64 * 2**20 + 1), "oversized frame (67108865, 67108864)", id="one too many"),
        pytest.param(pack(">QQ", 32, 2**62), "a part that is longer than its frame", id="long part"),
        pytest.param(pack(">QQ", 32, 25) + bytes(24), "longer than its frame", id="part one longer"),
        pytest.param(pack(">Q", 4) + bytes(4), "longer than its frame", id="half a length"),
        pytest.param(frame(*[b""] * 2000), "more than 1024 parts", id="many parts"),
        pytest.param(frame(b"1234567"), "without a sequence", id="short body"),
        pytest.param(message(1, b"y", b"1", b"2"), "a body or one part", id="parts of no message"),
        pytest.param(message(2), "message 2 came where 1 was expected", id="gap"),
        pytest.param(message(2**64 - 1), "came where 1 was expected", id="far gap"),
    ],
)
async def test_a_frame_that_is_none_ends_its_session_and_no_other(sent: bytes, reason: str) -> None:
    async with served() as rx, raw(rx) as (reader, writer):
        writer.write(header(1) + message(0, b"good") + sent)
        answers = await read_answers(reader)
        assert answers[-1][0] == "reject" and reason in str(answers[-1][1])
        assert answers[:-1] and set(answers[:-1]) == {("ack", 0)}, "what was good is acknowledged before"
        assert await rx.recv() == b"good"
        assert rx.statistics().rejects_sent == 1
        async with raw(rx) as (again, writing):
            writing.write(header(1) + message(1))
            answers = await read_answers(again)
            assert [kind for kind, _ in answers] == ["ack", "reject"], "it has ended for good"
            assert reason in str(answers[1][1])


@pytest.mark.req("T-072")
async def test_bytes_that_are_no_message_of_the_channel_end_the_session() -> None:
    async with served(int) as rx, raw(rx) as (reader, writer):
        writer.write(header(1) + message(0, msgspec.msgpack.encode("no number")))
        ((kind, reason),) = await read_answers(reader)
        assert kind == "reject" and "no int" in str(reason)


@pytest.mark.req("T-036")
async def test_a_session_that_is_not_known_has_to_begin_with_zero() -> None:
    async with served() as rx, raw(rx) as (reader, writer):
        writer.write(header(1) + message(5))
        ((kind, reason),) = await read_answers(reader)
        assert kind == "reject" and "not known here" in str(reason)


@pytest.mark.req("T-030", "T-044", "T-034", "T-040")
async def test_old_numbers_are_ignored_and_acknowledged_again() -> None:
    async with served() as rx:
        async with raw(rx) as (reader, writer):
            writer.write(header(7) + b"".join(message(number, b"%d" % number) for number in range(5)))
            while await read_answer(reader) != ("ack", 4):
                pass
            writer.write(message(0, b"again") + message(3, b"again"))
            assert await read_answer(reader) == ("ack", 4)
        async with raw(rx) as (reader, writer):
            writer.write(header(7))
            assert await read_answer(reader) == ("ack", 4), "each connection begins with the last one"
            writer.write(message(2, b"again") + message(5, b"5"))
            assert await read_answer(reader) == ("ack", 5)
        assert [await rx.recv() for _ in range(6)] == [b"%d" % number for number in range(6)]
        assert rx.statistics().duplicates == 3 and rx.unread == 0


@pytest.mark.req("T-074", "T-103")
async def test_an_empty_frame_ends_a_session_whose_sender_has_nothing_more_to_say() -> None:
    async with served() as rx, raw(rx) as (reader, writer):
        writer.write(header(7) + message(0, b"last") + frame())
        answers = await read_answers(reader)
        assert answers and set(answers) == {("ack", 0)}
        assert await rx.recv() == b"last"
        async with raw(rx) as (again, writing):
            writing.write(header(7) + message(1))
            ((kind, reason),) = await read_answers(again)
            assert kind == "reject" and "not known here" in str(reason), "it is forgotten"


@pytest.mark.req("T-037")
async def test_the_newest_connection_of_a_session_counts() -> None:
    async with served() as rx, raw(rx) as (old_reader, old_writer):
        old_writer.write(header(7) + message(0))
        assert await read_answer(old_reader) == ("ack", 0)
        async with raw(rx) as (reader, writer):
            writer.write(header(7) + message(1))
            assert await read_answers(old_reader) == [], "the old one is closed"
            while await read_answer(reader) != ("ack", 1):
                pass
            assert rx.unread == 2
        await rx.recv()
        await rx.recv()


@pytest.mark.req("T-038", "T-040", "T-041", "T-042")
async def test_acknowledgements_come_after_so_many_messages_or_so_long() -> None:
    settings: dict[str, Any] = {
        "message_ack_eagerly": False,
        "message_ack_every_n_messages": 3,
        "message_ack_time_interval": 0.1,
    }
    async with served(**settings) as rx, raw(rx) as (reader, writer):
        before = rx.statistics().acks_sent
        writer.write(header(1) + message(0) + message(1) + message(2))
        assert await read_answer(reader) == ("ack", 2), "three at once"
        writer.write(message(3))
        assert await read_answer(reader) == ("ack", 3), "one alone, though nothing follows"
        assert rx.statistics().acks_sent == before + 2
        for _ in range(4):
            await rx.recv()


@pytest.mark.parametrize("opening", [b"", b"ST", header(3), header(3) + message(0) + message(1)[:20]])
async def test_a_dialler_that_stops_half_way_is_given_up(opening: bytes) -> None:
    settings = TxRxSettings(idle_frame_timeout=0.2)
    _, rx = await serve("tcp:127.0.0.1:0", bytes, settings=settings)
    async with rx, raw(rx) as (reader, writer):
        writer.write(opening)
        if opening == header(3):
            # A complete header is enough: a session may be idle indefinitely.
            async with raw(rx) as (silent, _):
                assert await read_answers(silent) == []
            assert not reader.at_eof()
            writer.write(message(0))
            assert await read_answer(reader) == ("ack", 0)
            return
        answers = await read_answers(reader)
        assert rx.statistics().broken_connections == 1
        if answers:
            assert answers == [("ack", 0)]
            async with raw(rx) as (reader, writer):
                writer.write(header(3) + message(1))
                await until(lambda: rx.unread == 2)


async def test_memory_follows_what_arrives_and_not_what_is_promised() -> None:
    gigabyte = 2**30
    async with served(codec_max_frame_length=2 * gigabyte) as rx, AsyncExitStack() as stack:
        before = psutil.Process().memory_info().rss
        for session in range(50):
            _, writer = await stack.enter_async_context(raw(rx))
            promise = pack(">Q", gigabyte) + pack(">Q", 9) + pack(">Q", 0) + b"x" + pack(">Q", gigabyte - 25)
            writer.write(header(session) + promise + bytes(1000))
        # The bytes of the bystander, and these.
        await until(lambda: rx.statistics().bytes_received >= 50 * 1045)
        assert psutil.Process().memory_info().rss - before < 100 * 2**20


async def test_more_connections_than_allowed_are_closed_at_once() -> None:
    async with served(max_connections=3) as rx, raw(rx) as (_, one), raw(rx) as (second, two):
        one.write(header(1) + message(0))
        two.write(header(2) + message(0))
        assert await read_answer(second) == ("ack", 0)
        async with raw(rx) as (third, writer):
            writer.write(header(3) + message(0))
            assert await read_answers(third) == []
        two.transport.abort()
        async with await dial(rx.addr(), bytes) as tx, asyncio.timeout(10):
            await tx.send(b"there is room again")
        assert rx.unread == 3
        for _ in range(3):
            await rx.recv()


async def test_more_sessions_than_allowed_are_refused() -> None:
    async with served(max_sessions=2) as rx, raw(rx) as (reader, writer):
        writer.write(header(1) + message(0))
        assert await read_answer(reader) == ("ack", 0)
        async with raw(rx) as (other, writing):
            writing.write(header(2) + message(0))
            assert await read_answers(other) == [("reject", "the server has too many sessions")]
        await rx.recv()


@pytest.mark.req("T-079")
async def test_ends_of_connections_within_a_frame_are_counted() -> None:
    async with served() as rx:
        assert isinstance(rx, NetRx)
        for number, sent in enumerate([b"", message(0)[:-1], pack(">Q", 100), message(0)]):
            async with raw(rx) as (_, writer):
                writer.write(header(number) + sent)
                await writer.drain()
                writer.close()
                await writer.wait_closed()
            await until(lambda: len(rx._hub.connections) == 1)
        assert rx.statistics().broken_connections == 2
        assert await rx.recv() == b"x"


# Servers that break the rules


Script = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@dataclass
class FakeServer:
    address: str
    connections: int = 0
    open: int = 0


@asynccontextmanager
async def fake_server(script: Script) -> AsyncIterator[FakeServer]:
    """A server that accepts connections like a receiver, and then runs the test's script."""
    server = FakeServer("")

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server.connections += 1
        server.open += 1
        try:
            await script(reader, writer)
            while await reader.read(2**16):
                pass
        except ConnectionError:
            pass
        finally:
            writer.transport.abort()
            server.open -= 1

    listener = await asyncio.start_server(handle, "127.0.0.1", 0)
    server.address = f"tcp:127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    try:
        yield server
    finally:
        listener.close()
        await until(lambda: not server.open)


@pytest.mark.req("T-029", "T-034", "T-055", "T-073", "T-080", "T-081", "T-082")
async def test_what_a_sender_writes() -> None:
    heard: list[bytes] = []
    large = os.urandom(20_000)
    first = message(0, b"first") + message(1, b"", large) + message(2, b"third")

    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not heard:
            heard.append(await reader.readexactly(13 + len(first)))
            writer.write(ack(0))
            await writer.drain()
            await until(lambda: tx.pending == 2)
            writer.transport.abort()
        else:
            heard.append(await reader.readexactly(13 + len(first) - len(message(0, b"first"))))
            writer.write(ack(2))
            heard.append(await reader.read())

    async with fake_server(listen) as server:
        async with await dial(server.address, bytes) as tx:
            for one in (b"first", large, b"third"):
                tx.post(one)
            await tx.drain()
    session = unpack(">Q", heard[0][4:12])[0]
    assert heard == [
        header(session) + first,
        header(session) + message(1, b"", large) + message(2, b"third"),
        pack(">Q", 0),
    ], "again what was not acknowledged, and at the end an empty frame: nothing is left to say"


@pytest.mark.req("T-049", "T-006", "T-012", "T-018", "T-048")
@pytest.mark.parametrize(
    ("answer", "kind", "reason", "delivery"),
    [
        (frame(b"\1not you"), TxRxClosed, "rejected: not you", DeliveryStatus.NOT_DELIVERED),
        (frame(b"\2good night"), TxRxClosed, "good night", DeliveryStatus.NOT_DELIVERED),
        (frame(b"\1\xff\xfe"), TxRxClosed, "rejected: ", DeliveryStatus.NOT_DELIVERED),
        (ack(2), ProtocolViolation, "acknowledged 2, and only 2 were sent", DeliveryStatus.UNKNOWN),
        (ack(2**64 - 1), ProtocolViolation, "only 2 were sent", DeliveryStatus.UNKNOWN),
        (frame(b"\3"), ProtocolViolation, "neither Ack, nor Reject, nor Closed", DeliveryStatus.UNKNOWN),
        (frame(b"\0short"), ProtocolViolation, "neither Ack", DeliveryStatus.UNKNOWN),
        (frame(b"\1", b"part"), ProtocolViolation, "neither Ack", DeliveryStatus.UNKNOWN),
        (pack(">Q", 0), ProtocolViolation, "neither Ack", DeliveryStatus.UNKNOWN),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", ProtocolViolation, "oversized frame", DeliveryStatus.UNKNOWN),
        (
            pack(">QQ", 2**40, 2**40 - 8) + bytes(10**6),
            ProtocolViolation,
            "oversized",
            DeliveryStatus.UNKNOWN,
        ),
    ],
)
async def test_a_server_that_ends_the_session_or_breaks_the_rules_closes_the_sender(
    answer: bytes, kind: type[Exception], reason: str, delivery: DeliveryStatus
) -> None:
    async def say(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(13 + len(message(0)) * 2)
        writer.write(answer)

    async with fake_server(say) as server:
        tx = await dial(server.address, bytes)
        channels = [tx.try_post(b"x") for _ in range(2)]
        async with asyncio.timeout(10):
            errors = [await channel for channel in channels]
        for error in errors:
            assert error is not None and isinstance(error.error, kind)
            assert reason in error.reason and error.delivery is delivery
        assert tx.status().value.closed and reason in str(tx.status().value.reason)
        assert [one.message for one in await tx.close()] == [b"x", b"x"]
        # A later dialler gets through: had the sender dialled again, it would have been first.
        other = await dial(server.address, bytes)
        other.post(b"x")
        await until(lambda: server.connections >= 2)
        assert server.connections == 2
        other.post(b"x")
        await until(lambda: other.status().value.closed)
        await other.close()


async def test_acknowledgements_that_go_back_are_no_harm() -> None:
    async def say(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(13 + len(message(0)) * 3)
        writer.write(ack(1) + ack(0) + ack(1) + ack(2))

    async with fake_server(say) as server, await dial(server.address, bytes) as tx:
        channels = [tx.try_post(b"x") for _ in range(3)]
        assert [await channel for channel in channels] == [None] * 3
        assert tx.statistics().messages_delivered == 3 and not tx.status().value.closed


@pytest.mark.req("T-066")
async def test_a_server_that_never_acknowledges_is_given_up() -> None:
    async def nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        pass

    async with fake_server(nothing) as server:
        settings = TxRxSettings(
            message_delivery_timeout=1.0, link_timeout=0.05, message_ack_time_interval=0.02
        )
        tx = await dial(server.address, bytes, settings=settings)
        channels = [tx.try_post(b"%d" % number) for number in range(5)]
        async with asyncio.timeout(10):
            errors = [await channel for channel in channels]
        for number, error in enumerate(errors):
            assert error is not None and error.message == b"%d" % number
            assert isinstance(error.error, DeliveryTimeout) and error.delivery is DeliveryStatus.UNKNOWN
        assert server.connections > 1, "the silent link was replaced meanwhile"
        await tx.close()


# TLS


@dataclass(frozen=True)
class Authority:
    """The certificates of one authority, in files."""

    folder: Path
    ca: trustme.CA

    @classmethod
    def make(cls, folder: Path) -> Authority:
        folder.mkdir()
        ca = trustme.CA()
        ca.cert_pem.write_to_path(folder / "authority.pem")
        return cls(folder, ca)

    def issue(self, name: str, **options: Any) -> Path:
        path = self.folder / f"{name}-{os.urandom(4).hex()}.pem"
        self.ca.issue_cert(name, **options).private_key_and_cert_chain_pem.write_to_path(path)
        return path

    def settings(self, leaf: Path | None = None, **changes: Any) -> TxRxSettings:
        return TxRxSettings(
            tls_authorities=self.folder / "authority.pem",
            tls_certificate=leaf,
            tls_key=leaf,
            **changes,
        )


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority.make(tmp_path / "ours")


async def why_not(address: Any, settings: TxRxSettings) -> str:
    """The reason why a message does not arrive."""
    tx: Tx[bytes] = await dial(
        address, bytes, settings=replace(settings, message_delivery_timeout=0.5, backoff_cap=0.02)
    )
    with pytest.raises(SendError) as raised:
        await tx.send(b"secret")
    await tx.close()
    return raised.value.reason


@asynccontextmanager
async def tls_served(settings: TxRxSettings, good: TxRxSettings) -> AsyncIterator[Rx[bytes]]:
    """A TLS receiver that serves well-behaved clients during and after the test."""
    address, rx = await serve("metatls:localhost:0", bytes, settings=settings)
    async with rx, await dial(address, bytes, settings=good) as bystander:
        await bystander.send(b"before")
        yield rx
        await bystander.send(b"after")
        async with await dial(address, bytes, settings=good) as late:
            await late.send(b"late")
        assert [await rx.recv() for _ in range(3)] == [b"before", b"after", b"late"]
        assert bystander.statistics().connections == 1 and rx.unread == 0


@pytest.mark.req("T-093", "T-023")
async def test_a_server_of_another_authority_is_refused(authority: Authority, tmp_path: Path) -> None:
    other = Authority.make(tmp_path / "other")
    serving = authority.settings(authority.issue("localhost"))
    async with tls_served(serving, authority.settings()) as rx:
        reason = await why_not(rx.addr(), other.settings())
        assert "the server's certificate is refused" in reason and "unable to get local issuer" in reason
        assert "the server's certificate is refused" in await why_not(rx.addr(), TxRxSettings())


@pytest.mark.req("T-093")
async def test_an_expired_certificate_is_refused(authority: Authority) -> None:
    yesterday = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=1)
    serving = authority.settings(authority.issue("localhost", not_after=yesterday))
    address, rx = await serve("metatls:localhost:0", bytes, settings=serving)
    async with rx:
        assert "certificate has expired" in await why_not(address, authority.settings())
        assert rx.unread == 0


@pytest.mark.req("T-093")
async def test_a_certificate_of_another_host_is_refused(authority: Authority) -> None:
    serving = authority.settings(authority.issue("elsewhere.test"))
    address, rx = await serve("metatls:localhost:0", bytes, settings=serving)
    async with rx:
        reason = await why_not(address, authority.settings())
        assert "Hostname mismatch" in reason and "localhost" in reason


@pytest.mark.req("T-093")
async def test_mutual_tls_refuses_clients_without_a_certificate_of_its_authority(
    authority: Authority, tmp_path: Path
) -> None:
    stranger = Authority.make(tmp_path / "other").issue("client.test")
    serving = authority.settings(authority.issue("localhost"), tls_mutual=True)
    good = authority.settings(authority.issue("client.test"))
    async with tls_served(serving, good) as rx:
        reason = await why_not(rx.addr(), authority.settings())
        assert "mutual TLS" in reason and "set tls_certificate" in reason
        reason = await why_not(rx.addr(), authority.settings(stranger))
        assert "mutual TLS" in reason and "it refuses ours" in reason


def port_of(address: Address) -> int:
    assert isinstance(address, TcpAddress | TlsAddress)
    return address.port


@pytest.mark.req("T-092")
async def test_plain_text_at_a_tls_port_and_tls_at_a_plain_one(authority: Authority) -> None:
    serving = authority.settings(authority.issue("localhost"))
    async with tls_served(serving, authority.settings()) as rx:
        reason = await why_not(f"tcp:localhost:{port_of(rx.addr())}", TxRxSettings())
        assert "last attempt to connect: " in reason
    async with served() as plain:
        reason = await why_not(f"tls:127.0.0.1:{port_of(plain.addr())}", authority.settings())
        assert "last attempt to connect: " in reason and "None" not in reason


async def test_a_client_that_never_shakes_hands_is_given_up(authority: Authority) -> None:
    serving = authority.settings(authority.issue("localhost"), idle_frame_timeout=0.2)
    _, rx = await serve("metatls:127.0.0.1:0", bytes, settings=serving)
    async with rx, raw(rx) as (reader, _):
        async with asyncio.timeout(10):
            assert await reader.read() == b""


@pytest.mark.req("T-092", "T-023")
async def test_files_that_cannot_be_used_are_named(authority: Authority, tmp_path: Path) -> None:
    good, other = authority.issue("localhost"), authority.issue("localhost")
    broken, locked = tmp_path / "broken.pem", tmp_path / "locked.pem"
    broken.write_text("-----BEGIN CERTIFICATE-----\nnonsense\n-----END CERTIFICATE-----\n")
    key = load_pem_private_key(good.read_bytes(), None)
    locked.write_bytes(
        key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"passphrase"))
    )
    cases: list[tuple[dict[str, Any], str]] = [
        ({"tls_certificate": good, "tls_key": other}, f"{other} is not the key of the certificate in {good}"),
        ({"tls_certificate": tmp_path / "no", "tls_key": good}, f"{tmp_path / 'no'}: No such file"),
        ({"tls_certificate": good, "tls_key": tmp_path}, f"{tmp_path}: Is a directory"),
        ({"tls_certificate": broken, "tls_key": broken}, f"{broken} and {broken} are not a certificate"),
        ({"tls_certificate": good, "tls_key": locked}, "without passphrase"),
        ({"tls_authorities": broken}, f"{broken} holds no certificates"),
    ]
    for settings, says in cases:
        with pytest.raises(TxRxIOError) as raised:
            await dial("metatls:localhost:1", bytes, settings=TxRxSettings(**settings))
        assert says in str(raised.value)
    for settings, says in cases[:5]:
        with pytest.raises(TxRxIOError) as raised:
            await serve("metatls:localhost:0", bytes, settings=TxRxSettings(**settings))
        assert says in str(raised.value)
    with pytest.raises(TxRxIOError, match="tls_certificate and tls_key"):
        await serve("metatls:localhost:0", bytes, settings=TxRxSettings())
    with pytest.raises(TxRxIOError, match="tls_authorities"):
        mutual = TxRxSettings(tls_certificate=good, tls_key=good, tls_mutual=True)
        await serve("metatls:localhost:0", bytes, settings=mutual)


async def test_nothing_can_be_read_on_the_way(authority: Authority) -> None:
    serving = authority.settings(authority.issue("localhost"))
    address, rx = await serve("metatls:127.0.0.1:0", bytes, settings=serving)
    async with rx, TxRxProxy(f"tcp:127.0.0.1:{port_of(address)}", records=True) as proxy:
        through = f"metatls:localhost:{proxy.address.rpartition(':')[2]}"
        async with await dial(through, bytes, settings=authority.settings()) as tx:
            await tx.send(b"the secret")
            assert await rx.recv() == b"the secret"
        (link,) = proxy.links
        assert len(link.forwards) > 100
        assert b"secret" not in link.forwards and b"STRX" not in link.forwards
