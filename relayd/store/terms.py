"""Comparison of the database's log with what this process knows about it (`relayd.lineage`).

It is done once for every connection, when it is opened: a database cannot be replaced by another one while a
connection to it lasts. It is also done for the head that is read every few seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import asyncpg

from relayd.lineage import Claim, KnownLog, Lineage, Mark, Term
from relayd.logs import get_logger
from relayd.store.queries import STATE
from relayd.store.skips import FORGET
from relayd.store.types import LogLost, StoreUnavailable

__all__ = [
    "Reason",
    "Reset",
    "agree",
    "notice",
    "open_term",
    "read_head",
    "read_resets",
    "read_state",
]

_log = get_logger("relayd.store")

Reason = Literal["start", "rolled_back", "cursor", "moved", "operator"]
"""Why a term is opened. All but `start` begin an epoch: the database lacks what was committed
(`rolled_back`), a reader proves that it does (`cursor`), it may lack something because a dump was restored or
another server was promoted (`moved`), or an operator says so (`operator`; `restore` is the pipeline's)."""

_RESTORED = "restore"
"""The reason of the term with which the pipeline begins an epoch, before any relay writes again."""

_NOT_THERE = "the log has no end: is its database being restored?"

_LINEAGE = """
SELECT h.last_sequence, t.number, t.tag, t.begins_after, t.epoch, t.good_to
FROM log_head AS h CROSS JOIN log_terms AS t ORDER BY t.number
"""

_LOCK = """
SELECT h.last_sequence, h.home = h.tableoid AS at_home, t.reason,
    d.system_identifier IS DISTINCT FROM t.system_identifier
        AND d.system_identifier IS NOT NULL AND t.system_identifier IS NOT NULL AS other_cluster,
    d.timeline IS DISTINCT FROM t.timeline
        AND d.timeline IS NOT NULL AND t.timeline IS NOT NULL AS other_timeline
FROM log_head AS h CROSS JOIN relay_database() AS d
    LEFT JOIN log_terms AS t ON t.number = (SELECT max(number) FROM log_terms WHERE good_to IS NULL)
FOR UPDATE OF h
"""

_REMEMBER_LOST = """
INSERT INTO log_terms (number, tag, begins_after, epoch, good_to, reason, opened_at)
SELECT (SELECT max(number) FROM log_terms) + n, tag, $2, $3, $2, 'lost', $4
FROM unnest($1::bytea[]) WITH ORDINALITY AS lost (tag, n) ON CONFLICT DO NOTHING
"""

_OPEN = "SELECT tag, epoch FROM relay_open_term($1, $2, $3, $4)"

_RESETS = """
SELECT epoch, begins_after, reason, opened_at FROM log_terms
WHERE good_to IS NULL AND reason NOT IN ('start', 'first') ORDER BY number
"""


@dataclass(frozen=True, slots=True)
class Reset:
    """A new epoch: the log is known to have lost its end, or may have."""

    epoch: int
    good_to: int
    """The log's end when the epoch began: up to here the log is unchanged."""
    reason: str
    """A `Reason`, or the reason of another program."""
    at: int
    """Unix seconds."""


async def read_head(connection: asyncpg.Connection, known: KnownLog) -> int:
    """The end of the log. Raises `LogLost` if it contradicts what is known."""
    seen = known.seen
    head, tag = await read_state(connection)
    if known.is_lost:
        raise LogLost("the database has lost packets that were acknowledged")
    if tag == known.lineage.current.tag and head >= seen:
        known.saw(head)
        return int(head)
    return await agree(connection, known)


async def notice(connection: asyncpg.Connection, known: KnownLog, sequence: int) -> None:
    """Note that a packet at this sequence was read and will be served or cached: if a failover loses it, that
    must be noticed even if the feed has not come that far. Raises `LogLost`."""
    if sequence > known.seen:
        await read_head(connection, known)


async def read_state(connection: asyncpg.Connection) -> tuple[int, bytes]:
    """The end of the log, and the tag of its term. Raises `StoreUnavailable` if the log has no end yet."""
    state = await connection.fetchrow(STATE)
    if state is None:
        raise StoreUnavailable(_NOT_THERE)
    return state[0], state[1]


async def agree(connection: asyncpg.Connection, known: KnownLog) -> int:
    """Adopt the terms that others have opened, and return the end of the log. Raises `LogLost`."""
    certain = known.mark
    lineage, head = await _read(connection)
    if not lineage.holds(certain, head) and await connection.fetchval("SELECT pg_is_in_recovery()"):
        # After a failover the old address may lead to a standby that lags.
        raise StoreUnavailable("the database is a standby")
    if not known.adopt(lineage, head, certain):
        raise LogLost("the database has lost packets that were acknowledged")
    return head


async def open_term(
    connection: asyncpg.Connection,
    known: KnownLog,
    claims: Sequence[Claim],
    *,
    now: int,
    reason: Reason = "start",
    witness: Mark | None = None,
) -> Reset | None:
    """Open a term at the end of the log, and with it an epoch if the log has lost its end or may have.

    `claims` are what earlier processes knew; `witness` is a place that a reader proves to have existed. A
    `reason` other than `start` requests a new epoch in any case. Returns the new epoch, if there is one.
    Raises `LogLost`, with nothing changed, if the log contradicts what this process itself knows.
    """
    certain = known.mark
    async with connection.transaction():
        # A process that is suspended here would hold up every writer.
        await connection.execute("SET LOCAL idle_in_transaction_session_timeout = '10s'")
        place = await connection.fetchrow(_LOCK)
        lineage, head = await _read(connection)
        if not known.adopt(lineage, head, certain):
            raise LogLost("the database has lost packets that were acknowledged")
        found, least = _judge(lineage, head, claims, witness)
        is_exact = any(claim.is_exact for claim in claims) or known.is_followed
        if found is None and _has_moved(place, is_exact):
            found = "moved"
        if found is None and reason != "start":
            found = reason
        if found is None and witness is not None:
            return None  # another process was faster
        for claim in claims:
            tags, good_to = lineage.lost_terms(claim, head)
            if tags:
                await connection.execute(_REMEMBER_LOST, tags, good_to, claim.mark.epoch, now)
        tag, epoch = await connection.fetchrow(_OPEN, found or "start", now, found is not None, least)
        if found is not None or place["reason"] == _RESTORED:
            await connection.execute(FORGET)
        lineage, head = await _read(connection)
    known.lineage = lineage
    known.is_followed = True
    known.saw(head)
    assert lineage.current.tag == tag
    if found is None:
        return None
    _log.error("log_epoch_begins", reason=found, epoch=epoch, good_to=head)
    return Reset(epoch, head, found, now)


async def read_resets(connection: asyncpg.Connection) -> list[Reset]:
    """The epochs that have begun since the first, oldest first."""
    return [Reset(*row) for row in await connection.fetch(_RESETS)]


def _judge(
    lineage: Lineage, head: int, claims: Sequence[Claim], witness: Mark | None
) -> tuple[Reason | None, int]:
    """Whether a claim or the witness has a place that the log lacks, and the lowest epoch new to all of them.

    A place of an earlier epoch than the log's own proves nothing new: its loss began the current epoch.
    """
    found: Reason | None = None
    least = lineage.current.epoch
    if witness is not None and lineage.lacks(witness, head):
        found, least = "cursor", witness.epoch + 1
    for claim in claims:
        if lineage.lacks(claim.mark, head):
            found, least = "rolled_back", max(least, claim.mark.epoch + 1)
    return found, least


def _has_moved(place: asyncpg.Record, is_exact: bool) -> bool:
    """Whether the log is now in another cluster or table, or on another timeline, than when last written to.

    A restored dump says nothing about what it lacks. A promoted server has lost nothing if it has all of an
    exact claim.
    """
    if place["other_cluster"] or not place["at_home"]:
        return True
    return bool(place["other_timeline"]) and not is_exact


async def _read(connection: asyncpg.Connection) -> tuple[Lineage, int]:
    rows = await connection.fetch(_LINEAGE)
    if not rows:
        raise StoreUnavailable(_NOT_THERE)
    return Lineage(Term(*row[1:]) for row in rows), int(rows[0][0])
