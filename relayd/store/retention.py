"""Make the log's partitions ahead of time, and drop whole days and generations when they are past retention.

Only manifests and descriptors that newer ones replace are deleted row by row: deleting rows takes as long as
storing them did, and leaves the space to vacuum. A day is removed in one transaction under the log's lock:
the packets that retention spares move to the oldest partition, which grows to cover the day. So a spared
packet is never out of sight, and keeps its sequence.

If an archive is required, a day must first be proven to be in it (`archived`). That takes a while, so it is
done before the transaction: the rows of a finished day never change.
"""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import asyncpg
from strata.protocol.keys import IDENTITY_TYPES
from strata.protocol.provenance.manifest import CLIENT_MANIFEST
from strata.protocol.sequences import DAY_SECONDS, day_of, day_text, first_of_day

from relayd import failpoints
from relayd.logs import get_logger
from relayd.store.connection import translate_errors
from relayd.store.identities import INDEXED
from relayd.store.queries import HEAD
from relayd.store.types import RELAY_DESCRIPTOR, NotArchived

if TYPE_CHECKING:
    from relayd.store.archived import ArchivedDays

__all__ = ["Retention", "Swept", "agreed_now"]

_log = get_logger("relayd.store.retention")

_SWEEP_LOCK = 0x7377656570  # "sweep": the key of the advisory lock that lets one process at a time do this
_AHEAD_DAYS = 1
_YEAR_DAYS = 366

_PATIENCE = ("250ms",) * 8 + ("1500ms",) * 4
"""How long each try may block the log while it waits for readers to finish. Autovacuum gives way only after a
second, so the last tries are longer."""
_RETRY_INTERVAL = 0.2

_PARTITIONS = """
SELECT c.relname, c.relispartition FROM pg_class AS c
JOIN pg_class AS parent ON parent.relnamespace = c.relnamespace AND parent.oid = 'log_head'::regclass
WHERE c.relkind = 'r' AND c.relname ~ '^(packets|packet_ids)_d[0-9_d]+$'
"""
_NAME = re.compile(r"(packets|packet_ids)_d(\d+)(?:_d(\d+))?")

_MANIFEST = f"content_type = '{CLIENT_MANIFEST}'::bytea"

_MOVE_MANIFESTS = f"""
INSERT INTO packets_kept SELECT DISTINCT ON (author_id) * FROM {{name}} WHERE {_MANIFEST}
    ORDER BY author_id, coalesce(witnessed_at, received_at) DESC, packet_id
"""
_NEWER = f"""
other.author_id = kept.author_id AND {INDEXED.replace("content_type", "other.content_type")}
AND other.{_MANIFEST} AND (coalesce(other.witnessed_at, other.received_at), kept.packet_id)
    > (coalesce(kept.witnessed_at, kept.received_at), other.packet_id)
"""
_DROP_FORMER_MANIFESTS = f"""
DELETE FROM packets_kept AS kept USING (SELECT DISTINCT author_id FROM {{name}} WHERE {_MANIFEST}) AS moved
WHERE kept.author_id = moved.author_id AND {INDEXED} AND {_MANIFEST}
    AND (EXISTS (SELECT FROM packets_kept AS other WHERE {_NEWER})
        OR EXISTS (SELECT FROM packets AS other WHERE {_NEWER}))
"""
# only an author's newest manifest counts, and a peer may have delivered it before an older one.
# At this point `packets` holds only the days after this one: earlier days are gone, and what was kept of them
# is detached too.

_DESCRIPTOR = f"content_type = '{RELAY_DESCRIPTOR}'::bytea"
_DROP_EXPIRED_DESCRIPTORS = f"DELETE FROM packets_kept WHERE {_DESCRIPTOR} AND expires_at < $1"
_MOVE_DESCRIPTORS = f"""
INSERT INTO packets_kept SELECT DISTINCT ON (author_id) * FROM {{name}}
    WHERE {_DESCRIPTOR} AND (expires_at IS NULL OR expires_at >= $1)
    ORDER BY author_id, coalesce(witnessed_at, received_at) DESC, packet_id
"""
_DROP_FORMER_DESCRIPTORS = f"""
DELETE FROM packets_kept AS kept USING (SELECT DISTINCT author_id FROM {{name}} WHERE {_DESCRIPTOR}) AS moved
WHERE kept.author_id = moved.author_id AND {_DESCRIPTOR} AND EXISTS (
    SELECT FROM packets_kept AS other WHERE other.author_id = kept.author_id AND other.{_DESCRIPTOR}
    AND (coalesce(other.witnessed_at, other.received_at), kept.packet_id)
        > (coalesce(kept.witnessed_at, kept.received_at), other.packet_id))
"""
# of each relay the latest that has not expired. Descriptors of later days are not looked at: no
# index finds those of an author, and an author may have millions of other packets there.

_MOVE = {
    "packets": "INSERT INTO packets_kept SELECT * FROM {name} WHERE content_type = ANY ($1::bytea[])",
    # The ids of spared packets stay known as long as the packets are there, and those of erased packets
    # forever: a manifest that a peer still has is never too old to be accepted again.
    "packet_ids": (
        "INSERT INTO packet_ids_kept SELECT i.* FROM {name} AS i"
        " WHERE i.sequence IN (SELECT sequence FROM packets_kept UNION ALL SELECT sequence FROM tombstones)"
    ),
}


