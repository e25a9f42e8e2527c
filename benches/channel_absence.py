"""Absence: how fast a channel reads what it missed, by amount, and how soon a newcomer gets live messages.

The relay holds messages of three people who answer one another, each with a filter of the channel's size. A
participant that knows nothing opens the channel and reads until it is synced. Another one joins `now`, and is
timed until it gets a message that was sent after that. Memory is the growth of the process.
"""

from __future__ import annotations

import asyncio
import gc
import random
import resource
import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import strata
from strata.channels.messaging import MessageEnvelope
from strata.channels.messaging.binding import build_packet
from strata.channels.persistence import MemoryPersistence, Persistence
from strata.channels.sds import BloomParameters, HistoryEntry, SdsConfig, SdsMessage
from strata.channels.segmentation import SegmentationConfig, encode_segment, segment_message
from strata.protocol.ids import Identity
from strata.protocol.packets import Packet

from benches.daemon import RelayProcess
from benches.measures import Measure, Progress

__all__ = ["Joined", "Reading", "join_to_first_live", "measure", "publish_all", "read_all", "written"]

CHANNEL = "room"
_PUBLISHING = 256
_PATIENCE = 120.0
_FILTER_IDS = 100
"""A small filter: by default, most of a message is its filter, and the log would be gigabytes."""
_TARGET_RATE, _TARGET_SECONDS = 2_000, 2


@dataclass(frozen=True, slots=True)
class Reading:
    """The cost of reading a history once."""

    messages: int
    seconds: float
    cpu_seconds: float
    """CPU time of the reading process."""
    grown_bytes: int
    """The growth of the process's peak memory."""

    def __str__(self) -> str:
        rate, each = self.messages / self.seconds, 1e6 * self.cpu_seconds / self.messages
        return (
            f"{self.messages} messages in {self.seconds:.1f} s ({rate:,.0f} a second), "
            f"{each:.0f} µs of CPU each, {self.grown_bytes / 1e6:.0f} MB"
        )


def written(
    count: int, topic: str, *, filter_ids: int, first: int = 0, seed: int = 1
) -> Iterator[tuple[SdsMessage, Packet]]:
    """Messages of three people, as packets; each message names the two before it."""
    rng = random.Random(seed)
    size = BloomParameters(filter_ids, SdsConfig().bloom_filter_error_rate).size_bytes
    people = [Identity.from_seed(rng.randbytes(32)) for _ in range(3)]
    bloom = bytearray(size)
    last: list[HistoryEntry] = []
    now = int(time.time())
    for n in range(first, first + count):
        for _ in range(10):  # each message sets ten bits of a filter
            bloom[rng.randrange(size)] |= 1 << rng.randrange(8)
        if n % (filter_ids or 1) == 0:
            bloom = bytearray(size)
        (segment,) = segment_message(b"message %d" % n, SegmentationConfig(), request_id=f"{n:032x}")
        sender = n % 3
        message = SdsMessage(
            f"person-{sender}",
            f"{rng.getrandbits(256):064x}",
            CHANNEL,
            1000 * (now - 3_600) + n,
            tuple(last),
            bytes(bloom),
            content=encode_segment(segment),
        )
        envelope = MessageEnvelope(content_topic=topic, payload=message.encode())
        packet = build_packet(people[sender], envelope, now=now, nonce=f"0x{rng.getrandbits(128):032x}")
        last = [*last[-1:], HistoryEntry(message.message_id, packet.digest, message.sender_id)]
        yield message, packet


async def publish_all(url: str, packets: Iterator[tuple[SdsMessage, Packet]]) -> list[str]:
    """Publish all of these to a relay, in their order. Returns the message ids."""
    ids: list[str] = []
    async with strata.connect(url) as relay:
        under_way: list[asyncio.Task[object]] = []
        for message, packet in packets:
            ids.append(message.message_id)
            under_way.append(asyncio.create_task(_publish(relay, packet)))
            if len(under_way) >= _PUBLISHING:
                await asyncio.gather(*under_way)
                under_way.clear()
        await asyncio.gather(*under_way)
    return ids


async def _publish(relay: strata.Relay, packet: Packet) -> object:
    return await relay.publish(packet, timeout=120.0)


