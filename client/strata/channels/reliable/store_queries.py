"""The queries of one channel to the store: what was missed while away, and missing messages (channel.md §8).

An asyncio shell around `CatchingUp` and `Retrieval`, which decide when to ask, and for what.
Messages from the store go the way of all received messages (C-165). There is one query at a time.

What was missed is read oldest first, page by page, and a page is asked for once the one before it is taken: a
full inbox holds back the reading, and memory holds a page. Where the first messages name none that is known,
relays keep nothing older: they are asked for the named ones, and what no relay has is a gap.

What is heard meanwhile waits for its turn in the reading (`Participant.hold_heard`), from the moment on when
the node begins to hear. It does not wait for a store that falls silent, nor for one that failed when it was
last asked.
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

__all__ = ["StoreQueries"]

_log = logging.getLogger("strata.reliable")

_MAX_PAGES = 40
"""Most pages of a store without cursors that one query for missing messages reads; the next query follows."""
_MAX_ASKED = 64
"""Most questions in a row for messages at the end of what relays keep."""
_MAX_PAGES_SINCE = 4
"""Most pages held at once of what was said while a newcomer's node began to hear."""
_PER_TURN = 32
"""Messages taken before other tasks get their turn, in one step: about 10 ms of work."""
_PAGE_TIMEOUT = 60.0
_PATIENCE_SECONDS = 1.0
"""What a store does not have when it was just read may be on its way from there all the same."""
_AWAY_SECONDS = 15.0
"""How long a relay that is away is given to come back, before what the others lack is called gone."""
_RETRY_SECONDS = 5.0
_SILENT_SECONDS = 5.0
"""How long what is heard waits for a page."""
_JOIN_TIMEOUT = 1.5

T = TypeVar("T")


