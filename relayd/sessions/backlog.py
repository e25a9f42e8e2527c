"""Reading history from the store, for the subscriptions of one connection that are not live.

Each connection has one task, which lives only while there is something to read. The task takes the
subscriptions in turn, a page each, and waits for the socket before every page: the reader sets the pace, and
packets that it has not taken stay in the store (A-067). A subscription that has caught up goes live in the
same step.

A page examines a bounded number of rows of the log, so a search for rare packets takes many pages, most of
them empty. Between two pages, the readers of other accounts have their turn.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from typing import Final, Protocol

from strata.protocol.errors import ErrorCode

from relayd import failpoints
from relayd.feed.fanout import Sink
from relayd.feed.subscription import FeedPhase, FeedSubscription, Read
from relayd.relay import RunningRelay
from relayd.sessions.answers import lost_place_payload, read_failure_payload
from relayd.sessions.websocket import WebSocket
from relayd.store.payers import Payer
from relayd.store.queries import CANDIDATES
from relayd.store.types import Declined, LogPage, StoreTimeout, StoreUnavailable

__all__ = ["Backlog", "StoreReader"]

_PAGE_ROWS: Final = 500
_FEWEST_ROWS: Final = 20
_CANDIDATES_PER_ROW: Final = CANDIDATES // _PAGE_ROWS
_PATIENCE: Final = 0.1
"""History stands behind requests that arrive up to this many seconds later."""
_PIECE_SECONDS: Final = 0.0005
"""How long a page may occupy one turn of the loop, in seconds; the piece begun last may exceed it."""
_PIECE_ROWS, _PIECE_BYTES = 50, 64 * 1024
"""Rows and bytes of a piece; a piece becomes frames in a fraction of a millisecond."""
_NOTHING: Final = LogPage([], exhausted=True)
_RETRY_SECONDS: Final = (0.05, 2.0)


class StoreReader(Sink, Protocol):
    """A connection, as seen by its backlog."""

    @property
    def id(self) -> int:
        """The connection's number in the logs."""

    @property
    def payer(self) -> Payer:
        """The account that takes turns at the database with others."""

    def turn(self, now: float) -> float:
        """The place of the connection's next step among the steps of others; the lowest is first."""

    async def writable(self) -> None:
        """Wait until the socket has room, and until the reader owes neither bytes nor database time."""

    def backfilled(self, sent_bytes: int) -> None:
        """Charge bytes that came from the store to the budget for history."""

    def answer(self, payload: bytes, code: ErrorCode) -> None:
        """Queue an ERROR."""

    def end_subscription(self, subscription: FeedSubscription) -> None:
        """End a subscription that cannot be served."""


