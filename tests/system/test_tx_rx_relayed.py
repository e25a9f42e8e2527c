"""Tx and Rx over a real relay: the same promises, even if it dies."""

from __future__ import annotations

import asyncio

import pytest
from strata.channels.encryption import GroupKey, GroupKeyEncryption
from strata.protocol.ids import Identity
from strata.relays.connection import Options
from strata.txrx import (
    DeliveryStatus,
    RelayAddress,
    RelayEnd,
    SendError,
    TxRxClosed,
    TxRxIOError,
    TxRxSettings,
    dial,
    parse_address,
    serve,
)
from strata.txrx.relayed import RelayRx

from tests.support.relay_process import RelayProcess, running

PATIENT = TxRxSettings(message_delivery_timeout=60.0)
TOPICS = iter(range(1000))


@pytest.fixture
def address(relay: RelayProcess) -> str:
    return f"relay:{relay.ws}#/app/1/topic-{next(TOPICS)}/proto"


async def received(rx, count: int) -> list[bytes]:
    async with asyncio.timeout(60):
        return [await rx.recv() for _ in range(count)]


def numbered(count: int, first: int = 0) -> list[bytes]:
    return [b"message %d" % number for number in range(first, first + count)]


@pytest.mark.req("T-104")
async def test_messages_arrive_once_in_order_and_large_ones_whole(address):
    where, rx = await serve(address, bytes, settings=PATIENT)
    assert where == parse_address(address) == rx.addr()
    async with rx, await dial(address, bytes, settings=PATIENT) as tx:
        sent = [*numbered(3000), large := bytes(range(256)) * 4096, *numbered(3, 3000)]
        receiving = asyncio.create_task(received(rx, len(sent)))
        for message in sent[:-1]:
            tx.post(message)
        await tx.send(sent[-1])
        assert rx.statistics().messages_accepted == len(sent)
        got = await receiving
        assert got == sent and got[3000] == large


@pytest.mark.req("T-097")
async def test_what_was_posted_before_anybody_serves_arrives(address):
    async with await dial(address, bytes, settings=PATIENT) as tx:
        returned = [tx.try_post(message) for message in numbered(20)]
        _, rx = await serve(address, bytes, settings=PATIENT)
        async with rx:
            assert await received(rx, 20) == numbered(20)
            assert [await one for one in returned] == [None] * 20


@pytest.mark.req("T-039", "T-051")
async def test_what_was_taken_is_acknowledged_though_the_queue_is_full(address):
    small = TxRxSettings(message_delivery_timeout=60.0, queue_capacity=10)
    _, rx = await serve(address, bytes, settings=small)
    async with rx, await dial(address, bytes, settings=small) as tx:
        returned = [tx.try_post(message) for message in numbered(30)]
        async with asyncio.timeout(20):
            assert [await one for one in returned[:10]] == [None] * 10
        assert rx.unread == 10 and not returned[10].settled
        assert await received(rx, 30) == numbered(30)
        assert [await one for one in returned] == [None] * 30


@pytest.mark.req("T-033")
async def test_many_senders_each_in_its_own_order(address):
    _, rx = await serve(address, bytes, settings=PATIENT)
    async with rx:
        senders = [await dial(address, bytes, settings=PATIENT) for _ in range(4)]
        for number in range(50):
            for which, tx in enumerate(senders):
                tx.post(b"%d %d" % (which, number))
        got = [tuple(map(int, message.split())) for message in await received(rx, 200)]
        for which in range(4):
            assert [number for one, number in got if one == which] == list(range(50))
        for tx in senders:
            assert await tx.close() == []


@pytest.mark.req("T-017")
async def test_a_receiver_that_closes_is_told_to_its_senders(address):
    _, rx = await serve(address, bytes, settings=PATIENT)
    async with await dial(address, bytes, settings=PATIENT) as tx:
        await tx.send(b"one")
        await rx.join()
        async with asyncio.timeout(30):
            assert (await tx.status().wait_for(lambda status: status.closed)).closed
        with pytest.raises(SendError) as refused:
            await tx.send(b"two")
        assert isinstance(refused.value.error, TxRxClosed)
        assert await rx.recv() == b"one"
        with pytest.raises(TxRxClosed):
            await rx.recv()


