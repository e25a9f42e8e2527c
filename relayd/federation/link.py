"""Reading from one peer: a subscription to it on one side, admission on the other.

    upstream ══ EVENTs ══▶ stream's queue ─▶ window ─▶ admission ─▶ writer: packets and cursor, one commit

The connection is the client library's: it stays connected, proves this relay's identity, pages through
history and goes over to live events, and goes on by cursor after every cut. Packets are taken raw, and judged
as those of any publisher are (R-349). A window that is full stops taking; the library then leaves the feed
and the upstream's store is the buffer.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

import structlog
from strata.protocol.errors import ErrorCode, InvalidPacket, StrataError
from strata.protocol.ids import Identity
from strata.relays.connection.driver import Driver
from strata.relays.connection.stream import Phase, QueuedEvent, Stream
from strata.relays.connection.values import Statistics

from relayd.access.auth import REPLICATE
from relayd.admission.origin import PeerOrigin
from relayd.admission.pipeline import Admission
from relayd.admission.request import Lane, PublishRequest
from relayd.federation.asking import Asking
from relayd.federation.comparing import Fetched
from relayd.federation.intake import Intake, Item, PeerVerdict, is_suspicious, judge_refusal, retry_delay
from relayd.federation.mesh import Mesh
from relayd.federation.peers_file import Upstream
from relayd.federation.selection import options_for, query_for, stream_of
from relayd.store.peers import PeerPlace
from relayd.store.types import PeerMark, StoreError

__all__ = ["Link", "LinkEnded", "LinkParts", "LinkReports", "NotListed"]

_log = structlog.get_logger("relayd.federation")

_FLUSH_SECONDS = 1.0
_AUTH_TIMEOUT = 10.0
_AT_ONCE = 64
"""Packets taken before other tasks of the relay get their turn."""


class LinkEnded(Exception):
    """The peer cannot be read from for now; the text says why."""


class NotListed(LinkEnded):
    """The peer does not let this relay replicate (R-356)."""


@dataclass(slots=True)
class LinkReports:
    """What a link tells of what it reads."""

    verdicts: Callable[[PeerVerdict], None]
    refused_witness: Callable[[], None]
    skipped: Callable[[bytes, int, str], None]
    malformed: Callable[[], None]
    forged: Callable[[str], None]
    doubted: Callable[[], None] = lambda: None
    """The peer's log is not the one that was read: its cursors may have passed what is missing here."""


@dataclass(slots=True, kw_only=True)
class LinkParts:
    """What a link works with."""

    identity: Identity
    admission: Admission
    mesh: Mesh
    store_mark: Callable[[PeerMark], Awaitable[None]]
    """Stores how far a peer was read where no packet is stored with it."""
    clock: Callable[[], int]
    max_backfill_seconds: int
    told: LinkReports


