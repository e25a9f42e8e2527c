"""The packets that peers serve and this relay refused, and why: the table `peer_skips`.

A reason is the code of the refusal, followed by a slash and its detail if there is one; or it is `REPEATS`. A
packet that may be accepted next time counts in no comparison, so it is requested again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import asyncpg
from strata.protocol.errors import ErrorCode, InvalidPacket

__all__ = ["FORGET", "REASONS", "REPEATS", "SKIP", "TRIM", "Skip", "read_skips", "reason_of"]

Skip = tuple[bytes, int, str]
"""A packet's id and `timestamp`, and the reason."""

REPEATS: Final = "duplicate_of"
"""The reason for a packet that states the same as another one, which is stored (R-113, R-114)."""
_DETAIL: Final = "/"
_MAY_PASS: Final = [
    ErrorCode.INTERNAL_ERROR.value,
    ErrorCode.RATE_LIMITED.value,
    ErrorCode.TIMESTAMP_IN_FUTURE.value,
]
"""The codes of packets that may be accepted next time: this relay failed on them, a plug-in could not decide
or did not want them yet, or they came too early (a comparison looks at the past, when they are in time)."""


def reason_of(error: InvalidPacket) -> str:
    """The reason of a refusal, in the form that is stored and reported."""
    code = ErrorCode(error.code).value
    return f"{code}{_DETAIL}{error.detail}" if error.detail else code


SKIP: Final = """
INSERT INTO peer_skips AS old (peer_id, packet_id, "timestamp", reason)
SELECT $1, i, t, r FROM unnest($2::bytea[], $3::bigint[], $4::text[]) AS new (i, t, r)
ON CONFLICT (peer_id, packet_id) DO UPDATE SET "timestamp" = excluded."timestamp", reason = excluded.reason
    WHERE (old."timestamp", old.reason) <> (excluded."timestamp", excluded.reason)
"""
"""The last reason counts: a packet that might pass was requested again, and may now have another reason."""
TRIM: Final = """
DELETE FROM peer_skips WHERE peer_id = $1 AND ("timestamp", packet_id) <=
    (SELECT "timestamp", packet_id FROM peer_skips WHERE peer_id = $1
        ORDER BY "timestamp" DESC, packet_id DESC OFFSET $2 LIMIT 1)
"""
REASONS: Final = (
    "SELECT reason, count(*) FROM peer_skips WHERE peer_id = $1 GROUP BY reason ORDER BY 2 DESC LIMIT 50"
)
FORGET: Final = "DELETE FROM peer_skips"
"""For a log that has lost its end: a packet that was refused, later accepted from elsewhere and then lost
would never be requested again."""

_READ: Final = f"""
SELECT "timestamp", packet_id FROM peer_skips WHERE peer_id = $1 AND "timestamp" BETWEEN $2 AND $3
    AND split_part(reason, '{_DETAIL}', 1) <> ALL ($5) LIMIT $4
"""


async def read_skips(
    connection: asyncpg.Connection, peer_id: int, since: int, until: int, most: int
) -> Sequence[tuple[int, bytes]]:
    """`timestamp` and id of this peer's packets in a range of time that were refused permanently."""
    rows = await connection.fetch(_READ, peer_id, since, min(until, 2**62), most, _MAY_PASS)
    return [(row[0], row[1]) for row in rows]
