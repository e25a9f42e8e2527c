"""A relay as a program sees it: publish, subscribe, look up packets."""

from __future__ import annotations

import asyncio
import os
import ssl as ssl_module
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, MutableMapping
from dataclasses import replace
from types import TracebackType
from typing import Self, Unpack

from strata.protocol import packets
from strata.protocol.equivalence import equivalence_key
from strata.protocol.errors import (
    Closed,
    ErrorCode,
    InvalidPacket,
    MissingCapability,
    RequestRefused,
    RequestTimeout,
)
from strata.protocol.fields import is_content_id
from strata.protocol.ids import Signer
from strata.protocol.keys import IDENTITY_TYPES
from strata.protocol.packets import Packet
from strata.relays.arguments import check_connecting, check_packet, check_text, check_timeout, texts
from strata.relays.connection.dialing import check_tls, shown
from strata.relays.connection.driver import Driver
from strata.relays.connection.feed import Feed
from strata.relays.connection.http_packets import fetch_packet
from strata.relays.connection.inspection import KEYS_WANTED, Collector, Inspector
from strata.relays.connection.keyfetch import KeyFetcher
from strata.relays.connection.keyring import Anchors, KeyRing
from strata.relays.connection.options import Options
from strata.relays.connection.pins import PinFile
from strata.relays.connection.publishing import not_repeated
from strata.relays.connection.subscription import Subscription
from strata.relays.connection.values import (
    Announced,
    Authenticated,
    Delivery,
    FetchOptions,
    Published,
    Query,
    Statistics,
    SubscribeOptions,
)
from strata.relays.peer_timeout import PeerTimeout

__all__ = ["PacketRelay"]

_NEVER = 1 << 40
"""A time in the far future that still fits wherever a relay stores seconds."""
_HEAD_EXTENSIONS = frozenset({"history_marker", "received_range"})
_KEYS_FRESH_SECONDS = 60.0
"""Packets from strangers make a relay answer for one author's keys at most once in this time."""


