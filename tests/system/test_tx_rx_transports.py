"""Every transport keeps the same promises (T-094): one suite over all of them, on both event loops."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trustme
import uvloop
from strata.txrx import (
    Address,
    AddressInUse,
    CodecError,
    DeliveryStatus,
    InvalidAddress,
    OutboxFull,
    OversizedMessage,
    ReturnChannel,
    Rx,
    SendError,
    TcpAddress,
    TlsAddress,
    Tx,
    TxRxClosed,
    TxRxIOError,
    TxRxSettings,
    dial,
    serve,
    serve_local,
)
from strata.txrx.dialing import SessionTx

from tests.support.ports import free_port
from tests.support.waiting import until

NETWORK = ("tcp", "unix", "abstract", "metatls")
_names = iter(range(10**9))


@pytest.fixture(params=["asyncio", "uvloop"], autouse=True)
def event_loop_kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each test runs on both event loops; the choice is made before the test's loop exists."""
    if request.param == "uvloop":
        monkeypatch.setattr(asyncio.get_event_loop_policy(), "_loop_factory", uvloop.new_event_loop)
    return str(request.param)


async def test_the_suite_runs_on_both_event_loops(event_loop_kind: str) -> None:
    assert isinstance(asyncio.get_running_loop(), uvloop.Loop) == (event_loop_kind == "uvloop")


class Reading(msgspec.Struct):
    number: int
    text: str = ""
    data: bytes = b""


@dataclass(frozen=True)
class Transport:
    """Where to serve, and the settings that both ends need."""

    name: str
    address: str
    settings: TxRxSettings

    async def serve(self, message_type: Any = Reading, **changes: Any) -> tuple[Address, Rx[Any]]:
        return await serve(self.address, message_type, settings=replace(self.settings, **changes))

    async def dial(self, address: Address, message_type: Any = Reading, **changes: Any) -> Tx[Any]:
        return await dial(address, message_type, settings=replace(self.settings, **changes))


@pytest.fixture(scope="module")
def tls_settings(tmp_path_factory: pytest.TempPathFactory) -> TxRxSettings:
    folder = tmp_path_factory.mktemp("certificates")
    authority = trustme.CA()
    leaf = authority.issue_cert("localhost", "127.0.0.1", "::1")
    authority.cert_pem.write_to_path(folder / "authority.pem")
    leaf.private_key_and_cert_chain_pem.write_to_path(folder / "leaf.pem")
    return TxRxSettings(
        tls_certificate=folder / "leaf.pem",
        tls_key=folder / "leaf.pem",
        tls_authorities=folder / "authority.pem",
    )


def make_transport(name: str, folder: Path, tls: TxRxSettings) -> Transport:
    match name:
        case "local":
            return Transport(name, "local:0", TxRxSettings())
        case "tcp":
            return Transport(name, "tcp:127.0.0.1:0", TxRxSettings())
        case "unix":
            return Transport(name, f"unix:{folder / 's'}", TxRxSettings())
        case "abstract":
            unique = f"unix:@strata-test-{os.getpid()}-{next(_names)}"
            return Transport(name, unique, TxRxSettings())
    return Transport(name, "metatls:127.0.0.1:0", tls)


@pytest.fixture(params=["local", *NETWORK])
def transport(request: pytest.FixtureRequest, tmp_path: Path, tls_settings: TxRxSettings) -> Transport:
    return make_transport(request.param, tmp_path, tls_settings)


@pytest.fixture(params=NETWORK)
def network(request: pytest.FixtureRequest, tmp_path: Path, tls_settings: TxRxSettings) -> Transport:
    return make_transport(request.param, tmp_path, tls_settings)


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    """An unclosed transport warns when it is collected, and a warning fails the test."""
    yield
    gc.collect()


# Messages


@pytest.mark.req("T-020", "T-094", "T-015", "T-022", "T-090")
async def test_messages_arrive_in_the_order_of_posting_however_they_are_posted(transport: Transport) -> None:
    address, rx = await transport.serve()
    async with rx, await transport.dial(address) as tx:
        assert tx.addr() == rx.addr() == address
        tx.post(Reading(0, "posted"))
        channel = tx.try_post(Reading(1, "tried"))
        await tx.send(Reading(2, "sent"))
        assert [await rx.recv() for _ in range(3)] == [
            Reading(0, "posted"),
            Reading(1, "tried"),
            Reading(2, "sent"),
        ]
        assert channel.settled and await channel is None


