"""What a relay announces in its manifest: one small HTTP GET beside the WebSocket connection (R-139).

The manifest establishes no trust (R-390): it says which additions may be asked for, and every answer is
checked all the same. Any failure here means "a plain relay", never an error.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl as ssl_module
from urllib.parse import urlsplit

import msgspec

from strata.relays.connection.values import Announced

__all__ = ["MANIFEST_PATH", "discover", "http_get"]

MANIFEST_PATH = "/.well-known/strata-relay.json"
_MAX_BYTES = 256 * 1024
_MAX_EXTENSIONS = 256


class _Limits(msgspec.Struct):
    max_packet_bytes: int | None = None


class _Manifest(msgspec.Struct):
    extensions: list[str] = []
    relay_id: str | None = None
    max_packet_bytes: int | None = None
    limits: _Limits | None = None


_DECODER = msgspec.json.Decoder(_Manifest)


async def discover(url: str, *, ssl: ssl_module.SSLContext | None, timeout: float) -> Announced:
    """Fetch the manifest of the relay at a ws or wss URL; that of a plain relay if no manifest comes in time.

    At most 256 KiB are read. Raises nothing; cancelling closes the socket.
    """
    try:
        async with asyncio.timeout(timeout):
            body = await http_get(url, MANIFEST_PATH, ssl=ssl)
        return _read(body)
    except (OSError, TimeoutError, EOFError, ValueError, RecursionError):
        return Announced()
    except (msgspec.MsgspecError, asyncio.LimitOverrunError):
        return Announced()


def _read(body: bytes) -> Announced:
    manifest = _DECODER.decode(body)
    limit = manifest.max_packet_bytes
    if limit is None and manifest.limits is not None:
        limit = manifest.limits.max_packet_bytes
    return Announced(
        frozenset(manifest.extensions[:_MAX_EXTENSIONS]),
        limit if limit is not None and limit > 0 else None,
        manifest.relay_id,
    )


async def http_get(
    url: str, path: str, *, ssl: ssl_module.SSLContext | None, max_bytes: int = _MAX_BYTES
) -> bytes:
    """The body at `path` of the relay at a ws or wss URL; at most `max_bytes`.

    Raises `OSError`, and `ValueError`, `EOFError` or `asyncio.LimitOverrunError` for any answer but a 200.
    The caller bounds the time. Cancelling closes the socket.
    """
    parts = urlsplit(url)
    host = parts.hostname or ""
    secure = parts.scheme == "wss"
    reader, writer = await asyncio.open_connection(
        host, parts.port or (443 if secure else 80), ssl=ssl if secure else None, limit=64 * 1024
    )
    try:
        address = parts.netloc.rpartition("@")[2]
        writer.write(
            f"GET {path} HTTP/1.1\r\nHost: {address}\r\n"
            "Accept: application/json\r\nConnection: close\r\n\r\n".encode("ascii")
        )
        await writer.drain()
        return await _read_response(reader, max_bytes)
    finally:
        writer.transport.abort()  # nothing is owed to the peer, so nothing has to be waited for
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def _read_response(reader: asyncio.StreamReader, max_bytes: int) -> bytes:
    """The body of a 200 response. Raises `ValueError` for any other, and for one too large."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    status = head[0].split(" ", 2)
    if len(status) < 2 or not status[0].startswith("HTTP/1.") or status[1] != "200":
        raise ValueError("not found")
    headers = {
        name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:])
    }
    if headers.get("transfer-encoding", "").lower() == "chunked":
        return await _read_chunks(reader, max_bytes)
    length = int(headers.get("content-length", max_bytes + 1))
    if "content-length" in headers:
        if not 0 <= length <= max_bytes:
            raise ValueError("the answer is too large")
        return await reader.readexactly(length)
    body = bytearray()
    while piece := await reader.read(max_bytes + 1 - len(body)):
        body += piece
        if len(body) > max_bytes:
            raise ValueError("the answer is too large")
    return bytes(body)


async def _read_chunks(reader: asyncio.StreamReader, max_bytes: int) -> bytes:
    body = bytearray()
    while size := int((await reader.readuntil(b"\r\n")).partition(b";")[0], 16):
        if not 0 < size <= max_bytes - len(body):
            raise ValueError("the answer is too large")
        body += await reader.readexactly(size)
        await reader.readexactly(2)
    return bytes(body)
