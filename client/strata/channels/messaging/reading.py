"""Reading a topic from stores, page by page, in either order, and from a position on.

A *position* is text that a node returns with a page and accepts later: the place after that page, in every
store that the page came from. It is exact if stores have cursors, so reading on from it skips and repeats
nothing. A node without positions returns None, and its caller continues by time.
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
"""The most messages kept from a node that only reads newest first."""
_MAX_SPOOLED_BYTES = 32 << 20
_MAX_POSITION = 64_000
_MAX_PLACES = 256


@dataclass(frozen=True, slots=True)
class HistoryPage:
    """Some messages in the requested order."""

    messages: Sequence[NodeMessageReceived]
    position: str | None = None
    """Where to continue after this page; None if the store has no cursors."""


class PagedHistory(Protocol):
    """A node that reads in either order; other nodes are read newest first (`history`)."""

    def read(
        self,
        topic: str,
        *,
        order: Order,
        since_ms: int,
        until_ms: int | None = None,
        after: str | None = None,
    ) -> AsyncGenerator[HistoryPage, None]:
        """The stored messages of a topic, in the order in which the store got them, from `after` on.

        `since_ms` limits the reading of stores that `after` does not include. Raises as `history` does.
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
    """Read the pages of a topic from any node; see `PagedHistory`."""
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
        second = since_ms // 1000 * 1000  # authors give whole seconds
        if spool.is_whole or not newest or newest < second:
            return
        # Another walk brings what had no room. A second with more messages than fit must not end the reading.
        since_ms = newest if newest > second else second + 1000


def sent_ms(event: NodeMessageReceived) -> int:
    """When the author claims to have sent a message, in milliseconds; 0 if unknown."""
    return 1000 * (event.message.timestamp or 0)


class _Spool:
    """The oldest pages of a walk from new to old, which come first in the opposite order."""

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
    """How far a reader has come at one relay."""

    cursor: str | None
    received_at: int
    """When that relay received the last packet read, in Unix seconds."""


_DECODER = msgspec.json.Decoder(dict[str, Place])


def write_position(places: Mapping[str, Place]) -> str | None:
    """A position from the place at each relay; None without places, and for relays without cursors."""
    known = {url: place for url, place in places.items() if place.cursor is not None}
    text = msgspec.json.encode(dict(list(known.items())[:_MAX_PLACES])).decode() if known else ""
    return text if 0 < len(text) <= _MAX_POSITION else None


def read_position(text: str | None) -> dict[str, Place]:
    """The place at each relay; empty for a text that another kind of node has written."""
    try:
        return _DECODER.decode(text) if text is not None else {}
    except msgspec.MsgspecError:
        return {}
