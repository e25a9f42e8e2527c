"""One HTTP request to a Waku node, on its own connection. An asyncio shell."""

from __future__ import annotations

import asyncio
import ssl as ssl_module
from dataclasses import dataclass
from urllib.parse import urlsplit

from strata.protocol.errors import StrataError
from strata.relays.http_reply import answer_to, read_body, read_head
from strata.relays.peer_timeout import PeerTimeout

__all__ = ["HttpReply", "WakuRefused", "WakuUnreachable", "request"]


class WakuUnreachable(StrataError):
    """The Waku node does not answer, or its answer is not valid."""


class WakuRefused(StrataError):
    """The Waku node answered with a status other than success."""

    def __init__(self, path: str, status: int, reason: str) -> None:
        super().__init__(path, status, reason)
        self.path = path
        self.status = status
        self.reason = reason
        """The node's explanation for people, at most 200 characters."""

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
    """Make one request to a server at an http or https URL. `timeout` is in seconds, for the whole request.

    Raises `WakuUnreachable` if no answer of at most `max_bytes` arrives. Cancelling closes the socket; the
    server may have acted or not.
    """
    try:
        async with PeerTimeout(timeout):
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
    lines = [f"{method} {parts.path.rstrip('/')}{path} HTTP/1.1"]
    lines += [f"Host: {parts.netloc.rpartition('@')[2]}", "Accept: application/json", "Connection: close"]
    if body is not None:
        lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
    asked = "\r\n".join([*lines, "", ""]).encode("ascii") + (body or b"")
    port = parts.port or (443 if secure else 80)
    async with answer_to(asked, parts.hostname or "", port, ssl=context) as reader:
        status, headers = await read_head(reader)
        return HttpReply(status, await read_body(reader, headers, max_bytes))
