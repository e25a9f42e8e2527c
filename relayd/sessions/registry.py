"""The sockets of one process: all that are open, and those with bytes to write at the end of a step."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable
from typing import Protocol

__all__ = ["OpenSocket", "Registry"]


class OpenSocket(Protocol):
    """A socket, as the process that holds it sees it."""

    def flush(self) -> None:
        """Write the queued frames."""

    def check_deadlines(self, now: float) -> None:
        """Called about once a second; `now` is monotonic."""

    def withdraw(self) -> None:
        """What was written before now and waits still must leave within a second, or not at all."""

    def stop_reading(self) -> None:
        """Take nothing further from the peer."""

    def close(self, code: int, reason: str) -> None:
        """Start the closing handshake."""

    def abort(self) -> None:
        """Drop the socket."""


class Registry:
    """The open sockets. While `draining`, no socket reads and no new one becomes a session."""

    def __init__(self) -> None:
        self.sockets: set[OpenSocket] = set()
        self.draining = False
        self._dirty: list[OpenSocket] = []
        self._changed = asyncio.Event()

    def __len__(self) -> int:
        return len(self.sockets)

    def add(self, socket: OpenSocket) -> None:
        """A socket was accepted."""
        self.sockets.add(socket)

    def remove(self, socket: OpenSocket) -> None:
        """A socket is gone; one that was never added changes nothing."""
        self.sockets.discard(socket)
        self._changed.set()

    def wants_flush(self, socket: OpenSocket) -> None:
        """A socket has queued bytes; they are written at the end of this step."""
        self._dirty.append(socket)

    def flush(self) -> None:
        """End a step: write to each socket that has something, once."""
        while self._dirty:
            dirty, self._dirty = self._dirty, []
            for socket in dirty:
                socket.flush()
        self._changed.set()

    async def settle(self, condition: Callable[[], bool], timeout: float) -> bool:
        """Wait up to `timeout` seconds until `condition` holds, looking after every step; whether it does."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                while not condition():
                    self._changed.clear()
                    await self._changed.wait()
        return condition()

    def withdraw(self) -> None:
        """More is declined now: no socket may go on sending for long what it was given before."""
        for socket in self.sockets:
            socket.withdraw()

    def sweep(self, sockets: Iterable[OpenSocket], now: float) -> None:
        """Let these sockets look at their deadlines; `now` is monotonic."""
        for socket in sockets:
            socket.check_deadlines(now)
        self.flush()
