"""A topic that is subscribed: read from a relay or a pool until it is wanted no more. An asyncio shell."""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections.abc import Awaitable, Callable, Mapping
from contextlib import aclosing
from typing import Any

from strata.channels.messaging.packet_relays import DeliveredPacket, PacketRelays
from strata.protocol import packets
from strata.protocol.errors import Closed, RequestRefused, StrataError
from strata.relays.pool.pool import PacketPool
from strata.relays.pool.values import Position

__all__ = ["OVERLAP_SECONDS", "HeardTopic", "store_time"]

_log = logging.getLogger("strata.messaging")

OVERLAP_SECONDS = 600
"""How far back a subscription by time looks at relays' clocks: they may be behind ours."""
_RETRY_BASE, _RETRY_CAP = 1.0, 60.0
_STANDS_AFTER = 5.0
"""A subscription that a relay has not refused within this time is taken for standing."""


class HeardTopic:
    """A topic, and how far it was handed on: at one relay, or at each of a pool."""

    def __init__(
        self,
        relays: PacketRelays,
        topic: str,
        authors: tuple[str, ...],
        *,
        from_head: bool,
        hand_on: Callable[[DeliveredPacket, str], Awaitable[None]],
        wall: Callable[[], float],
    ) -> None:
        """`from_head`: what comes from now on is heard, and what relays have by then is not."""
        self.topic = topic
        self.authors = authors
        self.begun = asyncio.Event()
        """It is settled from where on the relays are heard, or that they are not."""
        self.failures = 0
        self.by_time = False
        """Relays were asked for what they received since a time: a wrong clock may keep them silent."""
        self._relays = relays
        self._from_head = from_head
        self._hand_on = hand_on
        self._wall = wall
        self._is_over = False
        self._cursor: str | None = None
        self._positions: Mapping[str, Position] = {}
        self._begin()

    def _begin(self) -> None:
        self._task = asyncio.create_task(self._run(), name=f"strata-topic {self.topic}")

    def begin_again(self) -> None:
        """Subscribe anew, by the clock as it is now."""
        self.end().cancel()
        self._is_over = False
        self._begin()

    def end(self) -> asyncio.Task[None]:
        """Let nobody wait for its beginning. Returns its task, which the caller has to cancel."""
        self._is_over = True
        self.begun.set()
        return self._task

    async def _run(self) -> None:
        """Read the topic until the relay object is closed."""
        since = int(min(self._wall(), store_time(self._relays) or math.inf)) - OVERLAP_SECONDS
        while True:
            try:
                if self._from_head and not self.begun.is_set():
                    await self._find_head()
                self.begun.set()
                await self._read(since)
                return
            except Closed:
                self.begun.set()
                return
            except Exception as error:
                if not isinstance(error, StrataError | OSError):
                    # A fault of ours must not end the reading unseen.
                    _log.exception("reading %s failed", self.topic)
                self.failures += 1
                _log.warning("%s cannot be read: %s", self.topic, error)
                bound = min(_RETRY_CAP, _RETRY_BASE * 2 ** min(self.failures, 10))
            await asyncio.sleep(random.uniform(_RETRY_BASE, bound))

    async def _read(self, since: int) -> None:
        subscription = self._relays.subscribe(
            types=self.topic, authors=self.authors, **self._beginning(since)
        )
        stands = asyncio.get_running_loop().call_later(_STANDS_AFTER, self._stands)
        try:
            async with aclosing(subscription):
                async for delivery in subscription:
                    self.failures = 0
                    await self._hand_on(delivery, self.topic)
                    if self._is_over:  # its handler has asked for that
                        return
                    self._cursor = getattr(delivery, "cursor", None) or self._cursor
                    self._positions = getattr(subscription, "positions", self._positions)
        finally:
            stands.cancel()

    def _stands(self) -> None:
        self.failures = 0

    async def _find_head(self) -> None:
        """Ask the relays where they end. Whoever cannot say is heard from a time on."""
        if isinstance(self._relays, PacketPool):
            self._positions = await self._relays.heads()
            return
        find_head = getattr(self._relays, "head", None)  # relays of other authors may lack it
        try:
            self._cursor = None if find_head is None else await find_head()
        except RequestRefused as refusal:
            _log.info("the relay did not say where it ends: %s", refusal)

    def _beginning(self, since: int) -> dict[str, Any]:
        """Where a subscription begins: behind what was handed on, else at this time by relays' clocks."""
        self.by_time = self._cursor is None
        if self._cursor is not None:
            oldest = max(0, since - packets.DEFAULT_MAX_PACKET_AGE_SECONDS)
            return {"cursor": self._cursor, "cursor_fallback_since": oldest}
        # By the time of receipt alone: what comes from another relay may have been written days ago.
        start: dict[str, Any] = {"received_since": max(0, since)}
        return start | ({"positions": self._positions} if self._positions else {})


def store_time(relays: PacketRelays) -> float | None:
    """The time by the relays' clocks, at the latest; None where they have not told it."""
    return getattr(relays, "latest_time", None)  # relays of other authors may lack it
