"""`relayd explain`: show how the database answers a filter, by running the statements of a SUBSCRIBE.

It only reads, under the time limit of a reader.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

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


class _Node(msgspec.Struct):
    """One node of a plan, as PostgreSQL describes it."""

    type: str = msgspec.field(name="Node Type")
    cost: float = msgspec.field(name="Total Cost")
    rows: float = msgspec.field(name="Actual Rows")
    loops: float = msgspec.field(name="Actual Loops")
    removed: float = msgspec.field(name="Rows Removed by Filter", default=0)
    index: str = msgspec.field(name="Index Name", default="")
    relation: str = msgspec.field(name="Relation Name", default="")
    hit_blocks: int = msgspec.field(name="Shared Hit Blocks", default=0)
    read_blocks: int = msgspec.field(name="Shared Read Blocks", default=0)
    plans: tuple[_Node, ...] = msgspec.field(name="Plans", default=())


class _Plan(msgspec.Struct):
    node: _Node = msgspec.field(name="Plan")
    milliseconds: float = msgspec.field(name="Execution Time")


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
                [plan] = msgspec.json.decode(told, type=tuple[_Plan])
                found.append(_explained(way.value, plan))
            return found
    finally:
        await close_quietly(connection)


def _explained(way: str, plan: _Plan) -> Explained:
    root = plan.node
    nodes = list(_nodes(root, 0))
    leaves = [node for _, node in nodes if not node.plans and node.loops]
    return Explained(
        way=way,
        meaning=_MEANING[way],
        indexes=tuple(sorted({node.index for _, node in nodes if node.index and node.loops})),
        rows=int(root.rows),
        looked_at=int(sum((node.rows + node.removed) * node.loops for node in leaves)),
        milliseconds=round(plan.milliseconds, 3),
        cost=root.cost,
        blocks=root.hit_blocks + root.read_blocks,
        plan=tuple(_line(depth, node) for depth, node in nodes),
    )


def _nodes(node: _Node, depth: int) -> Iterator[tuple[int, _Node]]:
    yield depth, node
    for child in node.plans:
        yield from _nodes(child, depth + 1)


def _line(depth: int, node: _Node) -> str:
    what = node.index or node.relation
    ran = f"{node.rows:g} rows" if node.loops else "never run"
    return f"{'  ' * depth}{node.type}{f' {what}' if what else ''}: {ran}, cost {node.cost:g}"
