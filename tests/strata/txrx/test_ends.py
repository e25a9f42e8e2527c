"""What a program sees of the two ends, with any transport."""

from __future__ import annotations

import asyncio
import gc
import inspect
import logging
import socket
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
import strata.txrx
from strata.txrx import (
    AddressInUse,
    ReturnChannel,
    Rx,
    SendError,
    Tx,
    TxRxClosed,
    TxRxSettings,
    dial,
    serve,
    serve_local,
)
from strata.txrx.dialing import NetTx
from strata.txrx.serving import NetRx

GUIDE = (Path(__file__).resolve().parents[3] / "docs" / "guides" / "tx-rx.md").read_text()


class Question(msgspec.Struct):
    text: str
    answer_to: str


def public(kind: type) -> set[str]:
    return {name for name in dir(kind) if not name.startswith("_")}


@pytest.mark.req("T-001", "T-101")
def test_channels_are_one_way() -> None:
    sending = {"post", "send", "try_post", "drain", "pending", "outbox_size", "unacked_size", "status"}
    receiving = {"recv", "unread", "join"}
    both = {"addr", "close", "statistics"}
    assert public(Tx) == sending | both
    assert public(Rx) == receiving | both
    ends = [kind for kind in vars(strata.txrx).values() if inspect.isclass(kind)]
    assert [kind for kind in ends if all(issubclass(kind, end) for end in (Tx, Rx))] == []


@pytest.mark.req("T-003", "T-004")
async def test_an_answer_goes_to_an_address_in_the_message(tmp_path: Path) -> None:
    question_to, questions = await serve(f"unix:{tmp_path}/questions", Question)
    answer_to, answers = await serve("tcp:127.0.0.1:0", str)
    async with questions, answers, await dial(question_to, Question) as asking:
        await asking.send(Question("what is the time?", str(answer_to)))
        asked = await questions.recv()
        async with await dial(asked.answer_to, str) as answering:
            await answering.send("late")
        assert await answers.recv() == "late"


@pytest.mark.req("T-005", "T-009")
async def test_posting_returns_at_once_though_nobody_is_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as unheard:
        port = unheard.getsockname()[1]
    tx = await dial(f"tcp:127.0.0.1:{port}", bytes, settings=TxRxSettings(message_delivery_timeout=0.2))
    # Nothing else could run between these two lines: neither of them can have waited.
    returned = tx.try_post(b"one")
    tx.post(b"two")
    assert tx.pending == 2 and not returned.settled
    error = await returned
    assert isinstance(error, SendError) and error.message == b"one"
    tx.post(b"three")
    assert await tx.close() != [] and tx.statistics().messages_refused == 1