class StoreQueries:
    """Asks the store for the messages that one channel lacks."""

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
        self.is_reading = False
        """Whether what was missed is being read."""
        self._receive = receive
        self._pass_over = pass_over
        self._flush = flush
        self._node = node
        self._engine = engine
        self._now_ms = now_ms
        self._woken = Alarm()
        self._is_back = Alarm()
        """The store has become available again: it need not be waited for."""
        self._connected = False
        self._read_range = ReadRange()
        self._has_places = getattr(node, "read", None) is not None
        """Whether the store tells places in it, from which a reading can go on, for all that is known."""
        self._delivered_before = -1
        self._again = False
        self._begins_here = engine.catching_up.joins_now
        self._may_hold = True
        """Whether what is heard may wait for the store: it answered when it was last asked."""
        self._settle_at = math.inf
        """When what is missing at the beginning will be so old that it is gone, if no store has it then."""
        self._joined = asyncio.Event()
        if not engine.catching_up.joins_now:
            self._joined.set()

    def leave_to_reading(self) -> bool:
        """Whether a message that the store has by now need not be heard, because the store is to be read."""
        catching_up = self._engine.catching_up
        if self.caught_up or self._begins_here:
            return False
        # A reading under way may be past it: another one follows, from where this one ends.
        self._again = self.is_reading
        if self._again:
            self._hold(True)  # what is heard from now on comes after it
        return self.is_reading or catching_up.is_due(self._now_ms())

    def wake(self) -> None:
        """A message may have been found missing."""
        self._woken.set()

    def will_read(self) -> None:
        """The node is about to hear, or to hear again: the store is read first."""
        self._hold(not self._begins_here and self._engine.catching_up.is_due(self._now_ms()))

    def _hold(self, on: bool) -> None:
        """Have what is heard wait for the reading; or wait no longer."""
        self._engine.hold_heard(on and self._may_hold, self._now_ms())
        if not on:
            self._flush()

    def connected(self, connected: bool) -> None:
        """The store has become available, or is away."""
        if self._connected and not connected:
            self._engine.catching_up.offline()
            self._may_hold = True  # a reading may have broken off for that alone
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
        """Wait until it is known what was said, if a new participant does not want it; not for long."""
        if not self._joined.is_set():
            try:
                async with asyncio.timeout(_JOIN_TIMEOUT):
                    await self._joined.wait()
            except TimeoutError:
                self._joined.set()

    async def run(self) -> None:
        """Ask whenever it is time, for as long as the channel is started."""
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
                    self._may_hold = await self._guarded(self._catch_up())
                    if not self._may_hold:
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

    async def _guarded(self, work: Awaitable[None]) -> bool:
        """Whether a query succeeded. A store that is away or breaks its protocol is asked again later."""
        try:
            await work
        except (StrataError, OSError, TimeoutError) as error:
            self.retrievals_failed += 1
            _log.info("the store could not be asked: %s", error)
            return False
        return True

    # What was missed.

    async def _catch_up(self) -> None:
        """Read everything from the mark on (C-171, C-172); a new participant reads as it wants to join."""
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
                    await self._settle_front()  # which may take a while: what comes meanwhile is read too
            progress = engine.sds.statistics.delivered > before
            engine.catching_up.succeeded(began_at, self._now_ms(), progress=progress)
        finally:
            self.is_reading = False
            engine.tell_gap()
            self._flush()

    async def _read_on(self, since: int, *, settle: bool) -> None:
        """Read from where the store was last read, or from `since` on, to the end.

        `settle`: all that was missed, so what is heard waits, and what nobody has is settled on the way.
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
                # A copy that was sent again may come later on: read on while there is room.
                if settle and page.messages and fruitless and engine.sds.is_crowded:
                    self._hold(False)
                    await self._settle_front(by_name_alone=True)
        if engine.catching_up.position is None:
            self._read_range.covered(since, began_at)
            self._has_places = self._has_places and not count

    async def _next_while_holding(self, pages: AsyncGenerator[T, None]) -> T | None:
        """The next page, for which what is heard waits; as `_next_page`."""
        self._hold(True)
        silent = asyncio.get_running_loop().call_later(_SILENT_SECONDS, self._hold, False)
        try:
            return await _next_page(pages)
        finally:
            silent.cancel()

    async def _take(self, messages: Iterable[NodeMessageReceived]) -> None:
        """Take what was read; the caller flushes."""
        for number, event in enumerate(messages, 1):
            if number % _PER_TURN == 0:
                self._flush()
                await asyncio.sleep(0)
            if self._is_before(event):
                await self._pass_over(event)
            else:
                await self._receive(event)

    async def _settle_front(self, *, by_name_alone: bool = False, heard: bool = False) -> None:
        """Ask by name for the messages behind which everything begins; go on without those that have expired.

        `by_name_alone`: what has no name in a store may still be read. `heard`: messages that were heard may
        name them, and not those alone that were read.
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
                return  # a single message: others may have it
            if not gone and sought <= {each.message_id for each in self._unknown_before(heard)}:
                # On their way: they are missing as others are, until they are old.
                self._settle_at = self._now_ms() + engine.settles_in(self._stores_now_ms())
                return
            engine.go_on_without(gone, self._now_ms())
            self._flush()

    async def _settle_later(self, now: int) -> None:
        """What may have been on its way at the end of a reading is old by now."""
        engine, before = self._engine, self._engine.sds.statistics.delivered
        self._settle_at = math.inf
        if not await self._guarded(self._settle_front()):
            self._settle_at = now + 1000 * _RETRY_SECONDS
        if engine.sds.statistics.delivered > before:
            engine.catching_up.made_room()
        engine.tell_gap()
        self._flush()

    async def _await_stragglers(self, gone: Collection[str], heard: bool) -> list[str]:
        """Which of these no store has, although they may come by another way or another store be back."""
        left, pause = _AWAY_SECONDS, _PATIENCE_SECONDS
        while True:
            await asyncio.sleep(pause)
            left, pause = left - pause, 2 * pause
            if not self._connected:
                raise ConnectionFailed("the relays went away while they were asked")
            # By a clock that was set a moment ago what is on its way looks old.
            whole = self._reaches_all() and not self._engine.catching_up.clock_jumped
            await self._seek(gone, heard)
            gone = self._expired(gone, heard)
            if not gone or left <= 0 or (whole and self._reaches_all()):
                return list(gone)

    async def _seek(self, ids: Collection[str], heard: bool) -> None:
        """Look once more for these missing messages, by name where they have one."""
        entries = [each for each in self._unknown_before(heard) if each.message_id in ids]
        named = hinted(entries) if self._can_ask else {}
        if named:
            await self._ask(named.values())
        if len(named) < len(entries):
            await self._read_rest()

    def _stores_now_ms(self) -> int:
        """The time by the clocks of the stores; by ours where they have not told theirs."""
        tell = getattr(self._node, "store_time", None)  # nodes of other authors may lack the method
        told = None if tell is None else tell()
        return self._now_ms() if told is None else int(1000 * told)

    def _reads_all(self) -> bool:
        """Whether a reading finds what was stored a moment ago: by its place, or by clocks that are right."""
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

        Where the stores have nothing at all, what was heard first says nothing of the age of what it follows.
        """
        engine = self._engine
        front = self._unknown_before(heard)
        if not self._is_young():
            front = engine.front(heard=heard, said_before=engine.settled_ms(self._stores_now_ms()))
        return [each.message_id for each in front if each.message_id in sought]

    def _unknown_before(self, heard: bool) -> list[HistoryEntry]:
        """The missing messages that may be from before all that can be had."""
        engine = self._engine
        return engine.sds.missing() if self._is_young() else engine.front(heard=heard)

    def _is_young(self) -> bool:
        """Whether this participant joined a moment ago, and wants nothing from before."""
        engine = self._engine
        return engine.config.join == "now" and engine.catching_up.is_young(self._now_ms())

    async def _begin_here(self) -> bool:
        """Note what was said last, so that nobody waits for it, and want none of it.

        Then take what was said since this participant opened the channel, and was stored before the node
        began to hear. Returns whether that was all of it.
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
        """Whether a stored message is from before this participant's part in the channel.

        Whoever joined now goes by the store's clock too: a sender whose own is slow is no less wanted.
        """
        begins = self._engine.catching_up.begins_ms
        if not 0 < sent_ms(event) < begins:
            return False
        by_store = event.received_at if self._engine.config.join == "now" else None
        return by_store is None or 1000 * by_store < begins

    # What is missing.

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
        """Whether everything stored has been read, and nothing has come of it or been heard since.

        Then what others name may be from before all that can be had.
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
        """Whether the store finds a message by its hash without being read through."""
        return bool(getattr(self._node, "finds_by_hash", True))

    async def _read_rest(self) -> None:
        """Read what is unread of the topic: on from a place, or by time where none is known.

        A topic that was empty when it was read gave no place, though its store may have places: what is new
        since then is read forwards, so that the next time there is one.
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
        """Newest first, for a store without cursors, until nothing is missing or so much is read."""
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
    """The next page, None at the end. Raises `TimeoutError` for a store that falls silent."""
    async with asyncio.timeout(_PAGE_TIMEOUT):
        return await anext(pages, None)
