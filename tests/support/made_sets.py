"""Sets of packets in memory, and a peer with any behaviour: for comparisons in virtual time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, field

from strata.protocol.errors import ErrorCode, RequestRefused
from strata.protocol.negentropy import ItemSet, Reconciler
from strata.relays.reconciling import Differences, TooManyPackets

from relayd.federation.comparing import Fetched
from relayd.store.items import ItemPlace, ItemRange, ItemsPage
from relayd.store.payers import Payer

__all__ = ["MadeItem", "MadeLog", "MadePeer", "made"]


@dataclass(frozen=True)
class MadeItem:
    """The part of a packet that a comparison looks at."""

    timestamp: int
    packet_id: bytes
    type: str = "POST"
    expires_at: int | None = None

    def is_in(self, span: ItemRange) -> bool:
        return (
            span.since <= self.timestamp <= span.until
            and (not span.types or self.type in span.types)
            and (self.expires_at is None or self.expires_at >= span.unexpired_at)
        )


def made(number: int, timestamp: int, type: str = "POST", expires_at: int | None = None) -> MadeItem:
    """An item whose id is derived from a number."""
    return MadeItem(timestamp, number.to_bytes(32, "big"), type, expires_at)


@dataclass
class MadeLog:
    """The part of a store that comparing needs."""

    held: dict[bytes, MadeItem] = field(default_factory=dict)
    erased: set[bytes] = field(default_factory=set)
    refused: dict[bytes, MadeItem] = field(default_factory=dict)
    """The rows of `peer_skips`, of any peer."""
    declined: set[bytes] = field(default_factory=set)
    pages: int = 0
    page_items: int = 7

    def put(self, *items: MadeItem) -> None:
        self.held |= {item.packet_id: item for item in items}

    async def items(
        self, span: ItemRange, place: ItemPlace, payer: Payer | None = None, *, with_declined: bool = False
    ) -> ItemsPage:
        self.pages += 1
        wanted = [item for item in self.held.values() if with_declined or item.packet_id not in self.declined]
        page = wanted[place.after : place.after + self.page_items]
        following = place.after + self.page_items
        found = [(item.timestamp, item.packet_id) for item in page if item.is_in(span)]
        return ItemsPage(found, ItemPlace(0, following) if following < len(wanted) else None)

    async def skips(
        self, peer_id: int, span: ItemRange, most: int, payer: Payer | None = None
    ) -> Sequence[tuple[int, bytes]]:
        found = [i for i in self.refused.values() if span.since <= i.timestamp <= span.until]
        return [(item.timestamp, item.packet_id) for item in found[:most]]

    async def find(self, ids: Sequence[bytes], *_: object) -> dict[bytes, tuple[int, int]]:
        return {each: (1, 1) for each in ids if each in self.held or each in self.erased}


class MadePeer:
    """A peer: what it claims to have, what it serves, and how it misbehaves."""

    def __init__(self, items: Iterable[MadeItem], reader: MadeLog) -> None:
        self.claims = {item.packet_id: item for item in items}
        self.reader = reader
        self.serves: Callable[[bytes], bool] = lambda packet_id: True
        self.refuses: Callable[[MadeItem], bool] = lambda item: False
        """Selects the packets that the reader refuses."""
        self.most_items = 10**6
        self.busy = 0
        """The number of times it reports being busy before it answers."""
        self.retry_after: int | None = 15
        self.delay = 0.0
        self.answers_whole = True
        self.distort: Callable[[bytes], bytes] = lambda message: message
        self.granted: tuple[str, ...] = ("subscribe", "replicate")
        self.extensions: frozenset[str] = frozenset({"reconcile"})
        self.asked: list[ItemRange] = []
        self.fetched: list[list[bytes]] = []
        self.connections = 0
        self.open = 0

    @contextlib.asynccontextmanager
    async def connect(self) -> AsyncIterator[MadePeer]:
        self.connections += 1
        self.open += 1
        try:
            yield self
        finally:
            self.open -= 1

    async def compare(
        self,
        items: ItemSet,
        *,
        since: int,
        until: int,
        unexpired_at: int,
        types: tuple[str, ...] = (),
        authors: tuple[str, ...] = (),
        most_needed: int = 100_000,
    ) -> Differences:
        span = ItemRange(since, until, unexpired_at, types, authors)
        self.asked.append(span)
        await asyncio.sleep(self.delay)
        if self.busy:
            self.busy -= 1
            raise RequestRefused(ErrorCode.RATE_LIMITED, "busy", retry_after=self.retry_after)
        mine = [(item.timestamp, item.packet_id) for item in self.claims.values() if item.is_in(span)]
        if len(mine) > self.most_items:
            raise TooManyPackets(ErrorCode.RATE_LIMITED, "too many", detail="reconcile_too_large")
        asking, answering = Reconciler(items), Reconciler(ItemSet(mine))
        found = Differences()
        message: bytes | None = asking.initiate()
        while message is not None:
            answer = self.distort(answering.respond(message))
            found.rounds += 1
            found.bytes += len(message) + len(answer)
            result = asking.receive(answer)
            found.have.update(result.have)
            found.need.update(result.need)
            message = result.message
        if len(found.need) > most_needed:
            found.is_cut = True
        return found

    async def fetch(self, ids: Sequence[bytes]) -> Fetched:
        """Do what the link does: request packets, and have them judged."""
        self.fetched.append(list(ids))
        sent = {each for each in ids if each in self.claims and self.serves(each)}
        for packet_id in sent:
            item = self.claims[packet_id]
            if self.refuses(item):
                self.reader.refused[packet_id] = item
            else:
                self.reader.put(item)
        return Fetched(sent, self.answers_whole)
