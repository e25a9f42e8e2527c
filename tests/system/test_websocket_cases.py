"""RFC 6455 frame by frame: the relay accepts and refuses the same as the WebSocket library.

The relay reads most frames itself (`relayd/frames.py`), so its tolerance is compared with that of an echo
server of the library: the same raw bytes go to both, in one piece and in small ones, and each case also
states how it must end. The families are those of a WebSocket test suite: framing, pings, reserved bits,
opcodes, fragments, UTF-8, closing, limits.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import select
import socket
import struct
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest
from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed

from tests.support.relay_process import RelayProcess, running

TEXT, BINARY, CONT, CLOSE, PING, PONG = 1, 2, 0, 8, 9, 10
LIMIT_PACKET = 4096
LIMIT = 2 * LIMIT_PACKET + 65_536
"""The relay's frame limit with packets of at most 4 KiB (R-123)."""

MASK = b"\x11\x22\x33\x44"
DEADLINE = 10.0
JSON = b'{"type":"CASE"}'
UPGRADE = (
    b"GET %s HTTP/1.1\r\nHost: 127.0.0.1\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: AAECAwQFBgcICQoLDA0ODw==\r\nSec-WebSocket-Version: 13\r\n\r\n"
)


def frame(
    opcode: int,
    payload: bytes = b"",
    *,
    fin: bool = True,
    reserved: int = 0,
    masked: bool = True,
    width: int | None = None,
    length: int | None = None,
) -> bytes:
    """One client frame; `width` bytes of extended length and a false `length` if given."""
    length = len(payload) if length is None else length
    if width is None:
        width = 0 if length < 126 else 2 if length < 65_536 else 8
    first = fin << 7 | reserved << 4 | opcode
    second = masked << 7 | {0: length, 2: 126, 8: 127}[width]
    head = bytes((first, second)) + (length.to_bytes(width, "big") if width else b"")
    if not masked:
        return head + payload
    repeated = MASK * (len(payload) // 4 + 1)
    return head + MASK + bytes(a ^ b for a, b in zip(payload, repeated, strict=False))


def close(code: int, reason: bytes = b"") -> bytes:
    return frame(CLOSE, struct.pack("!H", code) + reason)


def split(payload: bytes, *cuts: int, opcode: int = TEXT) -> bytes:
    """A message in several frames."""
    edges = [0, *cuts, len(payload)]
    parts = [payload[a:b] for a, b in itertools.pairwise(edges)]
    last = len(parts) - 1
    return b"".join(frame(CONT if n else opcode, part, fin=n == last) for n, part in enumerate(parts))


@dataclass(frozen=True)
class Case:
    """The bytes sent, the expected close code, and the number of messages answered before it.

    A case without a code leaves the connection open: a ping and a close are sent after it.
    """

    sent: bytes
    code: int | None = -1
    messages: int | None = None

    @property
    def whole(self) -> bytes:
        return self.sent + (frame(PING, b"end") + close(1000) if self.code == -1 else b"")

    @property
    def ends_with(self) -> int | None:
        return 1000 if self.code == -1 else self.code


def framing() -> Iterator[tuple[str, Case]]:
    for size in (0, 1, 125, 126, 127, 128, 65_535, 65_536, 65_537):
        yield f"text of {size} bytes", Case(frame(TEXT, b"x" * size), messages=1)
        yield f"binary of {size} bytes", Case(frame(BINARY, b"\xfe" * size), messages=1)
    yield "two messages", Case(frame(TEXT, JSON) + frame(TEXT, JSON), messages=2)
    yield "unmasked text", Case(frame(TEXT, JSON, masked=False), 1002)
    yield "unmasked ping", Case(frame(PING, b"x", masked=False), 1002)
    yield "unmasked after masked", Case(frame(TEXT, JSON) + frame(TEXT, JSON, masked=False), 1002)
    yield "a short length in two bytes", Case(frame(TEXT, JSON, width=2), messages=1)
    yield "a short length in eight bytes", Case(frame(TEXT, JSON, width=8), messages=1)


def pings() -> Iterator[tuple[str, Case]]:
    for name, payload in {
        "empty": b"",
        "text": b"hi",
        "binary": b"\x00\xff\xfe",
        "125 bytes": b"p" * 125,
    }.items():
        yield f"ping, {name}", Case(frame(PING, payload))
    yield "ping of 126 bytes", Case(frame(PING, b"p" * 126), 1002)
    yield "ping with a length in two bytes", Case(frame(PING, b"p", width=2))
    yield "ten pings", Case(b"".join(frame(PING, bytes((n,))) for n in range(10)))
    yield "a pong nobody asked for", Case(frame(PONG, b"x"))
    yield "pong, then ping", Case(frame(PONG) + frame(PING, b"x"))
    yield "ping between messages", Case(frame(TEXT, JSON) + frame(PING, b"x") + frame(TEXT, JSON), messages=2)
    yield "pong of 126 bytes", Case(frame(PONG, b"p" * 126), 1002)


def reserved_bits() -> Iterator[tuple[str, Case]]:
    for bits in range(1, 8):
        yield f"text with reserved bits {bits}", Case(frame(TEXT, JSON, reserved=bits), 1002)
    for opcode in (BINARY, PING, PONG, CLOSE):
        yield f"opcode {opcode} with a reserved bit", Case(frame(opcode, reserved=1), 1002)
    yield "a reserved bit on a later message", Case(frame(TEXT, JSON) + frame(TEXT, JSON, reserved=4), 1002)
    yield "a reserved bit on a long text", Case(frame(TEXT, b"x" * 300, reserved=2), 1002)
    later = frame(TEXT, b"{", fin=False) + frame(CONT, b"}", reserved=4)
    yield "a reserved bit on a continuation", Case(later, 1002)


def opcodes() -> Iterator[tuple[str, Case]]:
    for opcode in (3, 4, 5, 6, 7, 11, 12, 13, 14, 15):
        yield f"opcode {opcode}", Case(frame(opcode, b"x"), 1002)
        yield f"opcode {opcode} after a text", Case(frame(TEXT, JSON) + frame(opcode), 1002)


def fragments() -> Iterator[tuple[str, Case]]:
    yield "text in two", Case(split(JSON, 4), messages=1)
    yield "binary in two", Case(split(b"\xff\xfe", 1, opcode=BINARY), messages=1)
    yield "text byte by byte", Case(split(JSON, *range(1, len(JSON))), messages=1)
    yield "empty fragments", Case(split(JSON, 0, 0, 5, 5, len(JSON)), messages=1)
    yield "nothing in three", Case(split(b"", 0, 0), messages=1)
    half = frame(TEXT, JSON[:5], fin=False)
    rest = frame(CONT, JSON[5:])
    yield "ping between fragments", Case(half + frame(PING, b"x") + rest, messages=1)
    yield "pong between fragments", Case(half + frame(PONG, b"x") + rest, messages=1)
    yield "a message after fragments", Case(half + rest + frame(TEXT, JSON), messages=2)
    yield "long whole text after fragments", Case(half + rest + frame(TEXT, b"x" * 300), messages=2)
    yield "a fragmented ping", Case(frame(PING, b"x", fin=False), 1002)
    yield "a fragmented pong", Case(frame(PONG, b"x", fin=False), 1002)
    yield "a fragmented close", Case(frame(CLOSE, b"", fin=False), 1002)
    yield "a continuation of nothing", Case(frame(CONT, b"x"), 1002)
    yield "an open continuation of nothing", Case(frame(CONT, b"x", fin=False), 1002)
    yield "a continuation after the end", Case(half + rest + rest, 1002)
    yield "text inside a message", Case(half + frame(TEXT, JSON), 1002)
    yield "long text inside a message", Case(half + frame(TEXT, b"x" * 300), 1002)
    yield "binary inside a message", Case(half + frame(BINARY, b"x"), 1002)
    yield "close inside a message", Case(half + close(1000), 1002)
    yield "a thousand fragments", Case(split(b"x" * 1000, *range(1, 1000)), messages=1)


GOOD_UTF8 = {
    "ascii": b"Hello",
    "two, three and four bytes": "é€🦀".encode(),
    "greek": "κόσμε".encode(),
    "last of each length": b"\x7f\xdf\xbf\xef\xbf\xbf\xf4\x8f\xbf\xbf",
    "first of each length": b"\x00\xc2\x80\xe0\xa0\x80\xf0\x90\x80\x80",
    "around the surrogates": b"\xed\x9f\xbf\xee\x80\x80",
    "non-characters": b"\xef\xbf\xbe\xf0\x9f\xbf\xbe",
    "long": "é".encode() * 200,
}
BAD_UTF8 = {
    "a lone continuation": b"\x80",
    "continuations": b"\xbf\x80\xbf",
    "a lone start": b"\xc3 ",
    "a cut end": b"caf\xc3",
    "a cut four": b"\xf0\x9f\xa6",
    "overlong slash": b"\xc0\xaf",
    "overlong in three": b"\xe0\x80\xaf",
    "overlong in four": b"\xf0\x80\x80\xaf",
    "overlong NUL": b"\xc0\x80",
    "a surrogate": b"\xed\xa0\x80",
    "a pair of surrogates": b"\xed\xa1\x8c\xed\xbe\xb4",
    "beyond Unicode": b"\xf4\x90\x80\x80",
    "five bytes": b"\xf8\x88\x80\x80\x80",
    "never bytes": b"\xfe\xff",
    "late": b"x" * 300 + b"\xff",
}


def utf8() -> Iterator[tuple[str, Case]]:
    for name, text in GOOD_UTF8.items():
        yield f"good UTF-8, {name}", Case(frame(TEXT, text), messages=1)
        yield f"good UTF-8 in pieces, {name}", Case(split(text, *range(1, min(len(text), 12))), messages=1)
    for name, text in BAD_UTF8.items():
        yield f"bad UTF-8, {name}", Case(frame(TEXT, text), 1007)
        yield f"bad UTF-8 in pieces, {name}", Case(split(text, *range(1, min(len(text), 12))), 1007)
        yield f"bad UTF-8 is good binary, {name}", Case(frame(BINARY, text), messages=1)


def closing() -> Iterator[tuple[str, Case]]:
    yield "close without a code", Case(frame(CLOSE), None)
    yield "close with one byte", Case(frame(CLOSE, b"\x03"), 1002)
    yield "close with a reason", Case(close(1000, b"bye"), 1000)
    yield "close with the longest reason", Case(close(1000, b"r" * 123), 1000)
    yield "close with too long a reason", Case(close(1000, b"r" * 124), 1002)
    yield "close with bad UTF-8", Case(close(1000, b"\xff"), 1007)
    for code in (1000, 1001, 1002, 1003, 1007, 1008, 1009, 1010, 1011, 3000, 3999, 4000, 4999):
        yield f"close with {code}", Case(close(code), code)
    for code in (0, 999, 1004, 1005, 1006, 1015, 1016, 1100, 2000, 2999, 5000, 65_535):
        yield f"close with the bad code {code}", Case(close(code), 1002)
    yield "text after close", Case(close(1000) + frame(TEXT, JSON), 1000, 0)
    yield "ping after close", Case(close(1000) + frame(PING, b"late"), 1000, 0)
    yield "close after close", Case(close(1000) + close(1001), 1000, 0)
    yield "rubbish after close", Case(close(1000) + b"\xff" * 50, 1000, 0)
    yield "text before close", Case(frame(TEXT, JSON) + close(1001), 1001)


def limits() -> Iterator[tuple[str, Case]]:
    yield "the largest frame", Case(frame(TEXT, b"x" * LIMIT), messages=1)
    yield "the largest message in fragments", Case(split(b"x" * LIMIT, 5, 70_000), messages=1)
    yield "the largest binary", Case(frame(BINARY, b"x" * LIMIT), messages=1)
    yield "a frame of one byte more", Case(frame(TEXT, b"x" * (LIMIT + 1)), 1009)
    yield "a message of one byte more", Case(split(b"x" * (LIMIT + 1), 5, 70_000), 1009)
    yield "a promise of one byte more", Case(frame(TEXT, b"x", length=LIMIT + 1, width=8), 1009)
    yield "a promise of 2^62 bytes", Case(frame(TEXT, b"x", length=2**62, width=8), 1009)
    yield "a large binary", Case(frame(BINARY, b"x" * (LIMIT + 1)), 1009)


FAMILIES = {
    "framing": framing,
    "pings": pings,
    "reserved bits": reserved_bits,
    "opcodes": opcodes,
    "fragments": fragments,
    "UTF-8": utf8,
    "closing": closing,
    "limits": limits,
}


@dataclass(frozen=True)
class Seen:
    """How a server reacted: messages answered, payloads of pongs, close code (-1: cut without one)."""

    messages: int
    pongs: tuple[bytes, ...]
    code: int | None


async def play(port: int, path: str, sent: bytes, pieces: int) -> Seen:
    """Send the bytes and read until the server ends the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**22)
    try:
        writer.write(UPGRADE % path.encode())
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 101 "), head
        sending = asyncio.create_task(_send(writer, sent, pieces), name="sender")
        try:
            async with asyncio.timeout(DEADLINE):
                return await _outcome(reader)
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
    finally:
        writer.transport.abort()


async def _send(writer: asyncio.StreamWriter, data: bytes, pieces: int) -> None:
    size = max(1, -(-len(data) // pieces))
    for at in range(0, len(data), size):
        writer.write(data[at : at + size])
        await writer.drain()
        await asyncio.sleep(0)


async def _outcome(reader: asyncio.StreamReader) -> Seen:
    messages, pongs = 0, list[bytes]()
    code: int | None = -1
    try:
        while True:
            first, second = await reader.readexactly(2)
            size = second
            if size >= 126:
                size = int.from_bytes(await reader.readexactly(2 if size == 126 else 8), "big")
            payload = await reader.readexactly(size)
            match first & 0x0F:
                case 8:
                    code = int.from_bytes(payload[:2], "big") if payload else None
                case 10:
                    pongs.append(payload)
                case 1 | 2 if not _is_challenge(payload):
                    messages += 1
    except (asyncio.IncompleteReadError, ConnectionError):
        return Seen(messages, tuple(pongs), code)


def _is_challenge(payload: bytes) -> bool:
    return payload.startswith(b"{") and b'"AUTH_CHALLENGE"' in payload


@asynccontextmanager
async def echo_server() -> AsyncIterator[int]:
    """The library's server with the relay's limit; yields its port."""

    async def echo(connection: ServerConnection) -> None:
        with contextlib.suppress(ConnectionClosed):  # most cases end with a closed connection
            async for message in connection:
                await connection.send(message)

    async with serve(
        echo, "127.0.0.1", 0, max_size=LIMIT, compression=None, ping_interval=None, close_timeout=2
    ) as server:
        yield server.sockets[0].getsockname()[1]


@pytest.fixture(scope="module")
def relay(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RelayProcess]:
    """A relay with a small frame limit."""
    with running(RelayProcess(tmp_path_factory.mktemp("frames"), max_packet_bytes=LIMIT_PACKET)) as process:
        manifest = json.loads(process.get("/.well-known/strata-relay.json")[2])
        assert manifest["limits"]["max_frame_bytes"] == LIMIT
        yield process
        assert process.is_running(), process.last_words()
        assert not process.complaints()


@pytest.mark.req("R-001", "R-123", "R-128")
@pytest.mark.parametrize("family", FAMILIES)
async def test_the_relay_judges_frames_as_the_library_does(relay: RelayProcess, family: str):
    port = int(relay.ws.rpartition(":")[2].partition("/")[0])
    at_once = asyncio.Semaphore(16)  # a socket closed for a bad frame lingers
    async with asyncio.timeout(60), echo_server() as echo_port:

        async def faults_of(name: str, case: Case, pieces: int) -> str:
            async with at_once:
                theirs = await play(echo_port, "/", case.whole, pieces)
                ours = await play(port, "/strata", case.whole, pieces)
            fault = _fault(case, ours, theirs)
            return fault and f"{name} in {pieces}: {fault}; relay {ours}, library {theirs}"

        plays = [faults_of(name, case, n) for name, case in FAMILIES[family]() for n in (1, 7, 100)]
        faults = list(filter(None, await asyncio.gather(*plays)))
    assert not faults, "\n".join(faults)


def _fault(case: Case, ours: Seen, theirs: Seen) -> str:
    if ours.code != case.ends_with:
        return f"expected the close code {case.ends_with}"
    if ours.code != theirs.code or (ours.pongs != theirs.pongs):
        return "the two differ"
    # The answer to a message may be overtaken by the failure of the next one, on either side.
    if case.messages is not None and ours.messages != case.messages:
        return f"expected {case.messages} answers"
    return ""


LAST_WORDS = {
    "a close frame": (close(1000), b"\x88\x02\x03\xe8"),
    "a frame that breaks the rules": (frame(TEXT, b"\xff"), b"\x88"),
    "an HTTP request": (b"", b"HTTP/1.1 404"),
}


@pytest.mark.req("R-001")
@pytest.mark.parametrize("name", LAST_WORDS)
def test_what_comes_after_the_last_word_resets_nothing(relay: RelayProcess, name: str):
    """The peer continues sending after the relay has closed its side, and can still read the reason."""
    sent, expected = LAST_WORDS[name]
    port = int(relay.ws.rpartition(":")[2].partition("/")[0])
    with socket.create_connection(("127.0.0.1", port), timeout=DEADLINE) as peer:
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if sent:
            peer.sendall(UPGRADE % b"/strata")
            with peer.makefile("rb", buffering=0) as lines:
                while lines.readline() != b"\r\n":
                    pass
            challenge = peer.recv(2, socket.MSG_WAITALL)
            size = int.from_bytes(peer.recv(2, socket.MSG_WAITALL)) if challenge[1] == 126 else challenge[1]
            peer.recv(size, socket.MSG_WAITALL)
        peer.sendall(sent or b"GET /nowhere HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        ended = select.poll()
        ended.register(peer, select.POLLRDHUP)
        assert ended.poll(DEADLINE * 1000), "the relay has said its last word"
        for _ in range(20):
            peer.sendall(frame(TEXT, JSON))
        said = b""
        while data := peer.recv(2**16):
            said += data
        assert said.startswith(expected)
