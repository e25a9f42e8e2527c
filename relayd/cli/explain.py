"""`relayd explain`: show how the database answers a filter, by running the statements of a SUBSCRIBE.

It only reads, under the time limit of a reader.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

import msgspec
from strata.protocol.errors import InvalidMessage
from strata.protocol.wire import Filters

from relayd.config import Settings
from relayd.feed.filters import compile_filter
from relayd.store.connection import close_quietly, connect, translate_errors
from relayd.store.queries import CANDIDATES, page_statement, ways
from relayd.store.reader import MAX_PAGE_BYTES
from relayd.store.types import LogQuery

__all__ = ["Explained", "explain", "read_filter"]

_CONNECT_TIMEOUT: Final = 5.0
_MEANING: Final = {
    "packet_id": "each packet id is looked up",
    "author_id": "the packets of each author, in the order of the log",
    "content_type": "the packets of each type, in the order of the log",
    "sequence": "the log itself, packet by packet",
}


@dataclass(frozen=True, slots=True)
class Explained:
    """One way to find the candidates of a page, and what it cost."""

    way: str
    meaning: str
    indexes: tuple[str, ...]
    rows: int
    """The number of packets in the page."""
    looked_at: int
    """The number of rows that indexes and tables returned, before filtering."""
    milliseconds: float
    cost: float
    """The planner's estimate, in its own unit."""
    blocks: int
    """The number of blocks of 8 KiB that were read, cached or not."""
    plan: tuple[str, ...]


def read_filter(text: str, settings: Settings) -> tuple[LogQuery, int]:
    """The query for these filters of a SUBSCRIBE (JSON), and their limit. Raises ValueError."""
    try:
        filters = msgspec.json.decode(text, type=Filters)
        compiled = compile_filter(filters, max_values=settings.max_filter_values)
    except (msgspec.DecodeError, InvalidMessage) as error:
        raise ValueError(f"not the filters of a SUBSCRIBE: {error}") from None
    limit = min(filters.limit if filters.limit is not None else settings.default_limit, settings.max_limit)
    return replace(compiled.query(until=filters.until), ascending=False), max(1, limit)


async def explain(url: str, query: LogQuery, limit: int, *, timeout: float = 10.0) -> list[Explained]:
    """Run each way to search and return what it did, in the order in which the relay tries them.

    Raises `StoreError`, also if a statement takes longer than `timeout` seconds.
    """
    connection = await connect(url, name="relayd explain", connect_timeout=_CONNECT_TIMEOUT)
    try:
        with translate_errors():
            await connection.execute("SET default_transaction_read_only = on")
            await connection.execute(f"SET statement_timeout = {math.ceil(timeout * 1000)}")
            head = await connection.fetchval("SELECT last_sequence FROM log_head")
            found = []
            for way in ways(query):
                statement, values = page_statement(
                    query, limit, int(time.time()), MAX_PAGE_BYTES, 0, head, way=way, candidates=CANDIDATES
                )
                told = await connection.fetchval(
                    f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {statement}", *values
                )
                [whole] = msgspec.json.decode(told)
                found.append(_explained(way.value, whole))
            return found
    finally:
        await close_quietly(connection)


def _explained(way: str, whole: dict[str, Any]) -> Explained:
    plan = whole["Plan"]
    nodes = list(_nodes(plan, 0))
    leaves = [node for _, node in nodes if not node.get("Plans") and node.get("Actual Loops")]
    return Explained(
        way=way,
        meaning=_MEANING[way],
        indexes=tuple(
            sorted({node["Index Name"] for _, node in nodes if "Index Name" in node and node["Actual Loops"]})
        ),
        rows=plan["Actual Rows"],
        looked_at=int(
            sum(
                (node["Actual Rows"] + node.get("Rows Removed by Filter", 0)) * node["Actual Loops"]
                for node in leaves
            )
        ),
        milliseconds=round(whole["Execution Time"], 3),
        cost=plan["Total Cost"],
        blocks=plan.get("Shared Hit Blocks", 0) + plan.get("Shared Read Blocks", 0),
        plan=tuple(_line(depth, node) for depth, node in nodes),
    )


def _nodes(node: dict[str, Any], depth: int) -> Iterator[tuple[int, dict[str, Any]]]:
    yield depth, node
    for child in node.get("Plans", ()):
        yield from _nodes(child, depth + 1)


def _line(depth: int, node: dict[str, Any]) -> str:
    what = node.get("Index Name") or node.get("Relation Name") or ""
    ran = f"{node['Actual Rows']:g} rows" if node["Actual Loops"] else "never run"
    return (
        f"{'  ' * depth}{node['Node Type']}{f' {what}' if what else ''}: {ran}, cost {node['Total Cost']:g}"
    )
