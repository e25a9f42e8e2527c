"""Sockets from accept to the end of their handshake, over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import structlog

from relayd.process import accepting
from relayd.process.accepting import Acceptor, bind
from relayd.slices import Slices
from relayd.tls import ServerTls, read_tls_files, write_dev_certificates


class Guest(asyncio.Protocol):
    """A connection that records what happens to it."""

    def __init__(self, log: list[str], welcome: bool = True) -> None:
        self.log = log
        self.welcome = welcome

    @property
    def socket(self) -> asyncio.Protocol:
        return self

    def accepted(self, peer: str | None) -> bool:
        self.log.append(f"accepted {peer}")
        return self.welcome

    def handshake_begins(self) -> None:
        self.log.append("begins")

    def handshake_ended(self, *, failed: bool) -> None:
        self.log.append("failed" if failed else "done")

    def connection_made(self, transport: Any) -> None:
        self.log.append("made")
        transport.write(b"hello")
        transport.close()


@asynccontextmanager
async def listening(
    connect: Callable[[], Guest],
    tls: ssl.SSLContext | None = None,
    timeout: float = 20.0,
    slices: Slices | None = None,
    takes_plain: bool = False,
) -> AsyncIterator[Acceptor]:
    (bound,) = bind("127.0.0.1", 0, reuse_port=False)
    listener = Acceptor(
        bound,
        connect,
        tls=tls,
        handshake_timeout=timeout,
        slices=slices or Slices(),
        takes_plain=takes_plain,
    )
    yield listener
    listener.close()
    listener.close()


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> ssl.SSLContext:
    made = write_dev_certificates(Path(tmp_path_factory.mktemp("tls")))
    return ServerTls(read_tls_files(made.cert, made.key)).context


async def test_a_plain_socket_is_accepted_and_served():
    log: list[str] = []
    async with listening(lambda: Guest(log)) as listener:
        reader, writer = await asyncio.open_connection("127.0.0.1", listener.port)
        assert await reader.read() == b"hello"
        writer.close()
    assert log == ["accepted 127.0.0.1", "made", "done"]


@pytest.mark.req("R-321")
async def test_a_socket_that_is_not_welcome_costs_no_handshake(tls):
    log: list[str] = []
    async with listening(lambda: Guest(log, welcome=False), tls) as listener:
        reader, writer = await asyncio.open_connection("127.0.0.1", listener.port)
        assert await reader.read() == b""
        writer.close()
    assert log == ["accepted 127.0.0.1"]


@pytest.mark.req("R-321")
async def test_a_peer_that_never_says_hello_is_counted_and_cut_off(tls, eventually):
    log: list[str] = []
    async with listening(lambda: Guest(log), tls, timeout=0.1) as listener:
        reader, writer = await asyncio.open_connection("127.0.0.1", listener.port)
        await eventually(lambda: log == ["accepted 127.0.0.1", "begins", "failed"])
        assert await reader.read() == b""
        writer.close()
        reader, writer = await asyncio.open_connection("127.0.0.1", listener.port)
        writer.write(b"GET / HTTP/1.1\r\n\r\n" * 100)
        await eventually(lambda: log[3:] == ["accepted 127.0.0.1", "begins", "failed"])
        writer.close()


async def test_a_handshake_under_way_is_dropped_when_the_listener_closes(tls, eventually):
    log: list[str] = []
    async with listening(lambda: Guest(log), tls) as listener:
        _, writer = await asyncio.open_connection("127.0.0.1", listener.port)
        await eventually(lambda: "begins" in log)
    await eventually(lambda: log[-1] == "failed")
    writer.close()


@pytest.mark.req("R-321")
async def test_a_crowd_is_accepted_over_many_turns_of_the_loop():
    log: list[str] = []
    most = 0

    async def watch() -> None:
        nonlocal most
        accepted = 0
        while accepted < 20:
            await asyncio.sleep(0)
            now = sum(line.startswith("accepted") for line in log)
            most, accepted = max(most, now - accepted), now

    async with listening(lambda: Guest(log), slices=Slices(seconds=0.0)) as listener:
        watching = asyncio.create_task(watch())
        crowd = [asyncio.open_connection("127.0.0.1", listener.port) for _ in range(20)]
        for reader, writer in await asyncio.gather(*crowd):
            assert await reader.read() == b"hello"
            writer.close()
        await watching
    assert most <= 2  # depending on the order of this task and that of the listener


class Poor:
    """A listening socket of a process that temporarily has no free descriptor."""

    def __init__(self, real: socket.socket, refusals: int) -> None:
        self.real, self.refusals = real, refusals

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def accept(self) -> Any:
        if self.refusals:
            self.refusals -= 1
            raise OSError(24, "Too many open files")
        return self.real.accept()


async def test_no_files_left_is_a_pause_and_not_the_end(monkeypatch, eventually):
    monkeypatch.setattr(accepting, "_PAUSE", 0.01)
    log: list[str] = []
    async with listening(lambda: Guest(log)) as listener:
        listener._socket = poor = Poor(listener._socket, 3)  # type: ignore[assignment]
        reader, writer = await asyncio.open_connection("127.0.0.1", listener.port)
        assert await reader.read() == b"hello"
        assert poor.refusals == 0
        writer.close()


async def test_nothing_is_asked_for_in_such_a_pause_and_a_listener_that_closes_in_it_stays_closed(
    monkeypatch, eventually
):
    monkeypatch.setattr(accepting, "_PAUSE", 0.05)
    async with listening(lambda: Guest([])) as listener:
        listener._socket = poor = Poor(listener._socket, 100)  # type: ignore[assignment]
        with socket.create_connection(("127.0.0.1", listener.port)):
            await eventually(lambda: poor.refusals < 100)
            for _ in range(20):  # the socket is readable all the time
                await asyncio.sleep(0)
            assert poor.refusals == 99
            listener.close()
            await asyncio.sleep(0.1)
            assert poor.refusals == 99


@pytest.mark.parametrize("host", ["", "::"])
def test_ipv6_and_ipv4_have_sockets_of_their_own(host):
    listening = bind(host, 0, reuse_port=False)
    families = {each.family for each in listening}
    only = [
        each.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY)
        for each in listening
        if each.family == socket.AF_INET6
    ]
    for each in listening:
        each.close()
    assert all(only) and (host == "" or families == {socket.AF_INET6})


@pytest.mark.skipif(sys.platform != "linux", reason="needs a second loopback address")
@pytest.mark.parametrize("taken", [0, 2])
def test_a_port_that_the_system_chooses_is_one_for_all_addresses(
    monkeypatch: pytest.MonkeyPatch, taken: int
) -> None:
    addresses = ["127.0.0.1", "127.0.0.2"]
    kind = (socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "")
    found = [(*kind, (address, 0)) for address in addresses]
    with contextlib.ExitStack() as stack:
        others: list[socket.socket] = []

        class Crowded(socket.socket):
            """Others take the port at the second address before we bind it."""

            def bind(self, where: Any) -> None:
                super().bind(where)
                if where == (addresses[0], 0) and len(others) < taken:
                    others.append(stack.enter_context(socket.socket()))
                    others[-1].bind((addresses[1], self.getsockname()[1]))
                    others[-1].listen()

        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
        monkeypatch.setattr(socket, "socket", Crowded)
        listening = [stack.enter_context(one) for one in bind("host.example", 0, reuse_port=False)]
        hosts, ports = zip(*(one.getsockname() for one in listening), strict=True)
        assert list(hosts) == addresses and len(set(ports)) == 1 and len(others) == taken


@pytest.mark.parametrize("here", [["127.0.0.1"], []])
def test_an_address_that_this_machine_lacks_is_left_out(monkeypatch: pytest.MonkeyPatch, here: list[str]):
    """As `localhost` has one of IPv6 in a container that has no IPv6."""
    kind = (socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "")
    found: list[Any] = [(*kind, (address, 0)) for address in ("192.0.2.1", *here)]
    found.append((1000, *kind[1:], ("::1", 0, 0, 0)))  # a family that the system does not know
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    if not here:
        with pytest.raises(OSError, match="Cannot assign requested address"):
            bind("host.example", 0, reuse_port=False)
        return
    with structlog.testing.capture_logs() as lines:
        (listening,) = bind("host.example", 0, reuse_port=False)
    with listening:
        assert listening.getsockname()[0] == "127.0.0.1"
    assert [(line["event"], line["address"]) for line in lines] == [
        ("address_left_out", "192.0.2.1"),
        ("address_left_out", "::1"),
    ]


def test_two_cannot_have_one_port_unless_they_share_it():
    (first,) = bind("127.0.0.1", 0, reuse_port=True)
    port = first.getsockname()[1]
    with pytest.raises(OSError):
        bind("127.0.0.1", port, reuse_port=False)
    (second,) = bind("127.0.0.1", port, reuse_port=True)
    first.close()
    second.close()


class Listening(Guest):
    """A connection that reads its peer's data to the end before it answers."""

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.log.append(data.decode())
        self.transport.write(b"hello")
        self.transport.close()


