"""WebSocket connections that find the address that answers, and can be closed and aborted at any time.

An asyncio transport that is closed with data left to send, and then sends it, drops its loop without noting
that it has ended (CPython 3.11). From then on its `abort` raises `AttributeError`, where after any other end
it does nothing. This happens when a peer closes in the middle of a large message and reads on, as a relay
does that makes way for another. `close` and `send` of the WebSocket library propagate the error.
"""

from __future__ import annotations

import asyncio
import math
from functools import partial

from websockets.asyncio.client import ClientConnection, connect

from strata.relays.reaching import reach

__all__ = ["ClientSocket", "open_websocket"]


class ClientSocket(ClientConnection):
    """A connection of the WebSocket library whose transport can safely be closed again after its end."""

    heard_at = -math.inf
    """When bytes last came, on the loop's clock."""

    def data_received(self, data: bytes) -> None:
        """Called by the transport."""
        self.heard_at = self.loop.time()
        super().data_received(data)

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by the transport, once."""
        super().connection_lost(exc)
        self.transport = _Ended(self.transport)


class _Ended(asyncio.Transport):
    """Stands in for a transport that has ended: it can still be queried, and closed again."""

    def __init__(self, ended: asyncio.Transport) -> None:
        super().__init__()
        self._ended = ended

    def get_extra_info(self, name: str, default: object = None) -> object:
        return self._ended.get_extra_info(name, default)

    def is_closing(self) -> bool:
        return True

    def close(self) -> None:
        """Do nothing: the transport is closed."""

    def abort(self) -> None:
        """Do nothing: the transport is closed."""


class _Connect(connect):
    async def open_tcp_connection(self) -> ClientConnection:
        """Connect to the first address of the host that answers; a proxy knows other addresses."""
        if self.proxy is not None:
            return await super().open_tcp_connection()
        given = self.create_connection_kwargs
        self.create_connection_kwargs = {**given, "sock": await reach(self.ws_uri.host, self.ws_uri.port)}
        try:
            return await super().open_tcp_connection()
        finally:
            self.create_connection_kwargs = given  # the socket is for this host, and not for a redirection


open_websocket = partial(_Connect, create_connection=ClientSocket)
"""Connect, like `websockets.asyncio.client.connect`."""
