"""`/metrics`, produced off the event loop and no more often than needed.

Writing the text takes several milliseconds, more with many workers, and anyone who can reach the port may
request it. So it is written in a thread, one text at a time and at most twenty in a second. All requests
that arrive before one is begun get that one: no request gets a text older than itself, and none makes the
relay write more.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final

__all__ = ["Scrape", "Scrapes"]

Scrape = tuple[str, bytes]
"""The content type and the text."""

_INTERVAL: Final = 0.05


class Scrapes:
    """The texts of `/metrics`. `count` runs on the loop before each text is written, `render` in a thread."""

    def __init__(self, count: Callable[[], None], render: Callable[[], Scrape]) -> None:
        self._count = count
        self._render = render
        self._next: asyncio.Task[Scrape] | None = None
        self._turn = asyncio.Lock()
        self._not_before = 0.0

    async def get(self) -> Scrape:
        """The text as of now or a moment later. Cancelling it does not affect other requests."""
        if self._next is None:
            self._next = asyncio.create_task(self._make(), name="metrics")
        return await asyncio.shield(self._next)

    async def _make(self) -> Scrape:
        async with self._turn:
            await asyncio.sleep(max(0.0, self._not_before - time.monotonic()))
            self._next = None  # requests from here on get a later one
            self._not_before = time.monotonic() + _INTERVAL
            self._count()
            return await asyncio.to_thread(self._render)
