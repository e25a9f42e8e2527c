"""What people and gaps cost: idle traffic and acknowledgement by people, catch-up and joining by the gap.

In these worlds nothing is lost and nothing fails, and all settings except the sizes of filter and segment are
the defaults. Times are virtual, so the figures are the same on every machine, except the CPU time.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from strata.channels.reliable.events import ReliableMessageDelivered

from strata_testkit.sim.loop import run_virtually
from strata_testkit.sim.simulation import Simulation
from strata_testkit.sim.weighing import weigh

__all__ = ["ByGap", "ByPeople", "by_gap", "by_people", "gaps_up_to", "measure", "people_up_to", "rows"]

_OPTIONS = {"bloom_filter_size": 500, "segment_size_bytes": 256}
_IDLE_MINUTES = 5
_MESSAGES = 20
_MOST_SECONDS = 3_600.0


@dataclass(frozen=True, slots=True)
class ByPeople:
    """A room in which people send twenty messages, and then nothing."""

    people: int
    idle_syncs_per_minute: float
    idle_bytes_per_minute: float
    """Bytes that the relays hand on while nobody says anything, to all participants together."""
    sends_per_message: float
    syncs_per_message: float
    bytes_per_delivery: float
    """Bytes that the relays hand on per message that a program gets."""
    acknowledged_after: float
    """Median virtual seconds from `send` to `delivered`."""
    items_kept: int
    """Items in the state of one participant."""
    cpu_seconds: float


@dataclass(frozen=True, slots=True)
class ByGap:
    """A participant that missed messages, and a newcomer, when everybody else is gone."""

    gap: int
    received: int
    """The missed messages that arrived within an hour."""
    seconds: float
    """Virtual seconds until the last of them arrived."""
    read: int
    """Messages read from the relays' stores for that."""
    said_synced_early: bool
    """Whether the channel said that it is synced while some had not arrived yet."""
    first_live_after: float | None
    """Virtual seconds until a newcomer had a message sent after it joined; None if not within an hour."""
    cpu_seconds: float


def people_up_to(most: int) -> list[int]:
    """The sizes of a room to measure."""
    return [each for each in (2, 5, 10, 30, 100, 300, 1_000) if each <= most]


def gaps_up_to(most: int) -> list[int]:
    """The gaps to measure."""
    return [each for each in (100, 300, 1_000, 3_000, 10_000, 30_000, 100_000) if each <= most]


def by_people(people: int) -> ByPeople:
    """Measure a room."""
    began_at = time.process_time()
    measured = run_virtually(lambda: _room(people))
    return ByPeople(people, *measured, cpu_seconds=round(time.process_time() - began_at, 2))


async def _room(people: int) -> tuple[float, float, float, float, float, float, int]:
    run = Simulation(1, participants=people, relays=1, options=_OPTIONS)
    run.evidence.programs_are_busy = False
    await run.start()
    await asyncio.sleep(10)
    sent_at: dict[str, float] = {}
    took: list[float] = []

    def delivered(event: ReliableMessageDelivered) -> None:
        took.append(run.network.time() - sent_at.get(event.request_id, run.network.time()))

    for each in run.participants:
        assert each.channel is not None
        each.channel.message_events.on(ReliableMessageDelivered.name, delivered)
    traffic, handed_on = run.evidence.traffic.copy(), run.network.bytes_handed_on
    for number in range(_MESSAGES):
        began_at = run.network.time()
        request_id = await run.participants[number % people].send(b"%04d" % number + b"." * 96)
        assert request_id is not None
        sent_at[request_id] = began_at
        await asyncio.sleep(3)
    await asyncio.sleep(60)
    spent = run.evidence.traffic - traffic
    handed_on = run.network.bytes_handed_on - handed_on
    deliveries = max(1, run.evidence.checks.deliveries)
    await asyncio.sleep(60)
    syncs, idle_bytes = run.evidence.traffic["sync"], run.network.bytes_handed_on
    await asyncio.sleep(60 * _IDLE_MINUTES)
    first = run.participants[0]
    figures = (
        round((run.evidence.traffic["sync"] - syncs) / _IDLE_MINUTES, 1),
        round((run.network.bytes_handed_on - idle_bytes) / _IDLE_MINUTES),
        round((spent["content"] + spent["again"]) / _MESSAGES, 2),
        round(spent["sync"] / _MESSAGES, 2),
        round(handed_on / deliveries),
        round(sorted(took)[len(took) // 2], 2) if took else _MOST_SECONDS,
        weigh(first.channel, first.disk.content).entries,
    )
    for each in run.participants:
        each.kill()
    return figures


def by_gap(gap: int) -> ByGap:
    """Measure an absence, and a newcomer's first message."""
    began_at = time.process_time()
    received, seconds, read, early = run_virtually(lambda: _absence(gap))
    first_live = run_virtually(lambda: _joining(gap))
    cpu = round(time.process_time() - began_at, 2)
    return ByGap(gap, received, seconds, read, early, first_live, cpu)


async def _absence(gap: int) -> tuple[int, float, int, bool]:
    run = Simulation(1, participants=1, relays=1, options=_OPTIONS)
    run.network.page_messages = 500
    run.evidence.programs_are_busy = False
    await run.start()
    (away,) = run.participants
    await asyncio.sleep(60)
    away.kill()
    await asyncio.sleep(run.play(gap) + 60 - run.network.time())
    began_at = last_at = run.network.time()
    await away.start()
    received, early = len(away.received), False
    while received < gap and run.network.time() - began_at < _MOST_SECONDS:
        await asyncio.sleep(0.5)
        assert away.channel is not None
        if len(away.received) > received:
            received, last_at = len(away.received), run.network.time()
        status = away.channel.sync_status()
        early = early or (received < gap and status.is_synced and not status.inbox)
    away.kill()
    return received, round(last_at - began_at, 1), run.network.messages_read, early


async def _joining(gap: int) -> float | None:
    run = Simulation(1, participants=0, relays=1, options=_OPTIONS)
    run.network.page_messages = 500
    run.evidence.programs_are_busy = False
    await run.start()
    await asyncio.sleep(run.play(gap) + 60 - run.network.time())
    speaker = await run.join("speaker")
    await asyncio.sleep(_MOST_SECONDS)
    began_at = run.network.time()
    joined = await run.join("new")
    request_id = await speaker.send(b"live")
    assert request_id is not None
    while not run.evidence.has_taken(joined.name, request_id):
        await asyncio.sleep(0.25)
        if run.network.time() - began_at > _MOST_SECONDS:
            break
    took = run.network.time() - began_at
    for each in run.participants:
        each.kill()
    return round(took, 1) if took <= _MOST_SECONDS else None


def rows(people: int, gap: int) -> Iterator[tuple[Callable[[int], ByPeople | ByGap], int]]:
    """The measurements: a function and its argument for each row of the two tables."""
    for count in people_up_to(people):
        yield by_people, count
    for missed in gaps_up_to(gap):
        yield by_gap, missed


def measure(row: tuple[Callable[[int], ByPeople | ByGap], int]) -> ByPeople | ByGap:
    """Measure one of the `rows`."""
    logging.getLogger("strata").setLevel(logging.CRITICAL)
    by, size = row
    return by(size)
