"""Authors with key chains beside authors without, on one relay: rate, CPU, cold start, memory.

Each identity has added or rotated a key by a KEY_EVENT that the relay has stored; its packets are signed with
the new key. Rounds of both kinds alternate, and so does the kind that begins, so that a drift of the machine
favours neither.
"""

from __future__ import annotations

import functools
import statistics
from dataclasses import dataclass

from benches.authors import sign_by_new_keys, sign_key_events, sign_plain
from benches.daemon import CpuTimes, RelayProcess
from benches.load import Load, make_load
from benches.measures import Measure, Plan, Progress
from benches.publish import publish

__all__ = ["measure"]

_LEAST_SHARE = 0.97
"""The share of the plain authors' rate that still counts as no measurable difference."""
_PLAIN_NAME = "as many plain authors"


@dataclass(frozen=True, slots=True)
class _Round:
    """One round: a packet by each author of a kind."""

    rate: float
    cost: CpuTimes
    grown_bytes: int


async def measure(relay: RelayProcess, plan: Plan, progress: Progress) -> list[Measure]:
    """The rate while all chains are in memory; after a restart, the rate of loading them, and their size."""
    count, rounds = plan.identities, plan.identity_rounds
    # One more round per side to warm up, and after the restart two of plain authors and one that loads.
    plain = make_load(count * (rounds + 3), progress, functools.partial(sign_plain, authors=count))
    chained = make_load(count * (rounds + 2), progress, functools.partial(sign_by_new_keys, authors=count))
    events = make_load(count, progress, sign_key_events)
    stored = await _publish(relay, events)
    progress(f"identities: {count:,} KEY_EVENTs, {stored.rate:,.0f}/s")
    event_bytes = sum(map(len, events.frames)) / count
    warm = await _warm(relay, plan, progress, plain, chained, stored)
    plain, chained = (load.take(count * (rounds + 1), len(load)) for load in (plain, chained))
    return warm + await _cold(relay, count, progress, plain, chained, warm[0].value, event_bytes)


async def _warm(
    relay: RelayProcess, plan: Plan, progress: Progress, plain: Load, chained: Load, stored: _Round
) -> list[Measure]:
    count = plan.identities
    pairs: list[tuple[_Round, _Round]] = []
    for number in range(plan.identity_rounds + 1):
        part = functools.partial(_part, number=number, count=count)
        if number % 2:
            mine = await _publish(relay, part(chained))
            theirs = await _publish(relay, part(plain))
        else:
            theirs = await _publish(relay, part(plain))
            mine = await _publish(relay, part(chained))
        progress(f"identities: {mine.rate:,.0f}/s beside {theirs.rate:,.0f}/s")
        if number:  # the first round warms up
            pairs.append((mine, theirs))
    sides = [[pair[side] for pair in pairs] for side in range(2)]
    # Over all rounds: if one round lost time to another program, its neighbour probably did too.
    rate, plain_rate = (len(side) / sum(1 / one.rate for one in side) for side in sides)
    cpu_us, plain_us = (
        statistics.fmean((one.cost.relay + one.cost.postgres) / count * 1e6 for one in side) for side in sides
    )
    return [
        Measure(
            "identities",
            f"{count} authors with a key chain",
            rate,
            "/s",
            _LEAST_SHARE * plain_rate,
            limit=plain_rate,
            limit_name=_PLAIN_NAME,
            details={
                "rounds": [mine.rate for mine, _ in pairs],
                "plain authors": [theirs.rate for _, theirs in pairs],
                **pairs[-1][0].cost.each(count),
            },
        ),
        Measure(
            "identities",
            "CPU of relay and PostgreSQL",
            cpu_us,
            "us",
            plain_us / _LEAST_SHARE,
            at_most=True,
            limit=plain_us,
            limit_name=_PLAIN_NAME,
        ),
        Measure(
            "identities",
            "KEY_EVENTs stored",
            stored.rate,
            "/s",
            limit=plain_rate,
            limit_name="plain packets",
            details=stored.cost.each(count),
        ),
    ]


async def _cold(
    relay: RelayProcess,
    count: int,
    progress: Progress,
    plain: Load,
    chained: Load,
    warm_rate: float,
    event_bytes: float,
) -> list[Measure]:
    """After a restart: plain authors twice, to learn what any packet leaves in memory, then every chain."""
    relay.restart()
    await _publish(relay, _part(plain, 0, count))
    usual = await _publish(relay, _part(plain, 1, count))
    cold = await _publish(relay, _part(chained, 0, count))
    progress(f"identities, cold: {cold.rate:,.0f}/s")
    chain_bytes = (cold.grown_bytes - usual.grown_bytes) / count
    return [
        Measure(
            "identities",
            "each one's first packet after a restart",
            cold.rate,
            "/s",
            limit=warm_rate,
            limit_name="chains in memory",
            details=cold.cost.each(count),
        ),
        Measure(
            "identities",
            "memory of a chain",
            chain_bytes / 1024,
            "KiB",
            at_most=True,
            limit=event_bytes / 1024,
            limit_name="its KEY_EVENT on the wire",
        ),
    ]


async def _publish(relay: RelayProcess, load: Load) -> _Round:
    """Publish a load, as `publish` does, and measure its other costs too."""
    cost, resident_bytes = relay.cpu_times(), relay.resident_bytes()
    seconds = await publish(relay.ws_url, load)
    return _Round(len(load) / seconds, relay.cpu_times().since(cost), relay.resident_bytes() - resident_bytes)


def _part(load: Load, number: int, count: int) -> Load:
    return load.take(number * count, count)
