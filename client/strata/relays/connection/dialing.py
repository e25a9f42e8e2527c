"""Opening one connection to a relay, and judging a failure: try again, or give up."""

from __future__ import annotations

import asyncio
import contextlib
import ssl as ssl_module
from urllib.parse import urlsplit, urlunsplit

from websockets.asyncio.client import ClientConnection
from websockets.exceptions import (
    ConnectionClosed,
    InvalidHandshake,
    InvalidMessage,
    InvalidProxy,
    InvalidStatus,
    InvalidURI,
    WebSocketException,
)

from strata.protocol.errors import ConnectionFailed
from strata.relays.connection.discovery import discover
from strata.relays.connection.options import Options
from strata.relays.connection.values import Announced
from strata.relays.connection.websocket import ClientSocket, open_websocket

__all__ = [
    "check_tls",
    "check_url",
    "describe",
    "dial",
    "hang_up",
    "is_relay_url",
    "may_retry",
    "shown",
    "tls_context",
]

_TOO_BIG = 1009
_NO_RELAY_HERE = "there is no relay at this path; the usual one is /strata"
_PASSING_STATUSES = frozenset({408, 425, 429, 500, 502, 503, 504})
# RFC 6455 §7.4.1. These mean that the two ends disagree about the protocol or that the relay does not accept
# us: another attempt would end the same way.
_FINAL_CLOSE_CODES = frozenset({1002, 1003, 1007, 1008, 1009, 1010})


def is_relay_url(url: str) -> bool:
    """Whether this is a ws or wss URL."""
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        return False
    return parts.scheme in ("ws", "wss") and bool(parts.hostname) and not parts.fragment


def check_url(url: str) -> None:
    """Raise `ConnectionFailed` unless this is a ws or wss URL."""
    if not is_relay_url(url):
        raise ConnectionFailed("not a relay URL; one looks like ws://127.0.0.1:7447/strata")


def check_tls(ssl: object) -> None:
    """Raise `TypeError` unless this is a TLS context or None."""
    if ssl is not None and not isinstance(ssl, ssl_module.SSLContext):
        raise TypeError(f"ssl must be an ssl.SSLContext, not {type(ssl).__name__}")


def tls_context(url: str, ssl: ssl_module.SSLContext | None) -> ssl_module.SSLContext | None:
    """The TLS context for a URL: None for ws; for wss, the one given or else the system's defaults."""
    if urlsplit(url).scheme != "wss":
        return None
    return ssl if ssl is not None else ssl_module.create_default_context()


async def dial(
    url: str, *, ssl: ssl_module.SSLContext | None, options: Options
) -> tuple[ClientSocket, Announced]:
    """Open a WebSocket connection and, concurrently, learn what the relay announces.

    Raises errors that `may_retry` and `describe` understand. Cancelling leaves no socket open.
    """
    if options.proxy is not None:
        return await _open(url, ssl, options), Announced()
    socket: ClientSocket | None = None
    failure: Exception | None = None
    try:
        async with asyncio.TaskGroup() as tasks:
            discovery = tasks.create_task(
                discover(url, ssl=ssl, timeout=options.manifest_timeout), name="strata-relay-manifest"
            )
            try:
                socket = await _open(url, ssl, options)
            except Exception as error:
                failure = error
                discovery.cancel()
    except BaseException:
        if socket is not None:
            socket.transport.abort()
        raise
    if socket is None:
        assert failure is not None
        raise failure
    return socket, discovery.result()


async def _open(url: str, ssl: ssl_module.SSLContext | None, options: Options) -> ClientSocket:
    socket = await open_websocket(
        url,
        ssl=ssl,
        compression="deflate" if options.compression else None,
        proxy=options.proxy,
        open_timeout=options.handshake_timeout,
        ping_interval=options.ping_interval,
        ping_timeout=options.ping_timeout,
        close_timeout=options.close_timeout,
        max_size=options.max_message_bytes,
    )
    assert isinstance(socket, ClientSocket)
    return socket


async def hang_up(socket: ClientConnection, timeout: float) -> None:
    """Close a connection; drop it if the closing handshake takes longer than `timeout` seconds.

    A peer that reads nothing would block the library's own close in a write, hence the deadline around it.
    """
    try:
        async with asyncio.timeout(timeout):
            await socket.close()
    except TimeoutError:
        pass
    finally:
        socket.transport.abort()
        # `abort` takes effect in the next iteration of the loop; wait until the connection has ended.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1):
                await socket.wait_closed()


def may_retry(error: Exception) -> bool:
    """Whether another attempt to connect may succeed after this failure. A pure function of the error."""
    match error:
        case ssl_module.SSLCertVerificationError():
            return False
        case OSError() | EOFError():  # TimeoutError is an OSError
            return True
        case ConnectionClosed():
            frame = error.rcvd or error.sent
            return frame is None or frame.code not in _FINAL_CLOSE_CODES
        case InvalidStatus():
            return error.response.status_code in _PASSING_STATUSES
        case InvalidMessage():
            # A server that does not speak HTTP will not start to; half a response means a lost connection.
            return isinstance(error.__cause__, EOFError)
        case _:
            return False


def describe(error: Exception, url: str, proxy: str | None = None) -> ConnectionFailed:
    """The failure as an error with one sentence: the cause and, where possible, what to do about it."""
    by = "" if proxy is None else f"through the proxy {shown(proxy)}: "
    return ConnectionFailed(
        f"no connection to {shown(url)}: {by}{_reason(error, by_proxy=proxy is not None)}"
    )


def shown(url: str) -> str:
    """The URL without user name, password and query, fit for logs and errors."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return "what is not a URL"
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def _reason(error: Exception, *, by_proxy: bool) -> str:
    match error:
        case InvalidURI() | InvalidProxy():
            return f"{error}"
        case InvalidStatus():
            status = error.response.status_code
            hint = {
                401: "it asks for credentials",
                403: "it does not let us in",
                404: _NO_RELAY_HERE,
            }.get(status, _NO_RELAY_HERE if status < 300 else "")
            return f"the server answered HTTP {status}" + (f": {hint}" if hint else "")
        case InvalidMessage() if isinstance(error.__cause__, EOFError):
            return "the connection was cut"
        case InvalidHandshake():
            return "the server does not speak WebSocket there"
        case ssl_module.SSLCertVerificationError():
            return f"its certificate is not trusted ({getattr(error, 'verify_message', error)})"
        case ssl_module.SSLError():
            return (
                f"no TLS with it ({getattr(error, 'reason', None) or error}); does it speak ws, and not wss?"
            )
        case ConnectionRefusedError():
            return f"nothing listens there; is the {'proxy' if by_proxy else 'relay'} running?"
        case ConnectionResetError() | ConnectionAbortedError() | BrokenPipeError():
            return "the connection was cut; does it speak the other of ws and wss?"
        case TimeoutError():
            return "it did not answer in time"
        case ConnectionClosed():
            frame = error.rcvd or error.sent
            if frame is None:
                return "the connection was cut"
            if error.rcvd is None and frame.code == _TOO_BIG:
                return f"this side closed with {frame}; Options.max_message_bytes is the limit"
            return f"{'the relay' if error.rcvd else 'this side'} closed with {frame}"
        case OSError():
            return error.strerror or str(error) or type(error).__name__
        case WebSocketException() | _:
            return str(error) or type(error).__name__
