"""Requests to a peer besides its stream: for packets by their ids, and for authors' keys.

Each request is a separate subscription that ends with its history, on the connection that reads.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

from strata.protocol.keys import IDENTITY_TYPES
from strata.relays.connection.driver import Driver
from strata.relays.connection.queue import QueuedEvent
from strata.relays.connection.stream import Phase, Stream
from strata.relays.connection.values import Query

from relayd.federation.claims import claimed_id
from relayd.federation.comparing import Fetched
from relayd.federation.intake import Intake, Item

__all__ = ["Asking"]

_KEY_TIMEOUT = 30.0
_FETCH_TIMEOUT = 120.0
_LOOK_SECONDS = 1.0


class Asking:
    """The requests of one link.

    `submit` hands a packet over to be judged; `has_room` says whether one more may wait for its verdict.
    `check` raises if the link is over.
    """

    def __init__(
        self,
        driver: Driver,
        *,
        submit: Callable[[Intake, Item], None],
        has_room: Callable[[Intake], bool],
        check: Callable[[], None],
    ) -> None:
        self._driver = driver
        self._submit = submit
        self._has_room = has_room
        self._check = check
        self._windows: dict[Intake, asyncio.Event] = {}
        """Windows of requested packets, each with the event that is set when something in it has changed."""

    def settled(self, intake: Intake) -> None:
        """A packet of this window has its verdict."""
        if (window := self._windows.get(intake)) is not None:
            window.set()

    def wake(self) -> None:
        """There may be room again."""
        for window in self._windows.values():
            window.set()

    async def fetch(self, ids: Sequence[bytes]) -> Fetched:
        """Have the peer send these packets, and wait for the verdicts, for two minutes at most.

        Raises what `check` raises. If it is cancelled, packets that have arrived still get their verdicts.
        """
        intake, sent, is_whole = Intake(None), set[bytes](), False
        done = self._windows[intake] = asyncio.Event()
        wanted = {"0x" + packet_id.hex(): packet_id for packet_id in ids}
        query = Query(packet_ids=tuple(wanted), live=False)
        try:
            async with asyncio.timeout(_FETCH_TIMEOUT), self._answers(query) as told:
                async for event in told.events():
                    packet_id = wanted.get(claimed_id(event.packet))  # admission checks it
                    if packet_id is None or packet_id in sent:
                        continue  # it was not requested, or is a repeat
                    while not self._has_room(intake):
                        await _set_within(done, _LOOK_SECONDS)
                        self._check()
                    sent.add(packet_id)
                    self._submit(intake, intake.add(bytes(event.packet), event.received_at, None))
                    await asyncio.sleep(0)
                is_whole = told.is_whole
                while len(intake):
                    await _set_within(done, _LOOK_SECONDS)
                    self._check()
        except TimeoutError:
            pass  # packets left over get their verdict later, or are found missing again
        finally:
            del self._windows[intake]
        return Fetched(sent, is_whole)

    async def keys_of(self, authors: tuple[str, ...], take: Callable[[QueuedEvent], Awaitable[None]]) -> bool:
        """Have the peer send some authors' identity packets, and hand each to `take`. Returns whether the
        peer sent all of them. Takes half a minute at most."""
        query = Query(authors=authors, types=tuple(sorted(IDENTITY_TYPES)), live=False)
        try:
            async with asyncio.timeout(_KEY_TIMEOUT), self._answers(query) as told:
                async for event in told.events():
                    await take(event)
                return told.is_whole
        except TimeoutError:
            return False

    @contextlib.asynccontextmanager
    async def _answers(self, query: Query) -> AsyncIterator[_Answers]:
        stream, arrived = self._driver.subscribe(query)
        try:
            yield _Answers(self._driver, stream, arrived, self._check)
        finally:
            with self._driver.step as core:
                core.unsubscribe(stream)


class _Answers:
    """The events of one request, up to the end of its history."""

    def __init__(
        self, driver: Driver, stream: Stream, arrived: asyncio.Event, check: Callable[[], None]
    ) -> None:
        self._driver = driver
        self._stream = stream
        self._arrived = arrived
        self._check = check

    @property
    def is_whole(self) -> bool:
        """Whether the peer has sent all that it has."""
        return self._stream.phase is Phase.ENDED and self._stream.error is None

    async def events(self) -> AsyncIterator[QueuedEvent]:
        """Yields each event; raises what `check` raises."""
        stream = self._stream
        while stream.phase is not Phase.ENDED or any(stream.waiting()):
            self._check()
            event = stream.take()
            if isinstance(event, QueuedEvent):
                with self._driver.step as core:
                    core.taken(stream, delivered=True, now=self._driver.loop.time())
                yield event
            elif event is None and stream.phase is not Phase.ENDED:
                self._arrived.clear()
                if not any(stream.waiting()):
                    await _set_within(self._arrived, _LOOK_SECONDS)


async def _set_within(event: asyncio.Event, seconds: float) -> None:
    """Wait until the event is set, for this long at most; the event is clear afterwards."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
    event.clear()
