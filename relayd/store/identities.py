"""Reads of identities for admission: the authors with keys or manifests in the log, and those packets.

Everything is read through the partial index `packets_identity`, so an author's millions of other packets cost
nothing. The index serves a query only if the query repeats its condition, hence `INDEXED`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

import msgspec
from strata.protocol.columns import HASHED
from strata.protocol.provenance.manifest import CLIENT_MANIFEST
from strata.protocol.sequences import DAY_SECONDS

from relayd.lineage import KnownLog
from relayd.store.columns import string_key
from relayd.store.connection import ConnectionPool
from relayd.store.payers import Payer
from relayd.store.terms import notice
from relayd.store.types import StoredPacket, TrustRow

__all__ = ["INDEXED", "AuthorsPage", "IdentityReader"]

INDEXED: Final = (
    "content_type IN ('KEY_EVENT'::bytea, 'RECOVERY_APPROVAL'::bytea, 'DID_DOCUMENT'::bytea,"
    " 'CLIENT_MANIFEST'::bytea, 'TRUST_EDGE'::bytea, 'TRUST_REVOCATION'::bytea)"
)

_AUTHORS: Final = """
SELECT author_id, sequence FROM packets WHERE content_type = $1 AND sequence > $2 ORDER BY sequence LIMIT $3
"""
# In log order, so that neighbours in the index are neighbours on the disk.

_ONE_BODY: Final = f"SELECT body FROM packets WHERE author_id = $1 AND {INDEXED} LIMIT 1"

_PACKETS: Final = f"""
SELECT p.sequence, coalesce(p.witnessed_at, p.received_at), p.body
FROM unnest($1::bytea[]) AS wanted (author) CROSS JOIN LATERAL
    (SELECT * FROM packets WHERE author_id = wanted.author AND {INDEXED}
     AND content_type = ANY ($2::bytea[]) AND sequence > $3 OFFSET 0) AS p
ORDER BY p.sequence
"""
# OFFSET 0 keeps the planner from turning the index scans of these authors into one scan of everybody's
# packets, which it considers cheaper while a day has no statistics yet.

_MOST_MANIFESTS: Final = 4096
"""The most manifests of one author that are searched for the one that counts."""

_MANIFESTS: Final = f"""
SELECT newest.sequence, newest.told_at, newest.body FROM unnest($1::bytea[]) AS wanted (author)
CROSS JOIN LATERAL (SELECT least(witnessed_at, received_at) AS told_at FROM packets
    WHERE author_id = wanted.author AND {INDEXED} AND content_type = '{CLIENT_MANIFEST}'::bytea
    ORDER BY sequence DESC LIMIT 1) AS last
CROSS JOIN LATERAL (
    SELECT * FROM (SELECT sequence, coalesce(witnessed_at, received_at) AS told_at, packet_id, body
        FROM packets
        WHERE author_id = wanted.author AND {INDEXED} AND content_type = '{CLIENT_MANIFEST}'::bytea
            AND sequence > (last.told_at / {DAY_SECONDS}) << 32 AND received_at >= last.told_at
        ORDER BY sequence DESC LIMIT {_MOST_MANIFESTS}) AS since
    ORDER BY told_at DESC, packet_id LIMIT 1) AS newest
