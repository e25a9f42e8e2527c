"""The statements that read pages of the log, one for each shape of query, and their parameters.

A statement looks at a limited number of candidates, for any query: the rows that one index finds
for one of the query's columns, in log order. Conditions on other columns are not searched for but checked on
each candidate, so a query whose conditions are hardly ever met ends at its last candidate and returns its
position: a row without a body, which is the first candidate that was not looked at.

A `Way` is the index that supplies the candidates. `ways` puts the ways in the order to try: if the first one
supplies mostly rows that do not match, the second, which continues where the first has stopped, may do
better. The reader tries both in turn, so a page costs at most twice what the better way would.

PostgreSQL answers `author_id = ANY (five) AND content_type = ANY (two)` with one bitmap of all rows that ever
matched, and sorts it for every page. So several values of one column are written as a LATERAL join: a few
rows of each value come from an index in log order, and are merged up to the first sequence at which a value
was cut off.

Every value is passed as a parameter (R-312); the text depends only on the shape. Many values are passed as
one text: the driver looks at each element of an array twice, which for a thousand takes milliseconds of the
loop.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Iterable
from typing import NamedTuple

from relayd.store.columns import string_keys
from relayd.store.declined import DECLINED_CONDITIONS, declined_parameters
from relayd.store.types import Declined, LogQuery

__all__ = [
    "ABUSE",
    "BY_ID",
    "CANDIDATES",
    "CHANNEL",
    "FIND",
    "FINDINGS",
    "HEAD",
    "LAST_SEQUENCE",
    "POSITION",
    "STATE",
    "TAIL",
    "TOMBSTONES",
    "TYPES",
    "Way",
    "page_statement",
    "ways",
]

CHANNEL = "relayd_log"
"""The LISTEN/NOTIFY channel; the payload is the last sequence of a commit."""

HEAD = "SELECT last_sequence FROM log_head"

LATEST_TOLD = "SELECT coalesce(latest_told_at, last_received_at) FROM log_head"

STATE = "SELECT last_sequence, tag FROM log_head"
"""The end of the log, and the tag of its current term."""

FIND = "SELECT packet_id, sequence, received_at FROM packet_ids WHERE packet_id = ANY ($1::bytea[])"

FINDINGS = """
SELECT i.packet_id, (SELECT p.annotation FROM packets p
    WHERE p.sequence = i.sequence AND p.packet_id = i.packet_id)
FROM packet_ids i WHERE i.packet_id = ANY ($1::bytea[])
"""

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

TOMBSTONES = "SELECT packet_id, body FROM tombstones WHERE packet_id = ANY ($1::bytea[])"

TYPES = """
WITH RECURSIVE found AS (
    (SELECT content_type FROM packets WHERE content_type >= $1 ORDER BY content_type LIMIT 1)
    UNION ALL
    SELECT (SELECT content_type FROM packets WHERE content_type > found.content_type
        ORDER BY content_type LIMIT 1)
    FROM found WHERE content_type IS NOT NULL
)
SELECT content_type FROM found WHERE content_type IS NOT NULL LIMIT $2
"""
"""The types of the log from a key on: one step in the index from each type to the next, however many packets
a type has."""

POSITION = "SELECT relay_position($1), last_received_at >= $1 FROM log_head"
"""The border below a received_at, and whether it is settled: no later packet can move it then."""

MOST_AHEAD = "SELECT most_ahead FROM log_head"
"""How much further than its own time a packet of this relay may stand in the log."""

LAST_SEQUENCE = 2**63 - 1
"""No sequence is above this."""

CANDIDATES = 10_000
"""The rows that one statement looks at by default: some 20 ms, if the database has them in memory."""

_MANY_VALUES = 64
"""With more values than this, reading the log itself is tried before an index scan for each value."""
_FEWEST_OF_VALUE = 2
_SPARE = 256
"""Candidates of one value beyond those that a page can send, to allow for those that do not match."""
_NOTHING = Declined()


class Way(enum.Enum):
    """The source of a page's candidates."""

    IDS = "packet_id"
    AUTHORS = "author_id"
    TYPES = "content_type"
    LOG = "sequence"


