"""Large logs for the benchmarks of the pipeline, made by several processes and brought in by COPY."""

from __future__ import annotations

import asyncio
import functools
import itertools
import os
import random
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import asyncpg
from blake3 import blake3
from strata.protocol import canonical, packets
from strata.protocol.ids import Identity

from relayd.postgres import EmbeddedPostgres
from relayd.store.migrate import migrate

__all__ = [
    "Made",
    "Row",
    "append",
    "append_rows",
    "author",
    "empty_log",
    "fill",
    "forget",
    "made_rows",
    "unsigned",
]

_CHUNK = 5_000
_TYPES = ("POST", "REACTION", "/bench/1/room/proto", "NOTE")
_COLUMNS = ("sequence", "received_at", "timestamp", "packet_id", "author_id", "content_type", "body")
_LOG_TABLES = ("packets", "packet_ids")
_WORDS = 2_000
_COPIED, _COPIES = 40, 20
"""Of varied texts one in forty repeats one of twenty."""

Row = tuple[int, int, bytes, bytes, bytes, bytes]
"""A packet as the log has it: received_at, timestamp, packet_id, author_id, content_type, body."""


@dataclass(frozen=True, slots=True)
class Made:
    """Which packets a log gets. Their ids are right."""

    rows: int
    signed: bool
    """Else the signatures are random digits: who does not look at signatures cannot tell, and signing takes
    most of the time."""
    at: int
    """Unix seconds at which the first is received."""
    seconds: int = 0
    """The last one is received so much later, on the same day."""
    first: int = 0
    """The number of the first packet; a packet of another number is another packet."""
    authors: int = 200
    varied: bool = False
    """A few authors write most, and texts differ; else authors take turns and texts are nearly the same."""


@contextmanager
def empty_log(folder: Path) -> Iterator[EmbeddedPostgres]:
    """A server with the migrated database of a relay, while the block runs."""
    with asyncio.Runner() as runner:
        server = EmbeddedPostgres(folder, tcp_port=_free_port())
        runner.run(server.__aenter__())
        try:
            runner.run(migrate(server.url))
            yield server
        finally:
            runner.run(server.__aexit__(None, None, None))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def fill(url: str, rows: int, *, signed: bool) -> None:
    """Put that many packets of this second into a log that has none of today."""
    append(url, Made(rows, signed, int(time.time())))