@pytest.mark.req("T-011", "T-013", "T-047", "T-086")
async def test_send_returns_when_the_message_is_in_the_queue(transport: Transport) -> None:
    address, rx = await transport.serve()
    async with rx, await transport.dial(address) as tx:
        for count in range(1, 4):
            async with asyncio.timeout(10):
                await tx.send(Reading(count))
            assert rx.unread == count, "and nobody has received"
        for _ in range(3):
            await rx.recv()


@pytest.mark.req("T-007")
async def test_a_return_channel_closes_without_a_value(transport: Transport) -> None:
    address, rx = await transport.serve()
    async with rx, await transport.dial(address) as tx:
        mine: ReturnChannel[Reading] = ReturnChannel()
        assert tx.try_post(Reading(1), mine) is mine
        assert await mine is None
        assert mine.error is None
        await rx.recv()


@pytest.mark.req("T-027", "T-094")
async def test_a_hundred_thousand_posts_arrive_once_and_in_order(transport: Transport) -> None:
    count = 100_000
    address, rx = await transport.serve(bytes)
    async with rx, await transport.dial(address, bytes) as tx:
        for number in range(count):
            tx.post(b"%d" % number)
        for number in range(count):
            assert await rx.recv() == b"%d" % number
        await tx.drain()
        assert tx.pending == 0 and rx.unread == 0
        assert tx.statistics().messages_delivered == rx.statistics().messages_accepted == count


@pytest.mark.req("T-080")
async def test_a_part_of_64_mib_arrives_whole(transport: Transport) -> None:
    data = os.urandom(2**20) * 64
    limit = 65 * 2**20
    address, rx = await transport.serve(codec_max_frame_length=limit)
    async with rx, await transport.dial(address, codec_max_frame_length=limit) as tx:
        tx.post(Reading(1, "before"))
        await tx.send(Reading(2, "large", data))
        tx.post(Reading(3, "after"))
        received = [await rx.recv() for _ in range(3)]
        assert [one.number for one in received] == [1, 2, 3]
        assert received[1].data == data


@pytest.mark.req("T-002", "T-019")
async def test_what_cannot_be_encoded_comes_back_at_once_and_the_channel_goes_on(
    transport: Transport,
) -> None:
    wrong = {"number": "one"}
    address, rx = await transport.serve()
    async with rx, await transport.dial(address) as tx:
        channel = tx.try_post(wrong)
        assert channel.settled
        assert isinstance(channel.error, SendError) and isinstance(channel.error.error, CodecError)
        assert channel.error.message is wrong and channel.error.reason
        assert channel.error.delivery is DeliveryStatus.NOT_DELIVERED
        with pytest.raises(SendError) as raised:
            tx.post(wrong)
        assert raised.value.message is wrong
        with pytest.raises(SendError):
            await tx.send(wrong)
        await tx.send(Reading(7))
        assert await rx.recv() == Reading(7)


@pytest.mark.req("T-077")
async def test_a_message_above_the_limit_comes_back_and_the_channel_goes_on(network: Transport) -> None:
    address, rx = await network.serve(bytes, codec_max_frame_length=100_000)
    async with rx, await network.dial(address, bytes, codec_max_frame_length=100_000) as tx:
        channel = tx.try_post(bytes(100_000))
        assert channel.error is not None and isinstance(channel.error.error, OversizedMessage)
        assert channel.error.reason.startswith("oversized frame (") and ", 100000)" in channel.error.reason
        await tx.send(bytes(99_000))
        assert len(await rx.recv()) == 99_000


@pytest.mark.req("T-033", "T-028")
async def test_a_hundred_senders_share_a_receiver_each_in_its_own_order(transport: Transport) -> None:
    each = 50
    address, rx = await transport.serve()
    senders = [await transport.dial(address) for _ in range(100)]
    async with rx:
        for number in range(each):
            for who, tx in enumerate(senders):
                tx.post(Reading(number, str(who)))
        received: dict[str, list[int]] = {}
        async with asyncio.timeout(30):
            for _ in range(each * len(senders)):
                message = await rx.recv()
                received.setdefault(message.text, []).append(message.number)
        assert len(received) == len(senders)
        assert all(numbers == list(range(each)) for numbers in received.values())
        assert await asyncio.gather(*(tx.close() for tx in senders)) == [[]] * len(senders)


