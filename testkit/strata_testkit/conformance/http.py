"""An HTTP GET that returns every status: a check must see what the client library hides."""

from __future__ import annotations

import asyncio
import ssl as ssl_module
import urllib.error
import urllib.request
from dataclasses import dataclass
from urllib.parse import urlsplit

import msgspec

__all__ = ["HttpAnswer", "get", "http_base"]

_MAX_BYTES = 4 * 2**20


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    """A status, the content type, and at most 4 MiB of body. Status 0 means that there was no HTTP answer."""

    status: int
    content_type: str = ""
    body: bytes = b""

    def json(self) -> object:
        """The body as JSON, or None."""
        try:
            return msgspec.json.decode(self.body)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return None


def http_base(url: str) -> str:
    """The HTTP origin beside a WebSocket URL (RFC-0009 §3.1.1)."""
    parts = urlsplit(url)
    scheme = {"ws": "http", "wss": "https"}[parts.scheme]
    return f"{scheme}://{parts.netloc.rpartition('@')[2]}"


async def get(url: str, *, ssl: ssl_module.SSLContext | None, timeout: float) -> HttpAnswer:
    """GET a URL. Raises nothing; cancelling leaves a thread behind, which `timeout` (seconds) ends."""
    return await asyncio.to_thread(_get, url, ssl, timeout)


def _get(url: str, ssl: ssl_module.SSLContext | None, timeout: float) -> HttpAnswer:
    try:
        with urllib.request.urlopen(url, timeout=timeout, context=ssl) as answer:
            return HttpAnswer(answer.status, answer.headers.get_content_type(), answer.read(_MAX_BYTES))
    except urllib.error.HTTPError as error:
        with error:
            return HttpAnswer(error.code, error.headers.get_content_type(), error.read(_MAX_BYTES))
    except (OSError, ValueError):
        return HttpAnswer(0)
