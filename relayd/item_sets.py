"""The set of items on one side of a comparison: read from the log a page at a time, sorted in a thread."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection
from typing import TypeVar

from strata.protocol.negentropy import ItemSet

from relayd.store import Store
from relayd.store.items import ItemPlace, ItemRange
from relayd.store.payers import NOBODY, Asker

__all__ = ["TooManyItems", "gather", "in_thread"]

T = TypeVar("T")


class TooManyItems(Exception):
    """There are more packets than one comparison may hold: compare a shorter period."""


async def gather(
    store: Store,
    span: ItemRange,
    *,
    max_items: int,
    skips_of: int | None = None,
    with_declined: bool = False,
    without: Collection[bytes] = (),
    asker: Asker = NOBODY,
    pace: Callable[[], Awaitable[None]] | None = None,
) -> ItemSet:
    """The items that the log has of a range, and those that it refused from the peer `skips_of`, which only
    the side that asks may count as its own.

    Only the id and the time of a refused packet are remembered. So refused packets are left out of a set of
    certain types or authors: there every refused packet would differ, whatever its type.

    Packets `without` are left out. `pace` is awaited before each page; `asker` is charged. Raises
    `TooManyItems`, `StoreUnavailable`, `StoreTimeout`. Cancelling ends it.
    """
    found: set[tuple[int, bytes]] = set()
    place: ItemPlace | None = ItemPlace()
    while place is not None:
        if pace is not None:
            await pace()
        page = await store.items(span, place, asker.payer, with_declined=with_declined)
        found.update(item for item in page.items if item[0] >= 0 and item[1] not in without)
        if len(found) > max_items:
            raise TooManyItems
        place = page.place
    if skips_of is not None and not span.types and not span.authors:
        found.update(await store.skips(skips_of, span, max_items + 1, asker.payer))
        if len(found) > max_items:
            raise TooManyItems
    return await in_thread(lambda: ItemSet(found), asker)


async def in_thread(work: Callable[[], T], asker: Asker) -> T:
    """Do a piece of work in a thread, and charge the asker the processor time that it took."""

    def timed() -> tuple[T, float]:
        began = time.thread_time()
        return work(), time.thread_time() - began

    result, seconds = await asyncio.to_thread(timed)
    asker.checked_for(seconds)
    return result
