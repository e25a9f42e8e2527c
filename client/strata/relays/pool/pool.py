"""Several relays as a program sees them: publish, subscribe, look up packets. An asyncio shell."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import ssl as ssl_module
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from dataclasses import replace
from types import TracebackType
from typing import Self, Unpack

from strata.protocol import packets
from strata.protocol.errors import Closed, ConnectionFailed, RequestTimeout, StrataError
from strata.protocol.ids import Signer
from strata.protocol.packets import Packet
from strata.relays.arguments import check_connecting, check_packet, check_text, check_timeout, texts
from strata.relays.bootstrap import KnownRelay
from strata.relays.connection.dialing import check_tls, check_url, is_relay_url, shown
from strata.relays.connection.driver import check_loop
from strata.relays.connection.keyring import Anchors
from strata.relays.connection.pins import address_of
from strata.relays.connection.relay import PacketRelay
from strata.relays.connection.values import Delivery, Query, SubscribeOptions
from strata.relays.peer_timeout import PeerTimeout
from strata.relays.pool.checks import Checks
from strata.relays.pool.link import MakeRelay, PoolRelay
from strata.relays.pool.options import PoolOptions
from strata.relays.pool.patience import FindPatience
from strata.relays.pool.profiles import EffectiveProfile, Profile
from strata.relays.pool.publisher import Publisher
from strata.relays.pool.reading import Reading
from strata.relays.pool.relays import Relays
from strata.relays.pool.subscription import PoolSubscription
from strata.relays.pool.values import (
    PoolFetchOptions,
    PoolPublished,
    PoolStatistics,
    PoolSubscribeOptions,
    Position,
    RelayView,
    check_positions,
)

__all__ = ["PacketPool"]

_log = logging.getLogger("strata.pool")

_HOUSEKEEPING_INTERVAL = 1.0
_HOUSEKEEPING_GAP = 0.02
"""However often it is woken, the housekeeper yields the loop to other tasks for this long."""
_SHIELDED_CONNECTIONS = 3
_COMPANY_SECONDS = 0.5
_HEAD_TIMEOUT = 2.0
_BY_ID = frozenset({"packet_ids", "http_packets"})
"""The extensions of relays that look packets up by their ids; others search their history."""
_SEARCHES = 10
"""How many times as long a search may bring nothing."""


class PacketPool:
    """Several relays that look like one; packets only. Belongs to one event loop.

    `strata.connect_pool` returns `strata.Pool`, which also opens channels.

    A packet is published to several relays at once, and a relay that does not answer delays nothing. A
    subscription reads from several relays and delivers each packet once. A relay that fails is replaced, and
    a relay that lies is no longer used. `make` replaces the function that makes connections, `wall` the
    clock, `random` the source of random numbers. A pool can be opened once: calls before that, and opening it
    again, raise `RuntimeError`.
    """

    def __init__(
        self,
        relays: Iterable[str | KnownRelay],
        *,
        identity: Signer | None = None,
        ssl: ssl_module.SSLContext | None = None,
        pins: str | os.PathLike[str] | None = None,
        anchors: Anchors | None = None,
        options: PoolOptions | None = None,
        make: MakeRelay | None = None,
        wall: Callable[[], float] = time.time,
        random: Callable[[], float] = random.random,
    ) -> None:
        options = PoolOptions() if options is None else options
        if not isinstance(options, PoolOptions):
            raise TypeError(
                f"options must be PoolOptions(…), not {type(options).__name__}: those of each connection are "
                "PoolOptions(relay=…)"
            )
        each = options.relay
        if options.profile is not Profile.STANDARD:
            options = replace(options, connections=max(options.connections, _SHIELDED_CONNECTIONS))
            if each.authenticate == "always":
                each = replace(each, authenticate="when_needed")
        if isinstance(relays, str):
            relays = [relays]  # itself, not its letters
        if not isinstance(relays, Iterable):
            raise TypeError(f"relays must be URLs of relays in a list, not {relays!r}")
        known = [KnownRelay(relay) if isinstance(relay, str) else relay for relay in relays]
        check_tls(ssl)
        for relay in known:
            check_connecting(getattr(relay, "url", relay), identity)
        relay_ids = {relay.url: relay.relay_id for relay in known if relay.relay_id is not None}
        met = {relay_id: address_of(url) for url, relay_id in relay_ids.items()}

        def connection(url: str, changed: Callable[[], None]) -> PoolRelay:
            return PacketRelay(
                url,
                identity=identity,
                ssl=ssl,
                pins=pins,
                anchors=anchors,
                options=replace(each, relay_id=relay_ids[url]) if url in relay_ids else each,
                met=met,
                changed=changed,
            )

        self._identity = identity
        self._options = options
        self._wall = wall
        self._random = random
        self._relays = Relays(
            dict.fromkeys(relay.url for relay in known),
            options,
            make=make or connection,
            came=self._relay_came,
            wall=wall,
            random=random,
        )
        self._readings: dict[Reading, None] = {}
        self._is_opened = False
        self._runner: asyncio.Task[None] | None = None
        self._failure: StrataError | None = None
        self._first = asyncio.Event()
        """Set once opening has succeeded or failed."""
        self._arrival = asyncio.Event()
        """Set, and replaced by a new event, when a relay has connected."""

    # Opening and closing.

    async def open(self) -> Self:
        """Connect to the first relays; returns when one is connected. Cancelling closes everything again.

        Raises `ConnectionFailed` if no relay could be reached in time, `OSError` for an unusable scores file,
        and `Closed` if the pool was closed before or meanwhile.
        """
        if self._is_opened:
            raise RuntimeError("a pool can be opened once")
        if not self._relays.urls:
            raise ConnectionFailed("a pool needs the URL of at least one relay")
        if not any(map(is_relay_url, self._relays.urls)):
            check_url(self._relays.urls[0])  # raises an error that shows what a URL looks like
        self._is_opened = True
        self._loop = asyncio.get_running_loop()
        try:
            if self._options.scores is not None:
                await self._relays.load(self._options.scores)
            self._check_failure()  # it may have been closed meanwhile
        except BaseException:
            self._is_opened = False
            self._relays.close_scores()
            raise
        relays, options, profile = self._relays, self._options, self._relays.profile
        copies = max(options.copies, profile.min_relays)
        self._checks = Checks(relays, options, copies=copies, random=self._random, wall=self._wall)
        self._publisher = Publisher(relays, self._checks, options, random=self._random)
        for warning in profile.warnings:
            _log.warning("%s", warning)
        self._runner = self._loop.create_task(self._run(), name="strata-pool")
        try:
            async with PeerTimeout(self._options.relay.connect_timeout):
                await self._first.wait()
            self._check_failure()
        except TimeoutError:
            await self.close()
            raise ConnectionFailed("none of the pool's relays can be reached") from None
        except BaseException:
            await self.close()
            raise
        return self

    async def close(self) -> None:
        """Close every connection and end every task. Idempotent.

        Publishes and subscriptions still waiting raise `Closed`; copies in the background are abandoned.
        Takes as long as the slowest relay takes to close, at most a second longer than
        `Options.close_timeout`.
        """
        self._check_loop()
        self._fail(Closed("the pool was closed"))
        if self._runner is not None:
            if not self._runner.done():  # if it is, its loop may be closed
                self._runner.cancel()
                await asyncio.wait([self._runner])
            self._relays.close_scores()  # a task that is cancelled before its first step runs no `finally`
            if not self._runner.cancelled():
                self._runner.result()  # errors in our own code must not go unnoticed

    async def __aenter__(self) -> Self:
        return await self.open()

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    # Publishing.

    async def publish(
        self,
        packet: Packet,
        *,
        timeout: float | None = None,
        on_stored: Callable[[], None] | None = None,
    ) -> PoolPublished:
        """Publish a packet to several relays; returns once `PoolOptions.confirmations` of them stored it.

        `on_stored` is called when the first of them has stored it. If it raises, so does this method in the
        end, although the packet is stored.

        The other copies continue in the background, and every relay that said OK is asked later whether it
        has the packet (`presence_delay`). A relay that does not answer delays nothing.

        Raises `RequestRefused` if every relay refuses the packet permanently, `RequestTimeout` if too few
        said OK within `timeout` seconds, `Closed`. After a timeout or cancellation the packet may or may not
        be stored; publishing the same packet again is safe.
        """
        self._check_open()
        check_packet(packet)
        check_timeout(timeout)
        timeout = self._options.publish_timeout if timeout is None else timeout
        return await self._publisher.publish(packet, timeout, on_stored)

    async def post(
        self, content: Mapping[str, object], *, expires_at: int | None = None, timeout: float | None = None
    ) -> PoolPublished:
        """Sign `content` with the pool's identity and the current time, and `publish` it.

        Raises what `publish` and `packets.build` raise, and `ValueError` without an identity.
        """
        if self._identity is None:
            raise ValueError("posting needs an identity: connect_pool(urls, identity=...)")
        packet = packets.build(self._identity, content, timestamp=int(self._wall()), expires_at=expires_at)
        return await self.publish(packet, timeout=timeout)

    # Reading.

    def subscribe(self, **options: Unpack[PoolSubscribeOptions]) -> PoolSubscription:
        """Read stored packets that match and then, with `live`, new ones, each once.

        `PoolSubscribeOptions` describes the options. Stored packets come from `PoolOptions.readers` relays.
        Raises `ValueError` for options that no relay could serve, `TypeError` for options that do not exist,
        and `Closed`.
        """
        self._check_open()
        positions = options.pop("positions", None) or {}
        check_positions(positions)
        query = Query.of(options, PoolSubscribeOptions)
        # A request for a packet by id cannot be hidden among others.
        coarse = self._relays.profile.coarse_filters and not query.packet_ids
        reading = Reading(
            self._relays,
            query,
            self._options,
            coarse=coarse,
            positions=positions,
            ended=self._reading_ended,
            wall=self._wall,
        )
        self._readings[reading] = None
        reading.manage()
        return PoolSubscription(reading)

    def fetch(self, **options: Unpack[PoolFetchOptions]) -> PoolSubscription:
        """Read stored packets that match, each once; ends when there are no more.

        The same as `subscribe` with `live=False`. A relay that brings nothing for long, or cannot be read to
        the end, is left once another one has come to its end: `PoolSubscription.unfinished` names it.
        """
        return self.subscribe(**options, live=False)

    async def get(
        self,
        packet_id: str,
        *,
        authors: Iterable[str] | str = (),
        since: int | None = None,
        until: int | None = None,
        timeout: float | None = None,
    ) -> Delivery | None:
        """Return the packet with this id, from the first relay that returns it; None if no relay has it.

        Asks every connected relay. Raises `Closed`, and `RequestTimeout` if no relay is connected, or if none
        returned the packet and some did not answer within `timeout` seconds (default
        `Options.history_timeout`).
        """
        self._check_open()
        check_text("packet_id", packet_id, may_be_none=False)
        check_timeout(timeout)
        timeout = self._options.relay.history_timeout if timeout is None else timeout
        asked = self._connections()
        query: SubscribeOptions = {
            "packet_ids": packet_id,
            "authors": texts("authors", authors),
            "since": since,
            "until": until,
            "limit": 1,
            "live": False,
        }

        async def ask(relay: PoolRelay) -> Delivery | None:
            async with relay.subscribe(**query) as found:
                return await anext(aiter(found), None)

        tasks = {self._loop.create_task(ask(relay), name="strata-pool-get") for relay in asked}
        pending, denials = tasks, 0
        try:
            async with PeerTimeout(timeout):
                while pending:
                    done, pending = await asyncio.wait(pending, return_when="FIRST_COMPLETED")
                    for task in done:
                        error = task.exception()
                        if error is not None and not isinstance(error, StrataError):
                            raise error
                        if error is None and (delivery := task.result()) is not None:
                            return delivery
                        denials += error is None
        except TimeoutError:
            pass
        finally:
            for task in tasks:
                task.cancel()
            if tasks:
                await asyncio.wait(tasks)
        if not asked or denials < len(asked):
            raise RequestTimeout(f"the search for {packet_id}", timeout)
        return None

    async def find(
        self, packet_ids: Iterable[str], *, types: Iterable[str] | str = (), since: int | None = None
    ) -> AsyncGenerator[Delivery, None]:
        """Yield those of these packets that any connected relay has, each once, in any order (C-285).

        Asks one relay after another, for the packets that earlier ones did not have. A relay that brings none
        for `PoolOptions.request_timeout` is left, or for ten times as long if it has to search its history;
        and so is one that brings them so slowly that each takes more than a twentieth of that.
        Raises the last relay's error if no relay could answer, `ConnectionFailed` if no relay is connected,
        and `Closed`.
        """
        self._check_open()
        wanted = dict.fromkeys(texts("packet_ids", packet_ids))
        answered, failure = False, None
        for relay in self._connections():
            if not wanted:
                return
            found = relay.find(tuple(wanted), types=types, since=since)
            patience = FindPatience(self._patience_with(relay))
            try:
                async with contextlib.aclosing(found):
                    while (delivery := await patience.next(found)) is not None:
                        if delivery.packet.packet_id in wanted:
                            del wanted[delivery.packet.packet_id]
                            yield delivery
                answered = True
            except (StrataError, OSError) as error:
                failure = error
        if wanted and not answered:
            raise failure or ConnectionFailed("none of the pool's relays is connected")

    def _patience_with(self, relay: PoolRelay) -> float:
        """How long a relay may take to find a packet, in seconds."""
        extensions = frozenset() if relay.announced is None else relay.announced.extensions
        return self._options.request_timeout * (1 if _BY_ID & extensions else _SEARCHES)

    async def _is_genuine(self, packet: Packet) -> bool:
        """Whether its author signed a packet that came inside another one: see `PacketRelay._is_genuine`.

        Asks one connected relay after another, until one has keys that confirm it. Raises the last relay's
        error if no relay could answer, `ConnectionFailed` if no relay is connected, and `Closed`.
        """
        self._check_open()
        answered, failure = False, None
        for relay in self._connections():
            try:
                if await relay._is_genuine(packet):
                    return True
                answered = True
            except (StrataError, OSError) as error:
                failure = error
        if not answered:
            raise failure or ConnectionFailed("none of the pool's relays is connected")
        return False

    async def heads(self) -> dict[str, Position]:
        """Return the ends of the connected relays' logs: `positions` for a subscription to new packets only.

        Waits up to half a second for relays that are still connecting, if fewer than `PoolOptions.readers`
        are connected. A relay that cannot say where its log ends, or does not within two seconds, is left
        out. Raises `Closed`.
        """
        self._check_open()
        company = self._loop.time() + _COMPANY_SECONDS
        while len(self._relays.connected()) < min(self._options.readers, len(self._relays.urls)):
            try:
                async with asyncio.timeout_at(company):
                    await self._arrival.wait()
            except TimeoutError:
                break
        urls = self._relays.connected()
        cursors = await asyncio.gather(*(self._head_of(url) for url in urls))
        return {url: each for url, each in zip(urls, cursors, strict=True) if each is not None}

    async def _head_of(self, url: str) -> Position | None:
        relay = self._relays.relay(url)
        if relay is None:
            return None
        told, now = relay.latest_time, self._wall()
        try:
            async with PeerTimeout(_HEAD_TIMEOUT):
                cursor = await relay.head()
        except (StrataError, TimeoutError) as error:
            _log.info("%s did not say where it ends: %s", shown(url), error)
            return None
        return None if cursor is None else Position(cursor, int(now if told is None else min(now, told)))

    # Looking.

    @property
    def statistics(self) -> PoolStatistics:
        """The live counters of what has happened so far, which keep changing."""
        return self._relays.statistics

    @property
    def relays(self) -> tuple[RelayView, ...]:
        """What is known about every relay, best first."""
        return tuple(self._relays.views())

    @property
    def profile(self) -> EffectiveProfile:
        """The privacy profile in force, with the one requested and why it is weaker (R-407, R-408)."""
        return self._relays.profile

    @property
    def is_connected(self) -> bool:
        """Whether any relay is connected now."""
        return bool(self._relays.connected())

    @property
    def seats(self) -> tuple[int, int]:
        """How many relays are connected, and how many should be: the number that packets are published to."""
        wanted = min(self._options.copies, len(self._relays.urls))
        return len(self._relays.connected()), max(1, wanted)

    @property
    def max_packet_bytes(self) -> int | None:
        """The smallest limit that a connected relay has announced; None if no relay has announced one."""
        limits = [relay.max_packet_bytes for relay in self._connections()]
        return min((limit for limit in limits if limit is not None), default=None)

    @property
    def latest_time(self) -> float | None:
        """The lowest upper bound of a connected relay's time, in Unix seconds; see `Relay.latest_time`."""
        times = [relay.latest_time for relay in self._connections()]
        return min((at for at in times if at is not None), default=None)

    @property
    def unsettled(self) -> int:
        """The number of published packets not yet confirmed to be present on enough relays (C-274)."""
        return self._checks.unsettled

    def add(self, url: str) -> None:
        """Add a relay to the pool; it will be used in its turn."""
        self._relays.add(url)

    def remove(self, url: str) -> None:
        """Remove a relay from the pool and forget its score, in the scores file too."""
        self._relays.remove(url)

    def _connections(self) -> list[PoolRelay]:
        connected = [self._relays.relay(url) for url in self._relays.connected()]
        return [relay for relay in connected if relay is not None]

    # The housekeeper.

    async def _run(self) -> None:
        try:
            async with asyncio.TaskGroup() as self._relays.tasks:
                self._relays.spawn(self._relays.write_scores(), "strata-pool-scores")
                await self._keep_house()
        finally:
            self._fail(
                ConnectionFailed("the pool was cancelled, as asyncio.run does when it ends; open a new one")
            )

    async def _keep_house(self) -> None:
        while True:
            self._relays.arrange(self._loop.time())
            for reading in list(self._readings):
                reading.manage()
            self._checks.run_due()
            wait = min(self._checks.get_timer() - self._loop.time(), _HOUSEKEEPING_INTERVAL)
            try:
                async with asyncio.timeout(max(wait, _HOUSEKEEPING_GAP)):
                    await self._relays.woken()
                await asyncio.sleep(_HOUSEKEEPING_GAP)
            except TimeoutError:
                pass

    def _relay_came(self, url: str) -> None:
        self._first.set()
        self._arrival.set()
        self._arrival = asyncio.Event()
        for reading in self._readings:
            reading.relay_came(url)

    def _reading_ended(self, reading: Reading) -> None:
        self._readings.pop(reading, None)

    def _fail(self, error: StrataError) -> None:
        """End everything permanently: every waiting call receives the error."""
        if self._failure is None:
            self._failure = error
        self._first.set()
        for reading in list(self._readings):
            reading.end(self._failure)
        if self._runner is not None:
            self._publisher.fail(self._failure)
            self._checks.end()

    def _check_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _check_open(self) -> None:
        self._check_failure()
        if self._runner is None:
            raise RuntimeError("the pool is not open: use `async with`")
        self._check_loop()

    def _check_loop(self) -> None:
        if self._runner is not None and not self._runner.done():
            check_loop(self._loop, "the pool")
