"""One HTTP request to a Waku node, on a connection of its own. An asyncio shell."""

from __future__ import annotations

import asyncio
import contextlib
import ssl as ssl_module
from dataclasses import dataclass
from urllib.parse import urlsplit

from strata.protocol.errors import StrataError

__all__ = ["HttpReply", "WakuRefused", "WakuUnreachable", "request"]

_MAX_HEAD_BYTES = 64 * 1024


class WakuUnreachable(StrataError):
    """The Waku node does not answer, or not as HTTP does."""


class WakuRefused(StrataError):
    """The Waku node answered with a status that is no success."""

    def __init__(self, path: str, status: int, reason: str) -> None:
        super().__init__(path, status, reason)
        self.path = path
        self.status = status
        self.reason = reason
        """What the node said, for people, at most 200 characters."""

    def __str__(self) -> str:
        return f"{self.path}: {self.status} {self.reason}".rstrip()


@dataclass(frozen=True, slots=True)
class HttpReply:
    """A status and a body."""

    status: int
    body: bytes


async def request(
    base_url: str,
    method: str,
    path: str,
    body: bytes | None = None,
    *,
    ssl: ssl_module.SSLContext | None,
    timeout: float,
    max_bytes: int,
) -> HttpReply:
    """Ask a server at an http or https URL once. `timeout` is in seconds, for all of it.

    Raises `WakuUnreachable` if no answer of at most `max_bytes` comes. Cancelling closes the socket, and the
    server may have acted or not.
    """
    try:
        async with asyncio.timeout(timeout):
            return await _request(base_url, method, path, body, ssl, max_bytes)
    except (OSError, EOFError, ValueError, TimeoutError, asyncio.LimitOverrunError) as error:
        raise WakuUnreachable(f"{method} {path.partition('?')[0]}: {error or 'no answer'}") from error


async def _request(
    base_url: str,
    method: str,
    path: str,
    body: bytes | None,
    ssl: ssl_module.SSLContext | None,
    max_bytes: int,
) -> HttpReply:
    parts = urlsplit(base_url)
    secure = parts.scheme == "https"
    context = (ssl or ssl_module.create_default_context()) if secure else None
    reader, writer = await asyncio.open_connection(
        parts.hostname or "", parts.port or (443 if secure else 80), ssl=context, limit=_MAX_HEAD_BYTES
    )
    try:
        lines = [f"{method} {parts.path.rstrip('/')}{path} HTTP/1.1"]
        lines += [f"Host: {parts.netloc.rpartition('@')[2]}", "Accept: application/json", "Connection: close"]
        if body is not None:
            lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
        writer.write("\r\n".join([*lines, "", ""]).encode("ascii") + (body or b""))
        await writer.drain()
        return await _read_answer(reader, max_bytes)
    finally:
        writer.transport.abort()  # nothing is owed to the server, so nothing has to be waited for
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def _read_answer(reader: asyncio.StreamReader, max_bytes: int) -> HttpReply:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    version, _, rest = head[0].partition(" ")
    if not version.startswith("HTTP/1."):
        raise ValueError("not HTTP")
    status = int(rest[:3])
    headers = {
        name.strip().lower(): value.strip() for name, _, value in (each.partition(":") for each in head)
    }
    if headers.get("transfer-encoding", "").lower() == "chunked":
        return HttpReply(status, await _read_chunks(reader, max_bytes))
    if "content-length" in headers:
        length = int(headers["content-length"])
        if not 0 <= length <= max_bytes:
            raise ValueError("the answer is too large")
        return HttpReply(status, await reader.readexactly(length))
    body = await reader.read(max_bytes + 1)
    while piece := await reader.read(max_bytes + 1):
        body += piece
        if len(body) > max_bytes:
            raise ValueError("the answer is too large")
    return HttpReply(status, body)


async def _read_chunks(reader: asyncio.StreamReader, max_bytes: int) -> bytes:
    body = bytearray()
    while size := int((await reader.readuntil(b"\r\n")).partition(b";")[0], 16):
        if not 0 < size <= max_bytes - len(body):
            raise ValueError("the answer is too large")
        body += await reader.readexactly(size)
        await reader.readexactly(2)
    return bytes(body)
