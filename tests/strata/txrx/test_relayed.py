"""Sessions over a reliable channel, with a channel that a test holds in its hands."""

from __future__ import annotations

import asyncio
import gc
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from strata.channels.rate_limit import SendQueueFull
from strata.channels.sds import OutgoingFull
from strata.protocol.errors import StrataError
from strata.txrx import (
    DeliveryStatus,
    DeliveryTimeout,
    RelayAddress,
    RelayEnd,
    TxRxClosed,
    TxRxSettings,
    relayed,
)
from strata.txrx.codecs import BytesCodec
from strata.txrx.frames import SEQUENCE, Ack, encode_header, encode_response
from strata.txrx.framing import frame_of
from strata.txrx.relayed import (
    _DATA,
    _HELLO,
    _PLACE,
    RelayRx,
    RelayTx,
    _Line,
    _message,
    _read,
)

from tests.support.waiting import until

ADDRESS = RelayAddress("ws://relay.example/strata", "/test/1/relayed/proto")
QUICK = TxRxSettings(message_delivery_timeout=2.0)


@dataclass
class Message:
    payload: bytes
    author: str | None = "did:a:1"
    """None: somebody else repeats it."""


class Channel:
    """One end of a channel; what it sends goes to `to`, signed by `author`."""

    def __init__(self, author: str = "did:a:1") -> None:
        self.author = author
        self.to: Channel | None = None
        self.arrived: asyncio.Queue[Message | StrataError] = asyncio.Queue()
        self.refuses: Callable[[], StrataError | None] = lambda: None

    async def send(self, payload: bytes) -> None:
        await asyncio.sleep(0)
        refusal = self.refuses()
        if refusal is not None:
            raise refusal
        if self.to is not None:
            self.to.arrived.put_nowait(Message(payload, self.author))

    send_ephemeral = send

    def __aiter__(self) -> Channel:
        return self

    async def __anext__(self) -> Message:
        message = await self.arrived.get()
        if isinstance(message, StrataError):
            self.refuses = lambda: message
            raise message
        return message


class Line(_Line):
    """Stands for a relay and a channel on it: a new one each time it is opened."""

    def __init__(self, *channels: Channel, members: tuple[str, ...] = ()) -> None:
        super().__init__(ADDRESS, RelayEnd(members=members))
        self.channels = list(channels)
        self.channel: Any = None
        self.is_open = False

    async def open(self) -> None:
        self.channel = self.channels.pop(0)

        self.is_open = True

    async def close(self) -> None:
        self.is_open = False


def joined(one: Channel, other: Channel) -> None:
    one.to, other.to = other, one


def sender(*channels: Channel, settings: TxRxSettings = QUICK) -> RelayTx[bytes]:
    tx = RelayTx(ADDRESS, BytesCodec(), settings, RelayEnd())
    tx._line = Line(*channels)
    return tx


async def receiver(
    channel: Channel, settings: TxRxSettings = QUICK, members: tuple[str, ...] = ()
) -> RelayRx[bytes]:
    line = Line(channel, members=members)
    await line.open()
    return RelayRx(ADDRESS, BytesCodec(), settings, line)


@pytest.mark.req("T-104")
async def test_what_the_channel_brings_of_others_than_the_members_is_not_handed_over() -> None:
    alice, mallory, ours = Channel("did:a:alice"), Channel("did:a:mallory"), Channel("did:a:rx")
    rx = await receiver(ours, members=("did:a:alice",))
    joined(alice, ours)
    good = sender(alice)
    await good.send(b"from a member")
    mallory.to = ours
    bad = sender(mallory)
    returned = bad.try_post(b"let me in")
    ours.arrived.put_nowait(Message(_message(_HELLO, 7, 1), author=None))
    await asyncio.sleep(0.1)
    assert len(rx._service._open) == 1
    await good.send(b"from a member too")
    assert [await rx.recv(), await rx.recv()] == [b"from a member", b"from a member too"]
    await rx.join()
    await good.close()
    await bad.close()
    error = await returned
    assert error is not None and error.delivery is DeliveryStatus.NOT_DELIVERED


