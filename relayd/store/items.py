"""The packets that the log has of a range of time, as items of negentropy: `timestamp` and id, no bodies.

Like pages of history, a page looks at a limited number of rows of one index in log order, and says where the
next page continues:

    with types, or authors      their index, one value after another
    else                        the log itself, from where packets of that time begin

A packet may arrive long after its `timestamp`, so the only upper bound is the end of the log.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

import asyncpg

from relayd.store.columns import string_key
from relayd.store.declined import DECLINED_CONDITIONS, declined_parameters
from relayd.store.types import Declined

__all__ = ["ITEMS_AT_ONCE", "ItemPlace", "ItemRange", "ItemsPage", "read_items"]

ITEMS_AT_ONCE: Final = 5000
"""The number of rows that one page looks at."""


@dataclass(frozen=True, slots=True)
class ItemRange:
    """The range compared: packets of these types and authors (empty for all), by `timestamp`, inclusive."""

    since: int
    until: int
    unexpired_at: int
    """Packets that expire before this time count on neither side."""
    types: tuple[str, ...] = ()
    authors: tuple[str, ...] = ()


class ItemPlace(NamedTuple):
    """Where the next page begins: after a sequence, among the packets of one value."""

    value: int = 0
    after: int = 0


class ItemsPage(NamedTuple):
    """Items, and where to continue; `place` is None after the last page."""

    items: list[tuple[int, bytes]]
    place: ItemPlace | None


async def read_items(
    connection: asyncpg.Connection, span: ItemRange, place: ItemPlace, declined: Declined, start: int
) -> ItemsPage:
    """Read a page. Nothing of the range is at or below `start`; `declined` packets count as absent."""
    column, values = "", list[bytes]()
    conditions: dict[str, object] = {}
    if span.types:
        column, values = "content_type", [string_key(type_) for type_ in span.types]
        if span.authors:
            conditions["p.author_id = ANY ({}::bytea[])"] = [string_key(author) for author in span.authors]
    elif span.authors:
        column, values = "author_id", [string_key(author) for author in span.authors]
    for name, parameter in declined_parameters(declined).items():
        conditions[DECLINED_CONDITIONS[name]] = parameter
    parameters: list[object] = [
        max(place.after, start),
        ITEMS_AT_ONCE,
        span.since,
        span.until,
        span.unexpired_at,
    ]
    where = "p.sequence > $1"
    if column:
        where += f" AND p.{column} = $6"
        parameters.append(values[place.value])
    first = len(parameters) + 1
    parameters += conditions.values()
    wanted = [
        'p."timestamp" BETWEEN $3 AND $4',
        "(p.expires_at IS NULL OR p.expires_at >= $5)",
        *(condition.format(f"${n}") for n, condition in enumerate(conditions, first)),
    ]
    rows = await connection.fetch(
        'SELECT sequence, "timestamp", packet_id, wanted, n FROM'
        f" (SELECT p.*, {' AND '.join(wanted)} AS wanted, row_number() OVER (ORDER BY sequence) AS n FROM"
        ' (SELECT sequence, "timestamp", expires_at, packet_id, author_id, content_type, body'
        " FROM packets AS p"
        f" WHERE {where} ORDER BY sequence LIMIT $2::bigint) AS p) AS looked_at"
        " WHERE wanted OR n = $2 ORDER BY sequence",
        *parameters,
    )
    items = [(row[1], row[2]) for row in rows if row[3]]
    if rows and rows[-1][4] == ITEMS_AT_ONCE:
        return ItemsPage(items, ItemPlace(place.value, rows[-1][0]))
    following = place.value + 1
    return ItemsPage(items, ItemPlace(following) if following < len(values) else None)
