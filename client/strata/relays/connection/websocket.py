"""WebSocket connections that can be closed and dropped at any time, whatever has become of them.

An asyncio transport that is closed with something left to send, and then gets rid of it, forgets its loop
without noting that it has ended (CPython 3.11). Its `abort` raises `AttributeError` from then on, where it
does nothing after any other end. A peer that closes amid a large message and reads on leads there, as a relay
does that makes way for another. `close` and `send` of the WebSocket library pass the error on.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

from websockets.asyncio.client import ClientConnection, connect

__all__ = ["ClientSocket", "open_websocket"]


class ClientSocket(ClientConnection):
    """A connection of the WebSocket library, which has an end that nothing more can be done to."""

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by the transport, once."""
        super().connection_lost(exc)
        self.transport = _Ended(self.transport)


class _Ended(asyncio.Transport):
    """Stands for a transport that has ended: it can still be asked, and closed again."""

    def __init__(self, ended: asyncio.Transport) -> None:
        super().__init__()
        self._ended = ended

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._ended.get_extra_info(name, default)

    def is_closing(self) -> bool:
        return True

    def close(self) -> None:
        """It is closed."""

    def abort(self) -> None:
        """It is closed."""


open_websocket = partial(connect, create_connection=ClientSocket)
"""Connect: as `websockets.asyncio.client.connect`."""