@pytest.mark.req("T-065", "T-104")
async def test_a_message_posted_while_an_answer_is_read_counts_from_there() -> None:
    ours, theirs = Channel(), Channel()
    joined(ours, theirs)
    tx, rx = sender(ours), await receiver(theirs)
    await tx.send(b"one")
    await asyncio.sleep(0.1)
    ours.to = None  # nobody hears what follows
    assert tx._carrier is not None
    tx._carrier.heard(b"")  # wakes the task that sends …
    returned = tx.try_post(b"two")  # … before this one's own step
    async with asyncio.timeout(3.5):  # and not after two timeouts
        error = await returned
    assert error is not None and error.delivery is DeliveryStatus.UNKNOWN
    await tx.close()
    await rx.join()


@pytest.mark.req("T-021", "T-104")
async def test_a_receiver_whose_channel_fails_says_that_nothing_more_comes() -> None:
    channel = Channel()
    rx = await receiver(channel)
    waiting = asyncio.create_task(rx.recv())
    channel.arrived.put_nowait(StrataError("out of order"))
    async with asyncio.timeout(5):
        with pytest.raises(TxRxClosed, match="out of order"):
            await waiting
    await rx.join()


@pytest.mark.req("T-033", "T-104")
async def test_a_welcome_that_cannot_be_sent_ends_nothing_for_the_others() -> None:
    ours, theirs = Channel(), Channel()
    joined(ours, theirs)
    patient = TxRxSettings(message_delivery_timeout=10.0)
    tx, rx = sender(ours, settings=patient), await receiver(theirs, patient)
    refusals = [StrataError("the hook has no key yet")]
    theirs.refuses = lambda: refusals.pop() if refusals else None
    async with asyncio.timeout(8):
        await tx.send(b"message")
        assert await rx.recv() == b"message"
    await tx.close()
    await rx.join()


@pytest.mark.req("T-062", "T-104")
async def test_a_sender_whose_channel_has_failed_opens_another_one() -> None:
    first, theirs, second = Channel(), Channel(), Channel()
    joined(first, theirs)
    patient = TxRxSettings(message_delivery_timeout=10.0)
    tx, rx = sender(first, second, settings=patient), await receiver(theirs, patient)
    async with asyncio.timeout(8):
        await tx.send(b"one")
        first.arrived.put_nowait(StrataError("out of order"))
        await asyncio.sleep(0.1)
        joined(second, theirs)
        await tx.send(b"two")
        assert [await rx.recv(), await rx.recv()] == [b"one", b"two"]
    await tx.close()
    await rx.join()


@pytest.mark.req("T-026", "T-104")
async def test_cancelling_the_closing_of_a_sender_closes_its_line_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours, theirs = Channel(), Channel()
    joined(ours, theirs)
    tx, rx = sender(ours), await receiver(theirs)
    await tx.send(b"message")
    monkeypatch.setattr(ours, "send", lambda payload: asyncio.sleep(3600))
    closing = asyncio.create_task(tx.close())
    await asyncio.sleep(0.05)
    assert not closing.done()  # the last word does not go out
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    await asyncio.sleep(0)
    assert not tx._line.is_open  # type: ignore[attr-defined]
    assert tx._carrier is not None and tx._carrier._sending.done()
    assert tx._listening is not None and tx._listening.done()
    await rx.join()


@pytest.mark.req("T-024", "T-104")
async def test_a_receiver_that_nobody_holds_closes_itself() -> None:
    ours, theirs = Channel(), Channel()
    joined(ours, theirs)
    tx, rx = sender(ours), await receiver(theirs)
    await tx.send(b"message")
    messages = aiter(rx)
    service = rx._service
    del rx
    gc.collect()
    await tx.send(b"another")  # whoever iterates holds it
    assert [await anext(messages), await anext(messages)] == [b"message", b"another"]
    del messages
    gc.collect()
    async with asyncio.timeout(5):
        status = await tx.status().wait_for(lambda status: status.closed)
        await asyncio.wait(service.tasks)
    assert status.reason == "the receiver is gone"
    await tx.close()