"""
# the latest counts, and of two in the same second the one with the smaller id. It arrived here no
# earlier than the last one of the log was first received anywhere: for one published here, that is the second
# of its receipt.

_BY_KEY: Final = """
SELECT p.sequence, coalesce(p.witnessed_at, p.received_at), p.body
FROM packet_ids AS i JOIN packets AS p ON p.sequence = i.sequence
WHERE i.packet_id = $1
"""

_MAX_NUMBER: Final = 32
"""Somewhat more than the characters of the longest number in canonical form."""

_TRUST: Final = f"""
SELECT packet_id, coalesce(witnessed_at, received_at), content_type,
    CASE WHEN content_type = 'TRUST_EDGE'::bytea
        THEN left(
            (replace(convert_from(body, 'UTF8'), '\\u0000', '\\u0001')::json #> '{{content,strength}}')::text,
            {_MAX_NUMBER}
        ) END
FROM packets WHERE author_id = $1 AND {INDEXED} AND content_type = ANY ($2::bytea[]) AND sequence > $3
ORDER BY sequence DESC LIMIT $4
"""
# PostgreSQL has no text with a NUL, and would refuse the whole body for a NUL in a member that is not read.


class _Author(msgspec.Struct):
    author_id: str


_AUTHORS_PAGE_ROWS: Final = 5000


class AuthorsPage(NamedTuple):
    """Some authors of packets of a type, and the sequence to continue after; None at the end."""

    names: set[str]
    next: int | None


_AUTHOR_DECODER = msgspec.json.Decoder(_Author)


class IdentityReader:
    """Reads over the pool of short look-ups. Every method raises `StoreUnavailable` and `StoreTimeout`.
    A `payer` takes turns at the connections with others (see `ConnectionPool`).

    Trust packets are read over a separate pool, `budgets`: PostgreSQL must look into each body, and large
    ones must hold up neither the feed nor anybody's AUTH.
    """

    def __init__(self, known: KnownLog, lookups: ConnectionPool, budgets: ConnectionPool) -> None:
        self._known = known
        self._lookups = lookups
        self._budgets = budgets

    async def authors(self, type_: str, after: int = 0) -> AuthorsPage:
        """A page of the authors who have published packets of this type, in log order.

        A page reads a fixed number of index rows, so it stays fast however many identities there are.
        """
        async with self._lookups.lease() as connection:
            rows = await connection.fetch(_AUTHORS, string_key(type_), after, _AUTHORS_PAGE_ROWS)
            keys = {key for key, _ in rows}
            names = {key.decode() for key in keys if not key.startswith(HASHED)}
            for key in keys:
                if key.startswith(HASHED):  # a long name, which a packet has in full
                    body = await connection.fetchval(_ONE_BODY, key)
                    if body is not None:
                        names.add(_AUTHOR_DECODER.decode(body).author_id)
        return AuthorsPage(names, rows[-1][1] if rows else None)

    async def packets_of(
        self, authors: Sequence[str], types: Iterable[str], *, after: int = 0, payer: Payer | None = None
    ) -> list[StoredPacket]:
        """The authors' packets of these types after the sequence `after`, in log order.

        Of each author's manifests, only the one that counts (R-236).
        """
        keys = [string_key(author) for author in authors]
        wanted = set(types)
        async with self._lookups.lease(payer) as connection:
            columns = [string_key(type_) for type_ in wanted - {CLIENT_MANIFEST}]
            rows = await connection.fetch(_PACKETS, keys, columns, after) if columns else []
            if CLIENT_MANIFEST in wanted:
                rows += [row for row in await connection.fetch(_MANIFESTS, keys) if row[0] > after]
            await notice(connection, self._known, max((row[0] for row in rows), default=0))
        return sorted(StoredPacket(*row) for row in rows)

    async def trust_acts(
        self, author: str, types: Iterable[str], *, after: int, most: int, payer: Payer | None = None
    ) -> list[TrustRow]:
        """This author's trust packets after the sequence `after`, the newest first, at most `most`.

        No body is sent, whatever its size: PostgreSQL returns only the strength.
        """
        async with self._budgets.lease(payer) as connection:
            rows = await connection.fetch(
                _TRUST, string_key(author), [string_key(type_) for type_ in types], after, most
            )
        return [TrustRow(row[0], row[1], row[2].decode(), _number(row[3])) for row in rows]

    async def by_key(self, key: bytes, payer: Payer | None = None) -> StoredPacket | None:
        """The stored packet with this equivalence key."""
        async with self._lookups.lease(payer) as connection:
            row = await connection.fetchrow(_BY_KEY, key)
        return None if row is None else StoredPacket(*row)


def _number(text: str | None) -> float | None:
    """A piece of canonical JSON as a number; None if it is not one."""
    try:
        return None if text is None else float(text)
    except ValueError:
        return None