@pytest.mark.req("T-050", "T-051", "T-053")
@pytest.mark.parametrize("capacity", [1, 2, 7])
async def test_many_senders_get_their_turn_at_a_small_queue(network: Transport, capacity: int) -> None:
    each = 5
    address, rx = await network.serve(queue_capacity=capacity)
    senders = [await network.dial(address) for _ in range(20)]
    async with rx:
        for number in range(each):
            for who, tx in enumerate(senders):
                tx.post(Reading(number, str(who)))
        await until(lambda: rx.statistics().queue_full >= len(senders) - 1)
        assert rx.unread == capacity
        received: dict[str, list[int]] = {}
        async with asyncio.timeout(20):
            for _ in range(each * len(senders)):
                message = await rx.recv()
                received.setdefault(message.text, []).append(message.number)
                assert rx.unread <= capacity
        assert all(received[str(who)] == list(range(each)) for who in range(len(senders)))
        await asyncio.gather(*(tx.close() for tx in senders))


async def test_iterating_ends_with_the_channel(transport: Transport) -> None:
    address, rx = await transport.serve()
    async with await transport.dial(address) as tx:
        await tx.send(Reading(1))
        await tx.send(Reading(2))
        rx.close()
        assert [message.number async for message in rx] == [1, 2]
        await rx.join()


# The ends


@pytest.mark.req("T-021")
async def test_recv_gives_what_is_buffered_before_it_says_that_the_channel_is_closed(
    transport: Transport,
) -> None:
    address, rx = await transport.serve()
    async with await transport.dial(address) as tx:
        await tx.send(Reading(1))
        await tx.send(Reading(2))
        await rx.join()
        assert [(await rx.recv()).number for _ in range(2)] == [1, 2]
        for _ in range(2):
            with pytest.raises(TxRxClosed):
                await rx.recv()


async def test_closing_wakes_whoever_waits_in_recv(transport: Transport) -> None:
    _, rx = await transport.serve()
    waiting = [asyncio.create_task(rx.recv()) for _ in range(3)]
    await asyncio.sleep(0)
    await rx.join()
    for outcome in await asyncio.gather(*waiting, return_exceptions=True):
        assert isinstance(outcome, TxRxClosed)


@pytest.mark.req("T-016", "T-017", "T-018", "T-024")
async def test_closing_the_receiver_turns_the_status_of_every_sender(transport: Transport) -> None:
    address, rx = await transport.serve()
    senders = [await transport.dial(address) for _ in range(3)]
    for tx in senders:
        await tx.send(Reading(1))
        assert not tx.status().value.closed
    watching = [asyncio.create_task(tx.status().changed()) for tx in senders for _ in range(2)]
    await asyncio.sleep(0)
    rx.close()
    async with asyncio.timeout(10):
        for status in await asyncio.gather(*watching):
            assert status.closed and status.reason
    await rx.join()
    for tx in senders:
        assert await tx.close() == []
        assert tx.status().value.closed, "and never back"


@pytest.mark.req("T-010", "T-009", "T-012", "T-069")
async def test_posting_to_a_closed_channel_brings_the_message_back_at_once(transport: Transport) -> None:
    address, rx = await transport.serve()
    tx = await transport.dial(address)
    await tx.send(Reading(1))
    rx.close()
    async with asyncio.timeout(10):
        await tx.status().wait_for(lambda status: status.closed)
    message = Reading(2)
    channel = tx.try_post(message)
    assert channel.settled and channel.error is not None
    assert isinstance(channel.error.error, TxRxClosed)
    assert channel.error.message is message and channel.error.delivery is DeliveryStatus.NOT_DELIVERED
    tx.post(message)
    with pytest.raises(SendError) as raised:
        await tx.send(message)
    assert raised.value.message is message
    assert await tx.close() == []
    await rx.join()


