"""The queries of one channel to the store: what was missed while away, and missing messages (channel.md §8).

An asyncio shell around `CatchingUp` and `Retrieval`, which decide when to ask, and for what.
Messages from the store go the way of all received messages (C-165). There is one query at a time.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import TypeVar

from strata.channels.messaging.node import MessagingNode
from strata.channels.messaging.values import NodeMessageReceived
from strata.channels.reliable.alarm import Alarm
from strata.channels.reliable.engine import ChannelEngine, follows_others
from strata.channels.reliable.retrieval import ByHash, RetrievalPlan
from strata.channels.sds import SdsMessage
from strata.protocol.errors import StrataError

__all__ = ["StoreQueries"]

_log = logging.getLogger("strata.reliable")

_MAX_PAGES = 40
"""Most pages that one query for missing messages reads; the next query follows."""
_MAX_QUERY_PAGES = 1_000
"""Most pages that a query on connect reads, where none has a message of this channel (C-095)."""
_PAGE_TIMEOUT = 60.0
_RETRY_SECONDS = 5.0

T = TypeVar("T")


class StoreQueries:
    """Asks the store for the messages that one channel lacks."""

    def __init__(
        self,
        node: MessagingNode,
        engine: ChannelEngine,
        *,
        receive: Callable[[NodeMessageReceived], Awaitable[SdsMessage | None]],
        flush: Callable[[], None],
        now_ms: Callable[[], int],
    ) -> None:
        """`receive` takes each message that is found; `flush` stores what the engine changed."""
        self.retrievals = 0
        self.retrievals_failed = 0
        self.armed_for = math.inf
        """When the next query is due, in wall milliseconds."""
        self._receive = receive
        self._flush = flush
        self._node = node
        self._engine = engine
        self._now_ms = now_ms
        self._woken = Alarm()
        self._connected = False

    def wake(self) -> None:
        """A message may have been found missing."""
        self._woken.set()

    def connected(self, connected: bool) -> None:
        """The store has become available, or is away."""
        if self._connected and not connected:
            self._engine.catching_up.offline()
        self._connected = connected
        self._woken.set()

    async def run(self) -> None:
        """Ask whenever it is time, for as long as the channel is started."""
        engine = self._engine
        caught_up = False
        while True:
            self._woken.clear()
            now = self._now_ms()
            if not self._connected or engine.catching_up.has_missed:
                caught_up = False
            if self._connected:
                if not caught_up and engine.catching_up.is_due(now):
                    caught_up = await self._guarded(self._catch_up())
                    if not caught_up:
                        engine.catching_up.missed()
                        await asyncio.sleep(_RETRY_SECONDS)
                    continue
                caught_up = True
                if engine.retrieval.at <= now:
                    if (plan := engine.plan_retrieval(now)) is not None:
                        await self._retrieve(plan)
                    continue
            self.armed_for = engine.retrieval.at if self._connected else math.inf
            wait = (self.armed_for - now) / 1000
            await self._woken.wait(wait if wait < 1e9 else None)

    async def _guarded(self, work: Awaitable[None]) -> bool:
        """Whether a query succeeded. A store that is away or breaks its protocol is asked again later."""
        try:
            await work
        except (StrataError, OSError, TimeoutError) as error:
            self.retrievals_failed += 1
            _log.info("the store could not be asked: %s", error)
            return False
        return True

    async def _catch_up(self) -> None:
        """Newest first, until a page has a message of this channel that names others (C-171, C-172)."""
        engine = self._engine
        began_at = self._now_ms()
        since = engine.catching_up.begin(began_at)
        async with aclosing(self._node.history(engine.content_topic, since_ms=since)) as pages:
            for _ in range(_MAX_QUERY_PAGES):
                page = await _next_page(pages)
                if page is None:
                    break
                # Oldest first within the page, so that most messages come after those that they follow.
                if follows_others([await self._receive(event) for event in reversed(page)]):
                    break
        engine.catching_up.succeeded(began_at)
        self._flush()

    async def _retrieve(self, plan: RetrievalPlan) -> None:
        engine = self._engine
        before = {entry.message_id for entry in engine.sds.missing()}
        self.retrievals += 1
        if await self._guarded(self._fetch(plan)):
            after = {entry.message_id for entry in engine.sds.missing()}
            engine.retrieval.finished(self._now_ms(), brought=len(before - after), still_missing=bool(after))
        else:
            engine.retrieval.failed(self._now_ms())

    async def _fetch(self, plan: RetrievalPlan) -> None:
        topic = self._engine.content_topic
        if isinstance(plan, ByHash):
            async with aclosing(self._node.fetch(topic, plan.hashes)) as found:
                while (event := await _next_page(found)) is not None:
                    await self._receive(event)
            return
        async with aclosing(self._node.history(topic, since_ms=plan.since_ms)) as pages:
            for _ in range(_MAX_PAGES):
                page = await _next_page(pages)
                if page is None:
                    return
                for event in reversed(page):
                    await self._receive(event)
                if not self._engine.sds.missing():
                    return


async def _next_page(pages: AsyncGenerator[T, None]) -> T | None:
    """The next page, None at the end. Raises `TimeoutError` for a store that falls silent."""
    async with asyncio.timeout(_PAGE_TIMEOUT):
        return await anext(pages, None)
