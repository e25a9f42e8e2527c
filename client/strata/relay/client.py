"""The asyncio shell around `Connection`: sockets, tasks and one timer. It decides nothing."""

from __future__ import annotations

import asyncio
import logging
import math
import random
import ssl as ssl_module
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed

from strata import packets
from strata.errors import Closed, ConnectionFailed, ErrorCode, InvalidPacket, RequestTimeout, StrataError
from strata.ids import Signer
from strata.packets import Packet
from strata.relay.backoff import Backoff
from strata.relay.connection import Connection
from strata.relay.dialing import check_url, describe, dial, hang_up, may_retry, shown, tls_context
from strata.relay.inspection import Inspector
from strata.relay.options import Options
from strata.relay.publishing import Handle, PublishSettled
from strata.relay.subscribing import Phase, SubscriptionState
from strata.relay.subscription import Subscription
from strata.relay.values import Announced, Delivery, Order, Published, Query, Statistics, as_tuple

__all__ = ["Relay", "connect"]

_log = logging.getLogger("strata.relay")


def connect(
    url: str,
    *,
    identity: Signer | None = None,
    ssl: ssl_module.SSLContext | None = None,
    options: Options | None = None,
) -> Relay:
    """A connection to the relay at a ws or wss URL, to be opened by `async with` (or `await relay.open()`).

        async with strata.connect("ws://127.0.0.1:7447/strata", identity=me) as relay:
            await relay.post({"type": "POST", "text": "hello"})

    `identity` signs what `Relay.post` publishes. `ssl` replaces the system's TLS settings for wss. Opening
    raises `ConnectionFailed`: at once for what trying again cannot mend, else after `connect_timeout`.
    """
    return Relay(url, identity=identity, ssl=ssl, options=options or Options())


