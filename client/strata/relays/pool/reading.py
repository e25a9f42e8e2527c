"""The source of a subscription over several relays: readers, and sweeps of all relays. An asyncio shell."""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import time
from collections import Counter
from collections.abc import AsyncIterable, Callable, Coroutine, Mapping, Sequence

from strata.protocol.errors import (
    Closed,
    ConnectionFailed,
    MissingCapability,
    RequestRefused,
    StrataError,
)
from strata.relays.conduct import Aspect
from strata.relays.connection.dialing import shown
from strata.relays.connection.values import (
    RESUME_MARGIN_SECONDS,
    Delivery,
    LogReset,
    Query,
    SubscribeOptions,
)
from strata.relays.peer_timeout import PeerTimeout
from strata.relays.pool.merging import Merging
from strata.relays.pool.older_ids import OlderIdsOnDisk
from strata.relays.pool.options import PoolOptions
from strata.relays.pool.patience import ReadPatience
from strata.relays.pool.relays import Relays
from strata.relays.pool.sweeping import Start, Sweeps, start_after
from strata.relays.pool.values import Position

__all__ = ["Reading"]

_log = logging.getLogger("strata.pool")

_MEASURED_PACKETS = 50
"""A relay's throughput is not measured on fewer packets than this."""
_MOST_FAILURES = 3
"""How often one relay may fail to come to the end of a query that ends."""
_HOUR = 3600