class Backlog:
    """The subscriptions of a connection that read from the store."""

    def __init__(self, relay: RunningRelay, connection: StoreReader, socket: WebSocket) -> None:
        self._relay = relay
        self._traces = relay.read_traces
        self._connection = connection
        self._socket = socket
        self._behind: dict[FeedSubscription, None] = {}
        self._task: asyncio.Task[None] | None = None
        self._page_rows = _PAGE_ROWS
        self._late: set[FeedSubscription] = set()
        """The subscriptions whose last read took too long."""
        self._pause = _RETRY_SECONDS[0]
        self.held_bytes = 0
        """Bytes of a page that was read and is not sent yet."""

    def add(self, subscription: FeedSubscription) -> None:
        """Serve this subscription until it is live or closed."""
        if subscription not in self._behind:
            self._behind[subscription] = None
            self._relay.metrics.subscriptions_behind.inc()
            if self._traces is not None:
                self._traces.began(subscription)
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name=f"backlog-{self._connection.id}")

    def discard(self, subscription: FeedSubscription) -> None:
        """Stop serving this subscription; a read under way for it is dropped when it returns."""
        self._late.discard(subscription)
        if subscription in self._behind:
            del self._behind[subscription]
            self._relay.metrics.subscriptions_behind.dec()
            if self._traces is not None:
                self._traces.ended(subscription, "ended")
        if not self._behind:
            self.close()

    def close(self) -> None:
        """Stop; a read under way is cancelled in the database."""
        for subscription in self._behind:
            self._relay.metrics.subscriptions_behind.dec()
            if self._traces is not None:
                self._traces.ended(subscription, "ended")
        self._behind.clear()
        self._late.clear()
        if self._task is not None:
            self._task.cancel()
            self._task = None

    async def _run(self) -> None:
        try:
            await self._serve()
        except Exception as error:
            # Our bug, and the reader's position is known: close, so that the reader resumes by cursor.
            self._relay.faults.caught("backlog", error)
            self._fail()

    def _fail(self) -> None:
        try:
            self._socket.close(1011, "internal error; resume by cursor")
        except Exception as error:
            self._relay.faults.caught("backlog", error)
            self._socket.abort()

    async def _serve(self) -> None:
        while self._behind:
            subscription = next(iter(self._behind))
            await self._connection.writable()
            await self._its_turn()  # a thousand subscriptions may go live without a read
            if subscription not in self._behind:
                continue
            try:
                await self._step(subscription)
                self._pause = _RETRY_SECONDS[0]
                self._late.discard(subscription)
            except StoreTimeout:
                if subscription in self._behind:
                    self._give_up(subscription)
            except StoreUnavailable:
                # The log and the position are still there: wait for the database to come back.
                self._relay.metrics.store_reads["unavailable"].inc()
                await asyncio.sleep(random.uniform(self._pause / 2, self._pause))
                self._pause = min(self._pause * 2, _RETRY_SECONDS[1])
            if subscription in self._behind:  # move it to the end of the queue
                del self._behind[subscription]
                self._behind[subscription] = None
        self._task = None

    async def _its_turn(self) -> None:
        place = self._connection.turn(time.monotonic()) + _PATIENCE
        if self._relay.slices.is_over(place):
            await self._relay.slices.next(place)

    async def _step(self, subscription: FeedSubscription) -> None:
        """Read and send one page, or go live."""
        relay, fanout = self._relay, self._relay.fanout
        if not subscription.started:
            # Packets that other processes have acknowledged belong to history, so ask the log itself.
            await relay.tail.reach(await relay.store.head(self._connection.payer))
            if subscription not in self._behind:
                return  # it ended meanwhile, and others kept this task running
            if await self._is_lost(subscription) or subscription not in self._behind:
                return
            subscription.start(fanout.position)
        if subscription.phase is FeedPhase.CATCHING_UP and self._from_memory(subscription):
            return
        page_rows = _FEWEST_ROWS if subscription in self._late else self._page_rows
        read = subscription.next_read(fanout.position, page_rows)
        if read is None:
            self._go_live(subscription)
            return
        await self._read_page(subscription, read, page_rows)

    async def _is_lost(self, subscription: FeedSubscription) -> bool:
        """Whether its cursor is of a place that the log does not have; if so, end it with an ERROR (R-157).

        The log's head, and the terms with it, have just been read from the primary.
        """
        relay, mark = self._relay, subscription.resumes_after
        if mark is None:
            return False
        good_to = await relay.store.good_to(mark, self._connection.payer)
        if good_to is not None and mark.sequence <= good_to:
            return False
        await relay.store.bear_witness(mark)
        relay.metrics.lost_cursors.inc()
        if subscription in self._behind:
            cursor = None if good_to is None else subscription.good_cursor(good_to)
            payload = lost_place_payload(subscription.subscription_id, subscription.client_msg_id, cursor)
            self._connection.end_subscription(subscription)
            self._connection.answer(payload, ErrorCode.INVALID_CURSOR)
            self._socket.outbox.flush()
        return True

    async def _read_page(self, subscription: FeedSubscription, read: Read, page_rows: int) -> None:
        relay = self._relay
        if failpoints.ARMED:
            await failpoints.reached("sessions.page")
        query = relay.types.narrowed(read.query)
        if query is None:
            self._queue_rows(subscription, read, _NOTHING, 0, 0)
            self._socket.outbox.flush()
            return
        started = time.monotonic()
        declined = relay.fanout.declined
        page = await relay.store.page(
            query,
            read.limit,
            relay.clock(),
            max_bytes=relay.settings.outbound_queue_bytes,
            candidates=page_rows * _CANDIDATES_PER_ROW,
            payer=self._connection.payer,
        )
        relay.metrics.store_reads["ok"].inc()
        relay.metrics.store_read_seconds.observe(time.monotonic() - started)
        self._page_rows = min(_PAGE_ROWS, self._page_rows * 2)
        try:
            sent_bytes = await self._send_page(subscription, read, page, declined)
        finally:
            self.held_bytes = 0
        if self._traces is not None:
            self._traces.read(subscription, page, started, sent_bytes)

    async def _send_page(
        self, subscription: FeedSubscription, read: Read, page: LogPage, declined: Declined
    ) -> int:
        """Queue the page, piece by piece as the turns of the loop have time; return the bytes of its frames.

        Pages arrive as the database delivers them, several in one turn, and each takes milliseconds. If more
        has been declined since the page was read, the rest of the page is read anew.
        """
        sizes = [len(row.body) for row in page.rows]
        self.held_bytes = sum(sizes)
        first: int | None = 0
        sent_bytes = 0
        while first is not None:
            await self._its_turn()
            if subscription not in self._behind or self._relay.fanout.declined is not declined:
                break
            until = time.monotonic() + _PIECE_SECONDS
            while first is not None:
                end = _end_of_piece(sizes, first)
                sent_bytes += self._queue_rows(subscription, read, page, first, end)
                self.held_bytes -= sum(sizes[first:end])
                first = end if end < len(sizes) else None
                if time.monotonic() >= until:
                    break
            self._socket.outbox.flush()
        return sent_bytes

    def _queue_rows(
        self, subscription: FeedSubscription, read: Read, page: LogPage, first: int, end: int
    ) -> int:
        """Queue these rows of a page. What the page says of its end applies to its last row."""
        is_last = end == len(page.rows)
        frames, events = subscription.rows_read(
            read,
            page.rows[first:end],
            is_last and page.exhausted,
            self._relay.fanout.form,
            page.reached if is_last else None,
        )
        self._connection.backfilled(len(frames))
        self._queue(frames, events)
        return len(frames)

    def _from_memory(self, subscription: FeedSubscription) -> bool:
        """Close the last gap from the feed's memory, so that a busy log cannot outrun a read."""
        entries = self._relay.fanout.recent_after(subscription.position)
        if entries is None:
            return False
        fanout = self._relay.fanout
        self._queue(*subscription.entries_read(entries, self._relay.clock(), fanout.position, fanout.form))
        self._socket.outbox.flush()
        subscription.next_read(fanout.position, 0)
        self._go_live(subscription)
        return True

    def _go_live(self, subscription: FeedSubscription) -> None:
        del self._behind[subscription]
        self._relay.metrics.subscriptions_behind.dec()
        if self._traces is not None:
            self._traces.ended(subscription, "live")
        self._relay.fanout.join(subscription, self._connection)

    def _queue(self, frames: bytes, events: int) -> None:
        if frames:
            self._relay.metrics.events_sent["store"].inc(events)
            self._socket.outbox.queue(frames)

    def _give_up(self, subscription: FeedSubscription) -> None:
        """A read took too long: try once more from the same place, with a page that examines fewer rows. If
        that fails too, end the subscription with an ERROR."""
        self._relay.metrics.store_reads["timeout"].inc()
        self._page_rows = _FEWEST_ROWS
        if subscription not in self._late:
            self._late.add(subscription)
            return
        payload = read_failure_payload(subscription.subscription_id, subscription.client_msg_id)
        self._connection.end_subscription(subscription)
        self._connection.answer(payload, ErrorCode.INTERNAL_ERROR)
        self._socket.outbox.flush()


def _end_of_piece(sizes: Sequence[int], first: int) -> int:
    """Return where the piece that begins with this row ends. It has at least one row, if there is one."""
    end, size = first, 0
    while end < len(sizes) and end - first < _PIECE_ROWS and size < _PIECE_BYTES:
        size += sizes[end]
        end += 1
    return end