def ways(query: LogQuery) -> tuple[Way, ...]:
    """The ways to search for a page, in the order to try; each continues where the one before has stopped."""
    if query.packet_ids:
        return (Way.IDS,)
    if query.authors and query.types:
        return (Way.AUTHORS, Way.TYPES)
    values, way = (query.authors, Way.AUTHORS) if query.authors else (query.types, Way.TYPES)
    if not values:
        return (Way.LOG,)
    if len(values) == 1:
        return (way,)
    return (Way.LOG, way) if len(values) > _MANY_VALUES else (way, Way.LOG)


def _bounded(columns: str, rows: str, direction: str, max_bytes: str) -> str:
    """Cut off `rows` once their bodies exceed `max_bytes`, but never before the first.

    The sum needs only the lengths: bodies beyond the cut are neither decompressed nor sent.
    """
    length = "coalesce(octet_length(body), 0)"
    return (
        f"SELECT {columns} FROM (SELECT {columns}, sum({length}) OVER (ORDER BY sequence"
        f" {direction} ROWS UNBOUNDED PRECEDING) - {length} AS bytes_before"
        f" FROM ({rows}) AS rows) AS counted"
        f" WHERE bytes_before < {max_bytes} ORDER BY sequence {direction}"
    )


_TAIL_COLUMNS = (
    'sequence, received_at, packet_id, author_id, content_type, "timestamp", expires_at, body, annotation,'
    " witnessed_at, ingest_peer"
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
    """Everything that determines the text of a page's statement."""

    ascending: bool
    way: Way
    several: bool
    """Whether the way has several values, whose rows are merged."""
    filters: tuple[str, ...]
    """The other conditions; each takes one parameter, in this order after the fixed ones."""


_KEYS = "SELECT decode(each, 'hex') FROM string_to_table({}, ',') AS each"
"""The keys in a parameter of `_in_one_text`."""

_CONDITIONS = {
    "author": "author_id = {}",
    "authors": f"author_id IN ({_KEYS})",
    "type": "content_type = {}",
    "types": f"content_type IN ({_KEYS})",
    "since": '"timestamp" >= {}',
    "until": '"timestamp" <= {}',
}
_CONDITIONS = {name: "p." + condition for name, condition in _CONDITIONS.items()} | DECLINED_CONDITIONS
# As `LogEntry.filtered_at`.
_RECEIVED_AT = "CASE WHEN p.ingest_peer = 0 THEN p.witnessed_at ELSE p.received_at END"
_CONDITIONS |= {"received_since": _RECEIVED_AT + " >= {}", "received_until": _RECEIVED_AT + " <= {}"}
_CONDITIONS["not_peers"] = "(p.ingest_peer <> ALL ({}::integer[])) IS NOT FALSE"


def page_statement(
    query: LogQuery,
    limit: int,
    now: int,
    max_bytes: int,
    after: int,
    up_to: int | None,
    declined: Declined = _NOTHING,
    *,
    way: Way | None = None,
    candidates: int = CANDIDATES,
) -> tuple[str, list[object]]:
    """The statement for a page and its parameters; `after` and `up_to` replace the query's.

    Declined packets count as absent from the log (R-323). A row without a body is the last one: it and all
    beyond it were not looked at. `way` is one of `ways(query)`, by default the first.
    """
    way = way or ways(query)[0]
    columns: dict[Way, list[bytes]] = {
        Way.IDS: list(query.packet_ids),
        Way.AUTHORS: string_keys(query.authors),
        Way.TYPES: string_keys(query.types),
    }
    values = columns.pop(way, [])
    filters: dict[str, object] = {}
    for name, column in (("author", Way.AUTHORS), ("type", Way.TYPES)):
        rest = columns.get(column, [])
        if len(rest) == 1:
            filters[name] = rest[0]
        elif rest:
            filters[f"{name}s"] = _in_one_text(rest)
    for name in ("since", "until", "received_since", "received_until"):
        bound = getattr(query, name)
        if bound is not None:
            filters[name] = bound
    if query.not_peers:
        filters["not_peers"] = list(query.not_peers)
    if declined:
        filters |= declined_parameters(declined)
    several = way is Way.IDS or len(values) > 1
    if several and way is not Way.IDS:  # half as many as for one value: all are read before one is sent
        candidates = max(_FEWEST_OF_VALUE, min(limit + _SPARE, candidates // 2 // len(values)))
    last = LAST_SEQUENCE if up_to is None else up_to
    parameters: list[object] = [after, last, now, limit, max_bytes]
    if way is not Way.IDS:
        parameters.append(candidates)
    if values:
        parameters.append(_in_one_text(values) if several else values[0])
    parameters += filters.values()
    return _text(_Shape(query.ascending, way, several, tuple(filters))), parameters


def _in_one_text(keys: Iterable[bytes]) -> str:
    return ",".join(map(bytes.hex, keys))


@functools.lru_cache(maxsize=256)
def _text(shape: _Shape) -> str:
    direction = "ASC" if shape.ascending else "DESC"
    within = "p.sequence > $1 AND p.sequence <= $2"
    order = f"ORDER BY sequence {direction}"
    value = 6 if shape.way is Way.IDS else 7
    first = value if shape.way is Way.LOG else value + 1
    # served while now <= expires_at.
    conditions = ["(p.expires_at IS NULL OR p.expires_at >= $3)"]
    conditions += [_CONDITIONS[name].format(f"${n}") for n, name in enumerate(shape.filters, first)]
    matches = " AND ".join(conditions)
    if shape.way is Way.IDS:
        rows = (
            f"SELECT {_SHOWN} FROM packet_ids AS i"
            " JOIN packets AS p ON p.sequence = i.sequence AND p.packet_id = i.packet_id"
            f" WHERE i.packet_id = ANY (ARRAY({_KEYS.format(f'${value}')})) AND {within} AND {matches}"
            f" {order} LIMIT $4"
        )
    else:
        candidates = _of_several if shape.several else _of_one
        rows = candidates(shape, within, matches, direction, f"${value}")
    return _bounded(_COLUMNS, rows, direction, "$5")


_COLUMNS = "sequence, received_at, body, annotation"
_SHOWN = "p.sequence, coalesce(p.witnessed_at, p.received_at) AS received_at, p.body, p.annotation"
"""The same columns as shown to readers: with the earliest witness (R-367)."""
_LOOKED_AT = _TAIL_COLUMNS


def _qualified(columns: str) -> str:
    return ", ".join(f"p.{column.strip()}" for column in columns.split(","))


def _of_one(shape: _Shape, within: str, matches: str, direction: str, value: str) -> str:
    """The candidates of one scan that match, and the first candidate beyond those that may be looked at."""
    order = f"ORDER BY sequence {direction}"
    column = "" if shape.way is Way.LOG else f"p.{shape.way.value} = {value} AND "
    return (
        "SELECT sequence, received_at, CASE WHEN n <= $6 THEN body END AS body, annotation FROM"
        f" (SELECT {_SHOWN}, {matches} AS matches, row_number() OVER ({order}) AS n FROM"
        f" (SELECT {_qualified(_LOOKED_AT)} FROM packets AS p WHERE {column}{within}"
        f" {order} LIMIT $6::bigint + 1) AS p) AS candidates"
        f" WHERE matches OR n > $6 {order} LIMIT $4"
    )


def _of_several(shape: _Shape, within: str, matches: str, direction: str, value: str) -> str:
    """As `_of_one`, merged from a scan for each value, and complete up to the nearest end of a scan."""
    order = f"ORDER BY sequence {direction}"
    nearest, before = ("min", "<") if shape.ascending else ("max", ">")
    return (
        "SELECT sequence, received_at, CASE WHEN sequence IS DISTINCT FROM cut THEN body END AS body,"
        f" annotation FROM (SELECT {_COLUMNS}, matches,"
        f" {nearest}(sequence) FILTER (WHERE n > $6) OVER () AS cut FROM"
        f" ({_KEYS.format(value)}) AS wanted (value) CROSS JOIN LATERAL"
        f" (SELECT {_SHOWN}, {matches} AS matches, row_number() OVER ({order}) AS n FROM"
        f" (SELECT {_qualified(_LOOKED_AT)} FROM packets AS p WHERE p.{shape.way.value} = wanted.value"
        f" AND {within} {order} LIMIT $6::bigint + 1) AS p) AS candidates) AS merged"
        f" WHERE (matches AND (cut IS NULL OR sequence {before} cut)) OR sequence = cut {order} LIMIT $4"
    )
