"""The same two ends over a relay: `relay:wss://…#/topic`, an addition to the document.

The messages of a reliable channel (docs/guides/channels.md) carry the bytes of each session to the other
end, in order, even if connections break and relays fail. The session on top of it is the same as over
sockets: `send` waits for the acknowledgement of the receiver, not of any participant.

    Hello    kind 0, session, stream                              who receives? sent until answered
    Welcome  kind 1, session, receiver                            this receiver does; session 0: to everybody
    Data     kind 2, session, receiver, stream, number, bytes     a piece of the sender's stream
    Answer   kind 3, session, receiver, bytes                     whole frames to the sender
    Bye      kind 4, session, receiver                            the sender has closed

Each message begins with "STRX" and the kind in one byte; the numbers after it have 8 bytes each, big endian.
A sender begins a new stream with each connection. It numbers its streams from 1, and the pieces of each from
0.

A receiver takes a new random name each time it begins to serve, so that it never mistakes the traffic of an
earlier receiver, which a relay may still hold, for its own. It begins with a Welcome to everybody: a sender
with nothing pending forgets the receiver before, which may have been killed. So does a sender whose relay was
away. Pending messages stay with that receiver, because only it can tell whether it took them. A topic must
have only one receiver; a second one would also answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import ssl as ssl_module
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from math import inf
from struct import Struct
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from strata.channels.connecting import Relay, connect
from strata.protocol.errors import StrataError
from strata.protocol.ids import Identity, Signer
from strata.relays.arguments import authors_of
from strata.relays.connection import Options
from strata.txrx.addresses import RelayAddress
from strata.txrx.codecs import MessageCodec
from strata.txrx.dialing import SessionTx
from strata.txrx.ends import Rx, when_forgotten
from strata.txrx.errors import SendError, TxRxClosed, TxRxIOError
from strata.txrx.frames import HEADER_BYTES, encode_header
from strata.txrx.queue import RxQueue
from strata.txrx.receiving import ReceiverCounters, ReceivingLink, Sessions
from strata.txrx.returns import ReturnChannel
from strata.txrx.settings import TxRxSettings

if TYPE_CHECKING:
    from strata.channels.encryption import Encryption
    from strata.channels.reliable import ReliableChannel

__all__ = ["RelayEnd", "RelayRx", "RelayTx", "serve_relay"]

M = TypeVar("M")

_log = logging.getLogger(__name__)

_MAGIC = b"STRX"
_HELLO, _WELCOME, _DATA, _ANSWER, _BYE = range(5)
_EVERYBODY = 0
_HEAD = Struct(">4sBQQ")
_PLACE = Struct(">QQ")
_PIECE_BYTES = 64 * 1024
_MOST_UNDER_WAY = 64
"""The most pieces that a sender sends before the receiver acknowledges their messages."""
_HELLO_SECONDS = 1.0
_ANSWER_SECONDS = 0.02
"""Answers within this time are sent together, since each answer is a message on the relay."""
_FULL_SECONDS = 0.1
"""The wait before a piece for which the channel had no room is sent again."""
_LAST_WORDS_SECONDS = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayEnd:
    """How an end connects to a relay, and to which authors it listens there."""

    identity: Signer | None = None
    """Signs the packets of this end; by default a new identity."""
    encryption: Encryption | None = None
    """Both ends need the same encryption; if it needs a channel id, that is the topic. Without encryption,
    the relay and every reader of the topic can read the messages."""
    members: tuple[str, ...] = ()
    """The authors to listen to; if empty, every author on the topic. All ends should have members: without
    them, a sender believes any author that answers in the receiver's place."""
    ssl: ssl_module.SSLContext | None = None
    options: Options | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "members", authors_of("members", self.members))


