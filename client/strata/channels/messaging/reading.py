"""Reading what stores have of a topic, page by page, in either order, and from a place on.

A *position* is text that a node gives with a page and takes back later: the place behind that page, in every
store that it came from. It is exact where stores have cursors, so reading on from it skips nothing and gives
nothing twice. A node without positions gives None, and its caller goes on by time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Literal, Protocol

import msgspec

from strata.channels.messaging.node import MessagingNode
from strata.channels.messaging.values import NodeMessageReceived

__all__ = [
    "HistoryPage",
    "Order",
    "PagedHistory",
    "Place",
    "read_pages",
    "read_position",
    "sent_ms",
    "write_position",
]

Order = Literal["asc", "desc"]

_MAX_SPOOLED = 2_000
"""Most messages kept of a node that reads newest first alone."""
_MAX_SPOOLED_BYTES = 32 << 20
_MAX_POSITION = 64_000
_MAX_PLACES = 256


@dataclass(frozen=True, slots=True)
class HistoryPage:
    """Some messages in the order that was asked for."""

    messages: Sequence[NodeMessageReceived]
    position: str | None = None
    """Where to read on after this page; None where the store has no cursors."""


class PagedHistory(Protocol):
    """What a node has that reads in either order; a node without it is read newest first (`history`)."""

    def read(
        self,
        topic: str,
        *,
        order: Order,
        since_ms: int,
        until_ms: int | None = None,
        after: str | None = None,
    ) -> AsyncGenerator[HistoryPage, None]:
        """What the store has of a topic, in the order in which it got it, from `after` on.

        `since_ms` bounds what is read of stores that `after` does not know. Raises as `history` does.
        """
        ...


async def read_pages(
    node: MessagingNode,
    topic: str,
    *,
    order: Order,
    since_ms: int,
    until_ms: int | None = None,
    after: str | None = None,
) -> AsyncGenerator[HistoryPage, None]:
    """The pages of a topic from any node; see `PagedHistory`."""
    read = getattr(node, "read", None)  # nodes of other authors may be older than the method
    if read is not None:
        async with aclosing(
            read(topic, order=order, since_ms=since_ms, until_ms=until_ms, after=after)
        ) as pages:
            async for page in pages:
                yield page
        return
    if order == "desc":
        async with aclosing(node.history(topic, since_ms=since_ms)) as found:
            async for messages in found:
                if until_ms is not None:
                    messages = [each for each in messages if sent_ms(each) <= until_ms]
                yield HistoryPage(messages)
        return
    while True:
        spool, newest = _Spool(), 0
        async with aclosing(node.history(topic, since_ms=since_ms)) as found:
            async for messages in found:
                if messages:
                    spool.add(messages)
        while messages := spool.take():
            newest = max(newest, *map(sent_ms, messages))
            yield HistoryPage(messages)
        second = since_ms // 1000 * 1000  # authors tell seconds
        if spool.is_whole or not newest or newest < second:
            return
        # A further walk brings what had no room; but a second that is fuller than that must not be the end.
        since_ms = newest if newest > second else second + 1000


def sent_ms(event: NodeMessageReceived) -> int:
    """When its author says that a message was sent, in milliseconds; 0 if that is not known."""
    return 1000 * (event.message.timestamp or 0)


class _Spool:
    """The oldest pages of a walk from new to old: what is read first when it is turned round."""

    def __init__(self) -> None:
        self._pages: deque[Sequence[NodeMessageReceived]] = deque()
        self._messages = self._bytes = 0
        self.is_whole = True

    def add(self, page: Sequence[NodeMessageReceived]) -> None:
        self._pages.append(page)
        self._count(page, 1)
        while len(self._pages) > 1 and (self._messages > _MAX_SPOOLED or self._bytes > _MAX_SPOOLED_BYTES):
            self._count(self._pages.popleft(), -1)
            self.is_whole = False

    def take(self) -> Sequence[NodeMessageReceived]:
        return self._pages.pop()[::-1] if self._pages else ()

    def _count(self, page: Sequence[NodeMessageReceived], sign: int) -> None:
        self._messages += sign * len(page)
        self._bytes += sign * sum(len(each.message.payload) for each in page)


class Place(msgspec.Struct, frozen=True, array_like=True):
    """Where a reader stands with one relay."""

    cursor: str | None
    received_at: int
    """When that relay received the last packet, in Unix seconds."""


_DECODER = msgspec.json.Decoder(dict[str, Place])


def write_position(places: Mapping[str, Place]) -> str | None:
    """A position from the place at each relay; None without any, and for relays that give no cursors."""
    known = {url: place for url, place in places.items() if place.cursor is not None}
    text = msgspec.json.encode(dict(list(known.items())[:_MAX_PLACES])).decode() if known else ""
    return text if 0 < len(text) <= _MAX_POSITION else None


def read_position(text: str | None) -> dict[str, Place]:
    """The place at each relay; none for a text that another kind of node has written."""
    try:
        return _DECODER.decode(text) if text is not None else {}
    except msgspec.MsgspecError:
        return {}
