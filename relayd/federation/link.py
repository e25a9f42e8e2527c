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

import msgspec
import structlog
from strata.protocol.errors import ErrorCode, InvalidPacket, StrataError
from strata.protocol.ids import Identity
from strata.protocol.keys import IDENTITY_TYPES
from strata.protocol.provenance.manifest import CLIENT_MANIFEST
from strata.relays.connection.driver import Driver
from strata.relays.connection.options import Options
from strata.relays.connection.stream import Phase, QueuedEvent, Stream
from strata.relays.connection.values import Query

from relayd.access.auth import REPLICATE, SUBSCRIBE
from relayd.admission.origin import PeerOrigin
from relayd.admission.pipeline import Admission
from relayd.admission.request import Lane, PublishRequest
from relayd.federation.intake import Intake, Item, PeerVerdict, judge_refusal, retry_delay
from relayd.federation.mesh import Mesh
from relayd.federation.peers_file import Upstream
from relayd.store.peers import PeerPlace
from relayd.store.types import PeerMark, StoreError

__all__ = ["Link", "LinkEnded", "LinkParts", "LinkReports", "NotListed", "options_for", "stream_of"]

_log = structlog.get_logger("relayd.federation")

_FALLBACK_SECONDS = 86_700
"""How much older than its receipt a packet's timestamp may be, with both clocks' error (A-042)."""
_FLUSH_SECONDS = 1.0
_AUTH_TIMEOUT = 10.0
_KEY_FETCHES = 4
_KEY_TIMEOUT = 30.0
_FETCH_TIMEOUT = 120.0
_AT_ONCE = 64
"""Packets taken before other tasks of the relay get their turn."""


class LinkEnded(Exception):
    """The peer cannot be read from for now; the text says why."""


class NotListed(LinkEnded):
    """The peer does not let this relay replicate (R-356)."""


def options_for(peer: Upstream) -> Options:
    """How the connection to a peer behaves: it is held to its DID (R-298) and authenticates first (R-353)."""
    return Options(
        relay_id=peer.relay_id,
        authenticate="always",
        capabilities=(SUBSCRIBE, REPLICATE),
        resolve_keys=False,
        ping_interval=10.0,
        ping_timeout=20.0,
        backoff_base=0.5,
        backoff_cap=15.0,
    )


def stream_of(peer: Upstream) -> str:
    """Names what is read from a peer: another selection is another stream, and begins anew."""
    if peer.is_whole:
        return "all"
    return "\n".join(["types", *sorted(peer.types), "authors", *sorted(peer.authors)])