_HAS_TOLD = """
SELECT EXISTS (SELECT FROM packets WHERE sequence > $1 AND sequence < $2 AND coalesce(ingest_peer, 0) = 0
    AND coalesce(witnessed_at, received_at) < $3)
"""
_TURN = "UPDATE log_head SET last_received_at = greatest(last_received_at, $1)"
"""After a clock was far ahead, each true day gets the next number: else one day would last for years."""

_CLOCKS_APART = 3600
"""Seconds of difference that are worth a line in our log."""


async def agreed_now(connection: asyncpg.Connection) -> int:
    """The earlier of this machine's clock and the database's, in Unix seconds: one of them may be far ahead,
    and must not drop days."""
    here = int(time.time())
    there: int = await connection.fetchval("SELECT extract(epoch FROM clock_timestamp())::bigint")
    if abs(here - there) > _CLOCKS_APART:
        consequence = "retention goes by the earlier one"
        _log.warning("clocks_differ", database_ahead_seconds=there - here, consequence=consequence)
    return min(here, there)


class Swept(NamedTuple):
    """The result of one round of maintenance."""

    days: int
    generations: int


class _Partition(NamedTuple):
    parent: str
    end_day: int
    """The day after its last day."""
    name: str
    attached: bool


class Retention:
    """The rules of retention, and the round that enforces them. `retention_days` 0 keeps everything.

    With `archived`, a day is removed only if that proves it to be in the lake. `on_waiting` is then called in
    each round with the number of days past retention that wait for this, and with the reason of the oldest (a
    `Reason`); with 0 and None if none waits.
    """

    def __init__(
        self,
        *,
        retention_days: int,
        dedup_window_seconds: int,
        archived: ArchivedDays | None = None,
        on_waiting: Callable[[int, str | None], None] = lambda days, reason: None,
    ) -> None:
        self._retention_days = retention_days
        self._archived = archived
        self._on_waiting = on_waiting
        window_days = -(-dedup_window_seconds // DAY_SECONDS)
        # an id is remembered as long as its packet, and at least for the duplicate window.
        self._memory_days = max(retention_days, window_days, 1)
        # Two or three partitions to probe for an id; without retention, one per year.
        self._generation_days = self._memory_days if retention_days else _YEAR_DAYS

    async def sweep(self, connection: asyncpg.Connection, now: int) -> Swept:
        """Do one round, or nothing while another process does one; a partition that cannot be locked waits.

        Use the connection for nothing else: closing it releases the lock. Raises `StoreUnavailable`.
        Cancelling leaves every packet either where it was or removed.
        """
        if failpoints.ARMED:
            await failpoints.reached("store.retention")
        with translate_errors():
            if not await connection.fetchval("SELECT pg_try_advisory_lock($1)", _SWEEP_LOCK):
                return Swept(0, 0)
            return await self._sweep(connection, now)

    async def _sweep(self, connection: asyncpg.Connection, now: int) -> Swept:
        today, head_day = now // DAY_SECONDS, day_of(await connection.fetchval(HEAD))
        if head_day > today and await _has_begun(connection, head_day, today - 1):
            head_day += 1
            await connection.execute(_TURN, head_day * DAY_SECONDS)
        # The next sequence belongs to the day of the head or to a later one. If the clock is far behind, the
        # day that it names may have been dropped, and cannot be made again.
        await self._prepare_days(connection, max(today, head_day))
        for partition in await _partitions(connection):
            if not partition.attached:  # detached by a round that was interrupted before it could drop it
                await _drop(connection, partition)
        if not self._retention_days:
            return Swept(0, 0)
        # Nor is the day of the head ever dropped, whatever the clock says.
        days = await self._remove_days(connection, await self._past_days(connection, today, head_day), now)
        # An id may be removed only after its packet, even if the packet's day could not be locked.
        oldest_day = min(
            (p.end_day - 1 for p in await _partitions(connection) if p.parent == "packets"), default=today
        )
        ids_floor = min(today - self._memory_days, head_day, oldest_day)
        generations = await self._remove_all(
            connection, await _past(connection, "packet_ids", ids_floor), now
        )
        return Swept(days, generations)

    async def _past_days(self, connection: asyncpg.Connection, today: int, head_day: int) -> list[_Partition]:
        """The days past retention, the oldest first.

        A clock that was ahead has numbered the days since too high: such a day is over when the next begins.
        """
        floor = today - self._retention_days
        past: list[_Partition] = []
        for partition in await _past(connection, "packets", head_day):
            is_ahead = partition.end_day > today + 1
            if not (
                await _has_begun(connection, partition.end_day, floor)
                if is_ahead
                else partition.end_day <= floor
            ):
                break
            past.append(partition)
        return past

    async def _remove_days(self, connection: asyncpg.Connection, past: Sequence[_Partition], now: int) -> int:
        """Remove the days past retention, the oldest first, up to one that must wait. Returns how many."""
        if self._archived is None:
            return await self._remove_all(connection, past, now)
        removed = 0
        try:
            await self._archived.look(frozenset(partition.end_day - 1 for partition in past))
            for partition in past:
                await self._archived.check(connection, partition.name, partition.end_day - 1, now)
                if not await self._remove(connection, partition, now):
                    break
                removed += 1
        except NotArchived as why:
            self._wait(past[removed:], why)
        else:
            self._on_waiting(0, None)
        return removed

    def _wait(self, waiting: Sequence[_Partition], why: NotArchived) -> None:
        _log.warning(
            "retention_waits_for_archive",
            days=len(waiting),
            oldest=day_text(waiting[0].end_day - 1),
            reason=why.reason.value,
            problem=why.problem,
            action=why.action,
        )
        self._on_waiting(len(waiting), why.reason.value)

    async def _remove_all(self, connection: asyncpg.Connection, past: Sequence[_Partition], now: int) -> int:
        """Remove these partitions in this order. Returns how many were removed."""
        removed = 0
        for partition in past:
            if not await self._remove(connection, partition, now):
                break  # the kept partition must grow without a hole
            removed += 1
        return removed

    async def _prepare_days(self, connection: asyncpg.Connection, today: int) -> None:
        async with connection.transaction():
            await connection.execute("SELECT FROM log_head FOR UPDATE")
            await connection.execute(
                "UPDATE log_head SET generation_days = $1 WHERE generation_days <> $1", self._generation_days
            )
            for day in range(today, today + _AHEAD_DAYS + 1):
                await connection.execute("SELECT relay_add_day($1)", day)

    async def _remove(self, connection: asyncpg.Connection, partition: _Partition, now: int) -> bool:
        """Take a partition out of the log and drop it; False if readers did not release it in time."""
        for patience in _PATIENCE:
            try:
                await self._detach(connection, partition, patience, now)
            except (asyncpg.LockNotAvailableError, asyncpg.DeadlockDetectedError):
                await asyncio.sleep(_RETRY_INTERVAL * random.uniform(0.5, 1.5))
                continue
            await _drop(connection, partition)
            return True
        return False

    async def _detach(
        self, connection: asyncpg.Connection, partition: _Partition, patience: str, now: int
    ) -> None:
        parent, name = partition.parent, partition.name
        async with connection.transaction():
            # Lock the head first, as every append does: the other order can deadlock.
            await connection.execute(f"SET LOCAL lock_timeout = '{patience}'")
            await connection.execute("SELECT FROM log_head FOR UPDATE")
            await connection.execute(f"LOCK TABLE {parent} IN ACCESS EXCLUSIVE MODE")
            await connection.execute(f"ALTER TABLE {parent} DETACH PARTITION {parent}_kept")
            await connection.execute(f"ALTER TABLE {parent} DETACH PARTITION {name}")
            spared = [[type_.encode() for type_ in sorted(IDENTITY_TYPES)]]
            await connection.execute(
                _MOVE[parent].format(name=name), *(spared if parent == "packets" else ())
            )
            if parent == "packets":
                await connection.execute(_MOVE_MANIFESTS.format(name=name))
                await connection.execute(_DROP_FORMER_MANIFESTS.format(name=name))
                await connection.execute(_DROP_EXPIRED_DESCRIPTORS, now)
                await connection.execute(_MOVE_DESCRIPTORS.format(name=name), now)
                await connection.execute(_DROP_FORMER_DESCRIPTORS.format(name=name))
            # This reads packets_kept once, to check that all of it is below the new bound. It holds only
            # identity packets, and a manifest and a descriptor per author, so it is small beside a day.
            await connection.execute(
                f"ALTER TABLE {parent} ATTACH PARTITION {parent}_kept"
                f" FOR VALUES FROM (MINVALUE) TO ({first_of_day(partition.end_day)})"
            )


async def _has_begun(connection: asyncpg.Connection, day: int, true_day: int) -> bool:
    """Whether a day that is numbered too high has begun by the end of a true day."""
    end = (true_day + 1) * DAY_SECONDS
    return bool(await connection.fetchval(_HAS_TOLD, first_of_day(day), first_of_day(day + 1), end))


async def _drop(connection: asyncpg.Connection, partition: _Partition) -> None:
    # Separate from the detaching: deleting a large file takes a while, and the log need not wait for it.
    await connection.execute(f"DROP TABLE IF EXISTS {partition.name}")


async def _past(connection: asyncpg.Connection, parent: str, floor: int) -> list[_Partition]:
    """The partitions that end by day `floor`, the oldest first."""
    return sorted(
        partition
        for partition in await _partitions(connection)
        if partition.parent == parent and partition.attached and partition.end_day <= floor
    )


async def _partitions(connection: asyncpg.Connection) -> list[_Partition]:
    partitions = []
    for name, attached in await connection.fetch(_PARTITIONS):
        match = _NAME.fullmatch(name)
        if match is not None:
            end_day = int(match[3]) if match[3] else int(match[2]) + 1
            partitions.append(_Partition(match[1], end_day, name, attached))
    return partitions
