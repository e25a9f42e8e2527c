"""Sessions over a reliable channel, with a channel that the test controls."""

from __future__ import annotations

import asyncio
import gc
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from strata.channels.persistence import PersistenceClosed, StorageFull
from strata.channels.rate_limit import SendQueueFull
from strata.channels.reliable.errors import ChannelFailed, ChannelNotOpen
from strata.channels.sds import OutgoingFull
from strata.protocol.errors import StrataError
from strata.txrx import (
    DeliveryStatus,
    DeliveryTimeout,
    RelayAddress,
    RelayEnd,
    SendError,
    TxRxClosed,
    TxRxSettings,
)
from strata.txrx.codecs import BytesCodec
from strata.txrx.frames import SEQUENCE, Ack, Reject, encode_header, encode_response
from strata.txrx.multipart import frame_of
from strata.txrx.relayed import RelayRx, RelayTx, sending
from strata.txrx.relayed.line import (
    ANSWER,
    BYE,
    DATA,
    HELLO,
    PLACE,
    WELCOME,
    RelayLine,
    encode_words,
    read_words,
)

from tests.support.virtual_time import virtually
from tests.support.waiting import until

ADDRESS = RelayAddress("ws://relay.example/strata", "/test/1/relayed/proto")
QUICK = TxRxSettings(message_delivery_timeout=2.0)


@dataclass
class Message:
    payload: bytes
    author: str | None = "did:a:1"
    """None: somebody else repeats the message."""


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


class Line(RelayLine):
    """Replaces a relay and a channel on it: a new channel each time it is opened."""

    connections = 1

    def __init__(self, *channels: Channel, members: tuple[str, ...] = ()) -> None:
        super().__init__(ADDRESS, RelayEnd(members=members))
        self.channels = list(channels)
        self.channel: Any = None
        self.is_open = False

    async def open(self) -> None:
        assert not self.is_open, "one that has failed is closed first"
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


@pytest.mark.slow
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
    ours.arrived.put_nowait(Message(encode_words(HELLO, 7, 1), author=None))
    await asyncio.sleep(0.1)
    assert len(rx._service._open) == 1
    await good.send(b"from a member too")
    assert [await rx.recv(), await rx.recv()] == [b"from a member", b"from a member too"]
    await rx.join()
    await good.close()
    await bad.close()
    error = await returned
    assert error is not None and error.delivery is DeliveryStatus.NOT_DELIVERED


@pytest.mark.slow
@pytest.mark.req("T-065", "T-104")
async def test_a_message_posted_while_an_answer_is_read_counts_from_there() -> None:
    ours, theirs = Channel(), Channel()
    joined(ours, theirs)
    tx, rx = sender(ours), await receiver(theirs)
    await tx.send(b"one")
    await asyncio.sleep(0.1)
    ours.to = None  # from here on, messages are lost
    assert tx._carrier is not None
    tx._carrier.heard(b"")  # wakes the sending task …
    returned = tx.try_post(b"two")  # … before this task's own step
    async with asyncio.timeout(3.5):  # not after two timeouts
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


@pytest.mark.req("T-062", "T-104")
async def test_what_waits_for_its_acknowledgement_goes_again_when_the_channel_has_failed() -> None:
    first, theirs, second = Channel(), Channel(), Channel()
    joined(first, theirs)
    patient = TxRxSettings(message_delivery_timeout=10.0)
    tx, rx = sender(first, second, settings=patient), await receiver(theirs, patient)
    async with asyncio.timeout(8):
        await tx.send(b"one")
        first.to = None  # from here on nothing arrives
        sending = asyncio.create_task(tx.send(b"two"))
        await until(lambda: tx.unacked_size == 1)
        joined(second, theirs)
        first.arrived.put_nowait(StrataError("out of order"))
        await sending
        assert [await rx.recv(), await rx.recv()] == [b"one", b"two"]
    await tx.close()
    await rx.join()


@pytest.mark.req("T-062", "T-104")
async def test_a_sender_with_nothing_pending_goes_on_with_the_receiver_that_follows_a_killed_one() -> None:
    ours, killed, next_one = Channel(), Channel(), Channel()
    joined(ours, killed)
    tx, first = sender(ours), await receiver(killed)
    await tx.send(b"one")
    assert await first.recv() == b"one"
    killed.to = None
    for task in first._service.tasks:
        task.cancel()
    joined(ours, next_one)
    second = await receiver(next_one)
    await asyncio.sleep(0.1)
    async with asyncio.timeout(8):
        for text in (b"two", b"three"):
            await tx.send(text)
            assert await second.recv() == text
    await tx.close()
    await second.join()