async def read_all(
    url: str, topic: str, count: int, *, filter_ids: int, store: Persistence | None = None
) -> Reading:
    """Open a channel that knows nothing, and read until it is synced; raises if the order is wrong.

    Its clock is an hour ahead, and it believes that the relay's is too: so messages from just now count as
    missed, and are not received live as well.
    """
    gc.collect()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    cpu, began = time.process_time(), time.monotonic()
    taken = 0
    async with strata.connect(url, identity=Identity.generate()) as relay:
        relay.node.wall = lambda: time.time() + 3_600
        relay.node.store_time = relay.node.wall  # type: ignore[method-assign]
        room = relay.channel(
            CHANNEL,
            topic=topic,
            sender_id=secrets.token_hex(8),
            bloom_filter_size=filter_ids,
            persistence=store or MemoryPersistence(),
            sync_min_interval_ms=0,
        )
        async with room:
            async with asyncio.timeout(None) as patience:
                while taken < count or not room.sync_status().is_synced:
                    if taken == count:
                        await asyncio.sleep(0.01)
                        continue
                    patience.reschedule(asyncio.get_running_loop().time() + _PATIENCE)
                    message = await anext(room)
                    if message.payload != b"message %d" % taken:
                        raise AssertionError(f"{message.payload!r} came as number {taken}")
                    taken += 1
            spent = Reading(
                taken,
                time.monotonic() - began,
                time.process_time() - cpu,
                1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before),
            )
    return spent


@dataclass(frozen=True, slots=True)
class Joined:
    """What it took a newcomer to get the first live message."""

    seconds: float
    packets: int
    """The packets that the relay had sent by then."""


async def join_to_first_live(url: str, topic: str, *, filter_ids: int, pool: bool = False) -> Joined:
    """Join now, have a message sent at once, and receive it; `pool`: through a pool of this one relay."""
    # Authors' times are whole seconds: a message from the second of joining counts as sent afterwards.
    await asyncio.sleep(1.1 - time.time() % 1)
    said = written(1, topic, filter_ids=filter_ids, first=10_000_000, seed=secrets.randbits(32))
    began = time.monotonic()
    me = Identity.generate()
    connection: strata.Relay | strata.Pool = (
        strata.connect_pool([url], identity=me) if pool else strata.connect(url, identity=me)
    )
    async with connection:
        room = connection.channel(
            CHANNEL, topic=topic, sender_id=secrets.token_hex(8), bloom_filter_size=filter_ids, join="now"
        )
        async with room:
            await publish_all(url, said)
            message = await anext(room)
            if message.payload != b"message 10000000":
                raise AssertionError(f"{message.payload!r} was said before")
            return Joined(time.monotonic() - began, _packets_sent_to(connection))


def _packets_sent_to(connection: strata.Relay | strata.Pool) -> int:
    if isinstance(connection, strata.Relay):
        return connection.statistics.events_received
    return connection.statistics.packets_merged + connection.statistics.copies_dropped


async def measure(relay: RelayProcess, missed: Sequence[int], progress: Progress) -> list[Measure]:
    """Read histories of these sizes; after each, join and receive the first live message."""
    measures: list[Measure] = []
    for count in missed:
        topic = f"/bench/1/{secrets.token_hex(8)}/proto"
        await publish_all(relay.ws_url, written(count, topic, filter_ids=_FILTER_IDS))
        spent = await read_all(relay.ws_url, topic, count, filter_ids=_FILTER_IDS)
        progress(f"absence: {spent}")
        cost = {"µs of CPU each": 1e6 * spent.cpu_seconds / count, "grown MB": spent.grown_bytes / 1e6}
        rate = count / spent.seconds
        measures.append(
            Measure("absence", f"{count} missed, read", rate, "messages/s", _TARGET_RATE, details=cost)
        )
        joined = await join_to_first_live(relay.ws_url, topic, filter_ids=_FILTER_IDS)
        name, details = f"{count} said before, joined to first heard", {"packets sent": joined.packets}
        measures.append(
            Measure("absence", name, joined.seconds, "s", _TARGET_SECONDS, at_most=True, details=details)
        )
    return measures
