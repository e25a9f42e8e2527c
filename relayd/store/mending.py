"""Mend what a clock that was ahead has left in the log: packets that are told as received in the future."""

from __future__ import annotations

from typing import NamedTuple

import asyncpg
from strata.protocol.keys import IDENTITY_TYPES

from relayd.lineage import SKEW_SECONDS
from relayd.store.connection import translate_errors

__all__ = ["Mended", "mend_times"]

_MEND = """
WITH own AS (
    SELECT sequence, coalesce(witnessed_at, received_at) AS told FROM packets
    WHERE sequence > relay_position($2 + 1) AND coalesce(ingest_peer, 0) = 0),
parted AS (
    SELECT *, count(*) FILTER (WHERE told <= $2) OVER (ORDER BY sequence DESC) AS part FROM own),
righted AS (
    SELECT *, coalesce(max(told) FILTER (WHERE told <= $2) OVER (PARTITION BY part), $1) AS right_at
    FROM parted),
rows AS (
    UPDATE packets p SET witnessed_at = r.right_at, ingest_peer = 0 FROM righted r
        WHERE p.sequence = r.sequence AND r.told > $2
        RETURNING p.sequence, p.received_at - r.right_at AS ahead, r.told, r.right_at, p.content_type),
ids AS (
    UPDATE packet_ids i SET received_at = r.right_at FROM rows r WHERE i.sequence = r.sequence)
SELECT count(*), count(*) FILTER (WHERE content_type = ANY ($3::bytea[])), max(told), max(ahead) FROM rows
"""
"""A packet that is ahead gets the time of the next one that is not, so that their order stays. What a peer
delivered keeps the time at which the first relay received it."""

_HEAD = """
UPDATE log_head SET latest_told_at = $1, last_told_at = least(last_told_at, $1),
    most_ahead = greatest(most_ahead, $2)
"""


class Mended(NamedTuple):
    """What `mend_times` has done."""

    packets: int
    """The packets that were told as received in the future."""
    identity_packets: int
    """Those of them that decide about keys."""
    latest: int | None
    """The latest time that was told, in Unix seconds."""


async def mend_times(connection: asyncpg.Connection, now: int) -> Mended:
    """Have no packet told as received later than the tolerated skew after `now`, the right time.

    Appends wait meanwhile. Running processes keep the keys that they know: restart them if identity packets
    were mended. Raises `StoreUnavailable`; then nothing has changed.
    """
    with translate_errors():
        async with connection.transaction():
            await connection.execute("SELECT FROM log_head FOR UPDATE")
            types = [type_.encode() for type_ in sorted(IDENTITY_TYPES)]
            packets, keys, latest, ahead = await connection.fetchrow(_MEND, now, now + SKEW_SECONDS, types)
            await connection.execute(_HEAD, now, ahead or 0)
    return Mended(packets, keys, latest)