@pytest.mark.req("T-062", "T-104")
async def test_a_sender_asks_anew_who_receives_when_its_relay_was_away_meanwhile() -> None:
    ours, killed, next_one = Channel(), Channel(), Channel()
    joined(ours, killed)
    tx, first = sender(ours), await receiver(killed)
    await tx.send(b"one")
    for task in first._service.tasks:
        task.cancel()
    next_one.to = None  # its first words are not heard
    second = await receiver(next_one)
    await asyncio.sleep(0.1)
    joined(ours, next_one)
    tx._line.connections += 1  # type: ignore[misc]
    async with asyncio.timeout(8):
        for text in (b"two", b"three"):
            await tx.send(text)
            assert await second.recv() == text
    await tx.close()
    await second.join()


@pytest.mark.slow
@pytest.mark.req("T-062", "T-104")
async def test_what_is_pending_does_not_go_to_a_receiver_that_begins_meanwhile() -> None:
    ours, theirs, other = Channel(), Channel(), Channel("did:a:2")
    joined(ours, theirs)
    tx, first = sender(ours), await receiver(theirs)
    await tx.send(b"one")
    ours.to = None  # on its way for ever
    sending = asyncio.create_task(tx.send(b"two"))
    await until(lambda: tx.unacked_size == 1)
    joined(ours, other)
    second = await receiver(other)
    with pytest.raises(SendError) as caught:
        await sending
    assert caught.value.delivery is DeliveryStatus.UNKNOWN and not second.unread
    await asyncio.gather(first.join(), second.join())


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
    assert not closing.done()  # the last message is not sent
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
    await tx.send(b"another")  # the iterator keeps the receiver alive
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
    """Talks to a receiver message by message, as a sender over a relay does."""

    def __init__(self, theirs: Channel) -> None:
        self.ours, self._theirs = Channel(), theirs
        joined(self.ours, theirs)
        self.receiver = 0

    async def hello(self, session: int, stream: int = 1) -> None:
        self._say(encode_words(HELLO, session, stream))
        self.receiver = (await self.answer())[2]

    def piece(self, session: int, stream: int, number: int, data: bytes) -> None:
        self._say(encode_words(DATA, session, self.receiver, PLACE.pack(stream, number) + data))

    async def answer(self) -> tuple[int, int, int, bytes]:
        """Return kind, session, receiver and the rest of the next answer."""
        message = await self.ours.arrived.get()
        assert isinstance(message, Message)
        told = read_words(message.payload)
        assert told is not None
        return told

    def _say(self, payload: bytes) -> None:
        self._theirs.arrived.put_nowait(Message(payload))


class Desk:
    """Talks to a sender message by message, as a receiver over a relay does."""

    def __init__(self, theirs: Channel, receiver: int = 77) -> None:
        self.ours, self._theirs = Channel(), theirs
        joined(self.ours, theirs)
        self.receiver = receiver
        self.session = 0

    async def heard(self) -> tuple[int, int, int, bytes]:
        """Return kind, session, receiver or stream, and the rest of the sender's next message."""
        message = await self.ours.arrived.get()
        assert isinstance(message, Message)
        told = read_words(message.payload)
        assert told is not None
        return told

    async def hello(self) -> int:
        """Return the stream of the next Hello."""
        kind, self.session, stream, _ = await self.heard()
        assert kind == HELLO
        return stream

    async def piece(self) -> tuple[int, int, bytes]:
        """Return stream, number and bytes of the next piece."""
        kind, session, receiver, rest = await self.heard()
        assert (kind, session, receiver) == (DATA, self.session, self.receiver)
        return *PLACE.unpack_from(rest), rest[PLACE.size :]

    def say(
        self, kind: int, rest: bytes = b"", session: int | None = None, receiver: int | None = None
    ) -> None:
        session = self.session if session is None else session
        receiver = self.receiver if receiver is None else receiver
        self._theirs.arrived.put_nowait(Message(encode_words(kind, session, receiver, rest)))

    def acknowledge(self, sequence: int) -> None:
        self.say(ANSWER, encode_response(Ack(sequence)))


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
        await wire.hello(7)  # as if sent before the first answer came
        wire.piece(7, 1, 1, framed(1, b"two"))
        assert await rx.recv() == b"two"
        await wire.answer()
        await wire.hello(7, stream=2)
        wire.piece(7, 1, 2, framed(2, b"of the stream before"))
        wire.piece(7, 2, 0, encode_header(7) + framed(2, b"three"))
        assert await rx.recv() == b"three"
    assert rx.statistics().rejects_sent == 0
    await rx.join()


