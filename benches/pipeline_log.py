"""Large logs for the benchmarks of the pipeline, made by several processes and brought in by COPY."""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial

import asyncpg
from blake3 import blake3
from strata.protocol import canonical, packets
from strata.protocol.ids import Identity

__all__ = ["fill"]

_CHUNK = 5_000
_AUTHORS = 200
_TYPES = ("POST", "REACTION", "/bench/1/room/proto", "NOTE")
_COLUMNS = ("sequence", "received_at", "timestamp", "packet_id", "author_id", "content_type", "body")

_Row = tuple[bytes, bytes, bytes, bytes]


def fill(url: str, rows: int, *, signed: bool) -> None:
    """Put that many packets of today into an empty, migrated log, as relay_append would number them.

    Their ids are right. Their signatures are random digits unless `signed`: who does not look at signatures
    cannot tell, and signing takes most of the time.
    """
    now = int(time.time())
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        work = (range(start, min(start + _CHUNK, rows)) for start in range(0, rows, _CHUNK))
        made = _in_order(pool, partial(_make, now=now, signed=signed), work)
        asyncio.run(_copy(url, made, now))


def _in_order(
    pool: ProcessPoolExecutor, make: partial[list[_Row]], work: Iterator[range]
) -> Iterator[list[_Row]]:
    """As `pool.map`, but never more than a few chunks ahead."""
    waiting = [pool.submit(make, numbers) for numbers in itertools.islice(work, 4)]
    while waiting:
        yield waiting.pop(0).result()
        waiting += [pool.submit(make, numbers) for numbers in itertools.islice(work, 1)]


def _make(numbers: range, *, now: int, signed: bool) -> list[_Row]:
    rows = []
    for number in numbers:
        author = Identity(blake3(b"bench author %d" % (number % _AUTHORS)).digest())
        content = {"type": _TYPES[number % len(_TYPES)], "text": f"packet {number} {'lorem ipsum ' * 12}"}
        if signed:
            packet = packets.build(author, content, timestamp=now, nonce=str(number))
            rows.append((packet.digest, author.did.encode(), content["type"].encode(), packet.canonical))
            continue
        members: dict[str, object] = {
            "author_id": author.did,
            "content": content,
            "nonce": str(number),
            "timestamp": now,
            "version": 1,
        }
        digest = blake3(canonical.encode(members)).digest()
        noise = blake3(digest).digest(length=64).hex()
        members |= {"packet_id": f"0x{digest.hex()}", "signature": f"0x{noise}"}
        rows.append((digest, author.did.encode(), content["type"].encode(), canonical.encode(members)))
    return rows


async def _copy(url: str, made: Iterator[list[_Row]], now: int) -> None:
    connection = await asyncpg.connect(url)
    try:
        day = now // 86_400
        await connection.execute("SELECT relay_add_day($1)", day)
        sequence = day << 32
        for chunk in made:
            records = [
                (sequence + n, now, now, digest, author, kind, body)
                for n, (digest, author, kind, body) in enumerate(chunk, 1)
            ]
            await connection.copy_records_to_table("packets", records=records, columns=_COLUMNS)
            ids = [(record[3], record[0], now) for record in records]
            await connection.copy_records_to_table(
                "packet_ids", records=ids, columns=("packet_id", "sequence", "received_at")
            )
            sequence += len(chunk)
        await connection.execute(
            "UPDATE log_head SET last_sequence = $1, last_received_at = $2", sequence, now
        )
        await connection.execute("ANALYZE packets")
    finally:
        await connection.close()
