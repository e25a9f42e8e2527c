"""The transmitting end over a relay."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from dataclasses import replace
from math import inf
from typing import TYPE_CHECKING, Generic, TypeVar

from strata.protocol.errors import StrataError
from strata.txrx.addresses import RelayAddress
from strata.txrx.codecs import MessageCodec
from strata.txrx.dialing import SessionTx
from strata.txrx.errors import SendError
from strata.txrx.relayed.line import (
    ANSWER,
    BYE,
    DATA,
    EVERYBODY,
    FULL_SECONDS,
    HELLO,
    LAST_WORDS_SECONDS,
    PLACE,
    WELCOME,
    RelayEnd,
    RelayLine,
    encode_words,
    has_not_gone_out,
    is_full,
    read_words,
)
from strata.txrx.returns import ReturnChannel
from strata.txrx.settings import TxRxSettings

if TYPE_CHECKING:
    from strata.channels.reliable import ReliableChannel

__all__ = ["RelayTx"]

M = TypeVar("M")

_log = logging.getLogger(__name__)

_PIECE_BYTES = 64 * 1024
_MOST_UNDER_WAY = 64
"""The most pieces that a sender sends before the receiver acknowledges their messages."""
_HELLO_SECONDS = 1.0


class RelayTx(SessionTx[M]):
    """The transmitting end. It connects to the relay when the first message is posted."""

    def __init__(
        self, address: RelayAddress, codec: MessageCodec[M], settings: TxRxSettings, end: RelayEnd
    ) -> None:
        # The reliable channel repairs its connections itself: silence is no reason to connect again.
        patient = replace(settings, link_timeout=settings.message_delivery_timeout)
        super().__init__(address, codec, patient)
        self._line = RelayLine(address, end)
        self._listening: asyncio.Task[None] | None = None
        self._welcome: asyncio.Future[int] | None = None
        self._latest: int | None = None
        """The receiver that began last, as far as is known."""
        self._other: int | None = None
        """A receiver that answered instead: it may be one that was killed, whose answer was late. It is kept
        from one attempt to the next, because an attempt may be shorter than `_HELLO_SECONDS`."""
        self._silent_at = inf
        """When the latest receiver counts as silent, and the other one is taken."""
        self._streams = 0
        self._carrier: _Carrier[M] | None = None

    async def _attempt(self) -> None:
        try:
            if self._listening is None or self._listening.done():
                await self._line.close()  # a failed one, if there is any
                await self._line.open()
                self._listening = asyncio.create_task(self._listen(), name=f"listen {self._address}")
            session, stream = self._session.session_id, self._streams + 1
            receiver = self._latest = await self._ask(session, stream)
            self._streams, self._other = stream, None
            self._carrier = _Carrier(self, self._line.channel, session, receiver, stream)
        except StrataError as error:
            raise ConnectionError(str(error)) from error
        self._connected(self._carrier)

    async def _ask(self, session: int, stream: int) -> int:
        """Ask who receives until a receiver answers. Raises `StrataError`."""
        welcome: asyncio.Future[int] = self._loop.create_future()
        self._welcome = welcome
        while not welcome.done():
            if self._other is not None:
                now = self._loop.time()
                if now >= self._silent_at:
                    return self._other
                self._silent_at = min(self._silent_at, now + _HELLO_SECONDS)
            await self._line.channel.send_ephemeral(encode_words(HELLO, session, stream))
            await asyncio.wait([welcome], timeout=_HELLO_SECONDS)
        return welcome.result()

    def _why_late(self) -> str:
        is_open = self._listening is not None and not self._listening.done()
        return "no receiver answered" if is_open else super()._why_late()

    async def _listen(self) -> None:
        try:
            async for payload in self._line.heard():
                self._hear(payload)
        except StrataError as error:
            _log.warning("%s is heard no more: %s", self._address, error)
            if self._carrier is not None:
                self._carrier.abort()  # what waits for its acknowledgement goes again, on another line

    def _hear(self, payload: bytes) -> None:
        told = read_words(payload)
        if told is None:
            return
        kind, session, receiver, rest = told
        carrier = self._carrier
        if kind == WELCOME and session == EVERYBODY:
            self._latest, self._other = receiver, None  # it has its own time to answer
            if carrier is not None and carrier.receiver != receiver:
                self._ask_anew(carrier)
        if session != self._session.session_id:
            return
        if kind == WELCOME and self._welcome is not None and not self._welcome.done():
            if self._latest in (None, receiver):
                self._welcome.set_result(receiver)
            elif self._other is None:
                self._other, self._silent_at = receiver, inf
        elif kind == ANSWER and carrier is not None and carrier.receiver == receiver:
            carrier.heard(rest)

    def _do_post(self, message: M, return_channel: ReturnChannel[M] | None) -> SendError[M] | None:
        carrier = self._carrier
        # If any is pending it stays with its receiver, or the sender asks already: what it hears then counts.
        if carrier is not None and not self._session.pending and carrier.is_old:
            self._latest = None
            carrier.abort()
        return super()._do_post(message, return_channel)

    def _ask_anew(self, carrier: _Carrier[M]) -> None:
        """Ask who receives before the next message, if none is pending: another receiver may have begun."""
        if not self._session.pending:
            carrier.abort()

    async def close(self) -> list[SendError[M]]:
        try:
            return await super().close()
        finally:
            await self._leave()

    async def _leave(self) -> None:
        # If this is cancelled, it stops waiting and still closes.
        try:
            if self._carrier is not None:
                await self._carrier.leave()
        finally:
            try:
                if self._listening is not None:
                    self._listening.cancel()
                    await asyncio.wait([self._listening])
            finally:
                await self._line.close()


class _Carrier(Generic[M]):
    """The stream of one session to one receiver, in pieces."""

    def __init__(
        self, owner: RelayTx[M], channel: ReliableChannel, session: int, receiver: int, stream: int
    ) -> None:
        self.receiver = receiver
        self._connections = owner._line.connections
        self._owner = owner
        self._core = owner._session
        self._channel = channel
        self._session = session
        self._stream = stream
        self._number = 0
        self._under_way: deque[int] = deque()
        """For each piece, the number of the session's messages up to and including those in it."""
        self._is_over = False
        self._ready = asyncio.Event()
        self._sending = asyncio.create_task(self._send(), name=f"send {owner.addr()}")

    @property
    def is_old(self) -> bool:
        """Whether the relay has been away since it began."""
        return self._connections != self._owner._line.connections

    @property
    def unwritten(self) -> int:
        return 0

    def write(self) -> None:
        self._ready.set()

    def say_farewell(self) -> None:
        pass  # `Bye` follows the last piece

    def close(self) -> None:
        self._is_over = True
        self._ready.set()

    def abort(self) -> None:
        if not self._is_over:
            self.close()
            self._owner._lost(self, None)

    async def leave(self) -> None:
        """Send `Bye` after the pieces that the channel has accepted."""
        self.close()
        try:
            await asyncio.wait([self._sending], timeout=LAST_WORDS_SECONDS)
        finally:
            self._sending.cancel()

    def heard(self, frames: bytes) -> None:
        """Take answers of the receiver."""
        view = memoryview(frames)
        while view and not self._is_over and self._core.closed is None:
            buffer = self._core.get_buffer()
            count = min(len(buffer), len(view))
            buffer[:count] = view[:count]
            self._core.buffer_updated(count, asyncio.get_running_loop().time())
            view = view[count:]
        while self._under_way and self._under_way[0] <= self._core.acknowledged:
            self._under_way.popleft()
        self._ready.set()
        self._owner._heard()

    async def _send(self) -> None:
        try:
            while not self._is_over:
                await self._ready.wait()
                self._ready.clear()
                while not self._is_over and len(self._under_way) < _MOST_UNDER_WAY:
                    stream = b"".join(self._core.data_to_send(_PIECE_BYTES, are_written=False))
                    if not stream:
                        break
                    # All but the last of its messages fit in its first piece.
                    end = self._core.end
                    for start in range(0, len(stream), _PIECE_BYTES):
                        is_last = start + _PIECE_BYTES >= len(stream)
                        await self._send_piece(
                            stream[start : start + _PIECE_BYTES], end if is_last else end - 1
                        )
            await self._channel.send(encode_words(BYE, self._session, self.receiver))
        except StrataError as error:
            self._is_over = True
            self._owner._lost(self, error)

    async def _send_piece(self, piece: bytes, end: int) -> None:
        """Send a piece of the stream, which completes the messages before the sequence `end`."""
        place = PLACE.pack(self._stream, self._number)
        self._number += 1
        self._under_way.append(self._core.acknowledged + self._core.unacked_size)
        message = encode_words(DATA, self._session, self.receiver, place + piece)
        while not self._is_over:
            before = self._core.written(end)  # first, because the channel may take it before `send` returns
            try:
                await self._channel.send(message)
                return
            except StrataError as error:
                # A carrier that is over changes nothing: the session goes on without it.
                if not self._is_over and has_not_gone_out(error):
                    self._core.not_written(before)
                if not is_full(error):
                    raise
                # A message may have more pieces than the channel accepts before others acknowledge some.
                await asyncio.sleep(FULL_SECONDS)
