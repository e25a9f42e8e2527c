"""The writing side of the log: one held connection, one round trip for a batch."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import asyncpg

from relayd.store.columns import is_storable, string_key
from relayd.store.connection import close_quietly, connect, translate_errors
from relayd.store.types import Appended, Disposition, NewPacket, Outcome, StoreError, StoreUnavailable

__all__ = ["Log"]

_APPEND = "SELECT * FROM relay_append($1, $2, $3, $4, $5, $6, $7)"

_SESSION = {
    # The plans do not depend on the values, and planning a partitioned INSERT costs more than running it.
    "plan_cache_mode": "force_generic_plan",
    # A plan made while the duplicate index was empty must still be right when it is not.
    "enable_seqscan": "off",
    "enable_bitmapscan": "off",
    # The deadline is ours (`append_timeout`): a limit set for everybody must not fail a batch.
    "statement_timeout": "0",
    "lock_timeout": "0",
}

_INVALID = Disposition(Outcome.INVALID, 0, 0)


class Log:
    """Appends to the log over one connection, opened when needed and kept."""

    def __init__(self, url: str, *, connect_timeout: float, append_timeout: float) -> None:
        self._url = url
        self.connect_timeout = connect_timeout
        self._append_timeout = append_timeout
        self._connection: asyncpg.Connection[Any] | None = None
        self._turn = asyncio.Lock()
        self._closed = False

    @property
    def backend_pid(self) -> int | None:
        """The process id of our backend in the server: the sign by which we know our own notifications."""
        connection = self._connection
        return None if connection is None or connection.is_closed() else connection.get_server_pid()

    async def append(self, batch: Sequence[NewPacket], now: int) -> Appended:
        """Append a batch in one transaction, durable when this returns (R-189).

        Each packet gets a sequence, or DUPLICATE with the place of its first copy, or INVALID where the
        database refuses it alone. Raises `StoreUnavailable` when the outcome is unknown: append the same
        batch again, the duplicate index makes that safe. Cancelling leaves the outcome unknown as well.
        """
        fresh: dict[bytes, NewPacket] = {}
        for packet in batch:
            if packet.packet_id not in fresh and is_storable(packet):
                fresh[packet.packet_id] = packet
        try:
            row = await self._run(list(fresh.values()), now)
        except StoreError as error:
            if not _blames_a_row(error):
                raise
            for packet_id in await self._refused(list(fresh.values()), now):
                del fresh[packet_id]
            row = await self._run(list(fresh.values()), now)
        return Appended(row[0], _in_order(batch, _places(fresh, row)))

    async def _refused(self, batch: list[NewPacket], now: int) -> list[bytes]:
        """The ids of the rows that the database refuses, found by halving and without storing anything.

        So the good rows still go in together, and nothing foreign stands between `previous` and the last of
        them that the batch's owner does not know of.
        """
        try:
            await self._run(batch, now, keep=False)
            return []
        except StoreError as error:
            if not _blames_a_row(error):
                raise
        if len(batch) == 1:
            return [batch[0].packet_id]
        middle = len(batch) // 2
        return await self._refused(batch[:middle], now) + await self._refused(batch[middle:], now)

    async def _run(self, batch: list[NewPacket], now: int, *, keep: bool = True) -> asyncpg.Record:
        columns = (
            [packet.packet_id for packet in batch],
            [string_key(packet.author_id) for packet in batch],
            [string_key(packet.content_type) for packet in batch],
            [packet.timestamp for packet in batch],
            [packet.expires_at for packet in batch],
            [packet.body for packet in batch],
        )
        async with self._turn:
            connection = await self._connected()
            try:
                async with asyncio.timeout(self._append_timeout):
                    with translate_errors():
                        if keep:
                            # No explicit transaction: the statement is one, and BEGIN and COMMIT cost 180 µs.
                            return await connection.fetchrow(_APPEND, now, *columns)
                        trial = connection.transaction()
                        await trial.start()
                        try:
                            return await connection.fetchrow(_APPEND, now, *columns)
                        finally:
                            await trial.rollback()
            except TimeoutError:
                connection.terminate()
                raise StoreUnavailable("the database did not answer in time") from None

    async def _connected(self) -> asyncpg.Connection[Any]:
        if self._closed:
            raise StoreUnavailable("the store is closed")
        if self._connection is None or self._connection.is_closed():
            self._connection = await connect(
                self._url, name="relayd writer", connect_timeout=self.connect_timeout, **_SESSION
            )
        return self._connection

    async def close(self) -> None:
        """End the connection. Idempotent."""
        self._closed = True
        if self._connection is not None:
            await close_quietly(self._connection)


_BAD_ROW = (asyncpg.DataError, asyncpg.IntegrityConstraintViolationError, asyncpg.ProgramLimitExceededError)


def _blames_a_row(error: StoreError) -> bool:
    return isinstance(error.__cause__, _BAD_ROW)


def _places(fresh: dict[bytes, NewPacket], row: asyncpg.Record) -> dict[bytes, Disposition]:
    _, sequence, received_at, known_ids, known_sequences, known_received = row
    places: dict[bytes, Disposition] = {}
    if known_ids:
        for packet_id, known, known_at in zip(known_ids, known_sequences, known_received, strict=True):
            places[packet_id] = Disposition(Outcome.DUPLICATE, known, known_at)
    for packet_id in fresh:
        if packet_id not in places:
            sequence += 1
            places[packet_id] = Disposition(Outcome.STORED, sequence, received_at)
    return places


def _in_order(batch: Sequence[NewPacket], places: dict[bytes, Disposition]) -> list[Disposition]:
    """Give each packet its place; the second copy of an id inside the batch is a duplicate of the first."""
    seen: set[bytes] = set()
    dispositions: list[Disposition] = []
    for packet in batch:
        packet_id = packet.packet_id
        place = places.get(packet_id, _INVALID)
        if packet_id in seen and place.outcome is Outcome.STORED:
            place = place._replace(outcome=Outcome.DUPLICATE)
        seen.add(packet_id)
        dispositions.append(place)
    return dispositions
