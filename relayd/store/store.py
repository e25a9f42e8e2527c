"""`Store`: the relay's interface to its database; `Reader` does most of the reading."""

from __future__ import annotations

import asyncio
import contextlib
import math
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from types import TracebackType

import asyncpg

from relayd.lineage import Claim, KnownLog, Mark
from relayd.store.bus import Bus
from relayd.store.connection import (
    ConnectionPool,
    close_quietly,
    connect,
    connected,
    deadline,
    translate_errors,
)
from relayd.store.doorbell import Doorbell
from relayd.store.identities import IdentityReader
from relayd.store.log import Log
from relayd.store.mending import Mended, mend_times
from relayd.store.migrate import check_revision
from relayd.store.moderation import MODERATION_CHANNEL, Moderation
from relayd.store.payers import Payer
from relayd.store.peers import register_peers, register_peers_over
from relayd.store.reader import Reader
from relayd.store.retention import Retention, Swept, agreed_now
from relayd.store.roll import RollCall
from relayd.store.safety import check_safety
from relayd.store.sizes import Sizes, read_sizes
from relayd.store.terms import Reason, Reset, agree, read_head
from relayd.store.types import (
    Appended,
    AppendOutcome,
    Declined,
    IdentitiesMoved,
    NewPacket,
    PeerMark,
    RelaySecrets,
    TimeMoved,
)

__all__ = ["Store"]

_LOOKUP_CONNECTIONS = 2
_GRACE_SECONDS = 5.0
"""How many seconds after the server's own limit a read that takes too long is given up."""
_LONGEST_CHECK = 30.0
_LONGEST_CHORE = 600.0
"""Seconds that the checks at startup may take, and that one statement of maintenance may take."""
_WITNESS_INTERVAL = 60.0
_OTHERS_TELL_TIMEOUT = 5.0
"""Seconds after its start during which a process waits for what others knew of a lost log: they start too."""
_OTHERS_TELL_INTERVAL = 0.2

_READER = {
    # Which partitions a page touches depends on its bounds: plan it with them.
    "plan_cache_mode": "force_custom_plan",
    # A scan in log order that stops at the limit is nearly always best, but a new day has no statistics.
    "random_page_cost": "1",
    "enable_hashjoin": "off",
    "enable_mergejoin": "off",
    "default_transaction_read_only": "on",
}