def append(url: str, made: Made, part: range | None = None) -> None:
    """Put packets into a log that has none of a later day, as relay_append would number them.

    Of their day the log has had none, or those before the `part`, and nothing else.
    """
    part = range(made.rows) if part is None else part
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        work = (part[start : start + _CHUNK] for start in range(0, len(part), _CHUNK))
        chunks = _in_order(pool, partial(made_rows, made=made), work)
        asyncio.run(_copy(url, chunks, made.at // 86_400, part.start))


def _in_order(
    pool: ProcessPoolExecutor, make: partial[list[Row]], work: Iterator[range]
) -> Iterator[list[Row]]:
    """As `pool.map`, but never more than a few chunks ahead."""
    waiting = [pool.submit(make, numbers) for numbers in itertools.islice(work, 4)]
    while waiting:
        yield waiting.pop(0).result()
        waiting += [pool.submit(make, numbers) for numbers in itertools.islice(work, 1)]


def made_rows(numbers: range, *, made: Made) -> list[Row]:
    """The packets of these numbers of a log."""
    return [_row(made.first + n, made.at + n * made.seconds // made.rows, made) for n in numbers]


def _row(number: int, at: int, made: Made) -> Row:
    if made.varied:
        chosen = random.Random(number)
        who, text = int(made.authors * chosen.random() ** 3), _text(chosen)
    else:
        who, text = number % made.authors, f"packet {number} {'lorem ipsum ' * 12}"
    identity, did = author(who)
    kind = _TYPES[number % len(_TYPES)]
    content = {"type": kind, "text": text}
    if made.signed:
        packet = packets.build(identity, content, timestamp=at, nonce=str(number))
        return at, at, packet.digest, did, kind.encode(), packet.canonical
    return unsigned(did, content, at, number)


def unsigned(did: bytes, content: dict[str, str], at: int, number: int) -> Row:
    """A packet whose id is right and whose signature is random digits."""
    members: dict[str, object] = {
        "author_id": did.decode(),
        "content": content,
        "nonce": str(number),
        "timestamp": at,
        "version": 1,
    }
    digest = blake3(canonical.encode(members)).digest()
    noise = blake3(digest).digest(length=64).hex()
    members |= {"packet_id": f"0x{digest.hex()}", "signature": f"0x{noise}"}
    return at, at, digest, did, content["type"].encode(), canonical.encode(members)


@functools.lru_cache(maxsize=100_000)
def author(number: int) -> tuple[Identity, bytes]:
    """One of any number of authors, and its DID."""
    identity = Identity(blake3(b"bench author %d" % number).digest())
    return identity, identity.did.encode()


def _text(chosen: random.Random) -> str:
    if chosen.randrange(_COPIED) == 0:
        chosen = random.Random(-1 - chosen.randrange(_COPIES))
    return " ".join(chosen.choices(_vocabulary(), k=chosen.randrange(8, 36)))


@functools.cache
def _vocabulary() -> list[str]:
    chosen = random.Random(0)
    letters = "abcdefghijklmnopqrstuvwxyz"
    return ["".join(chosen.choices(letters, k=chosen.randrange(2, 10))) for _ in range(_WORDS)]


def append_rows(url: str, rows: list[Row], day: int, placed: int) -> None:
    """Put packets behind the `placed` ones that a day of the log has, and that were put there by us."""
    asyncio.run(_copy(url, iter([rows]), day, placed))


def forget(url: str, reached: int) -> None:
    """Take all packets out of a log that ends at `reached`, but for the last one.

    Tables go and not rows, as in retention: the disk is free at once, and nothing is left to vacuum.
    Retention knows whole days alone, and this is the day of the head. So no border is moved: a border within
    the day would tell an archive that rows of it may be missing, and the archive would not count them any
    more. As it is, an archive that has to read what is gone says that rows are missing. The last packet and
    its id stay, for by them an archive tells the log from the log of another relay.
    """
    asyncio.run(_forget(url, reached))


async def _forget(url: str, reached: int) -> None:
    connection = await asyncpg.connect(url)
    try:
        async with connection.transaction():
            # As every append does: the head first.
            head = await connection.fetchval("SELECT last_sequence FROM log_head FOR UPDATE")
            if head != reached:
                raise ValueError(f"the log ends at {head}, and what is archived at {reached}")
            for table in _LOG_TABLES:
                await connection.execute(
                    f"CREATE TEMPORARY TABLE last_of_{table} ON COMMIT DROP AS"
                    f" SELECT * FROM {table} WHERE sequence = {head}"
                )
            await connection.execute(f"TRUNCATE {', '.join(_LOG_TABLES)}")
            for table in _LOG_TABLES:
                await connection.execute(f"INSERT INTO {table} SELECT * FROM last_of_{table}")
    finally:
        await connection.close()


async def _copy(url: str, made: Iterator[list[Row]], day: int, placed: int = 0) -> None:
    connection = await asyncpg.connect(url)
    try:
        await connection.execute("SELECT relay_add_day($1)", day)
        sequence, received_at = (day << 32) + placed, 0
        for chunk in made:
            records = [(sequence + place, *row) for place, row in enumerate(chunk, 1)]
            await connection.copy_records_to_table("packets", records=records, columns=_COLUMNS)
            ids = [(record[3], record[0], record[1]) for record in records]
            await connection.copy_records_to_table(
                "packet_ids", records=ids, columns=("packet_id", "sequence", "received_at")
            )
            sequence, received_at = records[-1][0], records[-1][1]
        await connection.execute(
            "UPDATE log_head SET last_sequence = $1, last_received_at = $2", sequence, received_at
        )
        await connection.execute("ANALYZE packets")
    finally:
        await connection.close()
