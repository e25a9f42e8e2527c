"""The queries of one channel to the store: what was missed while away, and missing messages (channel.md §8).

An asyncio shell around `CatchingUp` and `Retrieval`, which decide when to query, and for what. Messages from
the store take the same path as all received messages (C-165). There is one query at a time.

Missed messages are read oldest first, page by page, and a page is requested only after the previous one has
been taken: a full inbox holds back the reading, and memory holds one page. If the first messages name no
known message, the relays keep nothing older. They are then queried for the named messages, and the messages
that no relay has are a gap.

Messages that the node hears on its subscription in the meantime wait for their turn in the reading
(`Participant.hold_heard`), from the moment when the node begins to listen. They do not wait for a store that
falls silent, nor for one that failed at the last query.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Iterable
from contextlib import aclosing
from typing import TypeVar

from strata.channels.awaiting import Alarm
from strata.channels.messaging.node import MessagingNode
from strata.channels.messaging.reading import HistoryPage, Order, read_pages, sent_ms
from strata.channels.messaging.values import ConnectionStatus, NodeMessageReceived
from strata.channels.reliable.catching_up import OVERLAP_MS, ReadRange
from strata.channels.reliable.engine import ChannelEngine
from strata.channels.reliable.retrieval import ByHash, RetrievalPlan, has_hint, hinted
from strata.channels.sds import HistoryEntry
from strata.protocol.errors import ConnectionFailed, StrataError
from strata.relays.peer_timeout import PeerTimeout

__all__ = ["StoreQueries"]

_log = logging.getLogger("strata.reliable")

_MAX_PAGES = 40
"""The most pages that one query for missing messages reads from a store without cursors."""
_MAX_ASKED = 64
"""The most queries in a row for messages at the end of what relays keep."""
_MAX_PAGES_SINCE = 4
"""The most pages held at once of messages sent while a newcomer's node began to listen."""
_PER_TURN = 32
"""Messages taken in one step before other tasks get their turn: about 10 ms of work."""
_PAGE_TIMEOUT = 60.0
_PATIENCE_SECONDS = 1.0
"""The first wait for messages that a store did not have when just read: they may still be on their way."""
_AWAY_SECONDS = 15.0
"""How long a relay that is away may take to come back before messages that the others lack count as gone."""
_RETRY_SECONDS = 5.0
_SILENT_SECONDS = 5.0
"""How long heard messages wait for a page."""
_JOIN_TIMEOUT = 1.5

T = TypeVar("T")


