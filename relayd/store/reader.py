"""The reading side of the log: pages, packets by id, and the duplicate index."""

from __future__ import annotations

import contextlib
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Final, NamedTuple
from weakref import WeakKeyDictionary

import asyncpg
from strata.protocol.sequences import DAY_SECONDS, first_of_day

from relayd import failpoints
from relayd.lineage import KnownLog, Mark
from relayd.store.columns import entry
from relayd.store.connection import ConnectionPool
from relayd.store.declined import covers
from relayd.store.items import ItemPlace, ItemRange, ItemsPage, read_items
from relayd.store.payers import Payer, Unbilled
from relayd.store.queries import (
    ABUSE,
    BY_ID,
    CANDIDATES,
    FIND,
    FINDINGS,
    LAST_SEQUENCE,
    LATEST_TOLD,
    MOST_AHEAD,
    POSITION,
    TAIL,
    TOMBSTONES,
    TYPES,
    page_statement,
    ways,
)
from relayd.store.skips import read_skips
from relayd.store.terms import Reset, agree, notice, read_head, read_resets, read_state
from relayd.store.types import (
    AbuseEntry,
    Declined,
    Gone,
    LogEntry,
    LogPage,
    LogQuery,
    StoredPacket,
    StoreTimeout,
    StoreUnavailable,
)

__all__ = ["MAX_PAGE_BYTES", "Reader"]

MAX_PAGE_BYTES = 4 * 2**20
"""The most bytes of bodies in one page, unless its first packet alone is larger."""

_MAX_SKEW_SECONDS = 300
"""How far a timestamp may be ahead of received_at (R-092), which links `since` to a packet's place."""

_LAST_DAY = 99_999
_CACHED_POSITIONS = 1024
_REPLICA_AWAY_SECONDS: Final = (1.0, 30.0)
"""How long a replica that failed is left alone: at first, and at most. If its machine has vanished, each
attempt to connect takes the whole connect timeout."""


class _Span(NamedTuple):
    """The rest of a page: `after < sequence <= up_to`, in whichever direction the page runs."""

    query: LogQuery
    after: int
    up_to: int
    limit: int
    now: int
    max_bytes: int
    candidates: int
    declined: Declined

    def beyond(self, border: int) -> _Span:
        """The rest that begins at `border`, which has not been looked at."""
        return self._replace(after=border - 1) if self.query.ascending else self._replace(up_to=border)

    @property
    def reached(self) -> int:
        """The last sequence before the rest, in the direction of the page."""
        return self.after if self.query.ascending else self.up_to + 1


_WATCH: Final = Unbilled()
"""Asks so seldom that it has used less than any other, and goes first."""