class Reading:
    """One subscription's readers, sweeps and queue; the pool calls `manage` when its relays have changed."""

    def __init__(
        self,
        relays: Relays,
        query: Query,
        options: PoolOptions,
        *,
        coarse: bool,
        positions: Mapping[str, Position],
        ended: Callable[[Reading], None],
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.query = query
        self._named = frozenset(query.authors)
        self._relays = relays
        self._options = options
        self._coarse = coarse
        self._ended = ended
        self._wall = wall
        self._loop = asyncio.get_running_loop()
        self._older_ids = OlderIdsOnDisk()
        self.merging = Merging(
            capacity=options.queue_packets,
            dedup_packets=options.dedup_packets,
            hold_back=options.hold_back,
            older_ids=self._older_ids,
        )
        now = int(wall())
        # Positions of an earlier session have times of the relay's clock, which may have been ahead of ours.
        positions = {url: Position(p.cursor, min(p.received_at, now)) for url, p in positions.items()}
        self.merging.positions |= positions
        self.merging.taken_positions |= positions
        self._sweeps = Sweeps(
            interval=options.sweep_interval if query.live else None,
            overlap=options.overlap,
            started_at=now,
        )
        for url, position in positions.items():
            if position.cursor is not None and position.received_at >= now - options.overlap:
                # The cursor is as recent as the time a sweep would begin at, and exact.
                self._sweeps.begin_at(url, position.cursor)
        self._readers: dict[str, asyncio.Task[None]] = {}
        self._read_from: set[str] = set()
        """Relays that have been read from."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._done: set[str] = set()
        """For a query that ends: relays that have sent everything."""
        self._refused: dict[str, StrataError] = {}
        self._failures: Counter[str] = Counter()
        """For a query that ends: how often each relay has failed to come to an end."""
        self._problems: dict[str, StrataError] = {}
        """The last problem of each relay that was read from."""
        self._lost: dict[str, Position | None] = {}
        """Readers that ended without a successor, and the position of each."""
        self.arrived = asyncio.Event()
        """Set when `take` may return something."""
        self._room = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._delivered = 0
        self.error: StrataError | None = None
        """Why the reading ended, if not by request."""
        self.has_ended = False

    def take(self) -> Delivery | None:
        """The next packet for the consumer, or None."""
        delivery = self.merging.take()
        if delivery is None:
            return None
        self._room.set()
        self._delivered += 1
        if self._delivered == self.query.limit:
            self.end()
            self.merging.drop()  # more than was requested
        return delivery

    def end(self, error: StrataError | None = None) -> None:
        """Read nothing more; what has arrived can still be taken. Idempotent."""
        if self.has_ended:
            return
        self.has_ended, self.error = True, error
        self.merging.release_all()
        for task in self._tasks.union(self._readers.values()):
            task.cancel()
        if self._timer is not None:
            self._timer.cancel()
        self._older_ids.close()
        self._ended(self)
        self.arrived.set()

    @property
    def relays(self) -> list[str]:
        """The relays that are read from now."""
        return list(self._readers)

    @property
    def finished(self) -> frozenset[str]:
        """For a query that ends: the relays that have sent everything."""
        return frozenset(self._done)

    @property
    def unfinished(self) -> dict[str, StrataError]:
        """For a query that ends: the relays that were read from and have not come to the end, and why."""
        if self.query.live:
            return {}
        return {url: problem for url, problem in self._problems.items() if url not in self._done}

    # Readers.

    def manage(self) -> None:
        """Start and end readers, and start the sweeps that are due."""
        if self.has_ended:
            return
        wanted = self._wanted()
        for url in [url for url in self._readers if url not in wanted and self._may_leave(url, wanted)]:
            self._leave(url)
        for url in wanted:
            if url not in self._readers and self._relays.relay(url) is not None:
                self._start_reader(url)
        if not self.query.live:
            self._end_if_complete(wanted)
        now = self._loop.time()
        for url in self._sweeps.due(self._relays.connected(), now):
            self._work(self._sweep(url), f"strata-pool-sweep {shown(url)}")

    def _wanted(self) -> list[str]:
        """The relays to read from now. Another relay takes the place of one that refuses or, if the query
        ends, cannot be read to the end: such a one must not leave the reader with fewer relays."""
        read = [*self._readers, *self._done]
        return [url for url in self._relays.readers(read, self._refused) if url not in self._done]

    def _may_leave(self, url: str, wanted: Sequence[str]) -> bool:
        """Whether a reader may end. For a live query, one without a connection stays: its stream resumes by
        itself when the relay is back."""
        if not self.query.live:
            return url not in self._relays.connected()
        # Without sweeps, packets that only this relay has would not be found.
        return self._options.sweep_interval is not None and bool(wanted) and url in self._relays.connected()

    def _leave(self, url: str) -> None:
        self._readers.pop(url).cancel()
        self._problems[url] = ConnectionFailed("the relay is no longer connected")
        self._lost[url] = self.merging.positions.get(url)
        self._sweeps.left_at(url, self._lost[url])

    def _start_reader(self, url: str) -> None:
        start = self._start_of(url)
        self._read_from.add(url)
        if any(reader not in self._relays.connected() for reader in self._readers):
            self._relays.statistics.readers_replaced += 1
        task = self._relays.spawn(self._read(url, start), f"strata-pool-reader {shown(url)}")
        self._readers[url] = task
        task.add_done_callback(lambda task: self._reader_ended(url, task))

    def _start_of(self, url: str) -> Start:
        """Where to start: at the relay's own position, or else before the last packet of the relay that it
        replaces (C-278). A query that ends starts at its beginning: it is to find all that the relay has."""
        query = self.query
        position = self.merging.positions.get(url)
        if position is not None:
            floor = position.received_at - RESUME_MARGIN_SECONDS
            swept = self._sweeps.cursor(url)
            if swept is not None and url not in self._read_from:
                return Start(swept, floor, query.since, query.received_since)  # all before it was swept
            if position.cursor is not None:
                return Start(position.cursor, floor, query.since, query.received_since)
            return self._after(position.received_at)
        gone = [r for r in self._readers if r not in self._relays.connected()]
        stood = [self.merging.positions.get(reader) for reader in gone]
        stood += [self._lost.pop(reader) for reader in list(self._lost)]
        earliest = [math.inf if p is None else p.received_at for p in stood]
        if not stood or math.inf in earliest or query.order == "desc" or not query.live:
            return Start(query.cursor, query.cursor_fallback_since, query.since, query.received_since)
        return self._after(int(min(earliest)))

    def _after(self, received_at: int) -> Start:
        return start_after(
            received_at - self._options.overlap,
            since=self.query.since,
            received_since=self.query.received_since,
        )

    def _end_if_complete(self, wanted: Sequence[str]) -> None:
        """End a query that ends, once its relays are done, or no relay is left that could continue."""
        if self._readers or (wanted and not self._done):
            return
        if self._done:
            self.end()
        elif self._refused:
            self.end(next(iter(self._refused.values())))

    # Reading.

    def _reader_ended(self, url: str, task: asyncio.Task[None]) -> None:
        if self._readers.get(url) is task:
            del self._readers[url]
        if self.has_ended or task.cancelled():
            return
        if self.query.live and self._refused and not self._readers:
            # All connected relays have refused permanently. Another relay may connect, but that is uncertain.
            if not [r for r in self._relays.connected() if r not in self._refused]:
                self.end(next(iter(self._refused.values())))
        # Not `manage` directly: a relay that fails immediately would be retried in an endless loop.
        self._relays.wake()

    async def _read(self, url: str, start: Start) -> None:
        """Read one relay's stream until it ends, is refused, or its connection is abandoned."""
        relay = self._relays.relay(url)
        if relay is None:
            return
        try:
            async with relay.subscribe(**self._request(url, start, live=self.query.live)) as stream:
                await self._hear(url, stream)
            self._done.add(url)
        except (RequestRefused, MissingCapability) as refusal:
            self._refused[url] = self._problems[url] = refusal
            self._lost[url] = self.merging.positions.get(url)
        except StrataError as error:
            self._problems[url] = error
            self._lost[url] = self.merging.positions.get(url)
            if not self.query.live and not isinstance(error, Closed):
                self._failures[url] += 1
                if self._failures[url] >= _MOST_FAILURES:
                    self._refused[url] = error

    async def _hear(self, url: str, stream: AsyncIterable[Delivery]) -> None:
        """Merge what a stream brings, until it ends.

        A relay may make up pages without end. So if a query that ends hears nothing for long from this one,
        although another has come to the end, this raises `RequestTimeout`.
        """

        def may_end() -> bool:
            return bool(self._done) and not self.query.live

        async with ReadPatience(
            self._options.request_timeout, may_end, "the rest of the history"
        ) as patience:
            async for delivery in stream:
                patience.heard()
                self._offer(url, delivery, in_stream=True)
                await self._wait_for_room()
                patience.wait()

    def _offer(self, url: str, delivery: Delivery, *, in_stream: bool) -> bool:
        """Merge a packet; true if it is the first copy. No await here, so no packet of a stream is lost."""
        # A packet that a relay received late from another relay shows an earlier time than the one the relay
        # filters by. So `received_since` is not checked: the rounding to the hour may let through too much,
        # but nothing is lost.
        if self._coarse and not self.query.matches(delivery.packet, delivery.received_at, by_receipt=True):
            return False  # requested only to hide which packets are wanted
        statistics, failures = self._relays.statistics, self.merging.older_ids_failures
        try:
            is_first = self.merging.offer(
                url,
                delivery,
                self._loop.time(),
                unix_now=int(self._wall()),
                readers=len(self._readers),
                in_stream=in_stream,
            )
        except OSError as error:
            # It is no longer known whether the packet was already delivered: stop rather than guess.
            self.end(StrataError(str(error)))
            return False
        statistics.forgotten_failures += self.merging.older_ids_failures - failures
        statistics.packets_merged += is_first
        statistics.copies_dropped += not is_first
        self._relays.served(delivery, url, named=delivery.packet.author_id in self._named)
        self._rearm()
        if len(self.merging):
            self.arrived.set()
        return is_first

    async def _wait_for_room(self) -> None:
        while self.merging.must_wait:
            self._room.clear()
            await self._room.wait()

    def _rearm(self) -> None:
        due_at = self.merging.get_timer()
        if due_at != math.inf and self._timer is None:
            self._timer = self._loop.call_at(due_at, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self.merging.handle_timer(self._loop.time())
        self._rearm()
        if len(self.merging):
            self.arrived.set()

    # Sweeping.

    def relay_came(self, url: str) -> None:
        """Note that a relay has connected: sweep it soon, and forget an earlier refusal.

        The cause of the refusal may no longer exist.
        """
        if self._failures[url] < _MOST_FAILURES:
            self._refused.pop(url, None)
        self._hasten_sweep(url)

    def _hasten_sweep(self, url: str) -> None:
        self._sweeps.hasten(url, self._loop.time())

    def _log_was_reset(self, url: str, reset: LogReset) -> None:
        """Note that a relay has lost the end of its log: another relay may have what was there."""
        self._relays.statistics.log_resets += 1
        _log.warning("%s: the log has lost its end: %s", shown(url), reset)
        for other in self._relays.connected():
            if other != url:
                self._hasten_sweep(other)
        self._relays.wake()

    async def _sweep(self, url: str) -> None:
        """Read everything that one relay received since its last sweep."""
        relay = self._relays.relay(url)
        query, began_at = self.query, int(self._wall())
        start = self._sweeps.start(url, since=query.since, received_since=query.received_since)
        last: Position | None = None
        packets = sent_bytes = 0
        spent = 0.0
        try:
            if relay is None:
                raise ConnectionFailed("the relay has no seat any more")
            async with relay.subscribe(**self._request(url, start, live=False)) as stream:
                deliveries = aiter(stream)
                while True:
                    asked_at = self._loop.time()
                    async with PeerTimeout(self._options.request_timeout):
                        delivery = await anext(deliveries, None)
                    spent += self._loop.time() - asked_at
                    if delivery is None:
                        break
                    packets, sent_bytes = packets + 1, sent_bytes + delivery.packet.size_bytes
                    found = self._offer(url, delivery, in_stream=False)
                    self._relays.statistics.packets_recovered += found
                    last = Position(delivery.cursor, delivery.received_at)
                    await self._wait_for_room()
        except (StrataError, TimeoutError):
            self._sweeps.failed(url, last, self._loop.time())
            self._relays.statistics.sweeps_failed += 1
            return
        self._sweeps.succeeded(url, last, began_at=began_at, now=self._loop.time())
        self._relays.statistics.sweeps += 1
        if packets >= _MEASURED_PACKETS and spent > 0:
            self._relays.observe(url, Aspect.HISTORY, good=packets, value=sent_bytes / spent)

    def _work(self, work: Coroutine[object, object, None], name: str) -> None:
        task = self._relays.spawn(work, name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _request(self, url: str, start: Start, *, live: bool) -> SubscribeOptions:
        """The query for one relay: a coarse one hides from the relay what exactly is wanted (R-405)."""
        query = self.query
        since, until = start.since, query.until
        authors, received_since, received_until = query.authors, start.received_since, query.received_until
        if self._coarse:
            authors = ()
            since = None if since is None else since // _HOUR * _HOUR
            received_since = None if received_since is None else received_since // _HOUR * _HOUR
            until = None if until is None else (until // _HOUR + 1) * _HOUR
            received_until = None if received_until is None else (received_until // _HOUR + 1) * _HOUR
        return {
            "authors": authors,
            "types": query.types,
            "packet_ids": query.packet_ids,
            "since": since,
            "until": until,
            "received_since": received_since,
            "received_until": received_until,
            "cursor": start.cursor,
            "cursor_fallback_since": start.cursor_fallback_since,
            "order": query.order,
            # A coarse stream has packets that do not count.
            "limit": None if self._coarse else query.limit,
            "live": live,
            "on_log_reset": functools.partial(self._log_was_reset, url),
        }