@pytest.mark.req("T-104")
async def test_a_sender_that_made_room_for_another_is_told_so_by_its_next_message() -> None:
    settings = TxRxSettings(max_connections=1, message_delivery_timeout=20.0)
    first, second, theirs = Channel(), Channel(), Channel()
    rx = await receiver(theirs, settings)
    quiet, other = sender(first, settings=settings), sender(second, settings=settings)
    async with asyncio.timeout(5):
        joined(first, theirs)
        await quiet.send(b"one")
        joined(second, theirs)
        await other.send(b"two")
        joined(first, theirs)
        error = await quiet.try_post(b"three")
    assert error is not None and "too many senders" in error.reason
    assert error.delivery is DeliveryStatus.NOT_DELIVERED
    assert [await rx.recv(), await rx.recv(), rx.unread] == [b"one", b"two", 0]
    await quiet.close()
    joined(second, theirs)
    await other.close()
    await rx.join()


class Wire:
    """Speaks to a receiver message by message, as a sender over a relay does."""

    def __init__(self, theirs: Channel) -> None:
        self.ours, self._theirs = Channel(), theirs
        joined(self.ours, theirs)
        self.receiver = 0

    async def hello(self, session: int, stream: int = 1) -> None:
        self._say(_message(_HELLO, session, stream))
        self.receiver = (await self.answer())[2]

    def piece(self, session: int, stream: int, number: int, data: bytes) -> None:
        self._say(_message(_DATA, session, self.receiver, _PLACE.pack(stream, number) + data))

    async def answer(self) -> tuple[int, int, int, bytes]:
        """Kind, session, receiver and the rest of the next answer."""
        message = await self.ours.arrived.get()
        assert isinstance(message, Message)
        told = _read(message.payload)
        assert told is not None
        return told

    def _say(self, payload: bytes) -> None:
        self._theirs.arrived.put_nowait(Message(payload))


def framed(number: int, body: bytes) -> bytes:
    return b"".join(frame_of(SEQUENCE.pack(number) + body))


@pytest.mark.req("T-030", "T-104")
async def test_words_that_come_late_or_again_change_nothing() -> None:
    theirs = Channel()
    rx, wire = await receiver(theirs), Wire(theirs)
    async with asyncio.timeout(5):
        await wire.hello(7)
        wire.piece(7, 1, 0, encode_header(7) + framed(0, b"one"))
        assert await rx.recv() == b"one"
        await wire.answer()
        await wire.hello(7)  # sent before the first answer came
        wire.piece(7, 1, 1, framed(1, b"two"))
        assert await rx.recv() == b"two"
        await wire.answer()
        await wire.hello(7, stream=2)
        wire.piece(7, 1, 2, framed(2, b"of the stream before"))
        wire.piece(7, 2, 0, encode_header(7) + framed(2, b"three"))
        assert await rx.recv() == b"three"
    assert rx.statistics().rejects_sent == 0
    await rx.join()


@pytest.mark.req("T-031", "T-104")
async def test_a_sender_of_whom_a_piece_is_lost_is_refused_after_what_came() -> None:
    theirs = Channel()
    rx, wire = await receiver(theirs), Wire(theirs)
    async with asyncio.timeout(5):
        await wire.hello(7)
        wire.piece(7, 1, 0, encode_header(7) + framed(0, b"one"))
        wire.piece(7, 1, 2, framed(2, b"three"))
        told = (await wire.answer())[3]
        if b"lost on the way" not in told:
            told = (await wire.answer())[3]
        assert b"lost on the way" in told
    assert (await rx.recv(), rx.unread) == (b"one", 0)
    await rx.join()