@dataclass(slots=True)
class LinkReports:
    """What a link tells of what it reads."""

    verdicts: Callable[[PeerVerdict], None]
    refused_witness: Callable[[], None]
    skipped: Callable[[bytes, int, str], None]
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
        self._fetches: dict[Intake, asyncio.Event] = {}
        """Windows of packets that were asked for by id, and what is set when all have their verdict."""
        self._doubts = 0
        self._key_slots = asyncio.Semaphore(_KEY_FETCHES)
        self._driver = Driver(
            peer.url,
            options_for(peer),
            signer=parts.identity,
            ssl=None,
            pins=None,
            met=None,
            changed=self._changed,
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
            stream, arrived = self._driver.subscribe(self._query(self._taken, reading.not_via))
            try:
                await self._take_from(stream, arrived)
            finally:
                with self._driver.step as core:
                    core.unsubscribe(stream)

    def _query(self, cursor: str | None, not_via: Sequence[str]) -> Query:
        """R-360, R-365, R-366: from where it was read to, else from the beginning of all that may count."""
        peer, place = self.peer, self._place
        since = 0 if place.oldest_witness is None else max(0, place.oldest_witness - _FALLBACK_SECONDS)
        last = self._intake.last_witness
        types = (*peer.types, *sorted(IDENTITY_TYPES), CLIENT_MANIFEST) if peer.types else ()
        return Query(
            authors=peer.authors,
            types=tuple(dict.fromkeys(types)),
            cursor=cursor,
            since=since if cursor is None else None,
            cursor_fallback_since=max(0, last - _FALLBACK_SECONDS) if last is not None else 0,
            not_via=tuple(not_via),
            replication_profile="FULL_ARCHIVE",
        )

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

    async def fetch(self, ids: Sequence[bytes]) -> set[bytes]:
        """Have the peer send these packets, at most as many as the window holds, and wait for the verdicts.

        Returns the ids of those that came; waits a minute or two at most. Raises `LinkEnded`. Cancelling
        leaves those that came to their verdicts.
        """
        intake, sent = Intake(None), set[bytes]()
        done = self._fetches[intake] = asyncio.Event()
        wanted = tuple("0x" + packet_id.hex() for packet_id in ids)
        stream, arrived = self._driver.subscribe(Query(packet_ids=wanted, live=False))
        try:
            async with asyncio.timeout(_FETCH_TIMEOUT):
                while stream.phase is not Phase.ENDED or any(stream.waiting()):
                    if self._is_closed or self._trouble is not None:
                        raise LinkEnded(self._trouble or "the link has ended")
                    event = stream.take()
                    if isinstance(event, QueuedEvent):
                        with self._driver.step as core:
                            core.taken(stream, delivered=True, now=self._driver.loop.time())
                        if len(sent) < len(ids) and (packet_id := _id_of(event)) in wanted:
                            while not self._has_room_in(intake) and not self._is_closed:
                                await _set_within(done, 1.0)
                            sent.add(bytes.fromhex(packet_id[2:]))
                            self._submit(intake, intake.add(bytes(event.packet), event.received_at, None))
                            await asyncio.sleep(0)
                    elif event is None and stream.phase is not Phase.ENDED:
                        arrived.clear()
                        if not any(stream.waiting()):
                            await _set_within(arrived, 1.0)
                while len(intake) and not self._is_closed:
                    await _set_within(done, 1.0)
        except TimeoutError:
            pass  # what is left has its verdict later, or is found missing again
        finally:
            del self._fetches[intake]
            with self._driver.step as core:
                core.unsubscribe(stream)
        return sent

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
                elif packet is not None:
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
        for event in self._fetches.values():
            event.set()

    def end(self, why: str) -> None:
        """Have `run` end with this."""
        self._trouble = why
        self._wake.set()

    def _settle(self, request: PublishRequest, verdict: PeerVerdict) -> None:
        intake, item = self._items.pop(request)
        intake.settle(item)
        if (looked_at := self._fetches.get(intake)) is not None:
            looked_at.set()
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
        async with self._key_slots:
            query = Query(authors=(author,), types=tuple(sorted(IDENTITY_TYPES)), live=False)
            stream, arrived = self._driver.subscribe(query)
            try:
                async with asyncio.timeout(_KEY_TIMEOUT):
                    while stream.phase is not Phase.ENDED or any(stream.waiting()):
                        event = stream.take()
                        if isinstance(event, QueuedEvent):
                            with self._driver.step as core:
                                core.taken(stream, delivered=True, now=self._driver.loop.time())
                            await self._take_key(event)
                        elif stream.phase is not Phase.ENDED:
                            arrived.clear()
                            await arrived.wait()
                item.has_keys = stream.error is None
            except TimeoutError:
                pass  # judged without them, then
            finally:
                with self._driver.step as core:
                    core.unsubscribe(stream)
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


async def _set_within(event: asyncio.Event, seconds: float) -> None:
    """Wait until it is set, and so long at most; it is clear afterwards."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
    event.clear()


class _Named(msgspec.Struct, gc=False):
    packet_id: str


_NAMED = msgspec.json.Decoder(_Named)


def _id_of(event: QueuedEvent) -> str:
    """The id that a packet claims; admission checks it."""
    try:
        return _NAMED.decode(event.packet).packet_id
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return ""


class LinkClosed(StrataError):
    """The link was ended on this side."""


def _reason(error: InvalidPacket) -> str:
    return (
        f"{ErrorCode(error.code).value}/{error.detail}" if error.detail else str(ErrorCode(error.code).value)
    )
