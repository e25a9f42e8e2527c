"""The dialler's end of a session: connects, moves bytes between a carrier and `sending`, settles returns.

The first connection is made when the first message is posted (T-064). A connection that breaks while no
message is pending is replaced when the next message is posted.
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
import ssl
from abc import abstractmethod
from typing import Generic, Protocol, TypeVar, cast

from strata.relays.backoff import Backoff
from strata.txrx.addresses import Address
from strata.txrx.codecs import MessageCodec
from strata.txrx.ends import Tx
from strata.txrx.errors import SendError, TxRxClosed, TxRxError
from strata.txrx.multipart import EMPTY_FRAME
from strata.txrx.returns import ReturnChannel
from strata.txrx.sending import SenderCounters, SendingSession
from strata.txrx.settings import TxRxSettings
from strata.txrx.sockets import NetAddress, connect, tune
from strata.txrx.timers import Timer
from strata.txrx.tls import explain_tls

__all__ = ["Carrier", "NetTx", "SessionTx"]

M = TypeVar("M")

_log = logging.getLogger(__name__)

_WRITE_AHEAD = 512 * 1024
"""The most bytes that may wait in the transport; further bytes stay in the outbox."""


class Carrier(Protocol):
    """One connection of a session, over any transport."""

    @property
    def unwritten(self) -> int:
        """The number of bytes that were given to it and have not been sent."""

    def write(self) -> None:
        """Take the bytes from the session that can be sent now."""

    def say_farewell(self) -> None:
        """Tell the server that the session is over, with all messages acknowledged."""

    def close(self) -> None:
        """End the connection after the written bytes have been sent, and report nothing more."""

    def abort(self) -> None:
        """End the connection now, and report that it is lost."""


class SessionTx(Tx[M]):
    """The transmitting end of a session; a subclass implements connecting."""

    def __init__(self, address: Address, codec: MessageCodec[M], settings: TxRxSettings) -> None:
        super().__init__(address)
        self._settings = settings
        self._loop = asyncio.get_running_loop()
        self._session: SendingSession[M, ReturnChannel[M]] = SendingSession(_new_id(), codec, settings)
        self._post = self._session.post
        self._scheduled = False
        self._is_closing = False
        self._connection: Carrier | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._timer = Timer(self._loop, self._handle_timer)
        self._waiting: dict[asyncio.Future[None], int] = {}
        self._left: list[SendError[M]] = []
        self._last_failure: str | None = None
        self._backoff = Backoff(
            base=settings.backoff_base, cap=settings.backoff_cap, random=random.SystemRandom().random
        )

    # For the program

    @property
    def pending(self) -> int:
        return self._session.pending

    @property
    def outbox_size(self) -> int:
        return self._session.outbox_size

    @property
    def unacked_size(self) -> int:
        return self._session.unacked_size

    def _do_post(self, message: M, return_channel: ReturnChannel[M] | None) -> SendError[M] | None:
        try:
            if self._is_closing:
                raise TxRxClosed("the Tx is being closed by its owner")
            self._post(message, return_channel)
        except TxRxError as error:
            return self._refused(error, message, return_channel)
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._flush)
        return None

    def _hurry(self) -> None:
        # The first message of a tick is sent at once; the next ones are sent together at its end.
        if self._session.pending == 1:
            self._step()

    async def drain(self, most: int = 0) -> None:
        while self._session.pending > most:
            waiter = self._loop.create_future()
            self._waiting[waiter] = most
            try:
                await waiter
            finally:
                self._waiting.pop(waiter, None)

    async def close(self) -> list[SendError[M]]:
        self._is_closing = True
        try:
            await self.drain()
            if self._connection is not None:
                self._connection.say_farewell()
        finally:
            self._close(TxRxClosed("closed by its owner"))
        left, self._left = self._left, []
        return left

    def statistics(self) -> SenderCounters:
        return self._session.statistics()

    def _close(self, error: TxRxError) -> None:
        self._session.close(error)
        self._step()

    # One step after each event

    def _flush(self) -> None:
        self._scheduled = False
        session = self._session
        if session.outbox_size or not session.is_marked:  # otherwise a `send` has already written the outbox
            self._step()

    def _step(self) -> None:
        """Write all that can be written, settle return channels, arm the timer."""
        session = self._session
        session.mark(self._loop.time())
        connection = self._connection
        if connection is not None:
            connection.write()
        elif session.pending and self._connecting is None:
            self._connecting = self._loop.create_task(self._connect(), name=f"dial {self._address}")
        for channel in session.take_delivered():
            channel._settle()
        if session.closed is not None:
            self._end(session.closed)
        if self._waiting:
            self._release(session.pending)
        self._timer.arm(self._session.get_timer())

    def _release(self, pending: int) -> None:
        for waiter, most in self._waiting.items():
            if pending <= most and not waiter.done():
                waiter.set_result(None)

    def _end(self, error: TxRxError) -> None:
        """Return all pending messages, once, after the session was closed."""
        self._set_closed(error)
        for returned in self._session.take_returned():
            came_back = SendError(
                returned.error, returned.message, reason=self._reason(error), delivery=returned.delivery
            )
            self._left.append(came_back)
            if returned.token is not None:
                returned.token._settle(came_back)
        if self._connecting is not None:
            self._connecting.cancel()
            self._connecting = None
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        self._timer.cancel()

    def _reason(self, error: TxRxError) -> str:
        if self._last_failure is None:  # no attempt failed, or the peer has answered since
            return str(error)
        return f"{error}; last attempt to connect: {self._last_failure}"

    def _handle_timer(self) -> None:
        connection = self._connection
        self._session.handle_timer(self._loop.time(), 0 if connection is None else connection.unwritten)
        if self._session.is_dead and connection is not None:
            _log.info("no acknowledgement from %s: connecting again", self._address)
            connection.abort()
        self._step()

    # Connections

    @abstractmethod
    async def _attempt(self) -> None:
        """Make one connection, and pass it to `_connected`. Raises `OSError` if that fails."""

    async def _connect(self) -> None:
        """Try until a connection is made; the delivery timeout cancels this task."""
        while True:
            delay = self._backoff.next_delay()
            try:
                async with asyncio.timeout(self._settings.connect_timeout):
                    await self._attempt()
            except ssl.SSLError as error:
                self._failed(explain_tls(error))
            except TimeoutError:
                self._failed(f"{self._why_late()} within {self._settings.connect_timeout:g} s")
            except OSError as error:
                self._failed(error.strerror or str(error))
            except ValueError as error:  # a host that the system refuses to look up
                self._failed(str(error))
            else:
                return
            if self._connecting is not asyncio.current_task():
                return self._overtaken()
            await asyncio.sleep(delay)

    def _overtaken(self) -> None:
        """Handle an attempt that connected at the moment of its timeout.

        The event loop has closed that connection, but not every loop reports it.
        """
        connection = self._connection
        if connection is not None:
            connection.close()
            self._lost(connection, None)

    def _failed(self, reason: str) -> None:
        if reason != self._last_failure:
            _log.info("no connection to %s: %s", self._address, reason)
        self._last_failure = reason

    def _connected(self, connection: Carrier) -> None:
        self._connecting = None
        if self._session.closed is not None:
            connection.close()
            return
        self._connection = connection
        self._session.connection_made(self._loop.time())
        self._step()

    def _heard(self) -> None:
        self._backoff.reset()
        self._last_failure = None
        self._step()

    def _lost(self, connection: Carrier, error: Exception | None) -> None:
        if connection is not self._connection:
            return
        self._connection = None
        self._last_failure = self._why_lost(error)
        self._session.connection_lost(_new_id())
        if self._session.pending and self._session.closed is None:
            self._connecting = self._loop.create_task(self._reconnect(), name=f"dial {self._address} again")
        else:
            self._step()

    def _why_late(self) -> str:
        return "no connection"

    def _why_lost(self, error: Exception | None) -> str:
        return "the connection was closed" if error is None else str(error)

    async def _reconnect(self) -> None:
        await asyncio.sleep(self._backoff.next_delay())
        await self._connect()


class NetTx(SessionTx[M]):
    """The transmitting end of a network address."""

    def __init__(
        self,
        address: NetAddress,
        codec: MessageCodec[M],
        settings: TxRxSettings,
        context: ssl.SSLContext | None,
    ) -> None:
        super().__init__(address, codec, settings)
        self._net_address = address
        self._context = context

    async def _attempt(self) -> None:
        await connect(self._net_address, lambda: _Connection(self), self._context)

    def _why_lost(self, error: Exception | None) -> str:
        if isinstance(error, ssl.SSLError):
            return explain_tls(error)
        why = super()._why_lost(error)
        if error is None and self._context is not None:
            # A server that refuses a client may end the handshake without a reason.
            ours = "refuses ours" if self._settings.tls_certificate else "asks for one: set tls_certificate"
            why += f"; if it has mutual TLS, it {ours}"
        return why


class _Connection(asyncio.BufferedProtocol, Generic[M]):
    """One connection of a `NetTx`."""

    def __init__(self, owner: NetTx[M]) -> None:
        self._owner = owner
        self._session = owner._session
        self._time = owner._loop.time
        self._transport: asyncio.Transport | None = None
        self._is_full = False
        self._is_over = False

    @property
    def unwritten(self) -> int:
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(high=_WRITE_AHEAD)
        tune(transport)
        self._owner._connected(self)

    def get_buffer(self, sizehint: int) -> memoryview:
        return memoryview(bytearray(64)) if self._is_over else self._session.get_buffer()

    def buffer_updated(self, nbytes: int) -> None:
        if not self._is_over:
            self._session.buffer_updated(nbytes, self._time())
            self._owner._heard()

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, error: Exception | None) -> None:
        self._is_over = True
        self._transport = None  # it must not be used any more
        self._owner._lost(self, error)

    def pause_writing(self) -> None:
        self._is_full = True

    def resume_writing(self) -> None:
        self._is_full = False
        self._owner._step()

    def write(self) -> None:
        """Write bytes of the session until the system accepts no more."""
        transport = self._transport
        if transport is None:
            return
        while not self._is_full and not transport.is_closing():  # a write may find the connection broken
            pieces = self._session.data_to_send()
            if not pieces:
                return
            for piece in pieces:
                transport.write(piece)

    def say_farewell(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(self._session.farewell())

    def close(self) -> None:
        self._is_over = True
        if self.unwritten > len(EMPTY_FRAME):
            # The messages have been returned to their sender; a peer that does not read must not delay this.
            self.abort()
        elif self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()


def _new_id() -> int:
    return secrets.randbits(64)