@pytest.mark.req("T-026", "T-010")
async def test_closing_the_sender_flushes_and_takes_no_more(transport: Transport) -> None:
    address, rx = await transport.serve()
    async with rx:
        tx = await transport.dial(address)
        for number in range(500):
            tx.post(Reading(number))
        assert await tx.close() == []
        assert rx.unread == 500
        refused = tx.try_post(Reading(500))
        assert refused.error is not None and isinstance(refused.error.error, TxRxClosed)
        assert tx.status().value.closed
        assert await tx.close() == [], "closing twice does nothing"
        assert [(await rx.recv()).number for _ in range(500)] == list(range(500))


async def test_a_receiver_outlives_its_senders(transport: Transport) -> None:
    address, rx = await transport.serve()
    async with rx:
        for number in range(5):
            async with await transport.dial(address) as tx:
                await tx.send(Reading(number))
        assert [(await rx.recv()).number for _ in range(5)] == list(range(5))


async def test_closing_a_receiver_twice_does_nothing_more(transport: Transport) -> None:
    address, rx = await transport.serve()
    rx.close()
    rx.close()
    await rx.join()
    await rx.join()
    _, again = await serve(address, Reading, settings=transport.settings)
    rx.close()
    async with again, await transport.dial(address) as tx:
        await tx.send(Reading(1))
        assert (await again.recv()).number == 1


@pytest.mark.req("T-025", "T-043")
async def test_joining_flushes_the_acknowledgements_that_are_due_much_later(network: Transport) -> None:
    late = {"message_ack_eagerly": False, "message_ack_time_interval": 3600.0}
    address, rx = await network.serve(**late)
    tx = await network.dial(address)
    channels = [tx.try_post(Reading(number)) for number in range(3)]
    await until(lambda: rx.unread == 3)
    assert not any(channel.settled for channel in channels)
    await rx.join()
    async with asyncio.timeout(10):
        assert [await channel for channel in channels] == [None] * 3
    assert await tx.close() == []


@pytest.mark.req("T-024", "T-025")
async def test_a_sender_in_full_flow_hears_that_the_receiver_has_closed(network: Transport) -> None:
    # Messages that the receiver has not read must not keep its last answers from arriving.
    address, rx = await network.serve(bytes, queue_capacity=10)
    tx = await network.dial(address, bytes)
    channels = [tx.try_post(bytes(10_000)) for _ in range(2_000)]
    await until(lambda: rx.unread == 10)
    await rx.join()
    async with asyncio.timeout(10):
        errors = [await channel for channel in channels]
    assert errors[:10] == [None] * 10, "what was taken is acknowledged"
    assert {one.delivery for one in errors[10:] if one is not None} == {DeliveryStatus.NOT_DELIVERED}
    assert sum(one is not None for one in errors) == 1_990
    assert [one.message for one in await tx.close()] == [bytes(10_000)] * 1_990


@pytest.mark.req("T-024")
async def test_a_receiver_that_is_forgotten_is_closed(network: Transport) -> None:
    address, rx = await network.serve()
    async with await network.dial(address) as tx:
        await tx.send(Reading(1))
        del rx
        gc.collect()
        async with asyncio.timeout(10):
            status = await tx.status().wait_for(lambda status: status.closed)
        assert status.reason
    _, again = await serve(address, Reading, settings=network.settings)
    await again.join()


@pytest.mark.req("T-064")
async def test_no_connection_is_made_before_the_first_message(network: Transport) -> None:
    address, rx = await network.serve()
    async with rx, await network.dial(address), await network.dial(address) as busy:
        await busy.send(Reading(1))
        await rx.recv()
        assert rx.statistics().connections == 1


@pytest.mark.req("T-056")
async def test_an_outbox_with_a_bound_refuses_what_is_too_much(network: Transport) -> None:
    address, rx = await network.serve()
    async with rx, await network.dial(address, outbox_limit=5) as tx:
        channels = [tx.try_post(Reading(number)) for number in range(8)]
        refused = [channel.error for channel in channels[5:]]
        assert all(one is not None and isinstance(one.error, OutboxFull) for one in refused)
        assert "outbox full" in str(refused[0])
        await tx.drain()
        await tx.send(Reading(8))
        assert [(await rx.recv()).number for _ in range(6)] == [0, 1, 2, 3, 4, 8]


