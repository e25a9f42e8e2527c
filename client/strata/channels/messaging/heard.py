"""A subscribed topic, read from a relay or a pool until it is no longer wanted. An asyncio shell."""

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
"""How far back a subscription by time goes, because relays' clocks may be behind ours."""
_RETRY_BASE, _RETRY_CAP = 1.0, 60.0
_STANDS_AFTER = 5.0
"""A subscription that a relay has not refused within this time counts as established."""


class HeardTopic:
    """A topic, and how far its messages were passed on, at one relay or at each relay of a pool."""

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
        """`from_head`: receive messages that arrive from now on, and not those that relays already have."""
        self.topic = topic
        self.authors = authors
        self.begun = asyncio.Event()
        """Set when it is settled where the subscription begins, or that there is none."""
        self.failures = 0
        self.by_time = False
        """Whether relays were asked for packets received since a time: a wrong clock may keep them silent."""
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
        """Subscribe again, by the current clock."""
        self.end().cancel()
        self._is_over = False
        self._begin()

    def end(self) -> asyncio.Task[None]:
        """Release all waits for the beginning. Returns the task, which the caller must cancel."""
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
                    # A bug of ours must not end the reading unnoticed.
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
                    if self._is_over:  # a handler has requested it
                        return
                    self._cursor = getattr(delivery, "cursor", None) or self._cursor
                    self._positions = getattr(subscription, "positions", self._positions)
        finally:
            stands.cancel()

    def _stands(self) -> None:
        self.failures = 0

    async def _find_head(self) -> None:
        """Ask the relays for their heads. A relay that cannot give one is read from a time on."""
        if isinstance(self._relays, PacketPool):
            self._positions = await self._relays.heads()
            return
        find_head = getattr(self._relays, "head", None)  # relays of other authors may lack it
        try:
            self._cursor = None if find_head is None else await find_head()
        except RequestRefused as refusal:
            _log.info("the relay did not say where it ends: %s", refusal)

    def _beginning(self, since: int) -> dict[str, Any]:
        """Where a subscription begins: after what was passed on, else at this time by relays' clocks."""
        self.by_time = self._cursor is None
        if self._cursor is not None:
            oldest = max(0, since - packets.DEFAULT_MAX_PACKET_AGE_SECONDS)
            return {"cursor": self._cursor, "cursor_fallback_since": oldest}
        # Only by the time of receipt: a packet from another relay may have been written days ago.
        start: dict[str, Any] = {"received_since": max(0, since)}
        return start | ({"positions": self._positions} if self._positions else {})


def store_time(relays: PacketRelays) -> float | None:
    """The latest time by the relays' clocks; None if they have not reported one."""
    return getattr(relays, "latest_time", None)  # relays of other authors may lack it
