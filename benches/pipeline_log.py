"""Large logs for the benchmarks of the pipeline, made by several processes and brought in by COPY."""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
import struct
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from pathlib import Path

import asyncpg

from benches.pipeline_packets import Made, Row, know_authors, made_rows
from relayd.postgres import EmbeddedPostgres
from relayd.store.migrate import migrate

__all__ = ["append", "append_rows", "empty_log", "fill", "forget"]

_CHUNK = 5_000
_COLUMNS = {
    "packets": ("sequence", "received_at", "timestamp", "packet_id", "author_id", "content_type", "body"),
    "packet_ids": ("packet_id", "sequence", "received_at"),
}
_COPY_HEAD = b"PGCOPY\n\xff\r\n\0" + bytes(8)
_COPY_END = struct.pack(">h", -1)
_START = struct.Struct(">hiqiqiqi32s")
_LENGTH = struct.Struct(">i")
_ID = struct.Struct(">hi32siqiq")


@contextmanager
def empty_log(folder: Path, *, searched: bool = True) -> Iterator[EmbeddedPostgres]:
    """A server with the migrated database of a relay, while the block runs.

    A log that is not searched lacks the indexes by author and by type, which take the database much time: no
    job of the pipeline uses them.
    """
    with asyncio.Runner() as runner:
        server = EmbeddedPostgres(folder, tcp_port=_free_port())
        runner.run(server.__aenter__())
        try:
            runner.run(migrate(server.url))
            if not searched:
                runner.run(_drop_indexes(server.url))
            yield server
        finally:
            runner.run(server.__aexit__(None, None, None))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def _drop_indexes(url: str) -> None:
    connection = await asyncpg.connect(url)
    try:
        await connection.execute("DROP INDEX packets_author, packets_type")
    finally:
        await connection.close()


def fill(url: str, rows: int, *, signed: bool) -> None:
    """Put that many packets of this second into a log that has none of today."""
    append(url, Made(rows, signed, int(time.time())))


def append(url: str, made: Made, part: range | None = None) -> None:
    """Put packets into a log that has none of a later day, as relay_append would number them.

    Of their day the log has had none, or those before the `part`, and nothing else.
    """
    part, day = range(made.rows) if part is None else part, made.at // 86_400
    if made.varied:
        know_authors(made.authors)  # once: the processes of later parts have them as well
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        work = (part[start : start + _CHUNK] for start in range(0, len(part), _CHUNK))
        asyncio.run(_copy(url, _in_order(pool, partial(_made_chunk, made=made), work), day))


def _in_order(pool: ProcessPoolExecutor, make: partial[_Chunk], work: Iterator[range]) -> Iterator[_Chunk]:
    """As `pool.map`, but never more than a few chunks ahead."""
    waiting = [pool.submit(make, numbers) for numbers in itertools.islice(work, 6)]
    while waiting:
        chunk = waiting.pop(0).result()
        waiting += [pool.submit(make, numbers) for numbers in itertools.islice(work, 1)]
        yield chunk


def append_rows(url: str, rows: list[Row], day: int, placed: int) -> None:
    """Put packets behind the `placed` ones that a day of the log has, and that were put there by us."""
    asyncio.run(_copy(url, iter([_chunk(rows, (day << 32) + placed + 1)]), day))


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Rows of a log in the binary form of COPY (PostgreSQL's documentation of COPY, File Formats)."""

    packets: bytes
    packet_ids: bytes
    last_sequence: int
    last_received_at: int


def _made_chunk(numbers: range, *, made: Made) -> _Chunk:
    return _chunk(made_rows(numbers, made=made), (made.at // 86_400 << 32) + numbers.start + 1)


def _chunk(rows: list[Row], first: int) -> _Chunk:
    packets, ids = [_COPY_HEAD], [_COPY_HEAD]
    for sequence, (received_at, timestamp, packet_id, author_id, content_type, body) in enumerate(
        rows, first
    ):
        packets.append(_START.pack(7, 8, sequence, 8, received_at, 8, timestamp, 32, packet_id))
        for value in (author_id, content_type, body):
            packets += (_LENGTH.pack(len(value)), value)
        ids.append(_ID.pack(3, 32, packet_id, 8, sequence, 8, received_at))
    table, map_of_ids = (b"".join([*parts, _COPY_END]) for parts in (packets, ids))
    return _Chunk(table, map_of_ids, first + len(rows) - 1, rows[-1][0])


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
            for table in _COLUMNS:
                await connection.execute(
                    f"CREATE TEMPORARY TABLE last_of_{table} ON COMMIT DROP AS"
                    f" SELECT * FROM {table} WHERE sequence = {head}"
                )
            await connection.execute(f"TRUNCATE {', '.join(_COLUMNS)}")
            for table in _COLUMNS:
                await connection.execute(f"INSERT INTO {table} SELECT * FROM last_of_{table}")
    finally:
        await connection.close()


async def _copy(url: str, made: Iterator[_Chunk], day: int) -> None:
    connection = await asyncpg.connect(url)
    try:
        await connection.execute("SET synchronous_commit = off")
        await connection.execute("SELECT relay_add_day($1)", day)
        for chunk in made:
            for table, columns in _COLUMNS.items():
                await connection.copy_to_table(
                    table, source=BytesIO(getattr(chunk, table)), columns=columns, format="binary"
                )
        await connection.execute(
            "UPDATE log_head SET last_sequence = $1, last_received_at = $2",
            chunk.last_sequence,
            chunk.last_received_at,
        )
        await connection.execute("ANALYZE packets")
    finally:
        await connection.close()
