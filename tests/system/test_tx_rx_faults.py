"""Channels over links that are cut, stall, and lose data: each message once, in order, or returned."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from strata.txrx import (
    DeliveryStatus,
    DeliveryTimeout,
    ReturnChannel,
    Rx,
    SendError,
    Tx,
    TxRxClosed,
    TxRxSettings,
    dial,
    serve,
)
from strata.txrx.dialing import NetTx
from strata.txrx.serving import NetRx

from tests.support.ports import free_port
from tests.support.tx_rx_proxy import TxRxProxy, listening, open_sockets
from tests.support.waiting import until

IMPATIENT: dict[str, Any] = {"link_timeout": 0.2, "message_ack_time_interval": 0.02}


@pytest.fixture(params=["tcp", "unix"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def new_address(kind: str, folder: Path) -> str:
    return "tcp:127.0.0.1:0" if kind == "tcp" else f"unix:{folder}/{os.urandom(4).hex()}"


@asynccontextmanager
async def proxied(
    kind: str, folder: Path, **changes: Any
) -> AsyncIterator[tuple[Rx[bytes], TxRxProxy, Tx[bytes]]]:
    """A receiver, a proxy in front of it, and a sender that dials the proxy."""
    settings = TxRxSettings(**changes)
    address, rx = await serve(new_address(kind, folder), bytes, settings=settings)
    async with rx, TxRxProxy(str(address), new_address(kind, folder)) as proxy:
        tx = await dial(proxy.address, bytes, settings=settings)
        try:
            yield rx, proxy, tx
        finally:
            # There is no use in waiting for messages that a test has left pending.
            closing = asyncio.create_task(tx.close())
            await asyncio.sleep(0)
            closing.cancel()
            await asyncio.gather(closing, return_exceptions=True)


# Cuts


@pytest.mark.req("T-027", "T-030", "T-032", "T-034", "T-044", "T-055", "T-062")
async def test_across_cuts_at_random_moments_each_message_arrives_once_and_in_order(
    kind: str, tmp_path: Path
) -> None:
    count = 100_000
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    async with proxied(kind, tmp_path) as (rx, proxy, tx):

        async def cut() -> None:
            while True:
                await asyncio.sleep(chance.uniform(0.0, 0.03))  # how far it gets; not a wait
                proxy.cut()

        async def post() -> None:
            for number in range(count):
                tx.post(b"%d" % number)
                if number % 500 == 0:
                    await tx.drain(most=2_000)

        cutting, posting = asyncio.create_task(cut()), asyncio.create_task(post())
        async with asyncio.timeout(60):
            for number in range(count):
                assert await rx.recv() == b"%d" % number
            cutting.cancel()
            await posting
            await tx.drain()
        assert rx.unread == 0
        assert tx.statistics().connections > 5 and tx.statistics().retransmits > 0
        assert rx.statistics().sessions <= tx.statistics().connections
        assert tx.statistics().messages_delivered == rx.statistics().messages_accepted == count


@pytest.mark.req("T-062", "T-079")
async def test_a_cut_within_a_large_frame_sends_it_again(kind: str, tmp_path: Path) -> None:
    message = os.urandom(2**20) * 8
    async with proxied(kind, tmp_path) as (rx, proxy, tx):
        channel = tx.try_post(message)
        await until(lambda: rx.statistics().bytes_received > 100_000)
        proxy.cut()
        assert await channel is None
        assert await rx.recv() == message
        assert rx.unread == 0
        assert tx.statistics().retransmits == 1
        assert rx.statistics().broken_connections == 1


@pytest.mark.req("T-079")
async def test_a_cut_between_frames_is_an_orderly_end(kind: str, tmp_path: Path) -> None:
    async with proxied(kind, tmp_path) as (rx, proxy, tx):
        await tx.send(b"1")
        proxy.cut()
        await tx.send(b"2")
        assert [await rx.recv(), await rx.recv()] == [b"1", b"2"]
        assert rx.statistics().broken_connections == 0


@pytest.mark.req("T-071")
async def test_losing_one_sender_ends_nothing_for_the_others(kind: str, tmp_path: Path) -> None:
    async with proxied(kind, tmp_path) as (rx, proxy, tx):
        async with await dial(rx.addr(), bytes) as other:
            await tx.send(b"first")
            await other.send(b"second")
            proxy.refuses = True
            proxy.cut()
            await other.send(b"third")
            assert [await rx.recv() for _ in range(3)] == [b"first", b"second", b"third"]


async def test_a_slow_link_changes_no_order(kind: str, tmp_path: Path) -> None:
    async with proxied(kind, tmp_path) as (rx, proxy, tx):
        proxy.delay = 0.02
        for number in range(300):
            tx.post(b"%d" % number)
            if number % 30 == 0:
                await asyncio.sleep(0.001)  # so that it goes out in several pieces
        assert [await rx.recv() for _ in range(300)] == [b"%d" % number for number in range(300)]


# Acknowledgements that do not arrive


@pytest.mark.req("T-065", "T-068")
async def test_a_message_whose_acknowledgement_is_lost_comes_back_though_it_has_arrived(
    kind: str, tmp_path: Path
) -> None:
    async with proxied(kind, tmp_path, message_delivery_timeout=0.3) as (rx, proxy, tx):
        proxy.drops_backwards = True
        with pytest.raises(SendError) as raised:
            await tx.send(b"doubtful")
        assert raised.value.delivery is DeliveryStatus.UNKNOWN
        assert isinstance(raised.value.error, DeliveryTimeout)
        assert await rx.recv() == b"doubtful"


@pytest.mark.req("T-044", "T-062")
async def test_a_lost_acknowledgement_is_made_good_by_the_next_connection(kind: str, tmp_path: Path) -> None:
    async with proxied(kind, tmp_path, **IMPATIENT) as (rx, proxy, tx):
        proxy.drops_backwards = True
        channel = tx.try_post(b"1")
        await until(lambda: rx.unread == 1 and proxy.dropped > 0)
        proxy.drops_backwards = False
        async with asyncio.timeout(10):
            assert await channel is None
        assert rx.unread == 1 and rx.statistics().duplicates == 1
        assert tx.statistics().connections == 2, "the silent connection was given up"


@pytest.mark.req("T-065", "T-006")
async def test_what_was_never_written_comes_back_as_not_delivered(kind: str, tmp_path: Path) -> None:
    nobody = f"tcp:127.0.0.1:{free_port()}" if kind == "tcp" else f"unix:{tmp_path}/nobody"
    tx = await dial(nobody, bytes, settings=TxRxSettings(message_delivery_timeout=0.3))
    with pytest.raises(SendError) as raised:
        await tx.send(b"early")
    assert raised.value.delivery is DeliveryStatus.NOT_DELIVERED
    expected = "Connect call failed" if kind == "tcp" else "No such file or directory"
    assert "last attempt to connect: " in raised.value.reason and expected in raised.value.reason
    await tx.close()


@pytest.mark.req("T-066", "T-006", "T-008", "T-017")
async def test_the_delivery_timeout_brings_everything_back_in_order(kind: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"message_delivery_timeout": 0.3, "queue_capacity": 10}
    async with proxied(kind, tmp_path, **settings) as (_, proxy, tx):
        proxy.drops_backwards = True
        messages = [b"%d" % number for number in range(50)]
        returned: list[bytes] = []

        async def wait(channel: ReturnChannel[bytes]) -> None:
            error = await channel
            assert error is not None
            returned.append(error.message)

        waiting = [asyncio.create_task(wait(tx.try_post(message))) for message in messages]
        async with asyncio.timeout(10):
            status = await tx.status().wait_for(lambda status: status.closed)
            await asyncio.gather(*waiting)
        assert status.reason is not None and "within 0.3 s" in status.reason
        assert [id(message) for message in returned] == [id(message) for message in messages]
        assert [one.message for one in await tx.close()] == messages
        refused = tx.try_post(b"late")
        assert refused.settled and refused.error is not None
        assert tx.pending == 0 and tx.statistics().messages_returned == 50


async def test_a_closed_sender_holds_no_socket_to_a_peer_that_does_not_read(
    kind: str, tmp_path: Path
) -> None:
    address, deaf = listening(new_address(kind, tmp_path))
    with deaf:
        before = open_sockets()
        tx = await dial(address, bytes, settings=TxRxSettings(message_delivery_timeout=0.3))
        channels = [tx.try_post(bytes(2**20)) for _ in range(20)]
        await until(lambda: tx.statistics().bytes_sent > 0)
        async with asyncio.timeout(10):
            assert all([await channel for channel in channels])
        assert len(await tx.close()) == 20
        await until(lambda: open_sockets() <= before)


@pytest.mark.req("T-067")
async def test_an_idle_sender_outlives_a_dead_server(kind: str, tmp_path: Path) -> None:
    short: dict[str, Any] = {"message_delivery_timeout": 0.1}
    async with proxied(kind, tmp_path, **short) as (rx, proxy, idle):
        await idle.send(b"1")
        proxy.refuses = True
        proxy.cut()
        for _ in range(3):
            # Others give up meanwhile, one after another: longer than the timeout, without measuring it.
            other = await dial(proxy.address, bytes, settings=TxRxSettings(**short))
            with pytest.raises(SendError):
                await other.send(b"lost")
            await other.close()
        assert not idle.status().value.closed
        proxy.refuses = False
        await idle.send(b"2")
        assert [await rx.recv(), await rx.recv()] == [b"1", b"2"]


@pytest.mark.req("T-063", "T-062")
async def test_attempts_to_connect_come_at_growing_intervals(tmp_path: Path) -> None:
    attempts: dict[float, int] = {}
    for cap in (0.01, 1.0):
        settings: dict[str, Any] = {
            "message_delivery_timeout": 1.0,
            "backoff_base": 0.01,
            "backoff_cap": cap,
        }
        async with proxied("unix", tmp_path, **settings) as (_, proxy, tx):
            proxy.refuses = True
            with pytest.raises(SendError):
                await tx.send(b"1")
            attempts[cap] = len(proxy.links)
    # Waits that do not grow are 5 ms long on average; growing ones have doubled seven times by the end.
    assert 2 <= attempts[1.0] < attempts[0.01] / 2


# Half-open connections


@pytest.mark.req("T-037", "T-062")
async def test_a_half_open_connection_is_replaced_and_overtaken(kind: str, tmp_path: Path) -> None:
    # On a busy machine a sound connection may be delayed by as long as the impatient ends wait.
    patient = {**IMPATIENT, "link_timeout": 1.0}
    async with proxied(kind, tmp_path, **patient) as (rx, proxy, tx):
        await tx.send(b"1")
        proxy.stall()
        async with asyncio.timeout(10):
            # The server still considers the old connection alive, and does not make the new one wait for it.
            await tx.send(b"2")
        assert [await rx.recv(), await rx.recv()] == [b"1", b"2"]
        assert len(proxy.links) == tx.statistics().connections == 2
        assert rx.statistics().sessions == 1, "the session has gone on"


@pytest.mark.req("T-053")
async def test_a_sender_that_stalls_within_a_frame_stops_no_other(kind: str, tmp_path: Path) -> None:
    async with proxied(kind, tmp_path) as (rx, proxy, tx):
        tx.post(os.urandom(2**20) * 16)
        await until(lambda: rx.statistics().bytes_received > 100_000)
        proxy.stall()
        async with await dial(rx.addr(), bytes) as other, asyncio.timeout(10):
            for number in range(2_000):
                other.post(b"%d" % number)
            assert [await rx.recv() for _ in range(2_000)] == [b"%d" % number for number in range(2_000)]
        assert tx.pending == 1


# A server that starts again


@pytest.mark.req("T-102")
async def test_a_restart_while_nothing_is_pending_is_not_noticed(kind: str, tmp_path: Path) -> None:
    async with proxied(kind, tmp_path) as (rx, proxy, tx):
        for number in range(3):
            await tx.send(b"%d" % number)
        address, again = await serve(new_address(kind, tmp_path), bytes)
        async with again:
            proxy.upstream = str(address)
            proxy.cut()
            assert isinstance(rx, NetRx) and isinstance(tx, NetTx)
            await until(lambda: not rx._hub.connections)
            await until(lambda: tx._connection is None)
            await tx.send(b"after")
            assert await again.recv() == b"after"
            assert rx.unread == 3
            assert tx.statistics().messages_posted == tx.statistics().messages_delivered == 4
            await tx.close()


@pytest.mark.req("T-036", "T-049", "T-006")
async def test_a_restart_while_something_is_pending_returns_it(kind: str, tmp_path: Path) -> None:
    async with proxied(kind, tmp_path) as (rx, proxy, tx):
        await tx.send(b"0")
        proxy.drops_backwards = True
        channels = [tx.try_post(b"%d" % number) for number in (1, 2)]
        await until(lambda: rx.unread == 3)
        address, again = await serve(new_address(kind, tmp_path), bytes)
        async with again:
            proxy.upstream = str(address)
            proxy.drops_backwards = False
            proxy.cut()
            async with asyncio.timeout(10):
                errors = [await channel for channel in channels]
            assert [one.message for one in errors if one is not None] == [b"1", b"2"]
            for error in errors:
                assert error is not None and isinstance(error.error, TxRxClosed)
                assert "rejected" in error.reason and "not known here" in error.reason
                # The previous server has them: nobody can say that they were not delivered.
                assert error.delivery is DeliveryStatus.UNKNOWN
            assert tx.status().value.closed
            assert len(proxy.links) == 2, "it does not connect again"
            assert again.unread == 0 and again.statistics().rejects_sent == 1


# A full queue


@pytest.mark.req("T-039", "T-051", "T-052", "T-054")
async def test_a_full_queue_loses_nothing_delays_acknowledgements_and_is_counted(
    kind: str, tmp_path: Path
) -> None:
    async with proxied(kind, tmp_path, queue_capacity=10) as (rx, _, tx):
        channels = [tx.try_post(b"%d" % number) for number in range(100)]
        async with asyncio.timeout(10):
            assert [await channel for channel in channels[:10]] == [None] * 10
        assert rx.unread == 10 and tx.pending == 90
        assert not any(channel.settled for channel in channels[10:])
        assert rx.statistics().queue_full == 1
        for number in range(100):
            assert await rx.recv() == b"%d" % number
            assert rx.unread <= 10
        await tx.drain()
        assert all(channel.settled and channel.error is None for channel in channels)
        assert tx.statistics().retransmits == 0


@pytest.mark.req("T-051")
async def test_a_queue_that_stays_full_costs_no_connection(kind: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "queue_capacity": 1,
        "link_timeout": 0.3,
        "message_ack_time_interval": 0.02,
    }
    async with proxied(kind, tmp_path, **settings) as (rx, _, tx):
        tx.post(b"1")
        tx.post(b"2")
        # Acknowledgements of taken messages are repeated while the rest waits: for twice the link timeout.
        await until(lambda: tx.statistics().acks_received >= 30)
        assert tx.statistics().connections == 1 and rx.unread == 1
        assert [await rx.recv(), await rx.recv()] == [b"1", b"2"]


# The end of a server that is busy


@pytest.mark.req("T-024", "T-008")
async def test_closing_a_receiver_in_full_flow_is_heard_by_every_sender(kind: str, tmp_path: Path) -> None:
    for _ in range(5):
        address, rx = await serve(new_address(kind, tmp_path), bytes)
        senders = [await dial(address, bytes) for _ in range(4)]
        outcomes: list[ReturnChannel[bytes]] = []

        async def post(tx: Tx[bytes], outcomes: list[ReturnChannel[bytes]] = outcomes) -> None:
            while not tx.status().value.closed:
                outcomes.append(tx.try_post(bytes(5_000)))
                await asyncio.sleep(0)

        posting = [asyncio.create_task(post(tx)) for tx in senders]
        for _ in range(200):
            await rx.recv()
        async with asyncio.timeout(10):
            await rx.join()
            await asyncio.gather(*posting)
        assert all(channel.settled for channel in outcomes), "each message is delivered or comes back"
        delivered = sum(channel.error is None for channel in outcomes)
        assert delivered == rx.statistics().messages_accepted
        unknown = [one for one in outcomes if one.error and one.error.delivery is DeliveryStatus.UNKNOWN]
        assert not unknown, "what was taken was acknowledged before the end"
        for tx in senders:
            await tx.close()