class _Line:
    """A relay and a reliable channel on it, opened together and closed together."""

    def __init__(self, address: RelayAddress, end: RelayEnd) -> None:
        self._address = address
        self._end = end
        self._stack = contextlib.AsyncExitStack()
        self._relay: Relay | None = None
        self.channel: ReliableChannel

    @property
    def connections(self) -> int:
        """How often the relay was connected to: what was said in between may not have been heard."""
        return 0 if self._relay is None else self._relay.statistics.connections

    async def open(self) -> None:
        """Open both. Raises `StrataError`. If it is cancelled, nothing stays open."""
        end = self._end
        relay = self._relay = connect(
            self._address.url,
            identity=end.identity or Identity.generate(),
            ssl=end.ssl,
            options=end.options,
        )
        options: dict[str, Any] = {"query_on_connect": False, "members": end.members}
        if end.encryption is not None:
            options["encryption"] = end.encryption
        try:
            await self._stack.enter_async_context(relay)
            channel = relay.channel(self._address.topic, topic=self._address.topic, **options)
            self.channel = await self._stack.enter_async_context(channel)
        except BaseException:
            await self.close()
            raise

    async def heard(self) -> AsyncIterator[bytes]:
        """The payloads of the members' messages.

        The channel also fetches messages of others to which its participants refer, and participants repeat
        those that cannot be fetched: a repeated one has no author, since nothing proves who wrote it.
        """
        members = self._end.members
        async for message in self.channel:
            if not members or message.author in members:
                yield message.payload

    async def close(self) -> None:
        """Close both; takes a few seconds at most."""
        try:
            async with asyncio.timeout(_LAST_WORDS_SECONDS):
                await self._stack.aclose()
        except (StrataError, TimeoutError) as error:
            _log.info("closing %s: %s", self._address, error)


def _message(kind: int, session: int, receiver: int, rest: bytes = b"") -> bytes:
    return _HEAD.pack(_MAGIC, kind, session, receiver) + rest


def _read(payload: bytes) -> tuple[int, int, int, bytes] | None:
    """The kind, session, receiver and rest of a message; None for other messages on the topic."""
    if len(payload) < _HEAD.size or not payload.startswith(_MAGIC):
        return None
    _, kind, session, receiver = _HEAD.unpack_from(payload)
    return kind, session, receiver, payload[_HEAD.size :]


def _is_full(error: StrataError) -> bool:
    """Whether a channel has no room for a message now, but will later."""
    # Imported here, since a program without channels over relays needs none of their modules.
    from strata.channels.rate_limit.values import SendQueueFull
    from strata.channels.sds.participant import OutgoingFull

    return isinstance(error, OutgoingFull | SendQueueFull)


def _has_not_gone_out(error: StrataError) -> bool:
    """Whether a channel whose `send` raised this has sent nothing of the message, and never will."""
    from strata.channels.persistence import PersistenceClosed, PersistenceError
    from strata.channels.reliable.errors import ChannelNotOpen, NotStarted

    if isinstance(error, PersistenceError):
        # Nothing goes out before it is stored. But a closing channel may still store what it had accepted.
        return not isinstance(error, PersistenceClosed)
    return _is_full(error) or isinstance(error, ChannelNotOpen | NotStarted)


class RelayTx(SessionTx[M]):
    """The transmitting end. It connects to the relay when the first message is posted."""

    def __init__(
        self, address: RelayAddress, codec: MessageCodec[M], settings: TxRxSettings, end: RelayEnd
    ) -> None:
        # The reliable channel repairs its connections itself: silence is no reason to connect again.
        patient = replace(settings, link_timeout=settings.message_delivery_timeout)
        super().__init__(address, codec, patient)
        self._line = _Line(address, end)
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
            await self._line.channel.send_ephemeral(_message(_HELLO, session, stream))
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
        told = _read(payload)
        if told is None:
            return
        kind, session, receiver, rest = told
        carrier = self._carrier
        if kind == _WELCOME and session == _EVERYBODY:
            self._latest, self._other = receiver, None  # it has its own time to answer
            if carrier is not None and carrier.receiver != receiver:
                self._ask_anew(carrier)
        if session != self._session.session_id:
            return
        if kind == _WELCOME and self._welcome is not None and not self._welcome.done():
            if self._latest in (None, receiver):
                self._welcome.set_result(receiver)
            elif self._other is None:
                self._other, self._silent_at = receiver, inf
        elif kind == _ANSWER and carrier is not None and carrier.receiver == receiver:
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
            await asyncio.wait([self._sending], timeout=_LAST_WORDS_SECONDS)
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
            await self._channel.send(_message(_BYE, self._session, self.receiver))
        except StrataError as error:
            self._is_over = True
            self._owner._lost(self, error)

    async def _send_piece(self, piece: bytes, end: int) -> None:
        """Send a piece of the stream, which completes the messages before the sequence `end`."""
        place = _PLACE.pack(self._stream, self._number)
        self._number += 1
        self._under_way.append(self._core.acknowledged + self._core.unacked_size)
        message = _message(_DATA, self._session, self.receiver, place + piece)
        while not self._is_over:
            before = self._core.written(end)  # first, because the channel may take it before `send` returns
            try:
                await self._channel.send(message)
                return
            except StrataError as error:
                # A carrier that is over changes nothing: the session goes on without it.
                if not self._is_over and _has_not_gone_out(error):
                    self._core.not_written(before)
                if not _is_full(error):
                    raise
                # A message may have more pieces than the channel accepts before others acknowledge some.
                await asyncio.sleep(_FULL_SECONDS)


