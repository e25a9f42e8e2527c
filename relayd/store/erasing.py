"""Erase packets: their contents and authors are removed, and their places in the log stay.

An erased row keeps its sequence, its id and its time of receipt. Cursors, archives and the duplicate index
depend on these: a manifest of the lake binds places, times and ids, so a day with erased rows is still proven
to be archived. Author, type, timestamp, body and annotation are removed, and the row expires in 1970, so that
readers of every version skip it. A tombstone in a separate table, signed by the relay, says that this was
done on purpose.

A batch is one transaction: rows, tombstones and the line in the moderation log. An erasure that is
interrupted is started again, and what was erased already is not looked at twice.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Final, NamedTuple

import asyncpg
from strata.protocol.ids import Signer
from strata.protocol.keys import IDENTITY_TYPES
from strata.protocol.tombstones import Tombstone, sign_tombstone, told_place

from relayd import failpoints
from relayd.moderation import Act, SubjectKind
from relayd.store.columns import string_key
from relayd.store.connection import connected
from relayd.store.moderation import Ruling, ring, take_turn, write

__all__ = ["EMPTY_ROWS", "PUT_TOMBSTONES", "SPARED", "Erased", "Eraser", "one_batch", "vacuum"]

_BATCH: Final = 500
SPARED: Final = [string_key(type_) for type_ in sorted(IDENTITY_TYPES)]
"""The types that are never erased."""

_OF_AUTHOR: Final = (
    "SELECT sequence, received_at, packet_id FROM packets"
    " WHERE author_id = $1 AND content_type <> ALL ($2::bytea[]) AND sequence > $3"
    " ORDER BY sequence LIMIT $4 FOR UPDATE"
)
_BY_ID: Final = (
    "SELECT p.sequence, p.received_at, p.packet_id FROM packets AS p"
    " WHERE p.packet_id = ANY ($1::bytea[]) AND p.author_id IN (SELECT found.author_id FROM packet_ids AS i"
    " JOIN packets AS found ON found.sequence = i.sequence AND found.packet_id = i.packet_id"
    " WHERE i.packet_id = ANY ($1::bytea[]) AND octet_length(found.body) > 0)"
    " AND p.content_type <> ALL ($2::bytea[]) AND octet_length(p.body) > 0"
    " ORDER BY p.sequence FOR UPDATE OF p"
)
"""The index knows one row of an id. Others, from before the id was forgotten, are found among those of the
author, which have an index of their own."""
_SPARED_OF_AUTHOR: Final = (
    "SELECT count(*) FROM packets WHERE author_id = $1 AND content_type = ANY ($2::bytea[])"
)
_SPARED_BY_ID: Final = (
    "SELECT count(*) FROM packet_ids AS i JOIN packets AS p ON p.sequence = i.sequence"
    " AND p.packet_id = i.packet_id WHERE i.packet_id = ANY ($1::bytea[])"
    " AND p.content_type = ANY ($2::bytea[])"
)
EMPTY_ROWS: Final = (
    "UPDATE packets SET author_id = '', content_type = '', \"timestamp\" = 0, expires_at = 0, body = '',"
    " annotation = NULL WHERE sequence = ANY ($1::bigint[])"
)
PUT_TOMBSTONES: Final = (
    "INSERT INTO tombstones (packet_id, sequence, erased_at, body)"
    " SELECT * FROM unnest($1::bytea[], $2::bigint[], $3::bigint[], $4::bytea[]) ON CONFLICT DO NOTHING"
)
_ERASED_FROM: Final = (
    "SELECT DISTINCT p.tableoid::regclass::text FROM tombstones AS t"
    " JOIN packets AS p ON p.sequence = t.sequence AND p.packet_id = t.packet_id"
    " WHERE t.erased_at IN (SELECT at FROM moderation_log"
    f" WHERE act = '{Act.ERASE}' AND kind = $1 AND subject = ANY ($2::text[])) ORDER BY 1"
)
"""Based on the moderation log, not on what this run has done: an earlier run may have been interrupted."""


class Erased(NamedTuple):
    """The result of an erasure."""

    packets: int
    spared: int
    """Packets that carry keys or their revocation: without them a revoked key could sign again."""


class Eraser:
    """Erases over its own connection. `signer` is the relay, whose DID the tombstones bear."""

    def __init__(
        self, url: str, signer: Signer, *, connect_timeout: float = 10.0, batch: int = _BATCH
    ) -> None:
        self._url = url
        self._signer = signer
        self._connect_timeout = connect_timeout
        self._batch = batch

    async def erase(
        self,
        kind: SubjectKind,
        subjects: Sequence[str],
        *,
        reason: str,
        actor: str,
        via: str,
        now: int,
        progress: Callable[[int], None] = lambda packets: None,
    ) -> Erased:
        """Erase these packets, or all packets that these authors have published until now.

        Then the tables are vacuumed, so that the old rows do not remain in them. Raises `StoreUnavailable`.
        If it is interrupted or cancelled, part of the work is done, and the same call does the rest, which
        may be only the VACUUM.
        """
        packets = spared = 0
        async with connected(self._url, "relayd erase", self._connect_timeout) as connection:
            for subject in subjects:
                ruling = Ruling(kind, subject, False, reason, actor, via)
                after = 0
                while True:
                    rows = await self._one_batch(connection, ruling, after, now)
                    packets += len(rows)
                    progress(packets)
                    if kind is SubjectKind.PACKET or not rows:
                        break  # fewer rows than a batch may mean that another erasure has some of them
                    after = rows[-1][0]
                spared += await _spared(connection, kind, subject)
            for (table,) in await connection.fetch(_ERASED_FROM, kind, list(subjects)):
                await vacuum(connection, table)
        return Erased(packets, spared)

    async def _one_batch(
        self, connection: asyncpg.Connection, ruling: Ruling, after: int, now: int
    ) -> list[asyncpg.Record]:
        async with one_batch(connection):
            rows: list[asyncpg.Record]
            if ruling.kind is SubjectKind.PACKET:
                rows = await connection.fetch(_BY_ID, [bytes.fromhex(ruling.subject[2:])], SPARED)
            else:
                key = string_key(ruling.subject)
                rows = await connection.fetch(_OF_AUTHOR, key, SPARED, after, self._batch)
            if not rows:
                return []
            sequences = [row[0] for row in rows]
            tombstones = [self._tombstone(row, now) for row in rows]
            ids = [row[2] for row in rows]
            await connection.execute(PUT_TOMBSTONES, ids, sequences, [now] * len(rows), tombstones)
            await connection.execute(EMPTY_ROWS, sequences)
            await take_turn(connection)
            await write(connection, ruling, Act.ERASE, now)
            await ring(connection)
        return rows

    def _tombstone(self, row: asyncpg.Record, now: int) -> bytes:
        sequence, received_at, packet_id = row
        name, at = told_place(packet_id, received_at)
        return sign_tombstone(Tombstone(name, sequence, at, now, self._signer.did), self._signer)


@contextlib.asynccontextmanager
async def one_batch(connection: asyncpg.Connection) -> AsyncIterator[None]:
    """The transaction of a batch."""
    async with connection.transaction():
        yield
        if failpoints.ARMED:
            await failpoints.reached("store.erase.before_commit")
    if failpoints.ARMED:
        await failpoints.reached("store.erase.after_commit")


async def vacuum(connection: asyncpg.Connection, table: str) -> None:
    """Have the database remove the old rows of a table, unless retention has dropped it meanwhile."""
    with contextlib.suppress(asyncpg.UndefinedTableError):
        await connection.execute(f"VACUUM {table}")


async def _spared(connection: asyncpg.Connection, kind: SubjectKind, subject: str) -> int:
    if kind is SubjectKind.PACKET:
        found: int = await connection.fetchval(_SPARED_BY_ID, [bytes.fromhex(subject[2:])], SPARED)
    else:
        found = await connection.fetchval(_SPARED_OF_AUTHOR, string_key(subject), SPARED)
    return found