@pytest.mark.req("T-100")
async def test_both_ends_count(network: Transport) -> None:
    address, rx = await network.serve(bytes)
    async with rx, await network.dial(address, bytes) as tx:
        for _ in range(5):
            await tx.send(bytes(100))
        sent, received = tx.statistics(), rx.statistics()
        assert sent.messages_posted == sent.messages_delivered == received.messages_accepted == 5
        assert sent.frames_sent == received.frames_received == 5 and sent.retransmits == 0
        assert sent.bytes_sent == 5 * 124 and received.bytes_received == 5 * 124 + 13
        assert sent.connections == received.connections == received.sessions == 1
        assert sent.acks_received == received.acks_sent == 5


# Addresses


@pytest.mark.req("T-097")
async def test_dialling_before_the_server_is_up(network: Transport) -> None:
    where = network.address
    if where.endswith(":0"):
        where = f"{where[:-1]}{free_port()}"
    early = await dial(where, Reading, settings=network.settings)
    channels = [early.try_post(Reading(number)) for number in range(3)]
    # The first attempt is over and has failed.
    assert isinstance(early, SessionTx)
    await until(lambda: early.statistics().connections == 0 and early._last_failure is not None)
    _, rx = await serve(where, Reading, settings=network.settings)
    async with rx, early:
        assert [await channel for channel in channels] == [None] * 3
        assert [(await rx.recv()).number for _ in range(3)] == [0, 1, 2]


@pytest.mark.req("T-098")
async def test_an_address_is_served_once_at_a_time(transport: Transport) -> None:
    address, rx = await transport.serve()
    with pytest.raises(AddressInUse) as raised:
        await serve(address, Reading, settings=transport.settings)
    assert str(address) in str(raised.value)
    async with await transport.dial(address) as tx:
        await tx.send(Reading(1))
        assert (await rx.recv()).number == 1, "the first goes on"
    await rx.join()
    _, again = await serve(address, Reading, settings=transport.settings)
    await again.join()


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.req("T-088")
@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]", "localhost", "*"])
@pytest.mark.parametrize("scheme", ["tcp", "metatls", "tls"])
async def test_hosts_of_every_kind(scheme: str, host: str, tls_settings: TxRxSettings) -> None:
    if host == "[::1]" and not _has_ipv6():
        pytest.skip("NOT TESTED: this machine has no IPv6")
    address, rx = await serve(f"{scheme}:{host}:0", Reading, settings=tls_settings)
    assert isinstance(address, TcpAddress | TlsAddress)
    assert address.port > 0
    assert str(address) == f"{scheme}:{host}:{address.port}"
    async with rx, await dial(str(address), Reading, settings=tls_settings) as tx:
        await tx.send(Reading(1))
        assert (await rx.recv()).number == 1
    with pytest.raises(InvalidAddress):
        await dial(f"{scheme}:{host}:0", Reading, settings=tls_settings)


@pytest.mark.req("T-088")
async def test_all_interfaces_can_be_dialled_by_each_of_their_addresses() -> None:
    address, rx = await serve("tcp:*:0", Reading)
    assert isinstance(address, TcpAddress)
    async with rx:
        for host in ("127.0.0.1", "[::1]") if _has_ipv6() else ("127.0.0.1",):
            async with await dial(f"tcp:{host}:{address.port}", Reading) as tx:
                await tx.send(Reading(1))
                assert (await rx.recv()).number == 1


async def test_a_host_that_is_not_here_cannot_be_served() -> None:
    with pytest.raises(TxRxIOError, match=r"tcp:192\.0\.2\.1:0 cannot be served"):
        await serve("tcp:192.0.2.1:0", Reading)
    with pytest.raises(TxRxIOError, match="cannot be served"):
        await serve("unix:/no/such/folder/socket", Reading)


@pytest.mark.req("T-091")
async def test_a_stale_socket_file_is_replaced_and_removed_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    assert path.is_socket()
    address, rx = await serve(f"unix:{path}", Reading)
    async with rx, await dial(address, Reading) as tx:
        await tx.send(Reading(1))
        assert (await rx.recv()).number == 1
    assert not path.exists()


@pytest.mark.req("T-091", "T-098")
async def test_the_socket_file_of_another_live_server_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        other.listen(1)
        inode = path.stat().st_ino
        with pytest.raises(AddressInUse):
            await serve(f"unix:{path}", Reading)
        assert path.stat().st_ino == inode


