"""One HTTP request on a separate connection, and its reply, read within bounds. An asyncio shell.

This module replaces an HTTP library: manifests, packets and Waku nodes need one request each.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl as ssl_module
from collections.abc import AsyncIterator, Mapping

from strata.relays.reaching import reach

__all__ = ["answer_to", "read_body", "read_head"]

_MAX_HEAD_BYTES = 64 * 1024


@contextlib.asynccontextmanager
async def answer_to(
    request: bytes, host: str, port: int, *, ssl: ssl_module.SSLContext | None
) -> AsyncIterator[asyncio.StreamReader]:
    """Send a request and yield a reader of the reply; the socket is closed at the end. Raises `OSError`."""
    reader, writer = await asyncio.open_connection(
        sock=await reach(host, port),
        ssl=ssl,
        server_hostname=None if ssl is None else host,
        limit=_MAX_HEAD_BYTES,
    )
    try:
        writer.write(request)
        await writer.drain()
        yield reader
    finally:
        writer.transport.abort()  # nothing is left to send, so there is nothing to wait for
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def read_head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    """Read the status, and the headers by their names in lower case.

    Raises `ValueError` for a reply that is not HTTP/1, `EOFError`, and `asyncio.LimitOverrunError` for a head
    above 64 KiB.
    """
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    version, _, rest = head[0].partition(" ")
    status = rest.partition(" ")[0]
    if not version.startswith("HTTP/1.") or len(status) != 3 or not status.isdecimal():
        raise ValueError("not HTTP")
    fields = (line.partition(":") for line in head[1:])
    return int(status), {name.strip().lower(): value.strip() for name, _, value in fields}


async def read_body(reader: asyncio.StreamReader, headers: Mapping[str, str], max_bytes: int) -> bytes:
    """Read the body after this head.

    Raises `ValueError` if it is malformed or too large, `EOFError`, and `asyncio.LimitOverrunError`.
    """
    if headers.get("transfer-encoding", "").lower() == "chunked":
        return await _read_chunks(reader, max_bytes)
    if "content-length" in headers:
        length = int(headers["content-length"])
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