@pytest.mark.req("T-104")
async def test_a_message_may_stop_half_way_for_as_long_as_its_sender_waits_for_it() -> None:
    theirs, timeout = Channel(), 4.0
    rx = await receiver(theirs, TxRxSettings(idle_frame_timeout=0.05, message_delivery_timeout=timeout))
    wire = Wire(theirs)
    message = framed(0, b"through a gap")
    async with asyncio.timeout(5):
        await wire.hello(7)
        wire.piece(7, 1, 0, encode_header(7) + message[:20])
        await asyncio.sleep(0.2)
        wire.piece(7, 1, 1, message[20:])
        assert await rx.recv() == b"through a gap"
        wire.piece(7, 1, 2, framed(1, b"never whole")[:20])
        (session,) = rx._service._open.values()
        await until(lambda: session.link.get_timer() is not None)
    given_up_at = session.link.get_timer()
    assert given_up_at is not None and given_up_at <= asyncio.get_running_loop().time() + timeout
    await rx.join()


@pytest.mark.req("T-104")
async def test_a_message_of_more_pieces_than_the_channel_takes_goes_as_there_is_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(relayed, "_FULL_SECONDS", 0.005)
    ours, theirs = Channel(), Channel()
    joined(ours, theirs)
    tx, rx = sender(ours), await receiver(theirs)
    await tx.send(b"small")
    answers: list[StrataError | None] = [
        OutgoingFull("too many await it"),
        SendQueueFull("lane", 10, 10),
        None,
    ]
    full = itertools.cycle(answers)
    ours.refuses = lambda: next(full)
    large = bytes(range(256)) * 1024  # in five pieces
    async with asyncio.timeout(5):
        await tx.send(large)
        assert [await rx.recv(), await rx.recv()] == [b"small", large]
    assert tx.statistics().connections == 1
    ours.refuses = lambda: OutgoingFull("nobody acknowledges anything")
    error = await tx.try_post(b"too late")
    assert error is not None and isinstance(error.error, DeliveryTimeout)
    await tx.close()
    assert tx._carrier is not None and tx._carrier._sending.done()
    await rx.join()


@pytest.mark.req("T-039", "T-104")
@pytest.mark.parametrize("full", [OutgoingFull("too many await it"), SendQueueFull("lane", 10, 10)])
async def test_an_answer_for_which_the_channel_has_no_room_goes_later(full: StrataError) -> None:
    theirs = Channel()
    rx, wire = await receiver(theirs), Wire(theirs)
    async with asyncio.timeout(5):
        await wire.hello(7)
        tries = iter(range(2))
        theirs.refuses = lambda: full if next(tries, None) is not None else None
        wire.piece(7, 1, 0, encode_header(7) + framed(0, b"one"))
        assert await rx.recv() == b"one"
        wire.piece(7, 1, 1, framed(1, b"two"))
        assert await rx.recv() == b"two"
        acknowledged = (await wire.answer())[3]
        while len(acknowledged) < 2 * len(encode_response(Ack(0))):
            acknowledged += (await wire.answer())[3]
    assert acknowledged == encode_response(Ack(0)) + encode_response(Ack(1))
    await rx.join()


@pytest.mark.req("T-104")
async def test_the_sender_that_was_quiet_for_longest_makes_room() -> None:
    theirs = Channel()
    rx = await receiver(theirs, TxRxSettings(max_connections=2, message_delivery_timeout=2.0))
    wire = Wire(theirs)
    async with asyncio.timeout(5):
        for session in (1, 2):
            await wire.hello(session)
        wire.piece(1, 1, 0, encode_header(1) + framed(0, b"still here"))
        await wire.answer()
        await wire.hello(3)
        wire.piece(1, 1, 1, framed(1, b"and here"))
        assert [await rx.recv(), await rx.recv()] == [b"still here", b"and here"]
    await rx.join()