async def test_one_port_speaks_with_and_without_tls(tls):
    log: list[str] = []
    trusting = ssl.create_default_context()
    trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE
    async with listening(lambda: Listening(log), tls, takes_plain=True) as listener:
        for context in (None, trusting):
            reader, writer = await asyncio.open_connection("127.0.0.1", listener.port, ssl=context)
            writer.write(b"GET")
            assert await reader.read() == b"hello"
            writer.close()
    assert sorted(log) == sorted(["accepted 127.0.0.1", "begins", "done", "GET"] * 2)


async def test_a_connection_that_is_through_its_handshake_is_kept_no_longer(tls, eventually):
    log: list[str] = []
    async with listening(lambda: Listening(log), tls, takes_plain=True) as listener:
        reader, writer = await asyncio.open_connection("127.0.0.1", listener.port)
        writer.write(b"G")
        assert await reader.read() == b"hello"
        writer.close()
        await eventually(lambda: not listener._arriving)


@pytest.mark.req("R-321")
async def test_a_socket_that_never_says_which_is_dropped_in_time(tls):
    log: list[str] = []
    async with listening(lambda: Guest(log), tls, timeout=0.05, takes_plain=True) as listener:
        reader, writer = await asyncio.open_connection("127.0.0.1", listener.port)
        assert await reader.read() == b""
        writer.close()
    assert log == ["accepted 127.0.0.1", "begins", "failed"]


async def test_whoever_has_said_nothing_is_dropped_when_the_listener_closes(tls):
    log: list[str] = []
    async with listening(lambda: Guest(log), tls, takes_plain=True) as listener:
        reader, writer = await asyncio.open_connection("127.0.0.1", listener.port)
        while not log:  # noqa: ASYNC110 - nothing tells of an accepted socket
            await asyncio.sleep(0)
    assert await reader.read() == b""
    writer.close()
    assert log == ["accepted 127.0.0.1", "begins", "failed"]


@pytest.mark.skipif(
    sys.platform != "linux", reason="elsewhere accepted sockets may have options of their own"
)
def test_the_system_takes_little_for_a_peer_that_reads_nothing() -> None:
    (listening,) = bind("127.0.0.1", 0, reuse_port=False)
    with listening, socket.create_connection(listening.getsockname()):
        listening.setblocking(True)
        accepted, _ = listening.accept()
        with accepted:
            accepted.setblocking(False)
            taken = 0
            with contextlib.suppress(BlockingIOError):
                while True:
                    taken += accepted.send(bytes(65_536))
            assert taken < 1_000_000
