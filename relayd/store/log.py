"""The writing side of the log: one held connection, one round trip for a batch."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import asyncpg

from relayd.store.columns import is_storable, string_key
from relayd.store.connection import close_quietly, connect, translate_errors
from relayd.store.types import Appended, Disposition, NewPacket, Outcome, StoreError, StoreTimeout, StoreUnavailable

__all__ = ["Log"]

_APPEND = "SELECT * FROM relay_append($1, $2, $3, $4, $5, $6, $7)"
_HEAD = "SELECT last_sequence FROM log_head"
_FIND = "SELECT packet_id, sequence, received_at FROM packet_ids WHERE packet_id = ANY ($1::bytea[])"

_SESSION = {
    # The plans do not depend on the values, and planning a partitioned INSERT costs more than running it.
    "plan_cache_mode": "force_generic_plan",
    # A plan made while the duplicate index was empty must still be right when it is not.
    "enable_seqscan": "off",
    "enable_bitmapscan": "off",
}

_INVALID = Disposition(Outcome.INVALID, 0, 0)


class Log:
    """Appends to the log over one connection, opened when needed and kept."""

    def __init__(self, url: str, *, connect_timeout: float, append_timeout: float) -> None:
        self._url = url
        self._connect_timeout = connect_timeout
        self._append_timeout = append_timeout
        self._connection: asyncpg.Connection[Any] | None = None
        self._turn = asyncio.Lock()
        self._closed = False

    @property
    def backend_pid(self) -> int | None:
        """The process id of our backend in the server: the sign by which we know our own notifications."""
        return None if self._connection is None else self._connection.get_server_pid()

    async def head(self) -> int:
        """The last sequence given out. Raises `StoreUnavailable`."""
        return int(await self._run(_HEAD, "fetchval"))

    async def find(self, ids: Sequence[bytes]) -> dict[bytes, tuple[int, int]]:
        """Which of `ids` were ever stored: their sequence and received_at. Raises `StoreUnavailable`."""
        if not ids:
            return {}
        rows = await self._run(_FIND, "fetch", list(ids))
        return {row[0]: (row[1], row[2]) for row in rows}

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
        if not fresh:
            return Appended(await self.head(), [_INVALID] * len(batch))
        previous, places = await self._append_distinct(list(fresh.values()), now)
        return Appended(previous, _in_order(batch, places))

    async def _append_distinct(
        self, batch: list[NewPacket], now: int
    ) -> tuple[int, dict[bytes, Disposition]]:
        try:
            row = await self._run(
                _APPEND,
                "fetchrow",
                now,
                [packet.packet_id for packet in batch],
                [string_key(packet.author_id) for packet in batch],
                [string_key(packet.content_type) for packet in batch],
                [packet.timestamp for packet in batch],
                [packet.expires_at for packet in batch],
                [packet.body for packet in batch],
            )
        except (StoreUnavailable, StoreTimeout):
            raise
        except StoreError as error:
            if not isinstance(error.__cause__, _BAD_ROW):
                raise
            return await self._bisect(batch, now)
        return row[0], _places(batch, row)

    async def _bisect(self, batch: list[NewPacket], now: int) -> tuple[int, dict[bytes, Disposition]]:
        """Append the halves of a batch that holds a row the database refuses, down to that row."""
        if len(batch) == 1:
            return await self.head(), {batch[0].packet_id: _INVALID}
        middle = len(batch) // 2
        previous, places = await self._append_distinct(batch[:middle], now)
        # What others appended between the halves is theirs to announce; readers go by `previous` alone.
        _, more = await self._append_distinct(batch[middle:], now)
        return previous, places | more

    async def _run(self, query: str, method: str, *arguments: object) -> Any:
        async with self._turn:
            connection = await self._connected()
            try:
                async with asyncio.timeout(self._append_timeout):
                    with translate_errors():
                        return await getattr(connection, method)(query, *arguments)
            except TimeoutError:
                connection.terminate()
                raise StoreUnavailable("the database did not answer in time") from None

    async def _connected(self) -> asyncpg.Connection[Any]:
        if self._closed:
            raise StoreUnavailable("the store is closed")
        if self._connection is None or self._connection.is_closed():
            self._connection = await connect(
                self._url, name="relayd writer", connect_timeout=self._connect_timeout, **_SESSION
            )
        return self._connection

    async def close(self) -> None:
        """End the connection. Idempotent."""
        self._closed = True
        if self._connection is not None:
            await close_quietly(self._connection)


_BAD_ROW = (asyncpg.DataError, asyncpg.IntegrityConstraintViolationError, asyncpg.ProgramLimitExceededError)


def _places(batch: list[NewPacket], row: asyncpg.Record) -> dict[bytes, Disposition]:
    _, base, received_at, known_ids, known_sequences, known_received = row
    places: dict[bytes, Disposition] = {}
    if known_ids:
        for packet_id, sequence, known_at in zip(known_ids, known_sequences, known_received, strict=True):
            places[packet_id] = Disposition(Outcome.DUPLICATE, sequence, known_at)
    for packet in batch:
        if packet.packet_id not in places:
            base += 1
            places[packet.packet_id] = Disposition(Outcome.STORED, base, received_at)
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
