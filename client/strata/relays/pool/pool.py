"""The asyncio shell of a pool of relays. What to do is decided by the modules without I/O beside it."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import ssl as ssl_module
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Self, cast

from strata.protocol import packets
from strata.protocol.errors import Closed, ConnectionFailed, RequestTimeout, StrataError
from strata.protocol.ids import Signer
from strata.protocol.packets import Packet
from strata.relays.bootstrap import KnownRelay
from strata.relays.connection.dialing import shown
from strata.relays.connection.keyring import Anchors
from strata.relays.connection.relay import PacketRelay
from strata.relays.connection.values import Delivery, Order, Query, as_tuple
from strata.relays.pool.checks import Checks
from strata.relays.pool.link import Link, PoolRelay
from strata.relays.pool.membership import Membership
from strata.relays.pool.options import PoolOptions
from strata.relays.pool.profiles import EffectiveProfile, Profile, effective_profile
from strata.relays.pool.publisher import Publisher
from strata.relays.pool.reading import Reading
from strata.relays.pool.reputation import Kind
from strata.relays.pool.scorekeeper import Scorekeeper
from strata.relays.pool.subscription import PoolSubscription
from strata.relays.pool.values import PoolPublished, PoolStatistics, Position, RelayView, Standing

__all__ = ["PacketPool"]

_log = logging.getLogger("strata.pool")

_HOUSEKEEPING_INTERVAL = 1.0
_HOUSEKEEPING_GAP = 0.02
"""However often it is woken, the housekeeper leaves the loop to others for this long."""
_SHIELDED_CONNECTIONS = 3


class PacketPool:
    """Several relays behind the face of one: packets alone. Made by `of`; belongs to one event loop.

    A packet is published to several relays at once and none is waited for that does not answer; a
    subscription reads from several and hands each packet on once; a relay that fails is replaced, one that
    lies is left. `statistics` counts, `relays` tells what is thought of each.
    """

    def __init__(
        self,
        urls: Iterable[str],
        *,
        identity: Signer | None,
        options: PoolOptions,
        make: Callable[[str], PoolRelay],
        wall: Callable[[], float] = time.time,
        random: Callable[[], float] = random.random,
    ) -> None:
        self.statistics = PoolStatistics()
        """What has happened so far; it goes on counting."""
        self._identity = identity
        self._options = options
        self._make = make
        self._wall = wall
        self._random = random
        self._ledger = Scorekeeper(wall)
        self._membership = Membership(
            as_tuple(urls),
            options,
            standing=self._ledger.standing,
            score=self._ledger.score,
            random=random,
        )
        self._links: dict[str, Link] = {}
        self._link_tasks: dict[str, asyncio.Task[None]] = {}
        self._readings: dict[Reading, None] = {}
        self._targets: list[str] = []
        self._profile = self._effective_profile()
        self._runner: asyncio.Task[None] | None = None
        self._failure: StrataError | None = None
        self._first = asyncio.Event()
        self._wake = asyncio.Event()

    @classmethod
    def of(
        cls,
        relays: Iterable[str | KnownRelay],
        *,
        identity: Signer | None = None,
        ssl: ssl_module.SSLContext | None = None,
        pins: str | os.PathLike[str] | None = None,
        anchors: Anchors | None = None,
        options: PoolOptions | None = None,
    ) -> Self:
        """A pool of relays that are given by URL or as a bootstrap file has them; not open yet."""
        options = options or PoolOptions()
        each = options.relay
        if options.profile is not Profile.STANDARD:
            options = replace(options, connections=max(options.connections, _SHIELDED_CONNECTIONS))
            if each.authenticate == "always":
                each = replace(each, authenticate="when_needed")
        known = [KnownRelay(relay) if isinstance(relay, str) else relay for relay in relays]
        relay_ids = {relay.url: relay.relay_id for relay in known if relay.relay_id is not None}

        def make(url: str) -> PoolRelay:
            its = replace(each, relay_id=relay_ids[url]) if url in relay_ids else each
            relay = PacketRelay(url, identity=identity, ssl=ssl, pins=pins, anchors=anchors, options=its)
            return cast(PoolRelay, relay)

        return cls([relay.url for relay in known], identity=identity, options=options, make=make)

    # Opening and closing.

    async def open(self) -> Self:
        """Connect to the first relays; returns as soon as one is there. Cancelling closes everything again.

        Raises `ConnectionFailed` if none could be reached in time, `OSError` for an unusable scores file.
        """
        if self._runner is not None:
            raise RuntimeError("a pool can be opened once")
        if not self._membership.urls:
            raise ConnectionFailed("a pool needs the URL of at least one relay")
        self._loop = asyncio.get_running_loop()
        if self._options.scores is not None:
            for url in await self._ledger.load(self._options.scores, lambda: self._membership.urls):
                self._membership.add(url)  # relays known to the file alone are members too
        copies = max(self._options.copies, self._profile.min_relays)
        self._checks = Checks(self, self._options, copies=copies, random=self._random, wall=self._wall)
        self._publisher = Publisher(self, self._checks, self._options, random=self._random)
        for warning in self._profile.warnings:
            _log.warning("%s", warning)
        self._runner = self._loop.create_task(self._run(), name="strata-pool")
        try:
            async with asyncio.timeout(self._options.relay.connect_timeout):
                await self._first.wait()
        except TimeoutError:
            await self.close()
            raise ConnectionFailed("none of the pool's relays can be reached") from None
        except BaseException:
            await self.close()
            raise
        return self

    async def close(self) -> None:
        """Close every connection and leave nothing behind. Idempotent.

        Publishes and subscriptions still waiting raise `Closed`; copies in the background are given up. Takes
        as long as the slowest relay's closing, `Options.close_timeout` and a second at most.
        """
        self._fail(Closed("the pool was closed"))
        if self._runner is not None:
            self._runner.cancel()
            await asyncio.wait([self._runner])
            if not self._runner.cancelled():
                self._runner.result()  # a fault of ours must not pass unseen

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
        """Hand a packet to several relays; returns once `PoolOptions.confirmations` of them have stored it.

        `on_stored` is called once the first of them has.

        The other copies go on in the background, and every relay that said OK is asked later whether it has
        the packet (`presence_delay`). A relay that does not answer is waited for by nobody.

        Raises `RequestRefused` if every relay refuses the packet for good, `RequestTimeout` if too few said
        OK within `timeout` seconds, `Closed`. After a timeout or cancelling, the packet may be stored or not;
        publishing the same packet again is safe.
        """
        self._check_open()
        timeout = self._options.publish_timeout if timeout is None else timeout
        return await self._publisher.publish(packet, timeout, on_stored)

    async def post(
        self, content: Mapping[str, Any], *, expires_at: int | None = None, timeout: float | None = None
    ) -> PoolPublished:
        """Sign `content` with the pool's identity, as of now, and `publish` it.

        Raises what `publish` and `packets.build` raise, and `ValueError` without an identity.
        """
        if self._identity is None:
            raise ValueError("posting needs an identity: connect_pool(urls, identity=...)")
        packet = packets.build(self._identity, content, timestamp=int(self._wall()), expires_at=expires_at)
        return await self.publish(packet, timeout=timeout)

    # Reading.

    def subscribe(
        self,
        *,
        authors: Iterable[str] | str = (),
        types: Iterable[str] | str = (),
        packet_ids: Iterable[str] | str = (),
        since: int | None = None,
        received_since: int | None = None,
        received_until: int | None = None,
        live: bool = True,
        until: int | None = None,
        order: Order = "asc",
        limit: int | None = None,
        positions: Mapping[str, Position] | None = None,
    ) -> PoolSubscription:
        """Stored packets that match, and with `live` the new ones after them, each once.

        `Query` tells the arguments. `positions`, of an earlier `PoolSubscription`, says where to go on at the
        relays it names. Stored packets are those of `PoolOptions.readers` relays. Raises `ValueError` for
        arguments no relay could serve, and `Closed`.
        """
        self._check_open()
        query = Query(
            authors=as_tuple(authors),
            types=as_tuple(types),
            packet_ids=as_tuple(packet_ids),
            since=since,
            until=until,
            received_since=received_since,
            received_until=received_until,
            order=order,
            limit=limit,
            live=live,
        )
        # A packet asked for by id cannot be hidden among others.
        coarse = self._profile.coarse_filters and not query.packet_ids
        reading = Reading(
            self, query, self._options, coarse=coarse, positions=positions or {}, wall=self._wall
        )
        self._readings[reading] = None
        reading.manage()
        return PoolSubscription(reading)

    def fetch(self, **query: Any) -> PoolSubscription:
        """Stored packets that match, each once, until there are no more: `subscribe` with `live=False`."""
        return self.subscribe(**query, live=False)

    async def get(
        self,
        packet_id: str,
        *,
        authors: Iterable[str] | str = (),
        since: int | None = None,
        until: int | None = None,
        timeout: float | None = None,
    ) -> Delivery | None:
        """The packet with this id, from whichever relay gives it first; None if none of them has it.

        Every connected relay is asked. Raises `RequestTimeout` if those that answered within `timeout`
        seconds (default `Options.history_timeout`) do not have it and others did not answer, `Closed`.
        """
        self._check_open()
        timeout = self._options.relay.history_timeout if timeout is None else timeout
        asked = [relay for url in self.connected() if (relay := self.relay(url)) is not None]
        query = {"packet_ids": packet_id, "authors": as_tuple(authors), "since": since, "until": until}

        async def ask(relay: PoolRelay) -> Delivery | None:
            async with relay.subscribe(**query, limit=1, live=False) as found:
                return await anext(aiter(found), None)

        tasks = {self._loop.create_task(ask(relay), name="strata-pool-get") for relay in asked}
        pending, denials = tasks, 0
        deadline = self._loop.time() + timeout
        try:
            while pending:
                left = deadline - self._loop.time()
                done, pending = await asyncio.wait(pending, timeout=left, return_when="FIRST_COMPLETED")
                for task in done:
                    error = task.exception()
                    if error is not None and not isinstance(error, StrataError):
                        raise error
                    if error is None and (delivery := task.result()) is not None:
                        return delivery
                    denials += error is None
                if not done:
                    break
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
        """Those of these packets that any connected relay has, each once, in any order (C-285).

        One relay is asked after another, for what the ones before it did not have. Raises what the last one
        raised if none could answer, `ConnectionFailed` if none is connected, and `Closed`.
        """
        self._check_open()
        wanted = dict.fromkeys(as_tuple(packet_ids))
        answered, failure = False, None
        for url in self.connected():
            relay = self.relay(url)
            if relay is None or not wanted:
                continue
            try:
                async for delivery in relay.find(tuple(wanted), types=types, since=since):
                    if wanted.pop(delivery.packet.packet_id, wanted) is None:
                        yield delivery
                answered = True
            except (StrataError, OSError) as error:
                failure = error
        if wanted and not answered:
            raise failure or ConnectionFailed("none of the pool's relays is connected")

    # Looking.

    @property
    def relays(self) -> tuple[RelayView, ...]:
        """What is known about every relay, best first."""
        membership = self._membership
        views = [self._ledger.view(url, connected=membership.is_connected(url)) for url in membership.urls]
        order = list(Standing)
        return tuple(sorted(views, key=lambda view: (order.index(view.standing), -view.score)))

    @property
    def profile(self) -> EffectiveProfile:
        """The privacy profile in force, with what was asked for and why it is less (R-407, R-408)."""
        return self._profile

    @property
    def is_connected(self) -> bool:
        """Whether any relay is connected at this moment."""
        return bool(self.connected())

    @property
    def seats(self) -> tuple[int, int]:
        """How many relays are connected, and how many should be: as many as packets are published to."""
        wanted = min(self._options.copies, len(self._membership.urls))
        return len(self.connected()), max(1, wanted)

    @property
    def max_packet_bytes(self) -> int | None:
        """The smallest limit that a connected relay has told; None if none has."""
        limits = [
            relay.max_packet_bytes for url in self.connected() if (relay := self.relay(url)) is not None
        ]
        return min((limit for limit in limits if limit is not None), default=None)

    @property
    def unsettled(self) -> int:
        """Packets published whose presence on enough relays has not been seen yet (C-274)."""
        return self._checks.unsettled

    def add(self, url: str) -> None:
        """Make another relay known; it gets its turn."""
        self._membership.add(url)
        self.wake()

    def remove(self, url: str) -> None:
        """Leave a relay and forget what was thought of it."""
        self._membership.remove(url)
        self._ledger.forget(url)
        self._checks.known.forget(url)
        self.wake()

    # For links, checks and subscriptions.

    def relay(self, url: str) -> PoolRelay | None:
        """The connection at this seat, whether up or down."""
        link = self._links.get(url)
        return None if link is None else link.relay

    def connected(self) -> list[str]:
        """The relays that are connected just now."""
        return [url for url in self._links if self._membership.is_connected(url)]

    def targets(self) -> Sequence[str]:
        """Where to publish, best first."""
        return self._targets

    def readers(self, current: Sequence[str]) -> list[str]:
        """Which relays a subscription that reads from `current` should read from (R-404)."""
        return self._membership.readers(max(self._options.readers, self._profile.min_relays), current)

    def served(self, delivery: Delivery, url: str) -> None:
        """A relay gave this packet: it has it."""
        self._checks.known.seen(delivery.packet, url, self._wall())

    def observe(self, url: str, kind: Kind, good: int = 0, bad: int = 0, value: float | None = None) -> None:
        """Take note of something seen of a relay."""
        self._ledger.observe(url, kind, good, bad, value)
        if bad:
            self.wake()  # it may have been once too often

    def ping_result(self, url: str, *, answered: bool) -> None:
        """A relay gave a sign of life, or did not."""
        if answered:
            self._membership.ping_answered(url)
        else:
            self._membership.ping_missed(url)
            self.wake()

    def link_changed(self, url: str, *, connected: bool) -> None:
        """A connection came or went."""
        if connected:
            self._membership.connected(url)
            self._first.set()
            for reading in self._readings:
                reading.hasten_sweep(url)
        else:
            self._membership.disconnected(url, self._loop.time())
        self._targets = self._membership.targets()
        self.wake()

    def wake(self) -> None:
        """Look after everything soon."""
        self._wake.set()

    def ended(self, reading: Reading) -> None:
        """A subscription needs no relays any more."""
        self._readings.pop(reading, None)

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """A task that ends with the pool at the latest."""
        return self._tasks.create_task(work, name=name)

    # The housekeeper.

    async def _run(self) -> None:
        try:
            async with asyncio.TaskGroup() as self._tasks:
                self.spawn(self._ledger.run(), "strata-pool-scores")
                await self._keep_house()
        finally:
            self._fail(ConnectionFailed("the pool's task has ended"))

    async def _keep_house(self) -> None:
        while True:
            self._wake.clear()
            self._replan()
            for reading in list(self._readings):
                reading.manage()
            self._checks.run_due()
            wait = min(self._checks.get_timer() - self._loop.time(), _HOUSEKEEPING_INTERVAL)
            try:
                async with asyncio.timeout(max(wait, _HOUSEKEEPING_GAP)):
                    await self._wake.wait()
                await asyncio.sleep(_HOUSEKEEPING_GAP)
            except TimeoutError:
                pass

    def _replan(self) -> None:
        """Judge every relay, and bring seats and links in step."""
        self.statistics.relays_blacklisted += self._ledger.judge(self._membership.urls)
        tried = self._membership.sample(self._loop.time())
        if tried is not None:
            self.statistics.relays_sampled += 1
            _log.info("trying %s", shown(tried))
        seats = self._membership.seats(self._loop.time())
        for url in [url for url in self._links if url not in seats]:
            del self._links[url]
            self._link_tasks.pop(url).cancel()
        for url in seats:
            if url not in self._links:
                link = Link(url, self._make, self._options, self, random=self._random)
                self._links[url] = link
                self._link_tasks[url] = self.spawn(link.run(), f"strata-pool-link {shown(url)}")
        self._targets = self._membership.targets()
        self._update_profile()
        self.statistics.scores_lost = self._ledger.lost

    def _update_profile(self) -> None:
        profile = self._effective_profile()
        if profile != self._profile:
            for warning in set(profile.warnings) - set(self._profile.warnings):
                _log.warning("%s", warning)
            self._profile = profile

    def _effective_profile(self) -> EffectiveProfile:
        return effective_profile(
            self._options.profile,
            relays=len(self._membership.usable()),
            has_proxy=self._options.relay.proxy is not None,
        )

    def _fail(self, error: StrataError) -> None:
        """Nothing further will happen: everyone who waits gets to know."""
        if self._failure is None:
            self._failure = error
        for reading in list(self._readings):
            reading.end(self._failure)
        if self._runner is not None:
            self._publisher.fail(self._failure)

    def _check_open(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._runner is None:
            raise RuntimeError("the pool is not open: use `async with`")