@pytest.mark.req("T-104")
@pytest.mark.parametrize(
    "stranger",
    [
        b"",
        b"hello",
        b"STRX",
        b"STRX\x02" + bytes(7),
        encode_words(HELLO, 7, 9).replace(b"STRX", b"OTHR"),
        encode_words(DATA, 7, 0),
        encode_words(DATA, 7, 0, bytes(15)),
        encode_words(DATA, 8, 0, bytes(16)),
        encode_words(ANSWER, 7, 0),
        encode_words(ANSWER, 7, 0, b"no frame"),
        encode_words(WELCOME, 7, 0),
        encode_words(BYE, 8, 0),
        encode_words(200, 7, 0, bytes(16)),
    ],
)
async def test_what_others_say_on_the_topic_is_no_harm(stranger: bytes) -> None:
    ours, theirs = Channel(), Channel()
    joined(ours, theirs)
    tx, rx = sender(ours), await receiver(theirs)
    async with asyncio.timeout(5):
        for message in (b"one", b"two"):
            ours.arrived.put_nowait(Message(stranger))
            theirs.arrived.put_nowait(Message(stranger))
            await tx.send(message)
            assert await rx.recv() == message
    assert tx.statistics().connections == 1
    assert list(rx._service._open) == [tx._session.session_id]
    await tx.close()
    await rx.join()


@pytest.mark.req("T-104")
async def test_a_sender_goes_by_what_its_own_receiver_says_to_it() -> None:
    theirs = Channel()
    tx, desk = sender(theirs), Desk(theirs)
    rejected = encode_response(Reject("not for you"))
    async with asyncio.timeout(5):
        first = tx.try_post(b"one")
        await desk.hello()
        desk.say(WELCOME, session=desk.session ^ 1, receiver=1)
        for kind in (HELLO, DATA, BYE):
            desk.say(kind, receiver=1)
        desk.say(ANSWER, rejected)  # no one is its receiver yet
        desk.say(WELCOME)
        assert await desk.piece() == (1, 0, encode_header(desk.session) + framed(0, b"one"))
        desk.say(WELCOME)  # the answer to a repeated Hello
        desk.say(WELCOME, receiver=1)  # from a second receiver
        desk.say(ANSWER, rejected, receiver=1)
        desk.say(ANSWER, rejected, session=desk.session ^ 1)
        for kind in (HELLO, DATA, BYE):
            desk.say(kind, rejected)
        await asyncio.sleep(0.05)
        assert not first.settled and not tx.status().value.closed
        desk.acknowledge(0)
        assert await first is None
        second = tx.try_post(b"two")
        assert await desk.piece() == (1, 1, framed(1, b"two"))
        desk.acknowledge(1)
        assert await second is None
    assert await tx.close() == []
    assert (await desk.heard())[0] == BYE


@pytest.mark.slow
@pytest.mark.req("T-097", "T-104")
@pytest.mark.parametrize("answers", [True, False])
async def test_a_late_welcome_of_a_receiver_that_another_has_followed_counts_if_that_one_is_silent(
    answers: bool,
) -> None:
    theirs = Channel()
    tx, desk = sender(theirs, settings=TxRxSettings(message_delivery_timeout=8.0)), Desk(theirs)
    async with asyncio.timeout(7):
        first = tx.try_post(b"one")
        await desk.hello()
        desk.say(WELCOME, session=0)
        desk.say(WELCOME, receiver=1)
        await desk.hello()
        if answers:
            desk.say(WELCOME)
        else:
            desk.receiver = 1
        assert await desk.piece() == (1, 0, encode_header(desk.session) + framed(0, b"one"))
        desk.acknowledge(0)
        assert await first is None
    assert await tx.close() == []


@pytest.mark.req("T-097", "T-104")
async def test_a_receiver_beside_a_silent_one_is_found_in_short_attempts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sending, "_HELLO_SECONDS", 0.3)
    theirs = Channel()
    tx = sender(theirs, settings=TxRxSettings(message_delivery_timeout=2.0, connect_timeout=0.1))
    desk = Desk(theirs, receiver=1)
    async with asyncio.timeout(5):
        message = tx.try_post(b"message")
        await desk.hello()
        desk.say(WELCOME, session=0, receiver=77)  # it began last, and is gone
        desk.say(WELCOME)
        while (told := await desk.heard())[0] == HELLO:
            pass
        assert told[:3] == (DATA, desk.session, desk.receiver)
        desk.acknowledge(0)
        assert await message is None
    await tx.close()


