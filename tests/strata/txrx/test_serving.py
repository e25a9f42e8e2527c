"""How a receiver handles peers that do not read."""

from __future__ import annotations

import asyncio
import errno
import socket
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import uvloop
from strata.txrx import TcpAddress, TxRxSettings, dial, serve, serving
from strata.txrx.frames import Ack, Closed, Reject, read_response
from strata.txrx.multipart import FrameReader, frame_of
from strata.txrx.serving import NetRx

from tests.support.waiting import until

MESSAGE = b"".join(frame_of(struct.pack(">Q", 0) + b"message"))


@pytest.mark.req("T-044")
@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_answers_do_not_pile_up_for_a_peer_that_takes_none(
    new_loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    async def exchange() -> None:
        address, rx = await serve("tcp:127.0.0.1:0", bytes)
        assert isinstance(address, TcpAddress) and isinstance(rx, NetRx)
        loop = asyncio.get_running_loop()
        with socket.socket() as peer:
            for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
                peer.setsockopt(socket.SOL_SOCKET, option, 4096)
            peer.connect(("127.0.0.1", address.port))
            peer.setblocking(False)
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await loop.sock_sendall(peer, struct.pack(">4sQB", b"STRX", 1, 1) + MESSAGE)
            assert await rx.recv() == b"message"
            (connection,) = rx._hub.connections.values()
            transport = connection._transport
            assert transport is not None
            for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):  # by default, the system buffers megabytes
                transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, option, 4096)
            # The same message repeatedly: each arrives alone, and each is acknowledged.
            for _ in range(100_000):
                try:
                    peer.send(MESSAGE)
                except BlockingIOError:
                    break  # the receiver has stopped reading
                await asyncio.sleep(0)
            else:
                pytest.fail("the receiver reads on, and keeps an answer for each")
            assert transport.get_write_buffer_size() < 128 * 1024
            # Others are not affected, and once the peer reads, the receiver reads again.
            async with await dial(address, bytes) as other:
                await other.send(b"other")
            assert await rx.recv() == b"other"
            before = rx.statistics().duplicates
            while not rx.statistics().duplicates > before:
                await loop.sock_recv(peer, 1 << 20)
        await until(lambda: not rx._hub.connections)
        await rx.join()

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(exchange())


@pytest.mark.parametrize("way", ["close", "a join that is cancelled"])
async def test_closing_leaves_a_peer_that_takes_no_answer(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "_LAST_WORDS_SECONDS", 0.2)
    address, rx = await serve("tcp:127.0.0.1:0", bytes)
    assert isinstance(address, TcpAddress) and isinstance(rx, NetRx)
    with socket.socket() as peer:
        peer.connect(("127.0.0.1", address.port))
        await until(lambda: rx._hub.connections)
        (connection,) = rx._hub.connections.values()
        assert connection._transport is not None
        connection._transport.write(bytes(16 << 20))  # instead of answers that it has not read
        if way == "close":
            rx.close()
        else:
            joining = asyncio.create_task(rx.join())
            await asyncio.sleep(0.01)
            joining.cancel()
            await asyncio.wait([joining])
        await until(lambda: not rx._hub.connections)


@pytest.mark.req("T-024", "T-043", "T-049", "T-078")
@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
@pytest.mark.parametrize("scheme", ["unix", "tcp"])
@pytest.mark.parametrize("end", ["a frame too many", "close"])
def test_whoever_is_sending_is_told_why_the_connection_ends(
    new_loop: Callable[[], asyncio.AbstractEventLoop], scheme: str, end: str, tmp_path: Path
) -> None:
    """Unread bytes would reset a connection closed at once, and the sender would only see its write fail."""

    async def exchange() -> None:
        where = f"unix:{tmp_path}/x" if scheme == "unix" else "tcp:127.0.0.1:0"
        capacity = 1 if end == "close" else 2  # with 1 the next frame waits for room
        settings = TxRxSettings(queue_capacity=capacity, codec_max_frame_length=1024)
        address, rx = await serve(where, bytes, settings=settings)
        assert isinstance(rx, NetRx)
        loop = asyncio.get_running_loop()
        with socket.socket(socket.AF_INET if scheme == "tcp" else socket.AF_UNIX) as peer:
            peer.connect(
                ("127.0.0.1", address.port) if isinstance(address, TcpAddress) else str(tmp_path / "x")
            )
            peer.setblocking(False)
            await loop.sock_sendall(peer, struct.pack(">4sQB", b"STRX", 1, 1) + MESSAGE)
            if end == "close":
                await until(lambda: rx.unread)
                await loop.sock_sendall(peer, bytes(100_000))  # what has no room is not read
                rx.close()
            else:
                await loop.sock_sendall(peer, struct.pack(">Q", 1 << 30))
                await until(lambda: rx.statistics().rejects_sent)
            for _ in range(20):
                await asyncio.sleep(0.001)
                await loop.sock_sendall(peer, bytes(10_000))
            told = b""
            while piece := await loop.sock_recv(peer, 4096):
                told += piece
        frames = FrameReader(1100)
        frames.feed(told)
        assert [type(read_response(frame)) for frame in frames.read(10)][-2:] == [
            Ack,
            Closed if end == "close" else Reject,
        ]
        await until(lambda: not rx._hub.connections)
        await rx.join()

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(exchange())


@pytest.mark.parametrize("end", ["a frame too many", "close"])
async def test_a_peer_that_was_told_why_and_stays_is_left(end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "_LEAVING_SECONDS", 0.1)
    address, rx = await serve("tcp:127.0.0.1:0", bytes, settings=TxRxSettings(codec_max_frame_length=1024))
    assert isinstance(address, TcpAddress) and isinstance(rx, NetRx)
    with socket.socket() as peer:
        peer.connect(("127.0.0.1", address.port))
        peer.sendall(struct.pack(">4sQB", b"STRX", 1, 1) + MESSAGE)
        await until(lambda: rx.unread)
        if end == "close":
            rx.close()
        else:
            peer.sendall(struct.pack(">Q", 1 << 30))
        await until(lambda: not rx._hub.connections)
    await rx.join()


@pytest.mark.req("T-024", "T-091")
async def test_a_socket_file_that_cannot_be_removed_keeps_nobody_from_hearing_of_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(path: str) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    address, rx = await serve(f"unix:{tmp_path}/x", bytes)
    async with await dial(address, bytes) as tx:
        await tx.send(b"message")
        with monkeypatch.context() as patch:
            patch.setattr("os.unlink", refuse)
            rx.close()
        async with asyncio.timeout(5):
            await tx.status().wait_for(lambda status: status.closed)
            assert [message async for message in rx] == [b"message"]
    assert "stays behind: Permission denied" in caplog.text
    _, another = await serve(address, bytes)
    await another.join()


@pytest.mark.req("T-035")
async def test_senders_that_are_gone_are_forgotten_one_after_the_other() -> None:
    settings = TxRxSettings(session_timeout=0.1, message_delivery_timeout=0.05)
    address, rx = await serve("tcp:127.0.0.1:0", bytes, settings=settings)
    assert isinstance(address, TcpAddress) and isinstance(rx, NetRx)
    for session in (1, 2):
        with socket.socket() as peer:
            peer.connect(("127.0.0.1", address.port))
            peer.sendall(struct.pack(">4sQB", b"STRX", session, 1) + MESSAGE)
            assert await rx.recv() == b"message"
        await asyncio.sleep(0.05)
    assert len(rx._hub.sessions) > 0
    await until(lambda: len(rx._hub.sessions) == 0)
    await rx.join()
