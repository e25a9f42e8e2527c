"""Reads a topic from relays: pages in either order, and messages by their hashes. An asyncio shell."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Any

from strata.channels.messaging.packet_relays import DeliveredPacket, PacketRelays, PacketStream
from strata.channels.messaging.reading import HistoryPage, Order, Place, read_position, write_position
from strata.channels.messaging.values import NodeMessageReceived
from strata.relays.connection.values import RESUME_MARGIN_SECONDS
from strata.relays.pool.pool import PacketPool
from strata.relays.pool.values import Position

__all__ = ["StoredMessages"]

_PAGE_MESSAGES = 500
_PAGE_BYTES = 4 << 20
_BY_HASH = frozenset({"packet_ids", "http_packets"})

Open = Callable[[DeliveredPacket, str], Awaitable[NodeMessageReceived | None]]
"""Returns the message in a packet of a topic; if there is none, counts the packet and returns None."""


class StoredMessages:
    """Reads the stores of a node's relays."""

    def __init__(self, relays: PacketRelays, open_packet: Open) -> None:
        self._relays = relays
        self._open = open_packet

    async def history(
        self, topic: str, *, since_ms: int, authors: tuple[str, ...]
    ) -> AsyncGenerator[Sequence[NodeMessageReceived], None]:
        """See `RelayNode.history`."""
        query = self._relays.subscribe(
            types=topic, authors=authors, since=max(0, since_ms // 1000), order="desc", live=False
        )
        page: list[NodeMessageReceived] = []
        async with aclosing(query) as found:
            async for delivery in found:
                message = await self._open(delivery, topic)
                if message is None:
                    continue
                page.append(message)
                if len(page) == _PAGE_MESSAGES:
                    yield page
                    page = []
        if page:
            yield page

    async def read(
        self,
        topic: str,
        *,
        order: Order,
        since_ms: int,
        until_ms: int | None,
        after: str | None,
        authors: tuple[str, ...],
    ) -> AsyncGenerator[HistoryPage, None]:
        """See `RelayNode.read`."""
        places = read_position(after)
        # Forwards only by the time of receipt: a packet from another relay may have been written days ago.
        query: dict[str, Any] = {"received_since" if order == "asc" else "since": max(0, since_ms // 1000)}
        if until_ms is not None:
            query["until"] = until_ms // 1000
        # Backward readers often want one page, so relays are not asked for the next page ahead of time.
        at_once = None if order == "asc" else _PAGE_MESSAGES
        first = set[bytes]()
        while True:
            found = self._relays.subscribe(
                types=topic,
                authors=authors,
                order=order,
                live=False,
                limit=at_once,
                **query,
                **self._resumed(places),
            )
            page: list[NodeMessageReceived] = []
            size = count = 0
            async with aclosing(found):
                async for delivery in found:
                    if delivery.packet.digest in first:
                        continue
                    count += 1
                    message = await self._open(delivery, topic)
                    places |= _place_of(self._relays, delivery)
                    if at_once is not None and not places:
                        first.add(delivery.packet.digest)
                    if message is None:
                        continue
                    page.append(message)
                    size += len(message.message.payload)
                    if len(page) == _PAGE_MESSAGES or size >= _PAGE_BYTES:
                        places |= _places_of(found)
                        yield HistoryPage(page, write_position(places))
                        page, size = [], 0
                places |= _places_of(found)
            is_end = at_once is None or count < at_once
            if page or is_end:
                yield HistoryPage(page, write_position(places))
            if is_end:
                return
            resumable = {url: place for url, place in places.items() if place.cursor is not None}
            if not places or len(resumable) < len(places):
                # A relay without cursors cannot continue from a place: it sends everything except this page.
                places, at_once = resumable, None

    def _resumed(self, places: dict[str, Place]) -> dict[str, Any]:
        """The options of a subscription that continues from these places."""
        if isinstance(self._relays, PacketPool):
            known = {url: Position(place.cursor, place.received_at) for url, place in places.items()}
            return {"positions": known} if known else {}
        place = places.get(getattr(self._relays, "url", ""))
        if place is None:
            return {}
        since = max(0, place.received_at - RESUME_MARGIN_SECONDS)
        return {"cursor": place.cursor, "cursor_fallback_since": since}

    @property
    def finds_by_hash(self) -> bool:
        """See `RelayNode.finds_by_hash`."""
        announced = getattr(self._relays, "announced", None)
        return announced is None or not _BY_HASH.isdisjoint(announced.extensions)

    async def fetch(
        self, topic: str, hashes: Sequence[bytes], *, since: int
    ) -> AsyncGenerator[NodeMessageReceived, None]:
        """See `RelayNode.fetch`; `since` limits the reading of a relay that cannot search."""
        wanted = [f"0x{each.hex()}" for each in hashes if len(each) == 32]
        async with aclosing(self._relays.find(wanted, types=topic, since=since)) as found:
            async for delivery in found:
                message = await self._open(delivery, topic)
                if message is not None:
                    yield message


def _place_of(relays: PacketRelays, delivery: DeliveredPacket) -> dict[str, Place]:
    """The place at the relay after a delivery, if there is one relay."""
    cursor = getattr(delivery, "cursor", None)
    if cursor is None or isinstance(relays, PacketPool):
        return {}
    return {getattr(relays, "url", ""): Place(cursor, getattr(delivery, "received_at", 0))}


def _places_of(found: PacketStream) -> dict[str, Place]:
    """The places at the relays of a pool after the last packet taken."""
    positions: dict[str, Position] = getattr(found, "positions", {})
    return {url: Place(each.cursor, each.received_at) for url, each in positions.items()}
