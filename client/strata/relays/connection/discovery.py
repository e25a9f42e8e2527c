"""What a relay announces in its manifest: one small HTTP GET beside the WebSocket connection (R-139).

The manifest establishes no trust (R-390): it only says which extensions may be used, and every answer is
still checked. Any failure here means "a plain relay", never an error.
"""

from __future__ import annotations

import asyncio
import ssl as ssl_module
from urllib.parse import urlsplit

import msgspec

from strata.relays.connection.values import Announced
from strata.relays.http_reply import answer_to, read_body, read_head
from strata.relays.peer_timeout import PeerTimeout

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
    """Fetch the manifest of the relay at a ws or wss URL; the default, a plain relay, if none comes in time.

    Reads at most 256 KiB. Raises nothing; cancelling closes the socket.
    """
    try:
        async with PeerTimeout(timeout):
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
    """Return the body, at most `max_bytes`, at `path` of the relay at a ws or wss URL.

    Raises `OSError`, and `ValueError`, `EOFError` or `asyncio.LimitOverrunError` for any answer other than a
    complete 200. The caller must bound the time. Cancelling closes the socket.
    """
    parts = urlsplit(url)
    secure = parts.scheme == "wss"
    asked = (
        f"GET {path} HTTP/1.1\r\nHost: {parts.netloc.rpartition('@')[2]}\r\n"
        "Accept: application/json\r\nConnection: close\r\n\r\n"
    ).encode("ascii")
    port = parts.port or (443 if secure else 80)
    async with answer_to(asked, parts.hostname or "", port, ssl=ssl if secure else None) as reader:
        status, headers = await read_head(reader)
        if status != 200:
            raise ValueError("not found")
        return await read_body(reader, headers, max_bytes)
