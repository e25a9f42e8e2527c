"""The statements that read pages of the log, one for each shape of query, and the values they take.

PostgreSQL answers `author_id = ANY (five) AND content_type = ANY (two)` with one bitmap of all that ever
matched and sorts it for every page. So several values of one column are written as a LATERAL join: each
value's rows come from an index in log order, at most a page of them, and are merged.

Every value travels as a parameter (R-312); the text depends on the shape alone.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

from relayd.store.columns import string_key
from relayd.store.declined import DECLINED_CONDITIONS, declined_parameters
from relayd.store.types import Declined, LogQuery

__all__ = [
    "ABUSE",
    "BY_ID",
    "CHANNEL",
    "FIND",
    "HEAD",
    "LAST_SEQUENCE",
    "POSITION",
    "STATE",
    "TAIL",
    "page_statement",
]

CHANNEL = "relayd_log"
"""The LISTEN/NOTIFY channel; the payload is the last sequence of a commit."""

HEAD = "SELECT last_sequence FROM log_head"

STATE = "SELECT last_sequence, tag FROM log_head"
"""Where the log ends, and under which term it is written."""

FIND = "SELECT packet_id, sequence, received_at FROM packet_ids WHERE packet_id = ANY ($1::bytea[])"

BY_ID = """
SELECT i.sequence, i.received_at, p.packet_id, p.author_id, p.content_type, p."timestamp", p.expires_at,
    p.body, p.annotation
FROM packet_ids AS i LEFT JOIN packets AS p ON p.sequence = i.sequence
WHERE i.packet_id = $1 AND (p.packet_id = i.packet_id) IS NOT FALSE
"""

ABUSE = """
SELECT author_id, verdict, reason, expires_at FROM abuse WHERE expires_at IS NULL OR expires_at >= $1
ORDER BY author_id
"""

POSITION = "SELECT relay_position($1), last_received_at >= $1 FROM log_head"
"""The border below a received_at, and whether it is settled: a packet yet to come cannot move it."""

LAST_SEQUENCE = 2**63 - 1
"""No sequence is above this."""

_MANY_ROWS = 16_384
_FEWEST_ROWS = 32
_NOTHING = Declined()


def _bounded(columns: str, rows: str, direction: str, max_bytes: str) -> str:
    """Cut `rows` where their bodies exceed `max_bytes`, but never before the first.

    The sum needs only the lengths: bodies beyond the cut are neither decompressed nor sent.
    """
    return (
        f"SELECT {columns} FROM (SELECT {columns}, sum(octet_length(body)) OVER (ORDER BY sequence"
        f" {direction} ROWS UNBOUNDED PRECEDING) - octet_length(body) AS bytes_before"
        f" FROM ({rows}) AS rows) AS counted"
        f" WHERE bytes_before < {max_bytes} ORDER BY sequence {direction}"
    )


_TAIL_COLUMNS = (
    'sequence, received_at, packet_id, author_id, content_type, "timestamp", expires_at, body, annotation'
)

_TAIL_ROWS = _bounded(
    _TAIL_COLUMNS,
    f"SELECT {_TAIL_COLUMNS} FROM packets WHERE sequence > $1 AND sequence <= $2 ORDER BY sequence LIMIT $3",
    "ASC",
    "$4",
)
TAIL = f"SELECT rows.*, (SELECT tag FROM log_head) AS tag FROM ({_TAIL_ROWS}) AS rows ORDER BY sequence"
"""Entries of the log, each with the tag of the term that was current when they were read."""


class _Shape(NamedTuple):
    """All that decides the text of a page's statement."""

    ascending: bool
    several: str | None
    """The column whose values are merged from one index scan each."""
    filters: tuple[str, ...]
    """The further conditions; each takes one parameter, in this order after the fixed ones."""


_CONDITIONS = {
    "author": "author_id = {}",
    "authors": "author_id = ANY ({}::bytea[])",
    "type": "content_type = {}",
    "types": "content_type = ANY ({}::bytea[])",
    "since": '"timestamp" >= {}',
    "until": '"timestamp" <= {}',
    "received_since": "received_at >= {}",
    "received_until": "received_at <= {}",
}
_CONDITIONS = {name: "p." + condition for name, condition in _CONDITIONS.items()} | DECLINED_CONDITIONS


def page_statement(
    query: LogQuery,
    limit: int,
    now: int,
    max_bytes: int,
    after: int,
    up_to: int | None,
    declined: Declined = _NOTHING,
) -> tuple[str, list[object], int]:
    """The statement for a page, its parameters and its limit; `after` and `up_to` stand in for the query's.

    Declined packets count as absent from the log (R-323).

    A query with very many values gets shorter pages than asked for, to bound the work of one statement.
    """
    filters: dict[str, object] = {}
    several: str | None = None
    values: list[bytes] = []
    authors = [string_key(author) for author in query.authors]
    types = [string_key(type_) for type_ in query.types]
    if query.packet_ids:
        several, values = "packet_id", list(query.packet_ids)
    elif len(authors) > 1:
        several, values, authors = "author_id", authors, []
    elif not authors and len(types) > 1:
        several, values, types = "content_type", types, []
    for name, column in (("author", authors), ("type", types)):
        if len(column) == 1:
            filters[name] = column[0]
        elif column:
            filters[f"{name}s"] = column
    for name in ("since", "until", "received_since", "received_until"):
        bound = getattr(query, name)
        if bound is not None:
            filters[name] = bound
    if declined:
        filters |= declined_parameters(declined)
    if several in ("author_id", "content_type"):
        limit = min(limit, max(_FEWEST_ROWS, _MANY_ROWS // len(values)))
    parameters: list[object] = [after, LAST_SEQUENCE if up_to is None else up_to, now, limit, max_bytes]
    if several:
        parameters.append(values)
    parameters += filters.values()
    return _text(_Shape(query.ascending, several, tuple(filters))), parameters, limit


@functools.lru_cache(maxsize=256)
def _text(shape: _Shape) -> str:
    direction = "ASC" if shape.ascending else "DESC"
    # served while now <= expires_at.
    conditions = ["p.sequence > $1", "p.sequence <= $2", "(p.expires_at IS NULL OR p.expires_at >= $3)"]
    first = 7 if shape.several else 6
    conditions += [_CONDITIONS[name].format(f"${n}") for n, name in enumerate(shape.filters, first)]
    columns = "p.sequence, p.received_at, p.body, p.annotation"
    order = f"ORDER BY sequence {direction} LIMIT $4"
    where = " AND ".join(conditions)
    if shape.several is None:
        rows = f"SELECT {columns} FROM packets AS p WHERE {where} {order}"
    elif shape.several == "packet_id":
        rows = (
            f"SELECT {columns} FROM packet_ids AS i"
            " JOIN packets AS p ON p.sequence = i.sequence AND p.packet_id = i.packet_id"
            f" WHERE i.packet_id = ANY ($6::bytea[]) AND {where} {order}"
        )
    else:
        rows = (
            f"SELECT {columns} FROM unnest($6::bytea[]) AS wanted (value) CROSS JOIN LATERAL"
            f" (SELECT {columns} FROM packets AS p"
            f" WHERE p.{shape.several} = wanted.value AND {where} {order}) AS p {order}"
        )
    return _bounded("sequence, received_at, body, annotation", rows, direction, "$5")
