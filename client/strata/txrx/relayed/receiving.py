"""The receiving end over a relay."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import OrderedDict
from dataclasses import replace
from typing import Generic, TypeVar

from strata.protocol.errors import StrataError
from strata.txrx.addresses import RelayAddress
from strata.txrx.codecs import MessageCodec
from strata.txrx.ends import Rx, when_forgotten
from strata.txrx.errors import TxRxClosed, TxRxIOError
from strata.txrx.frames import HEADER_BYTES, encode_header
from strata.txrx.queue import RxQueue
from strata.txrx.receiving import ReceiverCounters, ReceivingLink, Sessions
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
    is_full,
    read_words,
)
from strata.txrx.settings import TxRxSettings

__all__ = ["RelayRx", "serve_relay"]

M = TypeVar("M")

_log = logging.getLogger(__name__)

_ANSWER_SECONDS = 0.02
"""Answers within this time are sent together, since each answer is a message on the relay."""


async def serve_relay(
    address: RelayAddress, codec: MessageCodec[M], settings: TxRxSettings, end: RelayEnd
) -> RelayRx[M]:
    """Serve a topic. Raises `TxRxIOError` if the relay cannot be reached. If cancelled, nothing is served."""
    line = RelayLine(address, end)
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
        self, address: RelayAddress, codec: MessageCodec[M], settings: TxRxSettings, line: RelayLine
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
        self, address: RelayAddress, codec: MessageCodec[M], settings: TxRxSettings, line: RelayLine
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
        await asyncio.wait(self.tasks[:2], timeout=LAST_WORDS_SECONDS)
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
        told = read_words(payload)
        if told is None:
            return
        kind, session_id, receiver, rest = told
        if kind == HELLO:
            self._welcome(session_id, receiver)
            await self._send_welcome(session_id)
        elif receiver == self._name and session_id in self._open:
            if kind == DATA:
                await self._take_piece(session_id, rest)
            elif kind == BYE:
                self._drop(session_id)
        elif receiver == self._name and kind == DATA:
            self._refuse(session_id)
        self._arm()

    async def _send_welcome(self, session_id: int) -> None:
        try:
            await self._line.channel.send_ephemeral(encode_words(WELCOME, session_id, self._name))
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
        if len(rest) < PLACE.size:
            return
        stream, number = PLACE.unpack_from(rest)
        if (stream, number) < (session.stream, session.number):
            return
        if (stream, number) != (session.stream, session.number):
            session.link.refuse("a part of what was sent has been lost on the way")
        else:
            session.number += 1
            await self._take(session_id, session, memoryview(rest)[PLACE.size :])
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
        await self._send_welcome(EVERYBODY)
        while self._answers or self.queue.closed is None:
            await self._has_answers.wait()
            self._has_answers.clear()
            answers, self._answers = self._answers, {}
            pause = _ANSWER_SECONDS
            for session_id, frames in answers.items():
                message = encode_words(ANSWER, session_id, self._name, frames)
                try:
                    await self._line.channel.send(message)
                except StrataError as error:
                    if is_full(error):
                        # There may be no later answer, and without this one accepted messages would be
                        # returned to their sender.
                        self._answers[session_id] = frames + self._answers.get(session_id, b"")
                        self._has_answers.set()
                        pause = FULL_SECONDS
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
