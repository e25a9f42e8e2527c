"""Reading from one peer: a subscription to it on one side, admission on the other.

    upstream ══ EVENTs ══▶ stream's queue ─▶ window ─▶ admission ─▶ writer: packets and cursor, one commit
                           `PeerLink`      `Intake`    `Judging`    `Marking`

The client library provides the connection: it stays connected, proves this relay's identity, pages through
history and goes over to live events, and resumes by cursor after every cut. Packets are taken raw. A full
window stops taking them; the library then leaves the feed, and the upstream's store is the buffer.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence

from strata.protocol.errors import StrataError
from strata.relays.connection.driver import Driver
from strata.relays.connection.queue import QueuedEvent
from strata.relays.connection.stream import Phase, Stream
from strata.relays.connection.values import Statistics

from relayd.access.auth import REPLICATE
from relayd.federation.comparing import Fetched
from relayd.federation.intake import is_keepable
from relayd.federation.judging import Judging
from relayd.federation.link_parts import LinkEnded, LinkParts, NotListed
from relayd.federation.marking import Marking
from relayd.federation.peers_file import Upstream
from relayd.federation.selection import options_for, query_for
from relayd.logs import get_logger
from relayd.store.peers import PeerPlace

__all__ = ["PeerLink"]

_log = get_logger("relayd.federation")

_AUTH_TIMEOUT = 10.0
_AT_ONCE = 64
"""The number of packets taken before other tasks of the relay get their turn."""


class PeerLink:
    """Reading from one peer, until `run` is cancelled or raises `LinkEnded`. Its packets share one lane."""

    def __init__(self, peer: Upstream, peer_id: int, fence: int, place: PeerPlace, parts: LinkParts) -> None:
        self.peer = peer
        self.fence = fence
        self._parts = parts
        self._wake = asyncio.Event()
        self._trouble: str | None = None
        self._is_closed = False
        self._taken: str | None = place.cursor
        self._stream: Stream | None = None
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
        self._marking = Marking(peer, peer_id, fence, place, parts.mesh, parts.store_mark)
        self._judging = Judging(
            peer,
            peer_id,
            parts,
            self._driver,
            offer=self._marking.offer,
            stored=self._marking.stored,
            wake=self._wake.set,
            end=self.end,
            check=self._check_open,
        )

    @property
    def is_connected(self) -> bool:
        """Whether the peer is there and lets this relay replicate."""
        session = self._driver.session
        return session is not None and session.allows(REPLICATE)

    @property
    def has_read_all(self) -> bool:
        """Whether the whole log of the peer has been read, and every packet has its verdict."""
        stream = self._stream
        is_abreast = stream is not None and stream.phase is Phase.LIVE and not any(stream.waiting())
        return is_abreast and not len(self._marking.intake)

    @property
    def problem(self) -> str | None:
        """How the last connection, or the last attempt to connect, has ended."""
        problem = self._driver.last_problem
        return None if problem is None else str(problem)

    @property
    def statistics(self) -> Statistics:
        """The counters of the connection, which go on counting."""
        return self._driver.statistics

    @property
    def round_trip(self) -> float | None:
        """The time that the last ping took, in seconds."""
        return self._driver.round_trip

    @property
    def last_witness(self) -> int | None:
        """The latest time at which any packet read so far was first received anywhere."""
        return self._marking.intake.last_witness

    async def run(self) -> None:
        """Read until cancelled. Raises `LinkEnded`; nothing of the link is under way then."""
        mesh, driver, did = self._parts.mesh, self._driver, self.peer.relay_id
        mesh.start(did, self._taken, time.monotonic())
        flusher = asyncio.create_task(self._marking.flush(), name=f"peer-flush {did}")
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
            self._judging.close()
            mesh.lost(did, time.monotonic())
            driver.stop(LinkClosed())
            self._judging.release()
            with contextlib.suppress(StrataError):
                await driver.stopped()

    async def fetch(self, ids: Sequence[bytes]) -> Fetched:
        """Have the peer send these packets, and wait for the verdicts: see `Asking`. Raises `LinkEnded`."""
        return await self._judging.asking.fetch(ids)

    def end(self, why: str) -> None:
        """Have `run` end with this reason."""
        self._trouble = why
        self._wake.set()

    # Reading.

    async def _read(self) -> None:
        mesh, did, marking = self._parts.mesh, self.peer.relay_id, self._marking
        while True:
            reading = mesh.read(did, time.monotonic())
            if reading.rewinds:
                _log.info("peer_read_again", peer=did, reason="another peer of the group is silent")
                marking.begin(reading.from_cursor)
                self._taken = reading.from_cursor
            last_witness = marking.intake.last_witness
            query = query_for(self.peer, self._taken, reading.not_via, last_witness=last_witness)
            stream, arrived = self._driver.subscribe(query)
            self._stream = stream
            try:
                await self._take_from(stream, arrived)
            finally:
                with self._driver.step as core:
                    core.unsubscribe(stream)

    async def _take_from(self, stream: Stream, arrived: asyncio.Event) -> None:
        """Take packets until the peer must be asked for another selection."""
        mesh, did = self._parts.mesh, self.peer.relay_id
        taken = 0
        while not mesh.is_due(did, time.monotonic()):
            if stream.phase is Phase.ENDED and stream.error is not None:
                raise LinkEnded(str(stream.error))
            self._check_session()
            self._check_cursors()
            is_waiting = any(stream.waiting())
            if self.is_connected and (is_waiting or stream.phase is Phase.LIVE):
                mesh.heard(did)
            if stream.phase is Phase.LIVE and not is_waiting:
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

    def _receive(self, event: QueuedEvent) -> None:
        if not is_keepable(event.cursor):
            raise LinkEnded("the peer gives a cursor that cannot be kept")
        intake = self._marking.intake
        item = intake.add(bytes(event.packet), event.received_at, event.cursor)
        self._taken = event.cursor or self._taken
        self._judging.submit(intake, item)

    @property
    def _has_room(self) -> bool:
        return self._judging.has_room(self._marking.intake)

    # The state of the peer and the session.

    def _changed(self) -> None:
        """A connection came or went. A new connection does not mean that the peer lets itself be read."""
        if self._driver.announced is None:
            self._parts.mesh.lost(self.peer.relay_id, time.monotonic())
        self._wake.set()

    def _check_cursors(self) -> None:
        """Report a doubt if the log lost its end or forgot a cursor: cursors may have skipped packets."""
        statistics = self._driver.statistics
        doubts = statistics.log_resets + statistics.cursor_fallbacks
        if doubts != self._doubts:
            self._doubts = doubts
            self._parts.told.doubted()

    def _check_session(self) -> None:
        """End the link if the session lacks `replicate`: its packets may then differ from what was signed."""
        if self._trouble is not None:
            raise LinkEnded(self._trouble)
        if self._driver.failure is not None:
            raise LinkEnded(str(self._driver.failure))
        session = self._driver.session
        if session is not None and not session.allows(REPLICATE):
            raise NotListed("the peer does not name this relay in its replication_peers any more")

    def _check_open(self) -> None:
        if self._is_closed or self._trouble is not None:
            raise LinkEnded(self._trouble or "the link has ended")


class LinkClosed(StrataError):
    """The link was ended on this side."""
