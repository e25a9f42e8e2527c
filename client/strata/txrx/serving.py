"""The server of network addresses: moves bytes between sockets and `receiving`, and decides nothing."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import weakref
from typing import Any, Generic, TypeVar, cast

from strata.txrx.codecs import Codec
from strata.txrx.ends import Rx
from strata.txrx.errors import ChannelClosed
from strata.txrx.inbox import Inbox
from strata.txrx.receiving import ReceiverCounters, ReceivingLink, Sessions
from strata.txrx.settings import ChannelSettings
from strata.txrx.sockets import NetAddress, SocketFile, listen, tune

__all__ = ["NetRx", "serve_net"]

M = TypeVar("M")

_LAST_WORDS_SECONDS = 5.0


async def serve_net(
    address: NetAddress, codec: Codec[M], settings: ChannelSettings, context: ssl.SSLContext | None
) -> NetRx[M]:
    """Serve. Raises `AddressInUse`, `ChannelIOError`. Cancelling it leaves nothing behind."""
    real, sockets, file = await listen(address)
    hub = _Hub(codec, settings, Inbox(settings.queue_capacity), file)
    loop = asyncio.get_running_loop()
    try:
        for one in sockets:
            server = await loop.create_server(
                hub.new_connection,
                sock=one,
                ssl=context,
                ssl_handshake_timeout=None if context is None else settings.idle_frame_timeout,
                start_serving=False,
            )
            # Known before it starts, so that whoever cancels this has it closed, and not its socket alone.
            hub.servers.append(server)
            await server.start_serving()
    except BaseException:
        hub.close("the server could not start")
        for one in sockets:
            one.close()
        raise
    return NetRx(real, hub)


class NetRx(Rx[M]):
    """The receiving end of a network address."""

    def __init__(self, address: NetAddress, hub: _Hub[M]) -> None:
        super().__init__(address, hub.inbox)
        self._hub = hub
        # Connections hold on to the hub, and nothing to this: who forgets to close it has it closed.
        self._finalizer = weakref.finalize(self, _close_soon, hub, asyncio.get_running_loop())
        self._finalizer.atexit = False

    def close(self) -> None:
        self._finalizer.detach()
        self._hub.close("the receiver has closed the channel")

    async def join(self) -> None:
        self.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LAST_WORDS_SECONDS):
                await self._hub.gone.wait()
        self._hub.abort()

    def statistics(self) -> ReceiverCounters:
        return self._hub.counters


def _close_soon(hub: _Hub[Any], loop: asyncio.AbstractEventLoop) -> None:
    # Collected on any thread, perhaps when the loop is gone.
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(hub.close, "the receiver is gone")


class _Hub(Generic[M]):
    """What the connections of one server share."""

    def __init__(
        self, codec: Codec[M], settings: ChannelSettings, inbox: Inbox[M], file: SocketFile | None
    ) -> None:
        self.codec = codec
        self.settings = settings
        self.inbox = inbox
        self.counters = ReceiverCounters()
        self.sessions = Sessions(settings)
        self.servers: list[asyncio.Server] = []
        self.connections: dict[ReceivingLink[M], _Connection[M]] = {}
        self.gone = asyncio.Event()
        self._file = file
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None

    def new_connection(self) -> _Connection[M]:
        return _Connection(self)

    def close(self, reason: str) -> None:
        if self.inbox.closed is not None:
            return
        for server in self.servers:
            server.close()
        if self._file is not None:
            self._file.remove()
        self.inbox.close(ChannelClosed(reason))
        if self._timer is not None:
            self._timer.cancel()
        for connection in list(self.connections.values()):
            connection.close(reason)
        if not self.connections:
            self.gone.set()

    def abort(self) -> None:
        for connection in list(self.connections.values()):
            connection.abort()

    def lost(self, link: ReceivingLink[M]) -> None:
        self.connections.pop(link, None)
        if self.inbox.closed is not None:
            if not self.connections:
                self.gone.set()
            return
        at = self.sessions.get_timer()
        if at is not None and self._timer is None:
            self._timer = self._loop.call_at(at, self._forget)

    def _forget(self) -> None:
        self.sessions.handle_timer(self._loop.time())
        at = self.sessions.get_timer()
        self._timer = None if at is None else self._loop.call_at(at, self._forget)


class _Connection(asyncio.BufferedProtocol, Generic[M]):
    """One connection. Reading stops while its messages wait for room in the queue."""

    def __init__(self, hub: _Hub[M]) -> None:
        self._hub = hub
        self._loop = hub._loop
        self._inbox = hub.inbox
        self._time = hub._loop.time
        self._link = ReceivingLink(hub.sessions, hub.codec, hub.settings, hub.counters, self._time())
        self.get_buffer = self._link.get_buffer  # type: ignore[method-assign]
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._is_paused = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        hub = self._hub
        if hub.inbox.closed is not None or len(hub.connections) >= hub.settings.max_connections:
            self._transport.abort()
            return
        hub.connections[self._link] = self
        tune(transport)
        self._arm()

    def buffer_updated(self, nbytes: int) -> None:
        link, now = self._link, self._time()
        link.buffer_updated(nbytes, now)
        self._step(now)

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, error: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._inbox.forget(self)
        self._link.connection_lost(self._time())
        self._hub.lost(self._link)

    def close(self, reason: str) -> None:
        self._link.close(reason)
        self._write()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def _step(self, now: float) -> None:
        """Take what there is room for, answer, and read on or wait."""
        link, inbox = self._link, self._inbox
        if inbox.closed is None:
            messages = link.take(inbox.room, now)
            if messages:
                inbox.put(messages)
        if link.superseded is not None:
            older, link.superseded = link.superseded, None
            if older in self._hub.connections:
                self._hub.connections[older].abort()
        if link.is_blocked != self._is_paused:
            self._pause_or_resume()
        self._write()

    def _pause_or_resume(self) -> None:
        transport = self._transport
        assert transport is not None
        self._is_paused = self._link.is_blocked
        if self._is_paused:
            transport.pause_reading()
            self._inbox.when_room(self, self._room)
        elif not transport.is_closing():
            transport.resume_reading()

    def _room(self) -> None:
        self._step(self._time())
        if self._is_paused:
            self._inbox.when_room(self, self._room)

    def _write(self) -> None:
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        data = self._link.data_to_send()
        if data:
            transport.write(data)
        if self._link.is_finished:
            self._inbox.forget(self)
            transport.close()
        else:
            self._arm()

    def _arm(self) -> None:
        at = self._link.get_timer()
        timer = self._timer
        if at is None or (timer is not None and timer.when() <= at):
            return
        if timer is not None:
            timer.cancel()
        self._timer = self._loop.call_at(at, self._handle_timer)

    def _handle_timer(self) -> None:
        self._timer = None
        self._link.handle_timer(self._time())
        self._write()