class StoreQueries:
    """Queries the store for the messages that one channel lacks."""

    def __init__(
        self,
        node: MessagingNode,
        engine: ChannelEngine,
        *,
        receive: Callable[[NodeMessageReceived], Awaitable[object]],
        pass_over: Callable[[NodeMessageReceived], Awaitable[None]],
        flush: Callable[[], None],
        now_ms: Callable[[], int],
    ) -> None:
        """`receive` takes each message that is found, `pass_over` each that is not wanted.

        `flush` stores what the engine changed.
        """
        self.retrievals = 0
        self.retrievals_failed = 0
        self.armed_for = float("inf")
        """When the next query is due, in wall milliseconds."""
        self.caught_up = not engine.config.query_on_connect
        """Whether everything has been read that the store had when it was last reached."""
        engine.sds.set_reading(not self.caught_up)
        self.is_reading = False
        """Whether missed messages are being read."""
        self._receive = receive
        self._pass_over = pass_over
        self._flush = flush
        self._node = node
        self._engine = engine
        self._now_ms = now_ms
        self._woken = Alarm()
        self._is_back = Alarm()
        """Set when the store has become available again, and need not be waited for."""
        self._connected = False
        self._read_range = ReadRange()
        self._has_places = getattr(node, "read", None) is not None
        """Whether the store gives positions from which a reading can continue, as far as is known."""
        self._delivered_before = -1
        self._again = False
        self._begins_here = engine.catching_up.joins_now
        self._may_hold = True
        """Whether heard messages may wait for the store, because it answered the last query."""
        self._settle_at = math.inf
        """When messages missing at the beginning will be so old that they are gone if no store has them."""
        self._joined = asyncio.Event()
        if not engine.catching_up.joins_now:
            self._joined.set()

    def leave_to_reading(self) -> bool:
        """Whether a heard message that is already stored can be ignored, because the store will be read."""
        catching_up = self._engine.catching_up
        if self.caught_up or self._begins_here:
            return False
        # A reading under way may be past the message, so another one follows, from where this one ends.
        self._again = self.is_reading
        if self._again:
            self._hold(True)  # messages received from now on come after it
        return self.is_reading or catching_up.is_due(self._now_ms())

    def wake(self) -> None:
        """A message may have been found missing."""
        self._woken.set()

    def will_read(self) -> None:
        """The node is about to listen, or to listen again; the store is read first."""
        self._hold(not self._begins_here and self._engine.catching_up.is_due(self._now_ms()))

    def _hold(self, on: bool) -> None:
        """Make heard messages wait for the reading, or release them."""
        self._engine.hold_heard(on and self._may_hold, self._now_ms())
        if not on:
            self._flush()

    def connected(self, connected: bool) -> None:
        """The store has become available or unavailable."""
        if self._connected and not connected:
            self._engine.catching_up.offline()
            self._may_hold = True  # a reading may have been interrupted only by this
            self._set_caught_up(False)
        elif connected and not self._connected:
            self.will_read()
            self._is_back.set()
        self._connected = connected
        self._woken.set()

    def is_from_before(self, event: NodeMessageReceived) -> bool:
        """Whether a message was stored before this new participant began, and is not wanted."""
        return (event.stored or not event.live) and self._is_before(event)

    async def joined(self) -> None:
        """Wait briefly until it is known what was sent earlier, if a new participant does not want it."""
        if not self._joined.is_set():
            try:
                async with PeerTimeout(_JOIN_TIMEOUT):
                    await self._joined.wait()
            except TimeoutError:
                self._joined.set()

    async def run(self) -> None:
        """Query whenever it is time, as long as the channel is started."""
        engine, catching_up = self._engine, self._engine.catching_up
        self._set_caught_up(False)
        while True:
            self._woken.clear()
            now = self._now_ms()
            if not self._connected or catching_up.has_missed:
                self._set_caught_up(False)
            if self._connected:
                if not self.caught_up and catching_up.is_due(now):
                    self._is_back.clear()
                    has_read = await self._guarded(self._catch_up())
                    # A store that is away is waited for when it is back.
                    self._may_hold = has_read or not self._connected
                    if not has_read:
                        self._hold(False)
                        catching_up.broken_off()
                        await self._is_back.wait(_RETRY_SECONDS)
                    continue
                self._set_caught_up(not catching_up.has_missed)
                if engine.retrieval.at <= now:
                    if (plan := engine.plan_retrieval(now)) is not None:
                        await self._retrieve(plan)
                    continue
                if self._settle_at <= now:
                    await self._settle_later(now)
                    continue
            at = min(engine.retrieval.at, catching_up.retry_at, self._settle_at)
            self.armed_for = at if self._connected else float("inf")
            wait = (self.armed_for - now) / 1000
            await self._woken.wait(wait if wait < 1e9 else None)

    def _set_caught_up(self, caught_up: bool) -> None:
        if self._engine.config.query_on_connect:
            self.caught_up = caught_up
            self._engine.sds.set_reading(not caught_up)

    async def _guarded(self, work: Awaitable[None]) -> bool:
        """Whether a query succeeded. A store that is away or breaks its protocol is queried again later."""
        try:
            await work
        except (StrataError, OSError, TimeoutError) as error:
            self.retrievals_failed += 1
            _log.info("the store could not be asked: %s", error)
            return False
        return True

    # Messages missed while away.

    async def _catch_up(self) -> None:
        """Read everything from the mark on (C-171, C-172); a new participant reads according to `join`."""
        engine = self._engine
        began_at = self._now_ms()
        engine.catching_up.ahead_ms = max(0, began_at - self._stores_now_ms())
        since = engine.catching_up.begin(began_at)
        before = self._delivered_before = engine.sds.statistics.delivered
        self.is_reading = True
        try:
            if self._begins_here:
                whole = await self._begin_here()
                self._begins_here = False
                if whole:
                    self._read_range.covered(since, self._stores_now_ms())
                    engine.catching_up.succeeded(began_at, self._now_ms())
                    return
                since = engine.catching_up.since(began_at)
            self._again = True
            while self._again:
                self._again = False
                await self._read_on(since, settle=True)
                if not self._again:
                    self._hold(False)
                    await self._settle_front()  # may take a while: messages stored meanwhile are read too
            progress = engine.sds.statistics.delivered > before
            engine.catching_up.succeeded(began_at, self._now_ms(), progress=progress)
        finally:
            self.is_reading = False
            engine.tell_gap()
            self._flush()

    async def _read_on(self, since: int, *, settle: bool) -> None:
        """Read from where the store was last read, or from `since` on, to the end.

        `settle`: this reads everything that was missed, so heard messages wait, and missing messages that no
        store has are settled on the way.
        """
        engine, began_at, count = self._engine, self._stores_now_ms(), 0
        after = engine.catching_up.position
        next_page = self._next_while_holding if settle else _next_page
        async with aclosing(self._pages("asc", since, after=after)) as pages:
            while (page := await next_page(pages)) is not None:
                before = engine.sds.statistics.delivered
                count += len(page.messages)
                await self._take(page.messages)
                engine.catching_up.page_taken(
                    len(page.messages), _last_sent(page.messages), page.position, self._now_ms()
                )
                self._flush()
                fruitless = engine.sds.statistics.delivered == before
                # A copy that was sent again may come later, so continue while there is room.
                if settle and page.messages and fruitless and engine.sds.is_crowded:
                    self._hold(False)
                    await self._settle_front(by_name_alone=True)
        if engine.catching_up.position is None:
            self._read_range.covered(since, began_at)
            self._has_places = self._has_places and not count

    async def _next_while_holding(self, pages: AsyncGenerator[T, None]) -> T | None:
        """The next page, as `_next_page`; heard messages wait for it."""
        self._hold(True)
        silent = asyncio.get_running_loop().call_later(_SILENT_SECONDS, self._hold, False)
        try:
            return await _next_page(pages)
        finally:
            silent.cancel()

    async def _take(self, messages: Iterable[NodeMessageReceived]) -> None:
        """Take the messages that were read; the caller flushes."""
        for number, event in enumerate(messages, 1):
            if number % _PER_TURN == 0:
                self._flush()
                await asyncio.sleep(0)
            if self._is_before(event):
                await self._pass_over(event)
            else:
                await self._receive(event)

    async def _settle_front(self, *, by_name_alone: bool = False, heard: bool = False) -> None:
        """Request the messages at the front by hash; continue without those that have expired.

        The front is the missing messages right before the first waiting ones. `by_name_alone`: messages that
        a store cannot find by hash may still be read. `heard`: heard messages may name the front, not only
        those that were read.
        """
        engine = self._engine
        for _ in range(_MAX_ASKED):
            front = self._unknown_before(heard)
            named = hinted(front) if self._can_ask else {}
            unnamed: set[str] = set()
            if not by_name_alone and (not heard or self._reads_all()):
                unnamed |= {each.message_id for each in front if not self._can_ask or not has_hint(each)}
            sought = named.keys() | unnamed
            if not sought:
                return
            if named:
                await self._ask(named.values())
            gone = self._expired(sought, heard)
            if gone and not self._is_young():
                gone = await self._await_stragglers(gone, heard)
            if heard and len(gone) < 2 and not self._is_young():
                return  # a single message: other participants may have it
            if not gone and sought <= {each.message_id for each in self._unknown_before(heard)}:
                # They may be on their way, and are missing like others until they are old.
                self._settle_at = self._now_ms() + engine.settles_in(self._stores_now_ms())
                return
            engine.go_on_without(gone, self._now_ms())
            self._flush()

    async def _settle_later(self, now: int) -> None:
        """Settle messages that may have been on their way at the end of a reading, and are old by now."""
        engine, before = self._engine, self._engine.sds.statistics.delivered
        self._settle_at = math.inf
        if not await self._guarded(self._settle_front()):
            self._settle_at = now + 1000 * _RETRY_SECONDS
        if engine.sds.statistics.delivered > before:
            engine.catching_up.made_room()
        engine.tell_gap()
        self._flush()

    async def _await_stragglers(self, gone: Collection[str], heard: bool) -> list[str]:
        """Wait for late messages or for another store to return. Returns which of these no store has."""
        left, pause = _AWAY_SECONDS, _PATIENCE_SECONDS
        while True:
            await asyncio.sleep(pause)
            left, pause = left - pause, 2 * pause
            if not self._connected:
                raise ConnectionFailed("the relays went away while they were asked")
            # By a clock that was just set, messages on their way look old.
            whole = self._reaches_all() and not self._engine.catching_up.clock_jumped
            await self._seek(gone, heard)
            gone = self._expired(gone, heard)
            if not gone or left <= 0 or (whole and self._reaches_all()):
                return list(gone)

    async def _seek(self, ids: Collection[str], heard: bool) -> None:
        """Look once more for these missing messages, by hash if their hash is known."""
        entries = [each for each in self._unknown_before(heard) if each.message_id in ids]
        named = hinted(entries) if self._can_ask else {}
        if named:
            await self._ask(named.values())
        if len(named) < len(entries):
            await self._read_rest()

    def _stores_now_ms(self) -> int:
        """The time by the stores' clocks, or by ours if they have not reported theirs."""
        tell = getattr(self._node, "store_time", None)  # nodes of other authors may lack the method
        told = None if tell is None else tell()
        return self._now_ms() if told is None else int(1000 * told)

    def _reads_all(self) -> bool:
        """Whether a reading finds recently stored messages: by position, or because the clocks are right."""
        first, now = self._engine.sds.first_waiting(), self._now_ms()
        if first is None or self._engine.catching_up.position is not None:
            return True
        said = [first.lamport]
        sent_at = first.reception.origin.sent_at
        if sent_at is not None:
            said.append(1000 * sent_at)
        return all(abs(now - each) < OVERLAP_MS // 2 for each in said)

    def _reaches_all(self) -> bool:
        return self._node.connection_status is ConnectionStatus.CONNECTED

    def _expired(self, sought: Collection[str], heard: bool) -> list[str]:
        """Which of these are missing, and so old that nobody is still sending them.

        If the stores have nothing, the first heard message says nothing about the age of what it follows.
        """
        engine = self._engine
        front = self._unknown_before(heard)
        if not self._is_young():
            front = engine.front(heard=heard, said_before=engine.settled_ms(self._stores_now_ms()))
        return [each.message_id for each in front if each.message_id in sought]

    def _unknown_before(self, heard: bool) -> list[HistoryEntry]:
        """The missing messages that may be older than anything available."""
        engine = self._engine
        return engine.sds.missing() if self._is_young() else engine.front(heard=heard)

    def _is_young(self) -> bool:
        """Whether this participant joined recently and wants no earlier messages."""
        engine = self._engine
        return engine.config.join == "now" and engine.catching_up.is_young(self._now_ms())

    async def _begin_here(self) -> bool:
        """Note the last earlier messages, so that nothing waits for them, and take none of them.

        Then take the messages that were sent since this participant opened the channel, and stored before the
        node began to listen. Returns whether that was all of them.
        """
        catching_up = self._engine.catching_up
        oldest = catching_up.oldest(self._now_ms())
        catching_up.joined()
        read: list[NodeMessageReceived] = []
        last = None
        async with aclosing(self._pages("desc", oldest)) as pages:
            for _ in range(_MAX_PAGES_SINCE):
                page = await _next_page(pages)
                last = [] if page is None else page.messages
                read += last
                if all(map(self._is_before, last)):
                    break
        await self._take(reversed(read))
        self._joined.set()
        self._flush()
        return all(map(self._is_before, last or ()))

    def _is_before(self, event: NodeMessageReceived) -> bool:
        """Whether a stored message is from before this participant joined the channel.

        With `join="now"` the store's clock counts too, so that a sender with a slow clock is not ignored.
        """
        begins = self._engine.catching_up.begins_ms
        if not 0 < sent_ms(event) < begins:
            return False
        by_store = event.received_at if self._engine.config.join == "now" else None
        return by_store is None or 1000 * by_store < begins

    # Missing messages.

    async def _retrieve(self, plan: RetrievalPlan) -> None:
        engine = self._engine
        before = {entry.message_id for entry in engine.sds.missing()}
        self.retrievals += 1
        if await self._guarded(self._fetch(plan)):
            self._flush()
            if self._hears_its_first():
                await self._guarded(self._read_rest())
                await self._guarded(self._settle_front(heard=True))
                engine.tell_gap()
                self._flush()
            after = {entry.message_id for entry in engine.sds.missing()}
            still = bool(after - engine.sds.released())
            engine.retrieval.finished(self._now_ms(), brought=len(before - after), still_missing=still)
        else:
            engine.retrieval.failed(self._now_ms())
            self._flush()

    def _hears_its_first(self) -> bool:
        """Whether everything stored has been read, and nothing was delivered by that reading or since.

        The messages that others name may then be older than anything available.
        """
        if not self.caught_up or self._is_young():
            return self.caught_up
        engine = self._engine
        unheard = engine.sds.statistics.delivered == self._delivered_before
        return unheard and not engine.knows_what_was_before()

    async def _fetch(self, plan: RetrievalPlan) -> None:
        if isinstance(plan, ByHash) and self._can_ask:
            await self._ask(plan.hashes)
        else:
            await self._read_rest()

    @property
    def _can_ask(self) -> bool:
        """Whether the store finds a message by its hash without being read completely."""
        return bool(getattr(self._node, "finds_by_hash", True))

    async def _read_rest(self) -> None:
        """Read the unread part of the topic: on from a position, or by time if no position is known.

        A topic that was empty when it was read gave no position, although its store may have positions. New
        messages since then are read forwards, so that there is a position next time.
        """
        oldest = self._engine.catching_up.oldest(self._now_ms())
        unread = self._read_range.unread(oldest, self._stores_now_ms())
        if self._engine.catching_up.position is not None:
            await self._read_on(oldest, settle=False)
        elif self._has_places and len(unread) == 1 and unread[0][0] > oldest:
            await self._read_on(unread[0][0], settle=False)
        else:
            await self._read_unread(oldest)

    async def _ask(self, hashes: Iterable[bytes]) -> None:
        async with aclosing(self._node.fetch(self._engine.content_topic, tuple(hashes))) as found:
            while (event := await _next_page(found)) is not None:
                await self._take([event])
        self._flush()

    async def _read_unread(self, oldest: int) -> None:
        """Read a store without cursors newest first, until nothing is missing or `_MAX_PAGES` are read."""
        now = self._stores_now_ms()
        pages_read = 0
        for since, until in self._read_range.unread(oldest, now):
            reached = now if until is None else until
            async with aclosing(self._pages("desc", since, until=until)) as pages:
                while (page := await _next_page(pages)) is not None:
                    pages_read += 1
                    self._has_places |= page.position is not None
                    await self._take(reversed(page.messages))
                    self._flush()
                    reached = _last_sent(page.messages[-1:]) or reached
                    if not self._engine.sds.missing() or pages_read == _MAX_PAGES:
                        self._read_range.covered(reached, now if until is None else until)
                        return
            self._read_range.covered(since, now if until is None else until)

    def _pages(
        self, order: Order, since: int, *, until: int | None = None, after: str | None = None
    ) -> AsyncGenerator[HistoryPage, None]:
        return read_pages(
            self._node,
            self._engine.content_topic,
            order=order,
            since_ms=since,
            until_ms=until,
            after=after,
        )


def _last_sent(messages: Iterable[NodeMessageReceived]) -> int:
    return max(map(sent_ms, messages), default=0)


async def _next_page(pages: AsyncGenerator[T, None]) -> T | None:
    """Return the next page, or None at the end. Raises `TimeoutError` if the store falls silent."""
    async with PeerTimeout(_PAGE_TIMEOUT):
        return await anext(pages, None)
