"""`/metrics`, made off the event loop and not more often than anybody needs.

Writing the text out takes several milliseconds, more with many workers, and whoever can reach the port may
ask for it. So it is made in a thread, one at a time and twenty times in a second at most. All who ask before
one is begun get that one: nobody gets a text older than the request, and nobody makes the relay write more.
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
    """The texts of `/metrics`. `count` runs on the loop before each is made, `render` in a thread."""

    def __init__(self, count: Callable[[], None], render: Callable[[], Scrape]) -> None:
        self._count = count
        self._render = render
        self._next: asyncio.Task[Scrape] | None = None
        self._turn = asyncio.Lock()
        self._not_before = 0.0

    async def get(self) -> Scrape:
        """The text as of now or a moment later. Cancelling it lets others have theirs."""
        if self._next is None:
            self._next = asyncio.create_task(self._make(), name="metrics")
        return await asyncio.shield(self._next)

    async def _make(self) -> Scrape:
        async with self._turn:
            await asyncio.sleep(max(0.0, self._not_before - time.monotonic()))
            self._next = None  # whoever asks from here on gets a later one
            self._not_before = time.monotonic() + _INTERVAL
            self._count()
            return await asyncio.to_thread(self._render)