async def serve_relay(
    address: RelayAddress, codec: MessageCodec[M], settings: TxRxSettings, end: RelayEnd
) -> RelayRx[M]:
    """Serve a topic. Raises `TxRxIOError` if the relay cannot be reached. If cancelled, nothing is served."""
    line = _Line(address, end)
    try:
        await line.open()
    except StrataError as error:
        raise TxRxIOError(f"{address} cannot be served: {error}") from error
    return RelayRx(address, codec, settings, line)


class _Session(Generic[M]):
    """One sender, as the receiver sees it: its link, its stream, and the number of the next piece."""

    def __init__(self, link: ReceivingLink[M], stream: int) -> None:
        self.link = link
        self.stream = stream
        self.number = 0


class RelayRx(Rx[M]):
    """The receiving end."""

    def __init__(
        self, address: RelayAddress, codec: MessageCodec[M], settings: TxRxSettings, line: _Line
    ) -> None:
        # The tasks refer to the service and not to this end, so that an unreferenced end closes itself.
        self._service = _Service(address, codec, settings, line)
        super().__init__(address, self._service.queue)
        self._finalizer = when_forgotten(self, self._service.close)

    def statistics(self) -> ReceiverCounters:
        return self._service.counters

    def close(self) -> None:
        self._finalizer.detach()
        self._service.close("the receiver has closed the channel")

    async def join(self) -> None:
        self.close()
        await asyncio.wait(self._service.tasks)


