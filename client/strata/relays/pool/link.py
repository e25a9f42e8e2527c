"""The connection to one relay of a pool: made, watched and remade."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable
from types import TracebackType
from typing import Protocol, Self, Unpack

from strata.protocol.errors import StrataError
from strata.protocol.packets import Packet
from strata.relays.backoff import Backoff
from strata.relays.conduct import Aspect
from strata.relays.connection.values import Announced, Delivery, Published, Statistics, SubscribeOptions
from strata.relays.pool.options import PoolOptions

__all__ = ["Deliveries", "Link", "MakeRelay", "PoolRelay"]


class Deliveries(Protocol):
    """What a pool needs from a subscription."""

    def __aiter__(self) -> AsyncIterator[Delivery]: ...

    async def aclose(self) -> None: ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...


class PoolRelay(Protocol):
    """What a pool needs from a relay. `PacketRelay` is one; tests have others."""

    @property
    def is_connected(self) -> bool: ...

    @property
    def announced(self) -> Announced | None: ...

    @property
    def max_packet_bytes(self) -> int | None: ...

    @property
    def statistics(self) -> Statistics: ...

    @property
    def latest_time(self) -> float | None: ...

    async def open(self) -> object: ...

    async def close(self) -> None: ...

    async def publish(self, packet: Packet, *, timeout: float | None = None) -> Published: ...

    def subscribe(self, **options: Unpack[SubscribeOptions]) -> Deliveries: ...

    def find(
        self, packet_ids: Iterable[str], *, types: Iterable[str] | str = (), since: int | None = None
    ) -> AsyncGenerator[Delivery, None]: ...

    async def head(self) -> str | None: ...

    async def _is_genuine(self, packet: Packet) -> bool: ...


MakeRelay = Callable[[str, Callable[[], None]], PoolRelay]
"""Makes the relay at a URL, not yet open. The relay calls the given function when `is_connected` changes."""


class Listener(Protocol):
    """Receives reports of what happens on a link."""

    def link_changed(self, url: str, *, connected: bool) -> None: ...

    def observe(
        self, url: str, kind: Aspect, good: int = 0, bad: int = 0, value: float | None = None
    ) -> None: ...


class Link:
    """One seat of the pool. `relay` is set while its connection is kept, whether it is up or down now."""

    def __init__(
        self,
        url: str,
        make: MakeRelay,
        options: PoolOptions,
        listener: Listener,
        *,
        random: Callable[[], float],
    ) -> None:
        self.url = url
        self.relay: PoolRelay | None = None
        self.is_connected = False
        """The state last reported to the listener."""
        self._make = make
        self._options = options
        self._listener = listener
        self._backoff = Backoff(base=options.reconnect_base, cap=options.reconnect_cap, random=random)
        self._changed = asyncio.Event()
        self._reported = Statistics()

    async def run(self) -> None:
        """Keep a connection until cancelled, then close it."""
        while True:
            relay = self._make(self.url, self._changed.set)
            try:
                await relay.open()
            except (StrataError, OSError):  # OSError: the pin file, or too many open files
                self._listener.observe(self.url, Aspect.CONNECT, bad=1)
                self._tell(False)
                await asyncio.sleep(self._backoff.next_delay())
                continue
            self._backoff.reset()
            self.relay, self._reported = relay, Statistics()
            try:
                await self._watch(relay)
            finally:
                self.report()
                self.relay = None
                self._tell(False)
                await relay.close()

    async def _watch(self, relay: PoolRelay) -> None:
        """Report changes until the relay has been disconnected for `revive_after`."""
        loop = asyncio.get_running_loop()
        gone_at = loop.time()
        while True:
            self._changed.clear()
            if relay.is_connected != self.is_connected:
                gone_at = loop.time()
                self._tell(relay.is_connected)
            given_up_at = None if self.is_connected else gone_at + self._options.revive_after
            try:
                async with asyncio.timeout_at(given_up_at):
                    await self._changed.wait()
            except TimeoutError:
                return

    def _tell(self, connected: bool) -> None:
        self.is_connected = connected
        self._listener.link_changed(self.url, connected=connected)

    def report(self) -> None:
        """Report what has happened since the last report, by the relay's counters (R-341, R-342)."""
        if self.relay is None:
            return
        before, now = self._reported, self.relay.statistics
        self._reported = now

        def more(*counters: str) -> int:
            return sum(getattr(now, counter) - getattr(before, counter) for counter in counters)

        made, failed = more("connections"), more("connections_failed", "connections_lost")
        if made or failed:
            self._listener.observe(self.url, Aspect.CONNECT, made, failed)
        valid, forged = more("events_delivered", "events_repeated"), more("events_forged")
        if valid or forged:
            self._listener.observe(self.url, Aspect.VALIDITY, valid, forged)
        if malformed := more("events_invalid", "events_tampered", "messages_invalid") - forged:
            self._listener.observe(self.url, Aspect.FORM, bad=malformed)