@pytest.mark.req("T-091")
async def test_a_file_that_is_no_socket_is_left_alone(tmp_path: Path) -> None:
    path, link, target = tmp_path / "file", tmp_path / "link", tmp_path / "target"
    path.write_text("precious")
    target.write_text("precious too")
    link.symlink_to(target)
    for one in (path, link):
        with pytest.raises(AddressInUse, match="something else is there"):
            await serve(f"unix:{one}", Reading)
    assert path.read_text() == "precious" and link.read_text() == "precious too"


async def test_closing_leaves_a_socket_file_that_has_become_anothers(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    _, first = await serve(f"unix:{path}", Reading)
    # Renamed and not removed, so that the second file cannot take the first one's inode.
    path.rename(tmp_path / "moved")
    address, second = await serve(f"unix:{path}", Reading)
    await first.join()
    async with second, await dial(address, Reading) as tx:
        await tx.send(Reading(1))
        assert (await second.recv()).number == 1


# Settings


@pytest.mark.req("T-099")
async def test_settings_come_from_the_environment(
    network: Transport, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {
        "QUEUE_CAPACITY": 2,
        "CODEC_MAX_FRAME_LENGTH": 1000,
        "MESSAGE_ACK_EAGERLY": "no",
        "MESSAGE_ACK_TIME_INTERVAL": 3600,
        "MESSAGE_ACK_EVERY_N_MESSAGES": 2,
        "MESSAGE_DELIVERY_TIMEOUT": 0.5,
        "TLS_CERTIFICATE": network.settings.tls_certificate or "",
        "TLS_KEY": network.settings.tls_key or "",
        "TLS_AUTHORITIES": network.settings.tls_authorities or "",
    }
    for name, value in settings.items():
        monkeypatch.setenv(f"STRATA_CHANNEL_{name}", str(value))
    address, rx = await serve(network.address, bytes)
    tx = await dial(address, bytes)
    assert tx.try_post(bytes(1000)).error is not None, "frames above the limit"
    first = tx.try_post(b"1")
    await until(lambda: rx.unread == 1)
    assert not first.settled, "one message is too few for an acknowledgement"
    second = tx.try_post(b"2")
    assert [await first, await second] == [None, None]
    third = tx.try_post(b"3")
    async with asyncio.timeout(10):
        returned = await third
    assert rx.unread == 2, "the capacity"
    assert returned is not None and "within 0.5 s" in returned.reason
    await tx.close()
    await rx.join()


# Local channels only


@pytest.mark.req("T-057")
async def test_a_local_channel_with_a_capacity_refuses_what_is_too_much() -> None:
    address, rx = serve_local(int, capacity=2)
    async with rx, await dial(address, int) as tx:
        assert [tx.try_post(number).error is None for number in range(3)] == [True, True, False]
        refused = tx.try_post(3).error
        assert refused is not None and isinstance(refused.error, OutboxFull)
        assert not tx.status().value.closed
        assert await rx.recv() == 0
        await tx.send(4)
        assert [await rx.recv() for _ in range(2)] == [1, 4]
        assert rx.statistics().queue_full == 2


@pytest.mark.req("T-087")
async def test_local_addresses_are_numbers_of_which_zero_takes_a_free_one() -> None:
    (one, first), (two, second) = serve_local(int), serve_local(int)
    assert one != two
    async with first, second, await dial(one, int) as to_first, await dial(str(two), int) as to_second:
        await to_first.send(1)
        await to_second.send(2)
        assert (await first.recv(), await second.recv()) == (1, 2)
    with pytest.raises(TxRxClosed, match=str(one)):
        await dial(one, int)


async def test_a_local_message_is_handed_over_as_the_object_it_is() -> None:
    message = Reading(1)
    address, rx = serve_local(Reading)
    async with rx, await dial(address, Reading) as tx:
        await tx.send(message)
        assert await rx.recv() is message


# TLS only


@pytest.mark.req("T-092", "T-093")
async def test_mutual_tls(tls_settings: TxRxSettings) -> None:
    address, rx = await serve("metatls:localhost:0", Reading, settings=replace(tls_settings, tls_mutual=True))
    async with rx, await dial(address, Reading, settings=tls_settings) as tx:
        await tx.send(Reading(1))
        assert (await rx.recv()).number == 1