class Store:
    """An open log. Make one with `Store.open`, and close it.

    Methods may be called concurrently. Each raises `StoreUnavailable` while the database cannot be reached,
    and works again once it can: there is nothing to reopen.
    """

    def __init__(
        self,
        log: Log,
        reader: Reader,
        identities: IdentityReader,
        pools: Sequence[ConnectionPool],
        retention: Retention,
        url: str,
        known: KnownLog,
        lost: asyncio.Event,
        moderation: Moderation,
        roll: RollCall,
    ) -> None:
        self.identities = identities
        """The identity packets of the log, for admission."""
        self.moderation = moderation
        """The rulings of operators."""
        self.roll = roll
        """Roll calls: the open sessions of all processes."""
        self._log = log
        self._reader = reader
        # Methods that only read belong to the reader and are documented there.
        self.head, self.resets = reader.head, reader.resets
        self.latest_told_at = reader.latest_told_at
        self.page, self.items, self.skips = reader.page, reader.items, reader.skips
        self.find, self.findings, self.tombstones = reader.find, reader.findings, reader.tombstones
        self.by_id, self.tail, self.types, self.abuse = reader.by_id, reader.tail, reader.types, reader.abuse
        self.give_way = reader.give_way
        self._pools = pools
        self._retention = retention
        self._url = url
        self._connect_timeout = log.connect_timeout
        self._first: asyncpg.Connection | None = None
        """The connection of the checks at startup; the first chore uses it too, and closes it."""
        self._doorbell: Doorbell | None = None
        self._listener: asyncio.Task[None] | None = None
        self._bus: Bus | None = None
        self._bus_task: asyncio.Task[None] | None = None
        self._witness_due_at = 0.0
        self._others_told_at = time.monotonic() + _OTHERS_TELL_TIMEOUT
        self.secrets: RelaySecrets
        self.known = known
        """What this process knows of the log; it is kept up to date."""
        self.lost = lost
        """Set when the database turns out to lack what was committed. The store is then useless, and all its
        methods raise `LogLost`: open another one, with the claim of this one."""

    @classmethod
    async def open(
        cls,
        url: str,
        *,
        read_url: str | None = None,
        read_connections: int = 4,
        read_timeout: float = 10.0,
        append_timeout: float = 10.0,
        connect_timeout: float = 5.0,
        retention_days: int = 30,
        dedup_window_seconds: int = 604_800,
        archive_manifests: Path | None = None,
        on_retention_waiting: Callable[[int, str | None], None] = lambda days, reason: None,
        on_replica: Callable[[str], None] = lambda outcome: None,
        on_backend: Callable[[int], object] = lambda pid: None,
        allow_unsafe: bool = False,
    ) -> Store:
        """Open the log at `url`; `read_url` names a replica for pages. Migrates nothing.

        `archive_manifests` is the folder of a lake's manifests. If it is given, `maintain` drops only days
        that they prove to be in the lake, and calls `on_retention_waiting` about the others (see
        `Retention`). `on_backend` is called with the id of the server process that commits packets, whenever
        it is a new one.

        Raises `UnsafeDatabase` for a database that could lose acknowledged packets (unless `allow_unsafe`)
        or whose schema is not this program's, and `StoreUnavailable`. Cancelling closes what was opened.
        """

        def pool(target: str, size: int, name: str) -> ConnectionPool:
            timeout = str(math.ceil(read_timeout * 1000))  # 0 would be no limit
            return ConnectionPool(
                target,
                size,
                name=name,
                connect_timeout=connect_timeout,
                turn_timeout=read_timeout + _GRACE_SECONDS,
                check=check if target == url else None,  # a replica may lag: see `Reader`
                statement_timeout=timeout,
                **_READER,
            )

        async def check(connection: asyncpg.Connection) -> None:
            await read_head(connection, known)

        archived = None
        if archive_manifests is not None:
            from relayd.store.archived import ArchivedDays  # it needs relayd[archive]

            archived = ArchivedDays(archive_manifests)
        lost = asyncio.Event()
        known = KnownLog(on_lost=lost.set)
        lookups = pool(url, _LOOKUP_CONNECTIONS, "relayd lookups")
        pages = pool(url, read_connections, "relayd pages")
        budgets = pool(url, 1, "relayd budgets")
        replica = pool(read_url, read_connections, "relayd pages") if read_url is not None else None
        store = cls(
            Log(
                url,
                known,
                connect_timeout=connect_timeout,
                append_timeout=append_timeout,
                on_backend=on_backend,
                allow_unsafe=allow_unsafe,
            ),
            Reader(known, lookups, pages, replica, on_replica),
            IdentityReader(known, lookups, budgets),
            [pool for pool in (lookups, pages, budgets, replica) if pool is not None],
            Retention(
                retention_days=retention_days,
                dedup_window_seconds=dedup_window_seconds,
                archived=archived,
                on_waiting=on_retention_waiting,
            ),
            url,
            known,
            lost,
            Moderation(url, lookups, connect_timeout=connect_timeout),
            RollCall(url, lookups, connect_timeout=connect_timeout),
        )
        try:
            await store._check(allow_unsafe)
        except BaseException:
            await store.close()
            raise
        return store

    async def __aenter__(self) -> Store:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _check(self, allow_unsafe: bool) -> None:
        self._first = connection = await connect(
            self._url,
            name="relayd start",
            connect_timeout=self._connect_timeout,
            answer_timeout=_LONGEST_CHORE,
        )
        async with deadline(connection, _LONGEST_CHECK):
            await check_safety(connection, allow_unsafe=allow_unsafe)
            await check_revision(connection)
            # The first process decides; all others read its decision.
            await connection.execute(
                "INSERT INTO relay_secrets (identity_seed, cursor_key, created_at) VALUES ($1, $2, $3)"
                " ON CONFLICT DO NOTHING",
                secrets.token_bytes(32),
                secrets.token_bytes(32),
                int(time.time()),
            )
            (row,) = await connection.fetch("SELECT identity_seed, cursor_key, created_at FROM relay_secrets")
            await agree(connection, self.known)
        self.secrets = RelaySecrets(*row)

    async def begin(self, claims: Sequence[Claim] = ()) -> None:
        """Open a term of the log, which otherwise the first `append` does; `claims` are what earlier
        processes knew of the log.

        If the log has lost its end, or may have, an epoch begins, and an error is logged.
        """
        await self._log.open(claims)

    async def begin_epoch(self, reason: Reason, witness: Mark | None = None) -> Reset | None:
        """Begin a new epoch: the log may have lost its end. See `Log.begin_epoch`."""
        return await self._log.begin_epoch(reason, witness)

    async def bear_witness(self, mark: Mark) -> None:
        """Report a reader's cursor that only this log can have made and that names a place the log lacks.

        Begins an epoch unless one says so already. It acts at most once in `_WITNESS_INTERVAL`, because
        another log with a copy of our secrets can make such cursors too. Raises `StoreUnavailable`.
        """
        now = time.monotonic()
        if now >= self._witness_due_at and mark.epoch >= self.known.lineage.current.epoch:
            await self._log.begin_epoch("cursor", mark)
            self._witness_due_at = now + _WITNESS_INTERVAL

    async def good_to(self, mark: Mark, payer: Payer | None = None) -> int | None:
        """The sequence up to which the log of a place agrees with this one; None if that is unknown.

        A term that only another process knew becomes known once that process has started over. After a loss
        all processes do that, and the first ones wait for the others, but only for some seconds after their
        start. Raises `StoreUnavailable`.
        """
        while True:
            good_to = self.known.lineage.good_to(mark, self.known.seen)
            if good_to is not None or time.monotonic() >= self._others_told_at:
                return good_to
            await asyncio.sleep(_OTHERS_TELL_INTERVAL)
            await self.head(payer)

    async def append(
        self,
        batch: Sequence[NewPacket],
        now: int,
        followed: int | None = None,
        marks: Sequence[PeerMark] = (),
    ) -> Appended:
        """Append a batch in one transaction; it is durable when this returns (R-189). See `Log.append`."""
        try:
            appended = await self._log.append(batch, now, followed, marks)
        except (IdentitiesMoved, TimeMoved):
            raise  # nothing was appended, and that is certain
        except BaseException:
            # It may still have been committed, and the doorbell does not ring for our own backend.
            if self._doorbell is not None:
                self._doorbell.doubt()
            raise
        self.known.saw(max((place.sequence for place in appended.dispositions), default=0))
        if self._bus is not None and any(p.outcome is AppendOutcome.STORED for p in appended.dispositions):
            self._bus.committed(self.known.seen)
        return appended

    async def ping(self, *, trial: bool = False) -> None:
        """Check that the database answers, and takes writes: see `Log.check`. Raises `StoreError`."""
        await self._reader.ping()
        await self._log.check(trial=trial)

    @property
    def declined(self) -> Declined:
        """The packets that `page` leaves out and `by_id` calls `Gone` (R-323); replaceable at any time."""
        return self._reader.declined

    @declined.setter
    def declined(self, declined: Declined) -> None:
        self._reader.declined = declined

    @property
    def url(self) -> str:
        """The URL of the log's database."""
        return self._url

    async def listen(
        self,
        callback: Callable[[int], None],
        on_ruling: Callable[[], None] = lambda: None,
        on_question: Callable[[str], None] = lambda question: None,
        *,
        bus_url: str | None = None,
        on_bus: Callable[[str], None] = lambda what: None,
        on_report: Callable[[bytes], bool] | None = None,
    ) -> None:
        """Call back with the last sequence whenever another process has appended, until `close`.

        With `bus_url`, NATS carries the news, otherwise the database does. `on_bus` is called with the events
        of the bus (`BUS_EVENTS`), and `on_report` with what other processes `report` over it. `on_ruling` is
        called when an operator has ruled, though a call may be missed; `on_question` with each question of a
        roll call. Returns once it listens; the first call, with the head, has then been made. The callbacks
        must not raise or block. Cancelling stops listening.
        """
        if self._listener is not None:
            raise RuntimeError("the store has its listener already")

        async def look(connection: asyncpg.Connection) -> int:
            return await read_head(connection, self.known)

        self._doorbell = Doorbell(
            self._url,
            callback,
            own_pid=lambda: self._log.backend_pid,
            read_head=look,
            connect_timeout=self._connect_timeout,
            others={MODERATION_CHANNEL: on_ruling},
            has_bus=bus_url is not None,
            roll=self.roll,
            on_question=on_question,
        )
        if bus_url is not None:
            self._bus = Bus(
                bus_url,
                self.secrets.cursor_key,
                self.known,
                heard=callback,
                doubt=self._doorbell.doubt,
                told=on_bus,
                reported=on_report,
            )
            self._bus_task = asyncio.create_task(self._bus.run(), name="store bus")
        listening = asyncio.Event()
        self._listener = asyncio.create_task(self._doorbell.run(listening), name="store doorbell")
        waiter = asyncio.ensure_future(listening.wait())
        try:
            await asyncio.wait({waiter, self._listener}, return_when=asyncio.FIRST_COMPLETED)
            if self._listener.done():
                self._listener.result()
        except asyncio.CancelledError:
            self._listener.cancel()
            raise
        finally:
            waiter.cancel()

    def report(self, report: bytes) -> None:
        """Send a report to the other processes, if there is a bus."""
        if self._bus is not None:
            self._bus.report(report)

    async def maintain(self, now: int | None = None) -> Swept:
        """Make the coming day's partitions and drop what is past retention; run it every few minutes.

        It is done as of `now`, by default as of the earlier of this machine's and the database's clock.
        If days must be proven to be archived, that takes some seconds for a million packets.
        """
        async with self._chore("relayd maintenance") as connection:
            if now is None:
                now = await agreed_now(connection)
            return await self._retention.sweep(connection, now)

    async def mend_times(self, now: int) -> Mended:
        """Mend what a clock that was ahead has left; see `mending.mend_times`."""
        async with self._chore("relayd mending") as connection:
            return await mend_times(connection, now)

    async def register_peers(self, peers: Sequence[tuple[str, str]]) -> dict[str, int]:
        """Give peers their numbers; see `peers.register_peers`. Raises `StoreUnavailable`."""
        first = self._first
        if first is None or first.is_closed():
            return await register_peers(self._url, peers, connect_timeout=self._connect_timeout)
        async with deadline(first, _LONGEST_CHECK):
            return await register_peers_over(first, peers)

    @contextlib.asynccontextmanager
    async def _chore(self, name: str) -> AsyncIterator[asyncpg.Connection]:
        """A connection for one piece of work; it is closed afterwards."""
        first, self._first = self._first, None
        if first is None or first.is_closed():
            async with connected(
                self._url, name, self._connect_timeout, answer_timeout=_LONGEST_CHORE
            ) as connection:
                yield connection
            return
        try:
            with translate_errors():
                yield first
        finally:
            await close_quietly(first)

    async def sizes(self) -> Sizes:
        """The size of the database, and its connections. Raises `StoreUnavailable`."""
        return await read_sizes(self._url, connect_timeout=self._connect_timeout)

    async def close(self) -> None:
        """End every connection; calls that wait on one raise `StoreUnavailable`. Idempotent."""
        listening = {task for task in (self._listener, self._bus_task) if task is not None}
        for task in listening:
            task.cancel()
        if listening:
            await asyncio.wait(listening)
        if self._first is not None:
            await close_quietly(self._first)
        await self._log.close()
        for pool in self._pools:
            await pool.close()