@pytest.mark.req("T-014")
@pytest.mark.parametrize("where", ["local:0", "tcp:127.0.0.1:0"])
async def test_all_ways_of_posting_are_one(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    address, rx = await serve(where, bytes)
    async with rx, await dial(address, bytes) as tx:
        seen, real = [], tx._do_post

        def watched(message: Any, return_channel: Any) -> Any:
            seen.append((message, return_channel is not None))
            return real(message, return_channel)

        monkeypatch.setattr(tx, "_do_post", watched)
        tx.post(b"one")
        await tx.try_post(b"two")
        await tx.send(b"three")
        assert seen == [(b"one", False), (b"two", True), (b"three", True)]
        assert [await rx.recv() for _ in range(3)] == [b"one", b"two", b"three"]


@pytest.mark.req("T-046", "T-047")
async def test_local_channels_have_no_acknowledgements() -> None:
    never = TxRxSettings(
        message_ack_every_n_messages=10**9, message_ack_time_interval=3600, message_ack_eagerly=False
    )
    address, rx = await serve("local:0", bytes, settings=never)
    async with rx, await dial(address, bytes, settings=never) as tx:
        sending = tx.send(b"message")
        with pytest.raises(StopIteration):  # it does not wait at all, not even for one turn of the loop
            sending.send(None)
        assert rx.unread == 1 and tx.pending == 0
        assert rx.statistics().acks_sent == tx.statistics().acks_received == 0
        assert await rx.recv() == b"message"


@pytest.mark.req("T-024")
async def test_a_local_receiver_that_nobody_holds_is_closed() -> None:
    address, rx = serve_local(bytes)
    tx = await dial(address, bytes)
    await tx.send(b"message")
    del rx
    gc.collect()
    assert tx.status().value.closed
    assert (await tx.try_post(b"message")) is not None
    with pytest.raises(TxRxClosed, match="nobody serves"):
        await dial(address, bytes)


async def test_a_return_channel_is_for_one_message() -> None:
    address, rx = serve_local(bytes)
    async with rx, await dial(address, bytes) as tx:
        once: ReturnChannel[bytes] = ReturnChannel()
        assert tx.try_post(b"one", once) is once and await once is None
        with pytest.raises(ValueError, match="one message"):
            tx.try_post(b"two", once)
        assert rx.unread == 1
        await rx.recv()


@pytest.mark.req("T-070")
async def test_what_is_never_received_is_gone_counted_and_told(caplog: pytest.LogCaptureFixture) -> None:
    address, rx = await serve("tcp:127.0.0.1:0", bytes)
    async with rx, await dial(address, bytes) as tx:
        for _ in range(3):
            await tx.send(b"message")
        await rx.recv()
    assert rx.unread == 2
    told = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert told == [f"2 messages at {address} were never received"]
    assert "A message that is never received is gone with its `Rx`" in GUIDE


@pytest.mark.req("T-028", "T-061", "T-068")
def test_the_guide_says_what_is_not_promised() -> None:
    assert "Between different `Tx` there is no order." in GUIDE
    assert "Cancelling `send` ends the waiting and not the sending." in GUIDE
    assert "Sending it again after `UNKNOWN` may deliver it twice." in " ".join(GUIDE.split())
    assert "status()" in str(Tx.send.__doc__)


@pytest.mark.req("T-089")
async def test_small_frames_do_not_wait_for_more() -> None:
    address, rx = await serve("tcp:127.0.0.1:0", bytes)
    async with rx, await dial(address, bytes) as tx:
        await tx.send(b"message")
        assert isinstance(tx, NetTx) and isinstance(rx, NetRx)
        carrier: Any = tx._connection
        ours = carrier._transport.get_extra_info("socket")
        [theirs] = [connection._transport for connection in rx._hub.connections.values()]
        assert theirs is not None
        for one in (ours, theirs.get_extra_info("socket")):
            assert one.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0


@pytest.mark.req("T-016")
async def test_watchers_all_wake_and_late_ones_see_the_end() -> None:
    address, rx = serve_local(bytes)
    tx = await dial(address, bytes)
    watch = tx.status()
    waiting = [asyncio.create_task(watch.changed()) for _ in range(2)]
    following = aiter(watch)
    assert not (await anext(following)).closed
    await asyncio.sleep(0)
    waiting[0].cancel()
    rx.close()
    assert (await waiting[1]).closed and (await anext(following)).closed
    assert (await watch.wait_for(lambda status: status.closed)).reason == f"{address} is closed"


@pytest.mark.req("T-016", "T-020", "T-058")
async def test_a_wait_in_an_iteration_that_is_cancelled_does_not_end_it() -> None:
    address, rx = serve_local(bytes)
    tx = await dial(address, bytes)
    messages, statuses = aiter(rx), aiter(tx.status())
    await anext(statuses)
    for waiting in (messages, statuses):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await anext(waiting)
    await tx.send(b"message")
    assert await anext(messages) == b"message"
    rx.close()
    assert (await anext(statuses)).closed
    assert [message async for message in messages] == []


@pytest.mark.req("T-057")
async def test_a_local_queue_without_room_for_any_message_is_refused() -> None:
    for capacity in (0, -1):
        with pytest.raises(ValueError, match="at least 1"):
            serve_local(bytes, capacity=capacity)


async def test_a_local_end_that_is_forgotten_closes_wherever_the_collector_runs() -> None:
    address, rx = serve_local(str)
    tx = await dial(address, str)
    ended = asyncio.create_task(tx.status().changed())
    await asyncio.sleep(0)
    circle: list[object] = [rx]
    circle.append(circle)  # so that only the cyclic garbage collector finds it
    del rx, circle
    collector = threading.Timer(0.01, gc.collect)
    collector.start()
    async with asyncio.timeout(60):  # in a process of many tests, on a busy machine, it can be slow
        assert (await ended).closed
    collector.join()
    with pytest.raises(TxRxClosed):
        await dial(address, str)


@pytest.mark.req("T-024", "T-098")
async def test_a_local_address_stays_with_the_end_that_came_after_a_forgotten_one() -> None:
    _, rx = await serve("local:4711", bytes)
    held: list[Rx[bytes]] = [rx]
    del rx
    collector = threading.Thread(target=held.clear)
    collector.start()
    collector.join()
    _, another = await serve("local:4711", bytes)  # before the first one has closed on this loop
    await asyncio.sleep(0.01)
    async with another, await dial("local:4711", bytes) as tx:
        await tx.send(b"message")
        assert await another.recv() == b"message"
        with pytest.raises(AddressInUse):
            await serve("local:4711", bytes)
    with pytest.raises(TxRxClosed):
        await dial("local:4711", bytes)