class Relay:
    """One relay, kept connected until `close`. Made by `connect`; belongs to one event loop.

    Cuts are mended here: what has no answer is published again, subscriptions go on where they stood. When
    the relay cannot be had any more (a final refusal, not an absence) every call raises `ConnectionFailed`.
    """

    def __init__(
        self, url: str, *, identity: Signer | None, ssl: ssl_module.SSLContext | None, options: Options
    ) -> None:
        self._url = url
        self._identity = identity
        self._ssl = ssl
        self._options = options
        self._core = Connection(options, random=random.random)
        self._slots = asyncio.Semaphore(options.max_in_flight)
        self._waiters: dict[Handle, asyncio.Future[Published]] = {}
        self._arrivals: dict[SubscriptionState, asyncio.Event] = {}
        self._first = asyncio.Event()
        """Set once opening has come to something, good or bad."""
        self._writable = asyncio.Event()
        self._may_read = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = math.inf
        self._runner: asyncio.Task[None] | None = None
        self._failure: StrataError | None = None
        """Why nothing further will happen, once that is so."""
        self._last_problem: ConnectionFailed | None = None

    # Opening and closing.

    async def open(self) -> Self:
        """Connect. Cancelling closes everything again.

        Raises `ConnectionFailed`: at once for what trying again cannot mend, else after `connect_timeout`.
        """
        if self._runner is not None:
            raise RuntimeError("a relay connection can be opened once")
        check_url(self._url)
        self._loop = asyncio.get_running_loop()
        self._ssl = tls_context(self._url, self._ssl)
        self._runner = self._loop.create_task(self._run(), name=f"strata-relay {shown(self._url)}")
        try:
            async with asyncio.timeout(self._options.connect_timeout):
                await self._first.wait()
            if self._failure is not None:
                raise self._failure
        except TimeoutError:
            await self.close()
            raise self._last_problem or describe(TimeoutError(), self._url) from None
        except BaseException:
            await self.close()
            raise
        return self

    async def close(self) -> None:
        """Close the connection and leave nothing behind: no task, timer or socket. Idempotent.

        Publishes and subscriptions still waiting raise `Closed`. Takes at most `close_timeout` and a second;
        after cancelling, the closing goes on by itself for as long.
        """
        if self._failure is None:
            self._failure = Closed("the relay connection was closed")
        self._core.fail(self._failure)
        self._deliver()
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

    async def publish(self, packet: Packet, *, timeout: float | None = None) -> Published:
        """Hand a packet to the relay; returns once the relay has stored it durably.

        It is sent as often as it takes, over as many connections as it takes, within `timeout` seconds
        (default `Options.publish_timeout`). With `Options.max_in_flight` in progress, the next waits first.

        Raises `RequestRefused` if the relay refuses it for good or cannot take it in time, `RequestTimeout`
        if it did not answer in time, `InvalidPacket` if it is larger than the relay says it takes, `Closed`,
        `ConnectionFailed`. After a timeout or cancelling, the packet may be stored or not; publishing the
        same packet again is safe, for a relay keeps it once.
        """
        self._check_open()
        timeout = self._options.publish_timeout if timeout is None else timeout
        deadline = self._loop.time() + timeout
        if self._slots.locked():
            try:
                async with asyncio.timeout_at(deadline):
                    await self._slots.acquire()
            except TimeoutError:
                raise RequestTimeout(f"PUBLISH {packet.packet_id}", timeout) from None
        else:
            await self._slots.acquire()  # does not suspend
        try:
            return await self._publish(packet, deadline)
        finally:
            self._slots.release()

    async def _publish(self, packet: Packet, deadline: float) -> Published:
        self._check_open()
        announced = self._core.announced
        limit = None if announced is None else announced.max_packet_bytes
        if limit is not None and packet.size_bytes > limit:
            raise InvalidPacket(
                ErrorCode.PACKET_TOO_LARGE,
                f"the packet has {packet.size_bytes} bytes, the relay takes {limit}",
                max_bytes=limit,
            )
        now = self._loop.time()
        waiter: asyncio.Future[Published] = self._loop.create_future()
        handle = self._core.publish(packet.packet_id, packet.canonical, timeout=deadline - now, now=now)
        self._waiters[handle] = waiter
        self._deliver()
        try:
            return await waiter
        finally:
            if self._waiters.pop(handle, None) is not None:
                self._core.cancel_publish(handle)

    async def post(
        self, content: Mapping[str, Any], *, expires_at: int | None = None, timeout: float | None = None
    ) -> Published:
        """Sign `content` with the connection's identity, as of now, and `publish` it.

        Raises what `publish` and `packets.build` raise, and `ValueError` without an identity. A retry after a
        timeout makes another packet; to repeat the same one, build it and use `publish`.
        """
        if self._identity is None:
            raise ValueError("posting needs an identity: connect(url, identity=...)")
        packet = packets.build(self._identity, content, timestamp=int(time.time()), expires_at=expires_at)
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
        cursor: str | None = None,
        cursor_fallback_since: int | None = None,
        live: bool = True,
        until: int | None = None,
        order: Order = "asc",
        limit: int | None = None,
    ) -> Subscription:
        """Stored packets that match, and with `live` the new ones after them; `Query` tells each argument.

        The request goes out at once. Raises `ValueError` for arguments no relay could serve, `Closed`,
        `ConnectionFailed`.
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
            cursor=cursor,
            cursor_fallback_since=cursor_fallback_since,
            order=order,
            limit=limit,
            live=live,
        )
        state = self._core.subscribe(query, self._loop.time())
        arrived = self._arrivals[state] = asyncio.Event()
        subscription = Subscription(
            self,
            state,
            Inspector(query, self._options, self._core.statistics),
            arrived=arrived,
            call_soon=self._loop.call_soon_threadsafe,
        )
        self._deliver()
        return subscription

    def fetch(
        self,
        *,
        authors: Iterable[str] | str = (),
        types: Iterable[str] | str = (),
        packet_ids: Iterable[str] | str = (),
        since: int | None = None,
        until: int | None = None,
        received_since: int | None = None,
        received_until: int | None = None,
        cursor: str | None = None,
        order: Order = "asc",
        limit: int | None = None,
    ) -> Subscription:
        """Stored packets that match, at most `limit`, read page by page; ends when there are no more.

        The same as `subscribe` with `live=False`.
        """
        return self.subscribe(
            authors=authors,
            types=types,
            packet_ids=packet_ids,
            since=since,
            until=until,
            received_since=received_since,
            received_until=received_until,
            cursor=cursor,
            order=order,
            limit=limit,
            live=False,
        )

    async def get(
        self,
        packet_id: str,
        *,
        authors: Iterable[str] | str = (),
        since: int | None = None,
        until: int | None = None,
        timeout: float | None = None,
    ) -> Delivery | None:
        """The packet with this id, or None if the relay does not have it.

        A relay without the `packet_ids` addition is read through until the packet turns up (A-048): narrow
        that by `authors`, `since` and `until` where they are known.

        Raises `RequestTimeout` after `timeout` seconds (default `Options.history_timeout`), and what
        iterating a subscription raises.
        """
        timeout = self._options.history_timeout if timeout is None else timeout
        try:
            async with asyncio.timeout(timeout):
                async with self.fetch(
                    packet_ids=packet_id, authors=authors, since=since, until=until, limit=1
                ) as found:
                    async for delivery in found:
                        return delivery
        except TimeoutError:
            raise RequestTimeout(f"the search for {packet_id}", timeout) from None
        return None

    # Looking.

    @property
    def url(self) -> str:
        """The relay's address."""
        return self._url

    @property
    def statistics(self) -> Statistics:
        """What has happened since opening, as a copy that stays as it is."""
        current = self._core.statistics
        return replace(current, refusals=dict(current.refusals))

    @property
    def is_connected(self) -> bool:
        """Whether there is a connection at this moment."""
        return self._core.announced is not None

    @property
    def announced(self) -> Announced | None:
        """What the relay now connected says about itself; None between connections."""
        return self._core.announced

    # For `Subscription` alone.

    def taken(self, state: SubscriptionState, *, delivered: bool) -> None:
        """The event taken from `state` was dealt with."""
        self._core.taken(state, delivered=delivered, now=self._loop.time())
        self._deliver()

    def unsubscribe(self, state: SubscriptionState) -> None:
        """Close `state` for good."""
        self._core.unsubscribe(state)
        self._deliver()

    # Tasks.

    async def _run(self) -> None:
        """The one task that owns the socket."""
        failure: StrataError | None = None
        try:
            await self._keep_connected()
        except ConnectionFailed as error:
            failure = error
            _log.info("%s: giving up: %s", shown(self._url), error)
        finally:
            self._failure = self._failure or failure or ConnectionFailed("the connection's task has ended")
            self._core.fail(self._failure)
            self._deliver()
            self._first.set()
            statistics = self._core.statistics
            _log.info(
                "%s: closed after %d connections, %d packets published, %d delivered",
                shown(self._url),
                statistics.connections,
                statistics.publishes_acknowledged,
                statistics.events_delivered,
            )

    async def _keep_connected(self) -> None:
        options = self._options
        backoff = Backoff(base=options.backoff_base, cap=options.backoff_cap, random=random.random)
        while True:
            try:
                socket, announced = await dial(self._url, ssl=self._ssl, options=options)
            except Exception as error:
                self._core.statistics.connections_failed += 1
                self._judge(error)
            else:
                made_at = self._loop.time()
                self._judge(await self._serve(socket, announced))
                if self._loop.time() - made_at >= options.stable_after:
                    backoff.reset()
            await asyncio.sleep(backoff.next_delay())

    def _judge(self, error: Exception) -> None:
        problem = describe(error, self._url)
        if not may_retry(error):
            raise problem from error
        self._last_problem = problem
        _log.debug("%s: trying again: %s", shown(self._url), problem)

    async def _serve(self, socket: ClientConnection, announced: Announced) -> Exception:
        """Run one connection until it ends; returns how it ended."""
        _log.info("%s: connected, extensions %s", shown(self._url), sorted(announced.extensions))
        try:
            self._core.connection_made(announced, self._loop.time())
            self._deliver()
            self._first.set()
            async with asyncio.TaskGroup() as tasks:
                writer = tasks.create_task(self._write(socket), name="strata-relay-writer")
                ended = await self._read(socket)
                writer.cancel()
            return ended
        finally:
            self._core.connection_lost()
            self._deliver()
            await hang_up(socket, self._options.close_timeout)

    async def _read(self, socket: ClientConnection) -> Exception:
        core = self._core
        while True:
            try:
                data = await socket.recv(decode=False)
            except ConnectionClosed as closed:
                return closed
            core.receive_message(data, self._loop.time())
            self._deliver()
            while core.must_pause:
                self._may_read.clear()
                await self._may_read.wait()

    async def _write(self, socket: ClientConnection) -> None:
        """Send what waits. A relay that takes nothing for `write_timeout` is cut off; `_read` then ends."""
        while True:
            self._writable.clear()
            for frame in self._core.data_to_send():
                try:
                    async with asyncio.timeout(self._options.write_timeout):
                        await socket.send(frame, text=True)
                except ConnectionClosed:
                    return
                except TimeoutError:
                    socket.transport.abort()
                    return
            await self._writable.wait()

    # After every call to the core.

    def _deliver(self) -> None:
        """Send what waits, pass on what happened, arm the timer."""
        core = self._core
        for change in core.changes():
            if isinstance(change, PublishSettled):
                waiter = self._waiters.pop(change.handle, None)
                if waiter is None or waiter.done():
                    continue  # cancelled meanwhile
                if isinstance(change.outcome, Published):
                    waiter.set_result(change.outcome)
                else:
                    waiter.set_exception(change.outcome)
            else:
                ended = change.phase is Phase.ENDED
                arrived = self._arrivals.pop(change, None) if ended else self._arrivals.get(change)
                if arrived is not None:
                    arrived.set()
        if core.has_data_to_send:
            self._writable.set()
        if not core.must_pause:
            self._may_read.set()
        self._arm()

    def _arm(self) -> None:
        wake_at = self._core.get_timer()
        if wake_at == self._timer_at:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._timer_at = wake_at
        if wake_at != math.inf:
            self._timer = self._loop.call_at(wake_at, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self._timer_at = math.inf
        self._core.handle_timer(self._loop.time())
        self._deliver()

    def _check_open(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._runner is None:
            raise RuntimeError("the relay connection is not open: use `async with`")
