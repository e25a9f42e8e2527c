"""The writing side of the log: one permanent connection, one round trip per batch."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import asyncpg
from strata.protocol.keys import IDENTITY_TYPES

from relayd import failpoints
from relayd.lineage import Claim, KnownLog, Mark
from relayd.logs import get_logger
from relayd.store.columns import is_storable, string_key
from relayd.store.connection import close_quietly, connect, deadline
from relayd.store.safety import check_safety
from relayd.store.terms import Reason, Reset, agree, open_term
from relayd.store.types import (
    Appended,
    AppendOutcome,
    Disposition,
    IdentitiesMoved,
    LogLost,
    NewPacket,
    PeerMark,
    StoreError,
    StoreUnavailable,
    TimeMoved,
    UnsafeDatabase,
)

__all__ = ["Log"]

_log = get_logger("relayd.store")

_Result = TypeVar("_Result")

_APPEND = "SELECT * FROM relay_append($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14)"
_APPEND_REPLICATED = (
    "SELECT * FROM relay_append_replicated($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13,"
    " $14, $15, $16, $17, $18, $19, $20, $21)"
)

_SESSION = {
    # The plans do not depend on the values, and planning a partitioned INSERT costs more than running it.
    "plan_cache_mode": "force_generic_plan",
    # A plan made while the duplicate index was empty must still be good when it is not.
    "enable_seqscan": "off",
    "enable_bitmapscan": "off",
}

_INVALID = Disposition(AppendOutcome.INVALID, 0, 0)
_TERM_CHANGES = 8
"""How often an append starts over because another process has opened a term, before it gives up."""


class Log:
    """Appends to the log over one connection, opened when needed and kept.

    Each connection begins with a new term (`relayd.lineage`): the database behind a new connection may be an
    older copy. It may also be another server with other settings, so these are checked each time.
    """

    def __init__(
        self,
        url: str,
        known: KnownLog,
        *,
        connect_timeout: float,
        append_timeout: float,
        on_backend: Callable[[int], object] = lambda pid: None,
        allow_unsafe: bool = False,
    ) -> None:
        """`on_backend` is called with the process id of each new connection's backend; `allow_unsafe` is
        passed to `check_safety`."""
        self._known = known
        self._allow_unsafe = allow_unsafe
        self._problem: str | None = None
        self._on_backend = on_backend
        self._claims: list[Claim] = []
        self._url = url
        self.connect_timeout = connect_timeout
        self._append_timeout = append_timeout
        self._connection: asyncpg.Connection | None = None
        self._turn = asyncio.Lock()
        self._closed = False

    async def open(self, claims: Sequence[Claim]) -> None:
        """Open the connection and a term. Raises `StoreUnavailable`, and `LogLost` as `append` does."""
        self._claims += claims

        async def nothing(connection: asyncpg.Connection) -> None:
            pass

        await self._alone(nothing)

    async def begin_epoch(self, reason: Reason, witness: Mark | None = None) -> Reset | None:
        """Begin a new epoch; with a witness, only if the log lacks that place and no epoch says so yet.

        Raises `StoreUnavailable`.
        """

        async def begin(connection: asyncpg.Connection) -> Reset | None:
            if witness is None:
                return await self._open_term(connection, reason)
            return await self._open_term(connection, witness=witness)

        return await self._alone(begin)

    @property
    def backend_pid(self) -> int | None:
        """The process id of our backend in the server, by which we recognise our own notifications."""
        connection = self._connection
        return None if connection is None or connection.is_closed() else connection.get_server_pid()

    async def append(
        self,
        batch: Sequence[NewPacket],
        now: int,
        followed: int | None = None,
        marks: Sequence[PeerMark] = (),
    ) -> Appended:
        """Append a batch in one transaction, which is durable when this returns (R-189).

        Each packet gets a sequence, or DUPLICATE with the place of its first copy, or INVALID if the database
        refuses it alone. Raises `StoreUnavailable` if the outcome is unknown: append the same batch again,
        which the duplicate index makes safe. Cancelling also leaves the outcome unknown. Raises `LogLost`,
        with nothing appended, if the database lacks what this process knows to be there.

        `followed` is the sequence up to which the caller has applied identity packets; None if keys do not
        matter. Raises `IdentitiesMoved`, with nothing appended, if the log holds later ones, or later acts of
        trust of an author whose act of trust is in the batch; and likewise `TimeMoved` if the log would give
        another time than `KnownLog.time_at(now)`, as of which those without a witness were judged.

        `marks` say how far peers have been read once the batch is in; they are stored with it (R-364). Marks
        that the database refuses are left out: the batch also holds what was published here.
        """
        fresh, repeated = _distinct(batch)
        try:
            row = await self._run(list(fresh.values()), now, followed, marks)
        except StoreError as error:
            if not _blames_a_row(error):
                raise
            refused = await self._refused(list(fresh.values()), now)
            for packet_id in refused:
                del fresh[packet_id]
            if not refused and marks:
                # A mark is to blame. Without it the peer's packets come again, and are known then.
                _log.error("peer_marks_refused", peers=[mark.peer_id for mark in marks])
                marks = ()
            row = await self._run(list(fresh.values()), now, followed, marks)
        if row["told"] is None:
            raise IdentitiesMoved(row[0])
        self._known.told_at = row["told"]
        if row[1] is None:
            raise TimeMoved("the log gives another time")
        return Appended(row[0], _in_order(batch, _places(fresh, row), repeated))

    async def check(self, *, trial: bool = False) -> None:
        """Check that the database takes writes; with `trial`, by an append that is rolled back, and one of
        nothing that is committed: a standby that has to confirm commits may be away.

        Raises `StoreUnavailable`, or what an append would raise. Nothing is stored.
        """

        async def look(connection: asyncpg.Connection) -> None:
            if await connection.fetchval("SELECT current_setting('transaction_read_only')") == "on":
                raise StoreUnavailable("the database accepts no writes")

        await self._alone(look)
        if trial:
            now = int(time.time())
            await self._run([NewPacket(os.urandom(32), "", "", now, None, b"{}")], now, None, (), keep=False)
            await self._run([], now, None, ())

    async def _refused(self, batch: list[NewPacket], now: int) -> list[bytes]:
        """The ids of the rows that the database refuses, found by halving and without storing anything.

        So the good rows are still appended together, with no packets unknown to the batch's owner between
        `previous` and the last of them.
        """
        try:
            await self._run(batch, now, None, (), keep=False)
            return []
        except StoreError as error:
            if not _blames_a_row(error):
                raise
        if len(batch) == 1:
            return [batch[0].packet_id]
        middle = len(batch) // 2
        return await self._refused(batch[:middle], now) + await self._refused(batch[middle:], now)

    async def _run(
        self,
        batch: list[NewPacket],
        now: int,
        followed: int | None,
        marks: Sequence[PeerMark],
        *,
        keep: bool = True,
    ) -> asyncpg.Record:
        keys = [packet.equivalence_key for packet in batch]
        annotations = [packet.annotation for packet in batch]
        columns = (
            [packet.packet_id for packet in batch],
            [string_key(packet.author_id) for packet in batch],
            [string_key(packet.content_type) for packet in batch],
            [packet.timestamp for packet in batch],
            [packet.expires_at for packet in batch],
            [packet.body for packet in batch],
            # Passing keys at all changes the plan, so most batches are sent without.
            keys if any(keys) else None,
            annotations if any(annotations) else None,
            followed,
            any(packet.content_type in IDENTITY_TYPES for packet in batch),
        )
        peers: tuple[object, ...] = ()
        if marks or any(each.ingest_peer is not None or each.witnessed_at is not None for each in batch):
            peers = (
                [packet.witnessed_at for packet in batch],
                [packet.ingest_peer for packet in batch],
                [mark.peer_id for mark in marks],
                [mark.fence for mark in marks],
                [mark.stream for mark in marks],
                [mark.cursor for mark in marks],
                [mark.last_witness for mark in marks],
            )

        more = (*peers, None if followed is None else self._known.time_at(now))

        async def run(connection: asyncpg.Connection) -> asyncpg.Record:
            if keep:
                # No explicit transaction: the statement is one, and BEGIN and COMMIT cost 180 µs.
                return await self._commit(connection, now, columns, more)
            trial = connection.transaction()
            await trial.start()
            try:
                return await self._stand_and_append(connection, now, columns, more)
            finally:
                await trial.rollback()

        return await self._alone(run)

    async def _commit(
        self,
        connection: asyncpg.Connection,
        now: int,
        columns: tuple[object, ...],
        more: tuple[object, ...],
    ) -> asyncpg.Record:
        if failpoints.ARMED:
            await failpoints.reached("store.append.before_commit")
        row = await self._stand_and_append(connection, now, columns, more)
        if failpoints.ARMED:
            await failpoints.reached("store.append.after_commit")
        return row

    async def _stand_and_append(
        self,
        connection: asyncpg.Connection,
        now: int,
        columns: tuple[object, ...],
        more: tuple[object, ...],
    ) -> asyncpg.Record:
        """Append under the current term, whichever process opened it; `more` is what peers' packets add,
        and the time as of which the packets were judged."""
        known = self._known
        statement = _APPEND_REPLICATED if len(more) > 1 else _APPEND
        for _ in range(_TERM_CHANGES):
            tag = known.lineage.current.tag
            row = await connection.fetchrow(statement, now, *columns, tag, known.seen, *more)
            if row[0] is not None:
                return row
            await agree(connection, known)
            if not await connection.fetchval("SELECT home = tableoid FROM log_head"):
                await self._open_term(connection)
        raise StoreUnavailable("the terms of the log keep changing")

    async def _alone(self, work: Callable[[asyncpg.Connection], Awaitable[_Result]]) -> _Result:
        """Use the connection, one caller at a time and within `append_timeout`."""
        loop = asyncio.get_running_loop()
        async with self._turn:
            ends_at = loop.time() + self._append_timeout
            connection = await self._connected(ends_at)
            async with deadline(connection, ends_at - loop.time()):
                return await work(connection)

    async def _connected(self, ends_at: float) -> asyncpg.Connection:
        if self._closed:
            raise StoreUnavailable("the store is closed")
        if self._known.is_lost:
            raise LogLost("the database has lost packets that were acknowledged")
        if self._connection is None or self._connection.is_closed():
            loop = asyncio.get_running_loop()
            connection = await connect(
                self._url,
                name="relayd writer",
                connect_timeout=min(self.connect_timeout, ends_at - loop.time()),
                settings=_SESSION,
            )
            try:
                async with deadline(connection, ends_at - loop.time()):
                    await self._check_safety(connection)
                    await self._open_term(connection)
            except BaseException:
                connection.terminate()
                raise
            self._connection = connection
            self._on_backend(connection.get_server_pid())
        return self._connection

    async def _check_safety(self, connection: asyncpg.Connection) -> None:
        """Refuse to append to a server that could lose commits, as one after a failover may."""
        try:
            await check_safety(connection, allow_unsafe=self._allow_unsafe)
        except UnsafeDatabase as error:
            if str(error) != self._problem:
                self._problem = str(error)
                _log.error("database_unsafe", problem=self._problem)
            raise StoreUnavailable(f"the database is unsafe: {error}") from error
        self._problem = None

    async def _open_term(
        self, connection: asyncpg.Connection, reason: Reason = "start", witness: Mark | None = None
    ) -> Reset | None:
        reset = await open_term(
            connection, self._known, self._claims, now=int(time.time()), reason=reason, witness=witness
        )
        self._claims.clear()
        return reset

    async def close(self) -> None:
        """End the connection. Idempotent."""
        self._closed = True
        if self._connection is not None:
            await close_quietly(self._connection)


_BAD_ROW = (asyncpg.DataError, asyncpg.IntegrityConstraintViolationError, asyncpg.ProgramLimitExceededError)


def _blames_a_row(error: StoreError) -> bool:
    return isinstance(error.__cause__, _BAD_ROW)


def _places(fresh: dict[bytes, NewPacket], row: asyncpg.Record) -> dict[bytes, Disposition]:
    """The place of each packet by its id, and that of packets that repeat it in the batch by its key."""
    _, sequence, _, known_ids, known_sequences, known_received, known_of, received_at = row
    known: dict[bytes, Disposition] = {}
    if known_ids:
        for known_id, first, first_at, of in zip(
            known_ids, known_sequences, known_received, known_of, strict=True
        ):
            known[known_id] = Disposition(AppendOutcome.DUPLICATE, first, first_at, of)
    places: dict[bytes, Disposition] = {}
    for packet_id, packet in fresh.items():
        key = packet.equivalence_key
        by_key = known.get(key) if known and key is not None else None
        if by_key is not None and by_key.duplicate_of is None:
            by_key = by_key._replace(outcome=AppendOutcome.ERASED)
        place = (known.get(packet_id) if known else None) or by_key
        if place is None:
            sequence += 1
            place = Disposition(AppendOutcome.STORED, sequence, received_at)
        places[packet_id] = place
        if key is not None:
            repeat = place._replace(outcome=AppendOutcome.DUPLICATE, duplicate_of=packet_id)
            places[key] = by_key or repeat
    return places


def _distinct(batch: Sequence[NewPacket]) -> tuple[dict[bytes, NewPacket], dict[bytes, bytes]]:
    """The packets to store, by id; and the key of each packet that repeats one of them by its key."""
    fresh: dict[bytes, NewPacket] = {}
    first_with: dict[bytes, bytes] = {}
    repeated: dict[bytes, bytes] = {}
    for packet in batch:
        if packet.packet_id in fresh or not is_storable(packet):
            continue
        if packet.equivalence_key is not None:
            first = first_with.setdefault(packet.equivalence_key, packet.packet_id)
            if first != packet.packet_id:
                repeated[packet.packet_id] = packet.equivalence_key
                continue
        fresh[packet.packet_id] = packet
    return fresh, repeated


def _in_order(
    batch: Sequence[NewPacket], places: dict[bytes, Disposition], repeated: dict[bytes, bytes]
) -> list[Disposition]:
    """The place of each packet; a second copy inside the batch is a duplicate of the first."""
    seen: set[bytes] = set()
    dispositions: list[Disposition] = []
    for packet in batch:
        packet_id = packet.packet_id
        place = places.get(repeated.get(packet_id, packet_id), _INVALID)
        if packet_id in seen and place.outcome is AppendOutcome.STORED:
            place = place._replace(outcome=AppendOutcome.DUPLICATE)
        seen.add(packet_id)
        dispositions.append(place)
    return dispositions