class _Service(Generic[M]):
    """A topic that is served: its senders, and the tasks that listen to them and answer them."""

    def __init__(
        self, address: RelayAddress, codec: MessageCodec[M], settings: TxRxSettings, line: _Line
    ) -> None:
        self.queue: RxQueue[M] = RxQueue(settings.queue_capacity)
        self.counters = ReceiverCounters()
        self._address = address
        self._codec = codec
        # A sender may be silent within a message until that message times out: the channel repairs its own
        # connections, and other senders may come first while the queue is full.
        idle = max(settings.idle_frame_timeout, settings.message_delivery_timeout)
        self._settings = replace(settings, idle_frame_timeout=idle)
        self._line = line
        self._name = secrets.randbits(64)
        self._loop = asyncio.get_running_loop()
        self._sessions: Sessions[M] = Sessions(self._settings)
        self._open: OrderedDict[int, _Session[M]] = OrderedDict()
        """By session id; the session heard from most recently is the last."""
        self._answers: dict[int, bytes] = {}
        self._has_answers = asyncio.Event()
        self._room = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self.tasks = [
            asyncio.create_task(self._listen(), name=f"serve {address}"),
            asyncio.create_task(self._answer(), name=f"answer {address}"),
        ]

    def close(self, reason: str) -> None:
        if self.queue.closed is not None:
            return
        self.queue.close(TxRxClosed(reason))
        self._room.set()
        for session_id, session in self._open.items():
            session.link.close(reason)
            self._collect(session_id, session)
        self._has_answers.set()
        self.tasks[0].cancel()
        if self._timer is not None:
            self._timer.cancel()
        self.tasks.append(asyncio.create_task(self._leave(), name=f"leave {self._address}"))

    async def _leave(self) -> None:
        await asyncio.wait(self.tasks[:2], timeout=_LAST_WORDS_SECONDS)
        self.tasks[1].cancel()
        await self._line.close()

    # Listening

    async def _listen(self) -> None:
        try:
            async for payload in self._line.heard():
                await self._hear(payload)
        except StrataError as error:
            # Nothing more will arrive, so the waiting receiver and senders must be informed.
            _log.error("%s is served no more: %s", self._address, error)
            self.close(f"the channel on the relay has failed: {error}")

    async def _hear(self, payload: bytes) -> None:
        told = _read(payload)
        if told is None:
            return
        kind, session_id, receiver, rest = told
        if kind == _HELLO:
            self._welcome(session_id, receiver)
            await self._send_welcome(session_id)
        elif receiver == self._name and session_id in self._open:
            if kind == _DATA:
                await self._take_piece(session_id, rest)
            elif kind == _BYE:
                self._drop(session_id)
        elif receiver == self._name and kind == _DATA:
            self._refuse(session_id)
        self._arm()

    async def _send_welcome(self, session_id: int) -> None:
        try:
            await self._line.channel.send_ephemeral(_message(_WELCOME, session_id, self._name))
        except StrataError as error:
            # The sender will ask again, and the other senders still need to be served.
            _log.warning("no welcome through %s: %s", self._address, error)

    def _welcome(self, session_id: int, stream: int) -> None:
        if session_id in self._open:
            if stream <= self._open[session_id].stream:
                return  # a repeated Hello, sent before the answer arrived
            self._drop(session_id)
        while len(self._open) >= self._settings.max_connections:
            self._drop(next(iter(self._open)))
        link = ReceivingLink(self._sessions, self._codec, self._settings, self.counters, self._loop.time())
        self._open[session_id] = _Session(link, stream)

    def _drop(self, session_id: int) -> None:
        self._open.pop(session_id).link.connection_lost(self._loop.time())

    def _refuse(self, session_id: int) -> None:
        """Reject a sender that was dropped to make room for others, but continues to send: otherwise it would
        wait until its delivery timeout."""
        now = self._loop.time()
        link = ReceivingLink(self._sessions, self._codec, self._settings, self.counters, now)
        link.get_buffer()[:HEADER_BYTES] = encode_header(session_id)
        link.buffer_updated(HEADER_BYTES, now)
        link.take(1, now)
        link.refuse("the receiver has too many senders, and this one was quiet for longest")
        self._collect(session_id, _Session(link, 0))
        link.connection_lost(now)

    async def _take_piece(self, session_id: int, rest: bytes) -> None:
        session = self._open[session_id]
        self._open.move_to_end(session_id)
        if len(rest) < _PLACE.size:
            return
        stream, number = _PLACE.unpack_from(rest)
        if (stream, number) < (session.stream, session.number):
            return
        if (stream, number) != (session.stream, session.number):
            session.link.refuse("a part of what was sent has been lost on the way")
        else:
            session.number += 1
            await self._take(session_id, session, memoryview(rest)[_PLACE.size :])
        self._collect(session_id, session)

    async def _take(self, session_id: int, session: _Session[M], data: memoryview) -> None:
        """Accept all messages of a piece. Accepted messages are acknowledged before this waits for room."""
        link = session.link
        while not link.is_finished:
            while data and not link.is_blocked:
                buffer = link.get_buffer()
                count = min(len(buffer), len(data))
                buffer[:count] = data[:count]
                link.buffer_updated(count, self._loop.time())
                data = data[count:]
                self.queue.put(link.take(self.queue.room, self._loop.time()))
            if not link.is_blocked:
                return
            self._collect(session_id, session)
            self._room.clear()
            self.queue.when_room(self, self._room.set)
            if not self.queue.room:
                await self._room.wait()
            self.queue.put(link.take(self.queue.room, self._loop.time()))

    # Answering

    def _collect(self, session_id: int, session: _Session[M]) -> None:
        data = session.link.data_to_send()
        if data:
            self._answers[session_id] = self._answers.get(session_id, b"") + data
            self._has_answers.set()

    async def _answer(self) -> None:
        await self._send_welcome(_EVERYBODY)
        while self._answers or self.queue.closed is None:
            await self._has_answers.wait()
            self._has_answers.clear()
            answers, self._answers = self._answers, {}
            pause = _ANSWER_SECONDS
            for session_id, frames in answers.items():
                message = _message(_ANSWER, session_id, self._name, frames)
                try:
                    await self._line.channel.send(message)
                except StrataError as error:
                    if _is_full(error):
                        # There may be no later answer, and without this one accepted messages would be
                        # returned to their sender.
                        self._answers[session_id] = frames + self._answers.get(session_id, b"")
                        self._has_answers.set()
                        pause = _FULL_SECONDS
                    else:
                        # The sender receives no answer, and gives up after its own timeout.
                        _log.warning("no answer through %s: %s", self._address, error)
            await asyncio.sleep(pause)

    def _arm(self) -> None:
        moments = [session.link.get_timer() for session in self._open.values()]
        at = min((moment for moment in [*moments, self._sessions.get_timer()] if moment), default=None)
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if at is None else self._loop.call_at(at, self._handle_timers)

    def _handle_timers(self) -> None:
        now = self._loop.time()
        self._sessions.handle_timer(now)
        for session_id, session in list(self._open.items()):
            session.link.handle_timer(now)
            self._collect(session_id, session)
            if session.link.is_finished:
                self._drop(session_id)
        self._arm()
