"""The set that one side of a comparison holds: read from the log a page at a time, sorted in a thread."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from strata.protocol.negentropy import ItemSet

from relayd.store import Store
from relayd.store.connection import Payer
from relayd.store.items import ItemPlace, ItemRange

__all__ = ["TooManyItems", "gather", "in_thread", "is_of_all"]

T = TypeVar("T")


class TooManyItems(Exception):
    """More packets than one comparison may hold: compare a shorter time."""


def is_of_all(span: ItemRange) -> bool:
    """Whether packets of every type and author are compared."""
    return not span.types and not span.authors


async def gather(
    store: Store,
    span: ItemRange,
    *,
    max_items: int,
    skips_of: int | None,
    with_declined: bool = False,
    payer: Payer | None = None,
    pace: Callable[[], Awaitable[None]] | None = None,
    worked: Callable[[float], None] = lambda seconds: None,
) -> ItemSet:
    """What the log has of a range, and what it would not take from the peer `skips_of`.

    Of what was refused only the id and the time are remembered. So it is no part of a set of some types or
    authors: every packet that was ever refused would differ there, whatever its type.

    `pace` is awaited before each page; `worked` hears how long a thread worked. Raises `TooManyItems`,
    `StoreUnavailable`, `StoreTimeout`. Cancelling ends it.
    """
    found: set[tuple[int, bytes]] = set()
    place: ItemPlace | None = ItemPlace()
    while place is not None:
        if pace is not None:
            await pace()
        page = await store.items(span, place, payer, with_declined=with_declined)
        found.update(item for item in page.items if item[0] >= 0)
        if len(found) > max_items:
            raise TooManyItems
        place = page.place
    if skips_of is not None and is_of_all(span):
        found.update(await store.skips(skips_of, span, max_items + 1, payer))
        if len(found) > max_items:
            raise TooManyItems
    return await in_thread(lambda: ItemSet(found), worked)


async def in_thread(work: Callable[[], T], worked: Callable[[float], None]) -> T:
    """Do a piece of work beside the loop, and say what processor time it took."""

    def timed() -> tuple[T, float]:
        began = time.thread_time()
        return work(), time.thread_time() - began

    result, seconds = await asyncio.to_thread(timed)
    worked(seconds)
    return result
