"""The connection to one relay of a pool: made, watched, made again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable
from typing import Any, Protocol, Self

from strata.protocol.errors import StrataError
from strata.protocol.packets import Packet
from strata.relays.backoff import Backoff
from strata.relays.connection.values import Delivery, Published, Statistics
from strata.relays.pool.options import PoolOptions
from strata.relays.pool.reputation import Kind

__all__ = ["Deliveries", "Link", "PoolRelay"]

_LOOK_INTERVAL = 0.25
"""How often a connection is looked at. The relay object reports counters and no changes."""


class Deliveries(Protocol):
    """What a pool needs of a subscription."""

    def __aiter__(self) -> AsyncIterator[Delivery]: ...

    async def aclose(self) -> None: ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *exc: Any) -> None: ...


class PoolRelay(Protocol):
    """What a pool needs of a relay: `strata.Relay` is one, and so is a test's."""

    @property
    def is_connected(self) -> bool: ...

    @property
    def max_packet_bytes(self) -> int | None: ...

    @property
    def statistics(self) -> Statistics: ...

    async def open(self) -> Any: ...

    async def close(self) -> None: ...

    async def publish(self, packet: Packet, *, timeout: float | None = None) -> Published: ...

    def subscribe(self, **query: Any) -> Deliveries: ...

    def find(
        self, packet_ids: Iterable[str], *, types: Iterable[str] | str = (), since: int | None = None
    ) -> AsyncGenerator[Delivery, None]: ...


class Listener(Protocol):
    """Who is told what happens on a link."""

    def link_changed(self, url: str, *, connected: bool) -> None: ...

    def observe(
        self, url: str, kind: Kind, good: int = 0, bad: int = 0, value: float | None = None
    ) -> None: ...


class Link:
    """One seat of the pool. `relay` is there while its connection is kept, whether up or down just now."""

    def __init__(
        self,
        url: str,
        make: Callable[[str], PoolRelay],
        options: PoolOptions,
        listener: Listener,
        *,
        random: Callable[[], float],
    ) -> None:
        self.url = url
        self.relay: PoolRelay | None = None
        self._make = make
        self._options = options
        self._listener = listener
        self._backoff = Backoff(base=options.reconnect_base, cap=options.reconnect_cap, random=random)
        self._seen = Statistics()

    async def run(self) -> None:
        """Keep a connection until cancelled; then it is closed."""
        while True:
            relay = self._make(self.url)
            try:
                await relay.open()
            except StrataError:
                self._listener.observe(self.url, Kind.CONNECT, bad=1)
                self._listener.link_changed(self.url, connected=False)
                await asyncio.sleep(self._backoff.next_delay())
                continue
            self._backoff.reset()
            self.relay, self._seen = relay, Statistics()
            try:
                await self._watch(relay)
            finally:
                self.relay = None
                self._listener.link_changed(self.url, connected=False)
                await relay.close()

    async def _watch(self, relay: PoolRelay) -> None:
        """Report changes until the relay has been gone for `revive_after`."""
        loop = asyncio.get_running_loop()
        connected = False
        gone_at = loop.time()
        while connected or loop.time() - gone_at < self._options.revive_after:
            if relay.is_connected != connected:
                connected = not connected
                gone_at = loop.time()
                self._listener.link_changed(self.url, connected=connected)
            self.report()
            await asyncio.sleep(_LOOK_INTERVAL)

    def report(self) -> None:
        """Pass on what the counters say has happened since the last time (R-341, R-342)."""
        if self.relay is None:
            return
        before, now = self._seen, self.relay.statistics
        self._seen = now

        def more(*names: str) -> int:
            # A counter that the relay object does not have counts nothing.
            return sum(getattr(now, name, 0) - getattr(before, name, 0) for name in names)

        made, failed = more("connections"), more("connections_failed", "connections_lost")
        if made or failed:
            self._listener.observe(self.url, Kind.CONNECT, made, failed)
        valid = more("events_delivered", "events_repeated")
        invalid = more("events_invalid", "events_tampered", "messages_invalid")
        if valid or invalid:
            self._listener.observe(self.url, Kind.VALIDITY, valid, invalid)