async def test_a_receiver_begun_anew_takes_nothing_of_the_old_ones(address):
    quick = TxRxSettings(message_delivery_timeout=3.0)
    _, first = await serve(address, bytes)
    async with await dial(address, bytes, settings=quick) as tx:
        await tx.send(b"for the first")
        assert isinstance(first, RelayRx)
        tasks = first._service.tasks
        # It dies without a close: messages sent now are for it, and nobody answers.
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        lost = tx.try_post(b"lost")
        _, second = await serve(address, bytes)
        error = await lost
        assert error is not None and error.delivery is DeliveryStatus.UNKNOWN
        async with second, await dial(address, bytes, settings=PATIENT) as again:
            await again.send(b"for the second")
            assert await second.recv() == b"for the second" and second.unread == 0
    first.close()
    await first.join()


@pytest.mark.req("T-104")
async def test_a_receiver_that_follows_a_killed_one_gets_the_next_message(address):
    async with await dial(address, bytes, settings=PATIENT) as tx:
        _, killed = await serve(address, bytes, settings=PATIENT)
        await tx.send(b"one")
        assert isinstance(killed, RelayRx)
        for task in killed._service.tasks:
            task.cancel()
        _, rx = await serve(address, bytes, settings=PATIENT)
        async with rx:
            for _ in range(3):
                await asyncio.sleep(0.2)
                await tx.send(b"two")
            assert await received(rx, 3) == [b"two"] * 3
    await killed._service._line.close()


@pytest.mark.req("T-104")
async def test_other_senders_are_no_receivers(address):
    quick = TxRxSettings(message_delivery_timeout=3.0)
    async with await dial(address, bytes, settings=quick) as one, await dial(address, bytes) as other:
        returned = one.try_post(b"message"), other.try_post(b"message")
        error = await returned[0]
        assert error is not None and error.delivery is DeliveryStatus.NOT_DELIVERED
        _, rx = await serve(address, bytes)
        async with rx:
            assert await returned[1] is None and await rx.recv() == b"message"


async def test_only_who_has_the_key_understands(address):
    where = parse_address(address)
    assert isinstance(where, RelayAddress)
    keys = GroupKeyEncryption(where.topic, GroupKey.generate())
    _, rx = await serve(address, bytes, relay=RelayEnd(encryption=keys), settings=PATIENT)
    quick = TxRxSettings(message_delivery_timeout=3.0)
    async with rx:
        async with await dial(address, bytes, relay=RelayEnd(encryption=keys), settings=PATIENT) as tx:
            await tx.send(b"secret")
            assert await rx.recv() == b"secret"
        async with await dial(address, bytes, settings=quick) as stranger:
            assert await stranger.try_post(b"plain") is not None
        assert rx.unread == 0


async def test_only_members_are_heard(address):
    known = Identity.generate()
    _, rx = await serve(address, bytes, relay=RelayEnd(members=(known.did,)), settings=PATIENT)
    async with rx:
        async with await dial(address, bytes, relay=RelayEnd(identity=known), settings=PATIENT) as tx:
            await tx.send(b"hello")
        quick = TxRxSettings(message_delivery_timeout=3.0)
        async with await dial(address, bytes, settings=quick) as stranger:
            assert await stranger.try_post(b"hello?") is not None
        assert await rx.recv() == b"hello" and rx.unread == 0


async def test_without_a_relay_serving_says_so_and_messages_come_back():
    nowhere = "relay:ws://127.0.0.1:1/strata#/app/1/nowhere/proto"
    end = RelayEnd(options=Options(connect_timeout=1.0))
    with pytest.raises(TxRxIOError, match=r"cannot be served"):
        await serve(nowhere, bytes, relay=end)
    quick = TxRxSettings(message_delivery_timeout=1.0)
    async with await dial(nowhere, bytes, settings=quick, relay=end) as tx:
        error = await tx.try_post(b"message")
        assert error is not None and error.delivery is DeliveryStatus.NOT_DELIVERED


@pytest.mark.timeout(400)
async def test_a_relay_that_is_killed_costs_nothing(tmp_path):
    with running(RelayProcess(tmp_path)) as process:
        address = f"relay:{process.ws}#/app/1/killed/proto"
        port = int(process.ws.rpartition(":")[2].split("/")[0])
        _, rx = await serve(address, bytes, settings=PATIENT)
        async with rx, await dial(address, bytes, settings=PATIENT) as tx:
            receiving = asyncio.create_task(received(rx, 2000))
            for number, message in enumerate(numbered(2000)):
                tx.post(message)
                if number in (600, 1300):
                    await tx.drain(200)
                    process.kill()
                    process.port = port
                    await asyncio.to_thread(process.start)
            assert await receiving == numbered(2000)
            assert await tx.close() == []