@pytest.mark.slow
@pytest.mark.req("T-062", "T-104")
async def test_who_began_while_a_sender_asks_anew_is_not_forgotten_at_its_next_message(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sending, "_HELLO_SECONDS", 0.3)
    theirs = Channel()
    tx, desk = sender(theirs), Desk(theirs)
    async with asyncio.timeout(5):
        first = tx.try_post(b"one")
        await desk.hello()
        desk.say(WELCOME)
        await desk.piece()
        desk.acknowledge(0)
        assert await first is None
        tx._line.connections += 1  # type: ignore[misc]
        others = [tx.try_post(b"two")]
        assert (await desk.heard())[0] == BYE
        await desk.hello()
        tx._hear(encode_words(WELCOME, 0, desk.receiver))
        others.append(tx.try_post(b"three"))
        desk.say(WELCOME, receiver=1)  # one that was killed, late
        await desk.hello()
        desk.say(WELCOME)
        assert (await desk.piece())[:2] == (2, 0)
        desk.acknowledge(1)
        assert [await each for each in others] == [None, None]
    assert await tx.close() == []


@pytest.mark.req("T-097", "T-104")
async def test_a_sender_that_nobody_answers_asks_now_and_then() -> None:
    theirs = Channel()
    tx, desk = sender(theirs, settings=TxRxSettings(message_delivery_timeout=20.0)), Desk(theirs)
    async with asyncio.timeout(10):
        message = tx.try_post(b"message")
        assert await desk.hello() == 1
        await asyncio.sleep(0.3)
        assert desk.ours.arrived.empty()
        assert await desk.hello() == 1
        desk.say(WELCOME)
        assert (await desk.piece())[:2] == (1, 0)
        desk.acknowledge(0)
        assert await message is None
    await tx.close()


@pytest.mark.req("T-065", "T-104")
async def test_a_sender_that_nobody_answers_says_so() -> None:
    tx = sender(Channel(), settings=TxRxSettings(message_delivery_timeout=0.3, connect_timeout=0.05))
    error = await tx.try_post(b"message")
    assert error is not None and "no receiver answered within 0.05 s" in str(error)
    assert error.delivery is DeliveryStatus.NOT_DELIVERED
    await tx.close()


@pytest.mark.req("T-104")
async def test_so_many_pieces_are_under_way_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sending, "_MOST_UNDER_WAY", 4)
    monkeypatch.setattr(sending, "_PIECE_BYTES", 100)
    theirs = Channel()
    tx, desk = sender(theirs), Desk(theirs)
    frames = [framed(number, b"%100d" % number) for number in range(6)]
    async with asyncio.timeout(5):
        messages = [tx.try_post(b"%100d" % number) for number in range(6)]
        await desk.hello()
        desk.say(WELCOME)

        async def pieces(first: int, count: int) -> bytes:
            got = [await desk.piece() for _ in range(count)]
            await asyncio.sleep(0.02)
            assert desk.ours.arrived.empty()
            assert [number for _, number, _ in got] == list(range(first, first + count))
            assert all(len(data) <= 100 for _, _, data in got)
            return b"".join(data for _, _, data in got)

        # Each message is in two pieces.
        assert await pieces(0, 4) == encode_header(desk.session) + frames[0] + frames[1]
        desk.acknowledge(0)
        assert await pieces(4, 2) == frames[2]
        desk.acknowledge(0)
        assert await pieces(6, 0) == b""
        desk.acknowledge(2)
        assert await pieces(6, 4) == frames[3] + frames[4]
        desk.acknowledge(4)
        assert await pieces(10, 2) == frames[5]
        desk.acknowledge(5)
        assert [await message for message in messages] == [None] * 6
    await tx.close()


