"""Rings over NATS: its messages are heard, lost ones are made up for, and nobody else is believed."""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from collections.abc import Iterator

import nats
import pytest

from relayd.lineage import KnownLog
from relayd.store import Store, doorbell
from relayd.store.bus import BUS_EVENTS, Bus, BusMessages, probe_bus
from tests.support.nats import NatsServer

NOW = 1_790_000_000
KEY = bytes(range(32))
TAG = b"abcd"


@pytest.fixture
def bus() -> Iterator[NatsServer]:
    server = NatsServer().start()
    yield server
    server.kill()


@pytest.fixture
def no_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable the probes: only the bus reports commits."""
    monkeypatch.setattr(doorbell, "_BUS_PROBE_INTERVAL", 1000.0)


def test_a_message_is_believed_only_with_the_mac_of_its_log():
    ours, theirs = BusMessages(KEY), BusMessages(bytes(32))
    message = ours.encode(TAG, 2**60)
    assert ours.decode(message) == (TAG, 2**60)
    assert ours.subject != theirs.subject
    assert theirs.decode(message) is None
    for position in range(len(message)):
        changed = bytearray(message)
        changed[position] ^= 1
        assert ours.decode(bytes(changed)) is None
    for length in range(len(message)):
        assert ours.decode(message[:length]) is None


def test_a_report_is_sealed_for_itself_and_is_no_wake_up():
    ours, theirs = BusMessages(KEY), BusMessages(bytes(32))
    sealed = ours.seal(b"what was taken, in more than eight bytes")
    assert ours.unseal(sealed) == b"what was taken, in more than eight bytes"
    assert theirs.unseal(sealed) is None and ours.unseal(sealed[:-1]) is None
    assert ours.decode(sealed) is None and ours.unseal(ours.encode(TAG, 1)) is None
    assert ours.report_subject != ours.subject


async def test_reports_go_to_those_who_ask_for_them_and_are_not_kept_for_a_bus_that_is_away(
    store, second_store, eventually, bus, monkeypatch
):
    heard, told = list[bytes](), list[str]()

    def taken(report: bytes) -> bool:
        heard.append(report)
        return report != b"old"

    await second_store.listen(lambda _: None, bus_url=bus.url, on_bus=told.append, on_report=taken)
    store.report(b"nobody listens yet")
    await store.listen(lambda _: None, bus_url=bus.url)
    await connected(store, second_store)
    for report in (b"one", b"old", b"two"):
        store.report(report)
    await eventually(lambda: heard == [b"one", b"old", b"two"])
    assert told.count("refused") == 1
    bus.kill()
    await eventually(lambda: not store._bus.is_connected)
    store.report(b"away")
    bus.start()
    await connected(store, second_store)
    store.report(b"back")
    await eventually(lambda: heard[-1] == b"back")
    assert b"away" not in heard


@pytest.mark.req("R-311")
async def test_commits_of_others_ring_by_the_bus(store, second_store, packet, eventually, bus, no_looks):
    rings, own = list[int](), list[int]()
    await second_store.listen(rings.append, bus_url=bus.url)
    await store.listen(own.append, bus_url=bus.url)
    await connected(store, second_store)
    for number in range(3):
        await store.append([packet(number)], NOW)
        head = await store.head()
        await eventually(lambda: rings[-1] == head)  # noqa: B023 - awaited here
    await store.append([packet(0)], NOW)  # known already
    await second_store.append([packet(9)], NOW)
    head = await store.head()
    await eventually(lambda: own[-1] == head)
    assert rings[-1] == head - 1  # its own commit does not ring


async def connected(*stores: Store) -> None:
    """Wait until each hears the other: a message sent before the other listened may be lost."""
    async with asyncio.timeout(30):
        for store in stores:
            while store._bus is None or not store._bus.is_connected:  # noqa: ASYNC110
                await asyncio.sleep(0.01)


@pytest.mark.req("R-311", "R-167")
async def test_a_bus_that_is_killed_costs_latency_and_nothing_else(
    store, second_store, packet, eventually, bus, monkeypatch
):
    monkeypatch.setattr(doorbell, "_BUS_PROBE_INTERVAL", 0.1)
    rings = list[int]()
    await second_store.listen(rings.append, bus_url=bus.url)
    await store.listen(lambda sequence: None, bus_url=bus.url)
    await connected(store, second_store)
    bus.kill()
    await store.append([packet(1)], NOW)
    head = await store.head()
    await eventually(lambda: rings[-1] == head)
    bus.start()
    monkeypatch.setattr(doorbell, "_BUS_PROBE_INTERVAL", 1000.0)
    await connected(store, second_store)
    await asyncio.sleep(0.2)  # the last of the short looks is over
    await store.append([packet(2)], NOW)
    head = await store.head()
    await eventually(lambda: rings[-1] == head)
    assert rings == sorted(rings)


@pytest.mark.req("R-311", "R-167")
async def test_a_bus_that_is_late_says_nothing_that_is_not_so(
    store, second_store, packet, eventually, bus, monkeypatch
):
    monkeypatch.setattr(doorbell, "_BUS_PROBE_INTERVAL", 0.1)
    rings = list[int]()
    await second_store.listen(rings.append, bus_url=bus.url)
    await store.listen(lambda sequence: None, bus_url=bus.url)
    await connected(store, second_store)
    bus.pause()
    for number in range(50):
        await store.append([packet(number)], NOW)
    head = await store.head()
    await eventually(lambda: rings[-1] == head)
    bus.resume()
    await store.append([packet(99)], NOW)
    await eventually(lambda: rings[-1] == head + 1)
    assert max(rings) == head + 1


@pytest.mark.req("R-311")
async def test_with_and_without_a_bus_all_hear_of_all(
    store, second_store, packet, eventually, bus, monkeypatch
):
    """As while processes are restarted one after another with the new setting."""
    monkeypatch.setattr(doorbell, "_BUS_PROBE_INTERVAL", 0.1)
    by_notify, by_bus = list[int](), list[int]()
    await store.listen(by_notify.append)
    await second_store.listen(by_bus.append, bus_url=bus.url)
    await store.append([packet(1)], NOW)
    head = await store.head()
    await eventually(lambda: by_bus[-1] == head)
    await second_store.append([packet(2)], NOW)
    await eventually(lambda: by_notify[-1] == head + 1)


async def test_what_strangers_say_moves_nobody(bus):
    heard, doubts = list[int](), list[int]()
    known = KnownLog()
    told = Counter[str]()
    ours = Bus(
        bus.url,
        KEY,
        known,
        heard=heard.append,
        doubt=lambda: doubts.append(1),
        told=lambda what: told.update([what]),
    )
    running = asyncio.create_task(ours.run())
    client = await nats.connect(bus.url)
    messages, tag = BusMessages(KEY), known.lineage.current.tag
    async with asyncio.timeout(30):
        while not doubts:  # noqa: ASYNC110 - it looks once when it is connected
            await asyncio.sleep(0.01)
        for said in (b"", b"x" * 27, b"x" * 5000, BusMessages(bytes(32)).encode(tag, 2**60)):
            await client.publish(messages.subject, said)
        await client.publish(messages.subject, messages.encode(b"none", 2**60))  # of a lost log
        await client.publish(messages.subject, messages.encode(tag, 7))
        while not heard:  # noqa: ASYNC110 - another process carries it
            await asyncio.sleep(0.01)
    assert heard == [7]
    assert len(doubts) == 2
    assert told == {"connected": 1, "refused": 4, "doubted": 1, "heard": 1}
    assert set(told) <= set(BUS_EVENTS)
    await client.close()
    running.cancel()
    await asyncio.wait([running])


async def test_rulings_are_looked_for_at_every_look(store, eventually, bus, monkeypatch):
    monkeypatch.setattr(doorbell, "_BUS_PROBE_INTERVAL", 0.05)
    asked = list[int]()
    await store.listen(lambda sequence: None, lambda: asked.append(1), bus_url=bus.url)
    await eventually(lambda: len(asked) >= 2)


async def test_a_bus_is_probed_and_says_why_it_cannot_be_reached(bus):
    assert 0 < await probe_bus(bus.url) < 5
    bus.kill()
    with pytest.raises(ConnectionError, match=r"."):
        await probe_bus(bus.url)


async def test_a_server_that_takes_connections_and_says_nothing_keeps_none(monkeypatch):
    """Each attempt closes its connection: an idle relay hardly ever runs the collector of cycles."""
    monkeypatch.setattr("relayd.store.bus._CONNECT_SECONDS", 0.1)
    gone = asyncio.Event()

    async def taken(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        gone.set()
        writer.close()

    server = await asyncio.start_server(taken, "127.0.0.1", 0)
    gc.disable()
    try:
        with pytest.raises(ConnectionError):
            await probe_bus(f"nats://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        async with asyncio.timeout(10):
            await gone.wait()
    finally:
        gc.enable()
        server.close()