class Reader:
    """Reads over bounded pools: `pages` for long reads, `lookups` for short ones, so that slow pages never
    hold up the feed or an admission; and `replica`, if there is one, for pages in place of the primary.

    A replica may lag. It is used only for what it has: pages end at a snapshot, and a replica that has not
    reached it would leave a hole that the reader's cursor would then skip (R-154). It is also not used if it
    has a log that the primary has left, which the terms show. `on_replica` is called with the outcome of each
    attempt: `served`, `behind` or `unavailable`.
    """

    def __init__(
        self,
        known: KnownLog,
        lookups: ConnectionPool,
        pages: ConnectionPool,
        replica: ConnectionPool | None = None,
        on_replica: Callable[[str], None] = lambda outcome: None,
    ) -> None:
        self._known = known
        self._lookups = lookups
        self._pages = pages
        self._replica = replica
        self._on_replica = on_replica
        self._replica_due_at = 0.0
        self._replica_pause = _REPLICA_AWAY_SECONDS[0]
        self._learnt_under = known.lineage
        self._replayed: WeakKeyDictionary[asyncpg.Connection, int] = WeakKeyDictionary()
        self._positions: OrderedDict[int, int] = OrderedDict()
        self.declined = Declined()
        """The packets that pages and look-ups by id leave out (R-323). It may be replaced, never changed."""

    def give_way(self, to_others: Callable[[], bool]) -> None:
        """Read one page at a time while `to_others` says that others are in a hurry."""
        for pool in (self._pages, self._replica):
            if pool is not None:
                pool.gives_way = to_others

    async def head(self, payer: Payer | None = None) -> int:
        """The last sequence given out, 0 in an empty log. Raises `StoreUnavailable`."""
        async with self._lookups.lease(payer) as connection:
            return await read_head(connection, self._known)

    async def ping(self) -> None:
        """Check that the database answers, ahead of all waiting reads. Raises `StoreUnavailable`."""
        async with self._lookups.lease(_WATCH) as connection:
            await read_head(connection, self._known)

    async def resets(self) -> list[Reset]:
        """The epochs since the log's first, oldest first. Raises `StoreUnavailable`, `StoreTimeout`."""
        async with self._lookups.lease() as connection:
            return await read_resets(connection)

    async def latest_told_at(self) -> int:
        """The latest time at which the log says that a packet was received. Raises as `resets` does."""
        async with self._lookups.lease() as connection:
            return int(await connection.fetchval(LATEST_TOLD))

    async def find(self, ids: Sequence[bytes], payer: Payer | None = None) -> dict[bytes, tuple[int, int]]:
        """The sequence and received_at of those of `ids` that were ever stored.

        Raises `StoreUnavailable`, `StoreTimeout`.
        """
        if not ids:
            return {}
        if failpoints.ARMED:
            await failpoints.reached("store.lookup")
        async with self._lookups.lease(payer) as connection:
            rows = await connection.fetch(FIND, list(ids))
            await notice(connection, self._known, max((row[1] for row in rows), default=0))
        return {row[0]: (row[1], row[2]) for row in rows}

    async def findings(self, ids: Sequence[bytes], payer: Payer | None = None) -> dict[bytes, bytes]:
        """The relay's findings about the origin of these packets, for those that have any.

        Raises `StoreUnavailable`, `StoreTimeout`.
        """
        async with self._lookups.lease(payer) as connection:
            rows = await connection.fetch(FINDINGS, list(ids))
        return {packet_id: annotation for packet_id, annotation in rows if annotation is not None}

    async def by_id(
        self, packet_id: bytes, now: int, payer: Payer | None = None
    ) -> StoredPacket | Gone | None:
        """The packet; `Gone` if it is expired, removed or declined; None if its id is unknown."""
        async with self._lookups.lease(payer) as connection:
            row = await connection.fetchrow(BY_ID, packet_id)
        if row is None:
            return None
        sequence, received_at, *_, expires_at, body, annotation = row
        if body is None or (expires_at is not None and expires_at < now):
            return Gone(sequence, received_at)
        if self.declined and covers(self.declined, entry(tuple(row)).packet):
            return Gone(sequence, received_at)
        return StoredPacket(sequence, received_at, body, annotation)

    async def page(
        self,
        query: LogQuery,
        limit: int,
        now: int,
        max_bytes: int = MAX_PAGE_BYTES,
        candidates: int = CANDIDATES,
        payer: Payer | None = None,
    ) -> LogPage:
        """The first packets of the log that match, are neither expired at `now` nor declined, and fit in
        `max_bytes`.

        A page may be shorter than `limit`, or even empty, and yet not the last (see `LogPage`), so that no
        page looks at more than about twice `candidates` rows, whatever the query. The page takes a turn of
        `payer` (see `ConnectionPool`). Raises `StoreUnavailable` and `StoreTimeout`. Cancelling also cancels
        the statement in the database.
        """
        needed = self._known.seen if query.up_to is None else query.up_to
        async with self._page_connection(needed, payer) as connection:
            after, up_to = await self._bounds(connection, query)
            if up_to is not None and after >= up_to:
                return LogPage([], exhausted=True)
            last = LAST_SEQUENCE if up_to is None else up_to
            while True:
                declined = self.declined
                span = _Span(query, after, last, limit, now, max_bytes, candidates, declined)
                page = await self._search(connection, span)
                if declined is self.declined:  # else it was replaced while the page was read: read again
                    return page

    async def _search(self, connection: asyncpg.Connection, span: _Span) -> LogPage:
        """Try one way after another, each from where the one before has stopped."""
        query, rows, size = span.query, list[StoredPacket](), 0
        for way in ways(query):
            text, parameters = page_statement(
                query,
                span.limit - len(rows),
                span.now,
                span.max_bytes - size,
                span.after,
                span.up_to,
                span.declined,
                way=way,
                candidates=span.candidates,
            )
            found = await connection.fetch(text, *parameters)
            border = found.pop()[0] if found and found[-1][2] is None else None
            fresh = list(map(StoredPacket._make, found))
            rows += fresh
            if len(rows) >= span.limit:
                return LogPage(rows, exhausted=False)
            # A row is left out for its size only when those before it reach max_bytes.
            size += sum(len(row.body) for row in fresh)
            if size >= span.max_bytes:
                return LogPage(rows, exhausted=False)
            if border is None:
                return LogPage(rows, exhausted=True)
            span = span.beyond(border)
        return LogPage(rows, exhausted=False, reached=span.reached)

    async def items(
        self,
        span: ItemRange,
        place: ItemPlace = ItemPlace(),  # noqa: B008 - immutable
        payer: Payer | None = None,
        *,
        with_declined: bool = False,
    ) -> ItemsPage:
        """A page of the items of a range of time; the first page is at `ItemPlace()`.

        Raises `StoreUnavailable` and `StoreTimeout`. Cancelling also cancels the statement in the database.
        """
        async with self._pages.lease(payer) as connection:
            start = 0
            if span.since > _MAX_SKEW_SECONDS:
                start, _ = await self._position(connection, span.since - _MAX_SKEW_SECONDS)
            declined = Declined() if with_declined else self.declined
            return await read_items(connection, span, place, declined, start)

    async def skips(
        self, peer_id: int, span: ItemRange, most: int, payer: Payer | None = None
    ) -> Sequence[tuple[int, bytes]]:
        """The packets that a peer serves and this relay refused. Raises and cancels as `items` does."""
        async with self._pages.lease(payer) as connection:
            return await read_skips(connection, peer_id, span.since, span.until, most)

    async def tombstones(self, ids: Sequence[bytes]) -> dict[bytes, bytes]:
        """The tombstones of the erased packets among `ids` (`strata.protocol.tombstones`).

        Raises `StoreUnavailable`, `StoreTimeout`.
        """
        if not ids:
            return {}
        async with self._lookups.lease() as connection:
            return dict(map(tuple, await connection.fetch(TOMBSTONES, list(ids))))

    async def types(self, start: bytes, most: int) -> list[bytes]:
        """The first `most` keys of content types in the log, in order, beginning at `start`.

        Raises `StoreUnavailable`, `StoreTimeout`.
        """
        async with self._lookups.lease() as connection:
            return [key for (key,) in await connection.fetch(TYPES, start, most)]

    async def abuse(self, now: int) -> list[AbuseEntry]:
        """The rows of the abuse table in force at `now`. Raises `StoreUnavailable`, `StoreTimeout`."""
        async with self._lookups.lease() as connection:
            return list(map(AbuseEntry._make, await connection.fetch(ABUSE, now)))

    async def tail(
        self, after: int, up_to: int | None, limit: int, max_bytes: int = MAX_PAGE_BYTES
    ) -> list[LogEntry]:
        """All entries in `after < sequence <= up_to`, at most `limit` and `max_bytes`.

        Expired and declined ones are included: the feed leaves them out, but must know that they are there.
        Only an empty result means the end. Raises and cancels as `page` does.
        """
        last = LAST_SEQUENCE if up_to is None else up_to
        async with self._lookups.lease() as connection:
            rows = await connection.fetch(TAIL, after, last, limit, max_bytes)
            if rows and rows[0][-1] != self._known.lineage.current.tag:
                await agree(connection, self._known)  # before the terms of these entries are looked up
            elif rows:
                # If a failover loses them after the feed has passed them, that must be noticed.
                self._known.saw(rows[-1][0])
        return [entry(tuple(row)[:-1]) for row in rows]

    async def _bounds(self, connection: asyncpg.Connection, query: LogQuery) -> tuple[int, int | None]:
        """Turn the bounds on time into bounds on the sequence, so that a page starts where its rows are.

        They only narrow the search: the statement still compares each row's times.
        """
        after, up_to = query.after, query.up_to
        earliest = [] if query.received_since is None else [query.received_since]
        if query.since is not None:
            earliest.append(query.since - _MAX_SKEW_SECONDS)
        if earliest and max(earliest) > 0:
            position, _ = await self._position(connection, max(earliest))
            after = max(after, position)
        if query.received_until is not None:
            until = query.received_until + await connection.fetchval(MOST_AHEAD)
            position, settled = await self._position(connection, until + 1)
            if not settled:
                position = first_of_day(max(0, min(until // DAY_SECONDS + 1, _LAST_DAY)))
            up_to = position if up_to is None else min(up_to, position)
        return after, up_to

    async def _position(self, connection: asyncpg.Connection, received_at: int) -> tuple[int, bool]:
        """The sequence up to which everything was received before a time, and whether that is final."""
        received_at = max(0, min(received_at, _LAST_DAY * DAY_SECONDS))
        self._forget_other_terms()
        known = self._positions.get(received_at)
        if known is not None:
            self._positions.move_to_end(received_at)
            return known, True
        lineage = self._known.lineage
        ((position, settled),) = await connection.fetch(POSITION, received_at)
        if settled and lineage is self._known.lineage:
            self._positions[received_at] = position
            if len(self._positions) > _CACHED_POSITIONS:
                self._positions.popitem(last=False)
        return position, settled

    @contextlib.asynccontextmanager
    async def _page_connection(self, needed: int, payer: Payer | None) -> AsyncIterator[asyncpg.Connection]:
        """Lend a connection to a server that has the log up to `needed`."""
        async with contextlib.AsyncExitStack() as stack:
            connection = await self._from_replica(stack, needed, payer)
            if connection is None:
                yield await stack.enter_async_context(self._pages.lease(payer))
                return
            try:
                yield connection
            except (OSError, asyncpg.PostgresConnectionError, asyncpg.InterfaceError):
                self._replica_failed()
                raise

    async def _from_replica(
        self, stack: contextlib.AsyncExitStack, needed: int, payer: Payer | None
    ) -> asyncpg.Connection | None:
        """A connection to a replica that has enough, lent until `stack` unwinds; None to use the primary."""
        if self._replica is None:
            return None
        if time.monotonic() < self._replica_due_at:
            self._on_replica("unavailable")
            return None
        try:
            async with contextlib.AsyncExitStack() as attempt:
                connection = await attempt.enter_async_context(self._replica.lease(payer))
                has_enough = await self._has_replayed(connection, needed)
                self._replica_pause = _REPLICA_AWAY_SECONDS[0]
                if has_enough:
                    stack.push_async_exit(attempt.pop_all())
                    self._on_replica("served")
                    return connection
            self._on_replica("behind")
        except (StoreUnavailable, StoreTimeout):
            self._on_replica("unavailable")
            self._replica_failed()
        return None

    def _replica_failed(self) -> None:
        """Use only the primary for a while, longer each time."""
        now = time.monotonic()
        if now >= self._replica_due_at:  # else another page has just found the same
            self._replica_due_at = now + self._replica_pause
            self._replica_pause = min(self._replica_pause * 2, _REPLICA_AWAY_SECONDS[1])

    def _forget_other_terms(self) -> None:
        """Forget what was learnt before the terms changed: a failover may have lost that end of the log, and
        a replica that had it reaches beyond the shared part."""
        if self._learnt_under is not self._known.lineage:
            self._learnt_under = self._known.lineage
            self._replayed.clear()
            self._positions.clear()

    async def _has_replayed(self, connection: asyncpg.Connection, needed: int) -> bool:
        # Kept per connection: there may be several replicas behind one address.
        self._forget_other_terms()
        if self._replayed.get(connection, -1) < needed:
            head, tag = await read_state(connection)
            self._forget_other_terms()
            lineage = self._known.lineage
            # A replica that has diverged from the primary continues a log that is lost.
            shared = lineage.good_to(Mark(head, tag, 0), max(head, self._known.seen))
            self._replayed[connection] = -1 if shared is None or shared < head else head
        return self._replayed[connection] >= needed
