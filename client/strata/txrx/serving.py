"""The server of network addresses: it moves bytes between sockets and `receiving`, which decides."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from typing import Generic, TypeVar, cast

from strata.txrx.codecs import MessageCodec
from strata.txrx.ends import Rx, when_forgotten
from strata.txrx.errors import TxRxClosed
from strata.txrx.queue import RxQueue
from strata.txrx.receiving import ReceiverCounters, ReceivingLink, Sessions
from strata.txrx.settings import TxRxSettings
from strata.txrx.sockets import NetAddress, SocketFile, listen, tune
from strata.txrx.timers import Timer

__all__ = ["NetRx", "serve_net"]

M = TypeVar("M")

_LAST_WORDS_SECONDS = 5.0
_LEAVING_SECONDS = 2.0
"""How long a peer has to close a connection after it was told why it ends."""


async def serve_net(
    address: NetAddress, codec: MessageCodec[M], settings: TxRxSettings, context: ssl.SSLContext | None
) -> NetRx[M]:
    """Serve an address. Raises `AddressInUse`, `TxRxIOError`. If it is cancelled, nothing is served."""
    real, sockets, file = await listen(address)
    hub = _Hub(codec, settings, RxQueue(settings.queue_capacity), file)
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
            # Recorded before it starts, so that cancelling closes the server, and not only its socket.
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
        super().__init__(address, hub.queue)
        self._hub = hub
        # Connections refer to the hub and not to this end, so that an unreferenced end closes itself.
        self._finalizer = when_forgotten(self, hub.close)

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


class _Hub(Generic[M]):
    """The state that the connections of one server share."""

    def __init__(
        self, codec: MessageCodec[M], settings: TxRxSettings, queue: RxQueue[M], file: SocketFile | None
    ) -> None:
        self.codec = codec
        self.settings = settings
        self.queue = queue
        self.counters = ReceiverCounters()
        self.sessions: Sessions[M] = Sessions(settings)
        self.servers: list[asyncio.Server] = []
        self.connections: dict[ReceivingLink[M], _Connection[M]] = {}
        self.gone = asyncio.Event()
        self._file = file
        self._loop = asyncio.get_running_loop()
        self._timer = Timer(self._loop, self._forget)

    def new_connection(self) -> _Connection[M]:
        return _Connection(self)

    def close(self, reason: str) -> None:
        if self.queue.closed is not None:
            return
        for server in self.servers:
            server.close()
        if self._file is not None:
            self._file.remove()
        self.queue.close(TxRxClosed(reason))
        self._timer.cancel()
        for connection in list(self.connections.values()):
            connection.close(reason)
        if self.connections:
            # A peer that does not read could keep its socket open indefinitely.
            self._loop.call_later(_LAST_WORDS_SECONDS, self.abort)
        else:
            self.gone.set()

    def abort(self) -> None:
        for connection in list(self.connections.values()):
            connection.abort()

    def lost(self, link: ReceivingLink[M]) -> None:
        self.connections.pop(link, None)
        if self.queue.closed is not None:
            if not self.connections:
                self.gone.set()
            return
        self._timer.arm(self.sessions.get_timer())

    def _forget(self) -> None:
        self.sessions.handle_timer(self._loop.time())
        self._timer.arm(self.sessions.get_timer())


class _Connection(asyncio.BufferedProtocol, Generic[M]):
    """One connection.

    Reading stops while its messages wait for room in the queue, and while its peer does not read answers,
    which would pile up here.

    A peer that is told why its connection ends may still be sending. Unread bytes would reset the connection,
    and the reason and the last acknowledgement could be lost. So the bytes are read and dropped until the
    peer closes.
    """

    def __init__(self, hub: _Hub[M]) -> None:
        self._hub = hub
        self._loop = hub._loop
        self._queue = hub.queue
        self._time = hub._loop.time
        self._link = ReceivingLink(hub.sessions, hub.codec, hub.settings, hub.counters, self._time())
        self.get_buffer = self._link.get_buffer  # type: ignore[method-assign]
        self._transport: asyncio.Transport | None = None
        self._timer = Timer(hub._loop, self._handle_timer)
        self._is_paused = False
        self._is_unheard = False
        """Whether the peer does not read answers."""
        self._is_leaving = False
        """Whether the peer was told why the connection ends, and has not closed it yet."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        hub = self._hub
        if hub.queue.closed is not None or len(hub.connections) >= hub.settings.max_connections:
            self._transport.abort()
            return
        hub.connections[self._link] = self
        tune(transport)
        self._timer.arm(self._link.get_timer())

    def buffer_updated(self, nbytes: int) -> None:
        link, now = self._link, self._time()
        link.buffer_updated(nbytes, now)
        if self._is_leaving:
            link.discard()
        else:
            self._step(now)

    def eof_received(self) -> bool:
        return False

    def pause_writing(self) -> None:
        self._is_unheard = True
        self._pause_or_resume()

    def resume_writing(self) -> None:
        self._is_unheard = False
        self._pause_or_resume()

    def connection_lost(self, error: Exception | None) -> None:
        self._timer.cancel()
        self._transport = None  # it must not be used any more
        self._queue.forget(self)
        self._link.connection_lost(self._time())
        self._hub.lost(self._link)

    def close(self, reason: str) -> None:
        self._link.close(reason)
        self._write()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def _step(self, now: float) -> None:
        """Take the messages that fit, answer, and continue or pause reading."""
        link, queue = self._link, self._queue
        if queue.closed is None:
            messages = link.take(queue.room, now)
            if messages:
                queue.put(messages)
        if link.superseded is not None:
            older, link.superseded = link.superseded, None
            if older in self._hub.connections:
                self._hub.connections[older].abort()
        if link.is_blocked and queue.closed is None:
            queue.when_room(self, self._room)
        self._pause_or_resume()
        self._write()

    def _pause_or_resume(self) -> None:
        transport, pause = self._transport, self._link.is_blocked or self._is_unheard
        pause = pause and not self._is_leaving
        if transport is None or pause is self._is_paused:
            return
        self._is_paused = pause
        if pause:
            transport.pause_reading()
        elif not transport.is_closing():
            transport.resume_reading()

    def _room(self) -> None:
        self._step(self._time())

    def _write(self) -> None:
        transport = self._transport
        if transport is None or transport.is_closing() or self._is_leaving:
            return
        data = self._link.data_to_send()
        if data:
            transport.write(data)
        if not self._link.is_finished:
            self._timer.arm(self._link.get_timer())
            return
        self._queue.forget(self)
        if self._link.has_said_why and not transport.is_closing():
            self._leave(transport)
        else:
            transport.close()

    def _leave(self, transport: asyncio.Transport) -> None:
        self._is_leaving = True
        self._link.discard()
        self._pause_or_resume()
        if transport.can_write_eof():
            with contextlib.suppress(OSError):  # the peer is gone
                transport.write_eof()
        self._timer.cancel()
        self._timer.arm(self._time() + _LEAVING_SECONDS)

    def _handle_timer(self) -> None:
        if self._is_leaving:
            self.abort()
            return
        self._link.handle_timer(self._time())
        self._write()