class PacketRelay:
    """One relay, kept connected until `close`; packets only. Belongs to one event loop.

    `strata.connect` returns `strata.Relay`, which also opens channels.

    After a lost connection it reconnects: packets without an answer are published again, and subscriptions
    resume where they stopped. Once the relay refuses permanently (being unreachable is not a refusal), every
    call raises `ConnectionFailed`. `changed` is called when a connection is made or lost. It can be opened
    once: calls before that, and opening it again, raise `RuntimeError`.

    Connections that share `met` (DIDs of relays and their addresses) do not answer a challenge of one of
    their relays that another relay forwards.
    """

    def __init__(
        self,
        url: str,
        *,
        identity: Signer | None = None,
        ssl: ssl_module.SSLContext | None = None,
        pins: str | os.PathLike[str] | None = None,
        anchors: Anchors | None = None,
        options: Options | None = None,
        met: MutableMapping[str, str] | None = None,
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        check_connecting(url, identity)
        check_tls(ssl)
        options = Options() if options is None else options
        if not isinstance(options, Options):
            raise TypeError(f"options must be Options(…), not {type(options).__name__}")
        if identity is None and options.authenticate == "always":
            raise ValueError("authenticate='always' needs an identity: connect(url, identity=...)")
        self._url = url
        self._identity = identity
        self._options = options
        self._driver = Driver(
            url,
            options,
            signer=identity,
            ssl=ssl,
            pins=None if pins is None else PinFile(pins),
            met=met,
            changed=changed,
        )
        self._slots = asyncio.Semaphore(options.max_in_flight)
        ring = KeyRing(
            anchors or Anchors(),
            max_authors=options.key_authors,
            refresh_interval=options.key_refresh_interval,
        )
        self._keys = KeyFetcher(
            ring,
            self._identity_packets,
            timeout=options.key_timeout,
            name=f"strata-relay-keys {shown(url)}",
        )
        self._ring = ring if options.resolve_keys else None

    # Opening and closing.

    async def open(self) -> Self:
        """Connect, and authenticate if `authenticate="always"`. Cancelling closes everything again.

        Raises `ConnectionFailed` (at once if retrying cannot help, else after `connect_timeout`), whatever
        `authenticate` raises, and `IdentityError` or `OSError` for a pin file that cannot be read.
        """
        self._driver.prepare()
        try:
            await self._driver.open()
            if self._options.authenticate == "always":
                await self.authenticate()
        except BaseException:
            await self.close()
            raise
        return self

    async def close(self) -> None:
        """Close the connection and release every task, timer and socket. Idempotent.

        Publishes and subscriptions still waiting raise `Closed`. Takes at most a second longer than
        `close_timeout`. If cancelled, closing continues in the background for up to that long.
        """
        self._driver.stop(Closed("the relay connection was closed"))
        await self._keys.close()
        await self._driver.stopped()

    async def __aenter__(self) -> Self:
        return await self.open()

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    # Authenticating.

    async def authenticate(self, *, timeout: float | None = None) -> Authenticated:
        """Prove the connection's identity to the relay; returns once the relay has said AUTH_OK.

        Seldom needed: by default (`Options.authenticate`) the client authenticates when a relay requires it.
        After this call, every new connection authenticates before it sends anything else. Cancelling does not
        stop the authentication.

        Raises `RequestRefused` if the relay refuses, `RequestTimeout` if it does not answer within `timeout`
        seconds (default `Options.connect_timeout`), `InvalidMessage` if it is not the expected relay or its
        challenge must not be signed, `IdentityError` if the identity cannot sign, `ValueError` without an
        identity or with `authenticate="never"`, `Closed`, `ConnectionFailed`.
        """
        self._driver.check_open()
        check_timeout(timeout)
        if self._identity is None or self._options.authenticate == "never":
            raise ValueError("authenticating needs an identity, and options that allow it")
        return await self._driver.authenticate(self._options.connect_timeout if timeout is None else timeout)

    # Publishing.

    async def publish(
        self,
        packet: Packet,
        *,
        timeout: float | None = None,
        on_stored: Callable[[], None] | None = None,
    ) -> Published:
        """Publish a packet; returns once the relay has stored it durably.

        `on_stored` is called just before it returns; in a pool, it is called earlier. If it raises, so does
        this method, although the packet is stored.

        The packet is sent as many times, and over as many connections, as necessary within `timeout` seconds
        (default `Options.publish_timeout`). While `Options.max_in_flight` publishes are in progress, the next
        one waits.

        Raises `RequestRefused` if the relay refuses permanently or cannot take the packet in time (if
        authentication was tried, the cause says why it did not help), `MissingCapability` if the relay does
        not let the authenticated session publish, `RequestTimeout` if it did not answer in time,
        `InvalidPacket` if the packet is larger than the relay says it accepts, `Closed`, `ConnectionFailed`.
        If the relay says that it has another packet in this one's place (`Published.duplicate_of`), it has to
        show that one: otherwise this raises `RequestRefused` with detail `duplicate_of`.
        After a timeout or cancellation the packet may or may not be stored. Publishing the same packet again
        is safe, because a relay stores it once.
        """
        self._driver.check_open()
        check_packet(packet)
        check_timeout(timeout)
        timeout = self._options.publish_timeout if timeout is None else timeout
        deadline = self._driver.time() + timeout
        if self._slots.locked():
            try:
                async with PeerTimeout(timeout):
                    await self._slots.acquire()
            except TimeoutError:
                raise RequestTimeout(f"PUBLISH {packet.packet_id}", timeout) from None
        else:
            await self._slots.acquire()  # does not suspend
        try:
            published = await self._publish(packet, deadline, timeout)
            if published.duplicate_of is not None:
                await self._check_repeated(packet, published.duplicate_of, deadline)
        finally:
            self._slots.release()
        if on_stored is not None:
            on_stored()
        return published

    async def _publish(self, packet: Packet, deadline: float, timeout: float) -> Published:
        self._driver.check_open()
        announced = self._driver.announced
        limit = None if announced is None else announced.max_packet_bytes
        if limit is not None and packet.size_bytes > limit:
            raise InvalidPacket(
                ErrorCode.PACKET_TOO_LARGE,
                f"the packet has {packet.size_bytes} bytes, the relay takes {limit}",
                max_bytes=limit,
            )
        return await self._driver.publish(packet, deadline, timeout)

    async def _check_repeated(self, packet: Packet, of: str, deadline: float) -> None:
        """Raise `RequestRefused` unless the relay shows the packet `of`, and `packet` repeats it (R-113).

        The relay has said that it does not store `packet`, so its word alone confirms nothing.
        """
        if equivalence_key(packet) is None or not is_content_id(of):
            raise not_repeated(packet.packet_id, is_shown=False)
        try:
            remaining = max(deadline - self._driver.time(), 0.001)
            # The same author's, a document too: in another's packet it counts for nothing.
            found = await self.get(of, authors=packet.author_id, timeout=remaining)
        except (RequestRefused, MissingCapability) as error:
            if isinstance(error, RequestRefused) and error.retry_after is not None:
                raise
            raise not_repeated(packet.packet_id, is_shown=False) from error
        if found is None or equivalence_key(found.packet) != equivalence_key(packet):
            raise not_repeated(packet.packet_id, is_shown=found is not None)

    async def post(
        self, content: Mapping[str, object], *, expires_at: int | None = None, timeout: float | None = None
    ) -> Published:
        """Sign `content` with the connection's identity and the current time, and `publish` it.

        Raises what `publish` and `packets.build` raise, and `ValueError` without an identity. Another call
        after a timeout makes a new packet; to retry the same packet, build it and use `publish`.
        """
        if self._identity is None:
            raise ValueError("posting needs an identity: connect(url, identity=...)")
        packet = packets.build(self._identity, content, timestamp=int(time.time()), expires_at=expires_at)
        return await self.publish(packet, timeout=timeout)

    # Reading.

    def subscribe(self, **options: Unpack[SubscribeOptions]) -> Subscription:
        """Read stored packets that match and then, with `live`, new ones.

        `SubscribeOptions` describes the options. The request is sent at once. Raises `ValueError` for options
        that no relay could serve, `TypeError` for options that do not exist, `Closed`, `ConnectionFailed`.
        """
        self._driver.check_open()
        on_log_reset = options.pop("on_log_reset", None)
        if on_log_reset is not None and not callable(on_log_reset):
            raise TypeError(f"on_log_reset must be a function of a LogReset, not {on_log_reset!r}")
        query = Query.of(options)
        return Subscription(Feed(self._driver, query, self._keys), self._inspector(query), on_log_reset)

    def fetch(self, **options: Unpack[FetchOptions]) -> Subscription:
        """Read stored packets that match, at most `limit`, page by page; ends when there are no more.

        The same as `subscribe` with `live=False`.
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
        """Return the packet with this id, or None if the relay does not have it.

        If the relay lacks the `packet_ids` extension, its history is read until the packet is found (A-048):
        pass `authors`, `since` and `until` to narrow the search where they are known.

        Raises `RequestTimeout` after `timeout` seconds (default `Options.history_timeout`), and what
        iterating a subscription raises.
        """
        check_text("packet_id", packet_id, may_be_none=False)
        check_timeout(timeout)
        timeout = self._options.history_timeout if timeout is None else timeout
        try:
            async with PeerTimeout(timeout):
                async with self.fetch(
                    packet_ids=packet_id, authors=authors, since=since, until=until, limit=1
                ) as found:
                    async for delivery in found:
                        return delivery
        except TimeoutError:
            raise RequestTimeout(f"the search for {packet_id}", timeout) from None
        return None

    async def find(
        self, packet_ids: Iterable[str], *, types: Iterable[str] | str = (), since: int | None = None
    ) -> AsyncGenerator[Delivery, None]:
        """Yield those of these packets that the relay has, in any order.

        Uses the fastest way that the relay announces: the filter by id, or HTTP. Otherwise it reads the
        history from `since` on, newest first, until all are found (C-285). Raises `OSError`, and what
        iterating a subscription raises.
        """
        wanted = texts("packet_ids", packet_ids)
        extensions = frozenset() if self.announced is None else self.announced.extensions
        if not wanted:
            return
        if "http_packets" in extensions and "packet_ids" not in extensions and self._options.proxy is None:
            async for delivery in self._find_by_http(wanted):
                yield delivery
            return
        by_id = "packet_ids" in extensions
        query = self.fetch(
            packet_ids=wanted,
            types=types,
            since=None if by_id else since,
            order="asc" if by_id else "desc",
            limit=len(set(wanted)),
        )
        async with query as found:
            async for delivery in found:
                yield delivery

    async def _find_by_http(self, packet_ids: tuple[str, ...]) -> AsyncGenerator[Delivery, None]:
        query = Query(packet_ids=packet_ids, live=False)
        inspector = self._inspector(query)
        for packet_id in packet_ids:
            event = await fetch_packet(
                self._url,
                packet_id,
                ssl=self._driver.ssl,
                max_bytes=self.max_packet_bytes or packets.DEFAULT_MAX_PACKET_BYTES,
                timeout=self._options.history_timeout,
            )
            candidate = None if event is None else inspector.read(event)
            if candidate is None:
                continue
            delivery = inspector.judge(candidate)
            if delivery is KEYS_WANTED:
                await self._keys.fetch(candidate.packet.author_id, (), since=candidate.event.arrived_at)
                delivery = inspector.judge(candidate)
            if isinstance(delivery, Delivery):
                yield delivery

    async def head(self) -> str | None:
        """Return the cursor just past everything the relay has now, for a `subscribe` to new packets only.

        None for a relay that does not mark the end of history or cannot search by time of receipt: it cannot
        give such a cursor. Waits for a relay that is not connected. Raises what iterating a subscription
        raises. Cancelling ends the request.
        """
        self._driver.check_open()
        announced = self.announced
        if announced is not None and not announced.extensions >= _HEAD_EXTENSIONS:
            return None
        # Nothing matches these, not even on a plain relay. If nothing matches, the marker names the head.
        query = Query(since=_NEVER, received_since=_NEVER, live=False)
        feed = Feed(self._driver, query, self._keys)
        async with Subscription(feed, self._inspector(query)) as nothing:
            async for _ in nothing:
                pass  # only a relay that ignores the filters
        return feed.position

    # Looking.

    @property
    def url(self) -> str:
        """The relay's address."""
        return self._url

    @property
    def statistics(self) -> Statistics:
        """Counts since opening, as a copy that does not change."""
        current = self._driver.statistics
        return replace(current, refusals=dict(current.refusals))

    @property
    def is_connected(self) -> bool:
        """Whether there is a connection now."""
        return self._driver.announced is not None

    @property
    def seats(self) -> tuple[int, int]:
        """How many relays are connected, and how many should be."""
        return int(self.is_connected), 1

    @property
    def max_packet_bytes(self) -> int | None:
        """The largest packet the relay says it accepts; None between connections, or if it does not say."""
        announced = self._driver.announced
        return None if announced is None else announced.max_packet_bytes

    @property
    def announced(self) -> Announced | None:
        """What the connected relay says about itself; None between connections."""
        return self._driver.announced

    @property
    def session(self) -> Authenticated | None:
        """The identity and capabilities the relay grants this connection; None while it is anonymous."""
        return self._driver.session

    @property
    def latest_time(self) -> float | None:
        """An upper bound of the relay's time, in Unix seconds; late by a few minutes at most.

        None until the relay has sent a challenge, from which it is computed.
        """
        return self._driver.latest_time

    @property
    def relay_id(self) -> str | None:
        """The relay's DID, as expected or as first shown; None until either is known (R-298)."""
        return self._driver.relay_id

    # Authors' keys.

    async def _is_genuine(self, packet: Packet) -> bool:
        """Whether a packet that came inside another one was signed by its author, with the keys of its time.

        Asks the relay for the author's keys unless it did so within the last minute. With `resolve_keys` off,
        only the key in the author's DID counts. Raises `RequestTimeout`, and what a subscription raises.
        """
        if self._ring is None:
            try:
                packet.verify()
            except InvalidPacket:
                return False
            return True
        now = self._driver.loop.time()
        genuine = self._ring.vouches(packet, now - _KEYS_FRESH_SECONDS)
        if genuine is None:
            await self._keys.fetch(packet.author_id, (), since=now - _KEYS_FRESH_SECONDS)
            genuine = self._ring.vouches(packet, now - _KEYS_FRESH_SECONDS)
        return genuine is True

    def _inspector(self, query: Query) -> Inspector:
        return Inspector(query, self._options, self._driver.statistics, self._ring)

    async def _identity_packets(self, authors: tuple[str, ...]) -> AsyncGenerator[tuple[Packet, int], None]:
        """Yield every identity packet the relay has of these authors (R-073), with signatures unchecked."""
        self._driver.check_open()
        self._driver.statistics.key_fetches += 1
        query = Query(authors=authors, types=tuple(sorted(IDENTITY_TYPES)), live=False)
        feed = Feed(self._driver, query, self._keys)
        async with Subscription(feed, Collector(query, self._options, Statistics())) as found:
            async for delivery in found:
                yield delivery.packet, delivery.received_at
