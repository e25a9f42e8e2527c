"""Connections of the tests' own WebSocket clients, which are closed on exit from their block.

The library closes a connection within its own deadline, and drops it when that has passed. If a task is being
cancelled, Python 3.11.2 reports an expired deadline as the cancellation (gh-102780): the library then drops
nothing, and the socket stays open until the collector complains in the middle of another test.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

from strata.relays.connection.websocket import ClientSocket
from websockets.asyncio import client

__all__ = ["connect"]


class connect(client.connect):
    """As `websockets.asyncio.client.connect`."""

    def __init__(self, uri: str, **options: Any) -> None:
        super().__init__(uri, **{"create_connection": ClientSocket, **options})

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        left = self.connection
        try:
            await super().__aexit__(exc_type, exc_value, traceback)
        finally:
            left.transport.abort()