@pytest.mark.req("T-062", "T-104")
async def test_a_sender_whose_piece_is_refused_begins_anew_on_the_same_line() -> None:
    theirs = Channel()
    tx, desk = sender(theirs, settings=TxRxSettings(message_delivery_timeout=20.0)), Desk(theirs)
    async with asyncio.timeout(10):
        first = tx.try_post(b"one")
        await desk.hello()
        desk.say(WELCOME)
        await desk.piece()
        desk.acknowledge(0)
        assert await first is None
        refusals = [StrataError("the hook has no key yet")] * 2  # for the piece, and for the next Hello
        theirs.refuses = lambda: refusals.pop() if refusals else None
        second = tx.try_post(b"two")
        assert await desk.hello() == 2
        desk.say(WELCOME)
        assert await desk.piece() == (2, 0, encode_header(desk.session) + framed(1, b"two"))
        desk.acknowledge(1)
        assert await second is None
    await tx.close()


@pytest.mark.req("T-062", "T-104")
async def test_a_relay_that_cannot_be_reached_is_tried_again_and_named_as_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    theirs = Channel()
    tx, desk = sender(theirs, settings=TxRxSettings(message_delivery_timeout=20.0)), Desk(theirs)
    refusals = [StrataError("no relay there")] * 3
    opened = tx._line.open

    async def open_later() -> None:
        if refusals:
            raise refusals.pop()
        await opened()

    monkeypatch.setattr(tx._line, "open", open_later)
    async with asyncio.timeout(10):
        message = tx.try_post(b"message")
        await desk.hello()
        assert tx._last_failure == "no relay there"
        desk.say(WELCOME)
        await desk.piece()
        desk.acknowledge(0)
        assert await message is None
    await tx.close()


@pytest.mark.req("T-104")
async def test_a_piece_that_is_cut_off_changes_nothing() -> None:
    theirs = Channel()
    rx, wire = await receiver(theirs), Wire(theirs)
    async with asyncio.timeout(5):
        await wire.hello(7)
        theirs.arrived.put_nowait(Message(encode_words(DATA, 7, wire.receiver, bytes(15))))
        wire.piece(7, 1, 0, encode_header(7) + framed(0, b"one"))
        assert await rx.recv() == b"one"
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


@pytest.mark.slow
@pytest.mark.req("T-104")
async def test_a_message_of_more_pieces_than_the_channel_takes_goes_as_there_is_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sending, "FULL_SECONDS", 0.005)
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
    assert error.delivery is DeliveryStatus.NOT_DELIVERED
    await tx.close()
    assert tx._carrier is not None and tx._carrier._sending.done()
    await rx.join()


@pytest.mark.req("T-068", "T-104")
@pytest.mark.parametrize("taken", [0, 1, 4, 5])
async def test_a_message_of_which_the_channel_took_a_part_alone_is_not_delivered(
    monkeypatch: pytest.MonkeyPatch, taken: int
) -> None:
    monkeypatch.setattr(sending, "FULL_SECONDS", 0.005)
    theirs = Channel()
    tx, desk = sender(theirs), Desk(theirs)
    async with asyncio.timeout(10):
        posts = [tx.try_post(body) for body in (b"small", bytes(range(256)) * 1024)]
        await desk.hello()
        rooms = iter(range(taken))
        theirs.refuses = lambda: None if next(rooms, None) is not None else OutgoingFull("too many await it")
        desk.say(WELCOME)
        errors = [await post for post in posts]
    assert [error.delivery for error in errors if error is not None] == [
        DeliveryStatus.UNKNOWN if taken else DeliveryStatus.NOT_DELIVERED,
        DeliveryStatus.UNKNOWN if taken == 5 else DeliveryStatus.NOT_DELIVERED,
    ]
    await tx.close()


@pytest.mark.req("T-068", "T-104")
@pytest.mark.parametrize(
    ("error", "delivery"),
    [
        (StorageFull("no room left"), DeliveryStatus.NOT_DELIVERED),
        (ChannelNotOpen(), DeliveryStatus.NOT_DELIVERED),
        (PersistenceClosed("the writer was stopped"), DeliveryStatus.UNKNOWN),
        (ChannelFailed("a task", OSError()), DeliveryStatus.UNKNOWN),
    ],
    ids=lambda each: type(each).__name__,
)
@virtually
async def test_a_message_that_the_channel_could_not_store_is_not_delivered(
    error: StrataError, delivery: DeliveryStatus
) -> None:
    """Nothing goes out before it is stored; a channel that is closing, or fails, may have stored it."""
    theirs = Channel()
    tx, desk = sender(theirs), Desk(theirs)
    async with asyncio.timeout(10):
        post = tx.try_post(b"small")
        await desk.hello()
        theirs.refuses = lambda: error
        desk.say(WELCOME)
        returned = await post
    assert returned is not None and returned.delivery is delivery
    await tx.close()


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