class Link:
    """One peer, from `run` until that is cancelled or raises `LinkEnded`. Its packets have one lane."""

    def __init__(self, peer: Upstream, peer_id: int, fence: int, place: PeerPlace, parts: LinkParts) -> None:
        self.peer = peer
        self.fence = fence
        self._peer_id = peer_id
        self._parts = parts
        self._place = place
        self._intake = self._begin(place.cursor)
        self._lane = Lane(self, peer.relay_id, self._mark)
        self._key_lane = Lane(self, peer.relay_id)
        self._items: dict[PublishRequest, tuple[Intake, Item]] = {}
        self._answers: dict[PublishRequest, asyncio.Future[None]] = {}
        self._wake = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._trouble: str | None = None
        self._is_closed = False
        self._stored: PeerMark | None = None
        self._offered: PeerMark | None = None
        self._taken: str | None = place.cursor
        self._doubts = 0
        self._driver = Driver(
            peer.url,
            options_for(peer),
            signer=parts.identity,
            ssl=None,
            pins=None,
            met=None,
            changed=self._changed,
        )
        self._asking = Asking(
            self._driver, submit=self._submit, has_room=self._has_room_in, check=self._check_open
        )

    def _begin(self, cursor: str | None) -> Intake:
        place = self._place
        return Intake(cursor, oldest_witness=place.oldest_witness, last_witness=place.last_witness)

    @property
    def is_connected(self) -> bool:
        """Whether the peer is there and lets this relay replicate."""
        session = self._driver.session
        return session is not None and session.allows(REPLICATE)

    @property
    def statistics(self) -> Statistics:
        """What has happened on the connection; the counters go on counting."""
        return self._driver.statistics

    @property
    def round_trip(self) -> float | None:
        """Seconds that the last ping took."""
        return self._driver.round_trip

    @property
    def last_witness(self) -> int | None:
        """The latest time at which a packet that was read was first received anywhere."""
        return self._intake.last_witness

    async def run(self) -> None:
        """Read until cancelled. Raises `LinkEnded`, after which nothing of it is under way."""
        parts, driver = self._parts, self._driver
        parts.mesh.start(self.peer.relay_id, self._place.cursor, time.monotonic())
        flusher = asyncio.create_task(self._flush(), name=f"peer-flush {self.peer.relay_id}")
        try:
            driver.prepare()
            await driver.open()
            session = await driver.authenticate(_AUTH_TIMEOUT)
            if not session.allows(REPLICATE):
                raise NotListed("the peer does not name this relay in its replication_peers")
            await self._read()
        except StrataError as error:
            raise LinkEnded(str(error)) from None
        finally:
            flusher.cancel()
            self._is_closed = True
            for task in list(self._tasks):
                task.cancel()
            parts.mesh.lost(self.peer.relay_id, time.monotonic())
            driver.stop(LinkClosed())
            self._parts.admission.release(self)
            with contextlib.suppress(StrataError):
                await driver.stopped()

    # Reading.

    async def _read(self) -> None:
        mesh, did = self._parts.mesh, self.peer.relay_id
        while True:
            reading = mesh.read(did, time.monotonic())
            if reading.rewinds:
                _log.info("peer_read_again", peer=did, reason="another peer of the group is silent")
                self._intake = self._begin(reading.from_cursor)
                self._taken = reading.from_cursor
            query = query_for(
                self.peer,
                self._taken,
                reading.not_via,
                oldest_witness=self._place.oldest_witness,
                last_witness=self._intake.last_witness,
            )
            stream, arrived = self._driver.subscribe(query)
            try:
                await self._take_from(stream, arrived)
            finally:
                with self._driver.step as core:
                    core.unsubscribe(stream)

    async def _take_from(self, stream: Stream, arrived: asyncio.Event) -> None:
        """Take packets until the peer is to be asked for something else."""
        mesh, did = self._parts.mesh, self.peer.relay_id
        taken = 0
        while not mesh.is_due(did, time.monotonic()):
            if stream.phase is Phase.ENDED and stream.error is not None:
                raise LinkEnded(str(stream.error))
            self._check_session()
            self._check_cursors()
            if stream.phase is Phase.LIVE and not any(stream.waiting()):
                mesh.caught_up(did)
            if self._has_room and (event := stream.take()) is not None:
                if isinstance(event, QueuedEvent):
                    self._receive(event)
                with self._driver.step as core:
                    core.taken(stream, delivered=True, now=self._driver.loop.time())
                taken += 1
                if taken % _AT_ONCE == 0:
                    await asyncio.sleep(0)
                continue
            self._wake.clear()
            arrived.clear()
            if (self._has_room and any(stream.waiting())) or stream.phase is Phase.ENDED:
                continue
            await self._woken(arrived)

    async def _woken(self, arrived: asyncio.Event) -> None:
        waits = [asyncio.ensure_future(event.wait()) for event in (arrived, self._wake)]
        try:
            await asyncio.wait(waits, timeout=1.0, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    @property
    def _has_room(self) -> bool:
        return self._has_room_in(self._intake)

    def _has_room_in(self, intake: Intake) -> bool:
        if self._parts.admission.is_full():
            self._parts.admission.hold(self)
            return False
        return intake.has_room

    def _check_cursors(self) -> None:
        """A log that has lost its end, or forgotten a cursor, may hold what its cursors have passed."""
        statistics = self._driver.statistics
        doubts = statistics.log_resets + statistics.cursor_fallbacks
        if doubts != self._doubts:
            self._doubts = doubts
            self._parts.told.doubted()

    def _check_session(self) -> None:
        """What comes over a session without `replicate` may not be as it was signed: nothing of it counts."""
        if self._trouble is not None:
            raise LinkEnded(self._trouble)
        if self._driver.failure is not None:
            raise LinkEnded(str(self._driver.failure))
        session = self._driver.session
        if session is not None and not session.allows(REPLICATE):
            raise NotListed("the peer does not name this relay in its replication_peers any more")

    def _changed(self) -> None:
        """A connection came or went."""
        if self._driver.announced is None:
            self._parts.mesh.lost(self.peer.relay_id, time.monotonic())
        else:
            self._parts.mesh.connected(self.peer.relay_id)
        self._wake.set()

    def _receive(self, event: QueuedEvent) -> None:
        item = self._intake.add(bytes(event.packet), event.received_at, event.cursor)
        self._taken = event.cursor or self._taken
        self._submit(self._intake, item)

    def _submit(self, intake: Intake, item: Item) -> None:
        item.attempts += 1
        request = self._request(item.raw, item.received_at, self._lane)
        self._items[request] = (intake, item)
        self._parts.admission.submit(request)

    def _request(self, raw: bytes, received_at: int, lane: Lane) -> PublishRequest:
        origin = PeerOrigin(
            self._peer_id, received_at, self.peer.trust_received_at, self._parts.max_backfill_seconds
        )
        return PublishRequest(raw, None, lane, time.monotonic(), origin)

    async def fetch(self, ids: Sequence[bytes]) -> Fetched:
        """Have the peer send these packets, and wait for the verdicts: see `Asking`. Raises `LinkEnded`."""
        return await self._asking.fetch(ids)

    def _check_open(self) -> None:
        if self._is_closed or self._trouble is not None:
            raise LinkEnded(self._trouble or "the link has ended")

    # How far it was read.

    def _mark(self, requests: Sequence[PublishRequest]) -> PeerMark | None:
        """The writer asks: how far the peer was read once these are stored."""
        if self._is_closed:
            return None
        batch = {item for request in requests if (item := self._items.get(request)) is not None}
        self._offered = self._made_mark({item for _, item in batch})
        return self._offered

    def _made_mark(self, batch: set[Item]) -> PeerMark:
        intake = self._intake
        cursor = intake.cursor_with(batch)
        safe = self._parts.mesh.to_store(self.peer.relay_id, cursor, time.monotonic())
        return PeerMark(
            self._peer_id, self.fence, stream_of(self.peer), safe, intake.oldest_witness, intake.last_witness
        )

    async def _flush(self) -> None:
        """Store now and then how far the peer was read where no packet was stored with it."""
        while True:
            await asyncio.sleep(_FLUSH_SECONDS)
            mark = self._made_mark(set())
            if mark != self._stored and mark.cursor is not None:
                with contextlib.suppress(StoreError):  # next time, then
                    await self._parts.store_mark(mark)
                    self._stored = mark

    # Publisher: called by admission.

    def publish_accepted(
        self,
        request: PublishRequest,
        received_at: int,
        *,
        duplicate: bool,
        duplicate_of: bytes | None = None,
        queued: bool = False,
    ) -> None:
        """The packet is in the log."""
        if (answer := self._answers.pop(request, None)) is not None:
            answer.set_result(None)
            return
        origin = request.origin
        if origin is not None and origin.is_trusted and request.is_parsed and request.witness is None:
            self._parts.told.refused_witness()
        self._settle(request, PeerVerdict.KNOWN if duplicate else PeerVerdict.STORED)

    def publish_refused(self, request: PublishRequest, error: InvalidPacket) -> None:
        """The packet is not in the log: passed over, tried again, or an offence."""
        if (answer := self._answers.pop(request, None)) is not None:
            answer.set_result(None)
            return
        intake, item = self._items[request]
        verdict = judge_refusal(item, error)
        packet = request.packet if request.is_parsed else None
        match verdict:
            case PeerVerdict.LATER:
                del self._items[request]
                now = self._parts.clock()
                self._later(intake, item, retry_delay(item, packet, error, now))
                self._parts.told.verdicts(verdict)
            case PeerVerdict.KEYS if packet is not None:
                del self._items[request]
                self._spawn(self._with_keys(intake, item, packet.author_id))
                self._parts.told.verdicts(verdict)
            case _:
                if verdict is PeerVerdict.FORGED:
                    self._parts.told.forged(_reason(error))
                elif is_suspicious(error):
                    self._parts.told.malformed()
                if verdict is not PeerVerdict.FORGED and packet is not None:
                    self._parts.told.skipped(packet.digest, packet.timestamp, _reason(error))
                self._settle(request, verdict)

    def publish_unanswerable(self) -> None:
        """A verdict could not be taken: begin anew at the last place that is stored."""
        self.end("a verdict on a packet was lost")

    def checked_for(self, seconds: float) -> None:
        """Nothing is owed: the operator chose the peer, and the window bounds what of it is under way."""

    def room_again(self) -> None:
        """There is room for publishes again."""
        self._wake.set()
        self._asking.wake()

    def end(self, why: str) -> None:
        """Have `run` end with this."""
        self._trouble = why
        self._wake.set()

    def _settle(self, request: PublishRequest, verdict: PeerVerdict) -> None:
        intake, item = self._items.pop(request)
        intake.settle(item)
        self._asking.settled(intake)
        if verdict is PeerVerdict.STORED:
            self._stored = self._offered
        self._parts.told.verdicts(verdict)
        self._wake.set()

    def _later(self, intake: Intake, item: Item, delay: float) -> None:
        async def again() -> None:
            await asyncio.sleep(delay)
            self._submit(intake, item)

        self._spawn(again())

    async def _with_keys(self, intake: Intake, item: Item, author: str) -> None:
        """Fetch an author's identity packets and judge the packet once more: a peer may send out of order."""
        item.asked_for_keys = True
        try:
            item.has_keys = await self._asking.keys_of(author, self._take_key)
        except LinkEnded:
            return  # the packet comes again, to the next link
        self._submit(intake, item)

    async def _take_key(self, event: QueuedEvent) -> None:
        request = self._request(bytes(event.packet), event.received_at, self._key_lane)
        answer = self._answers[request] = asyncio.get_running_loop().create_future()
        self._parts.admission.submit(request)
        await answer

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        if self._is_closed:  # what was under way comes again, to the next link
            work.close()
            return
        task = asyncio.create_task(work, name=f"peer-packet {self.peer.relay_id}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class LinkClosed(StrataError):
    """The link was ended on this side."""


def _reason(error: InvalidPacket) -> str:
    return (
        f"{ErrorCode(error.code).value}/{error.detail}" if error.detail else str(ErrorCode(error.code).value)
    )
