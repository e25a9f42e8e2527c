"""Channels over a real relay: two programs that talk, and one large payload; each program in its own process.

All settings are defaults. `twoway`: both send, so the messages of one acknowledge those of the other.
`oneway`: only one sends, and the other acknowledges by its syncs. In both cases the last messages wait for a
sync. The limit is as many messages of the same size on the wire, sent through the node without a channel.
Nothing is lost on the way, so nothing may be sent again.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benches.channel_peer import ChannelProcess
from benches.daemon import RelayProcess
from benches.measures import FULL, Measure, Plan, Progress

__all__ = ["ChannelPlan", "measure", "plan_of"]


@dataclass(frozen=True, slots=True)
class ChannelPlan:
    """How much work the benchmarks of channels do."""

    rounds: int
    messages: int
    """The messages of each program that sends, as fast as the channel takes them."""
    blob_bytes: int
    losses: tuple[float, ...]
    seeds: int
    convergence_messages: int
    histories: tuple[int, ...]


_FULL = ChannelPlan(
    rounds=3,
    messages=2_000,
    blob_bytes=10_000_000,
    losses=(0.0, 0.1, 0.3),
    seeds=200,
    convergence_messages=100,
    histories=(1_000, 10_000, 100_000),
)
_BRIEF = ChannelPlan(
    rounds=1,
    messages=20,
    blob_bytes=300_000,
    losses=(0.0, 0.1),
    seeds=2,
    convergence_messages=10,
    histories=(100, 300),
)

PAYLOAD_BYTES = 120
WIRE_BYTES = 19_250
"""The size of an SDS message with such a payload and the default filter."""
SEGMENT_BYTES = 102_400


def plan_of(plan: Plan) -> ChannelPlan:
    """The plan of channels that corresponds to a plan."""
    return _FULL if plan is FULL else _BRIEF


async def measure(relay: RelayProcess, plan: Plan, progress: Progress) -> list[Measure]:
    """Two peers talk, then one sends a large payload. Raises `BenchError` if something was lost."""
    if sys.platform != "linux":
        progress("channels: needs Linux for its clock and its memory; left out")
        return []
    size = plan_of(plan)
    measures = await _talk(relay, size, progress, "twoway")
    measures += await _talk(relay, size, progress, "oneway")
    return measures + await _blob(relay, size, progress)


async def _order(pair: Sequence[ChannelProcess], do: str, counts: Sequence[int], **rest: int) -> list[Any]:
    """Have each of the two send its number of messages, and take those of the other."""
    (one, other), (first, second) = pair, counts
    answers = await asyncio.gather(
        one.order(do, count=first, expect=second, **rest), other.order(do, count=second, expect=first, **rest)
    )
    return list(answers)


async def _talk(relay: RelayProcess, size: ChannelPlan, progress: Progress, name: str) -> list[Measure]:
    counts = (size.messages, size.messages if name == "twoway" else 0)
    found: list[list[Any]] = []
    alone: list[float] = []
    bare_seconds = 0.0
    before = relay.cpu_times()
    async with (
        ChannelProcess(relay.ws_url, name, "alice") as alice,
        ChannelProcess(relay.ws_url, name, "bob") as bob,
    ):
        pair = (alice, bob)
        await _order(pair, "talk", (1, 1), window=1, payload_bytes=PAYLOAD_BYTES)
        for _ in range(size.rounds):
            found.append(
                await _order(pair, "talk", counts, window=size.messages, payload_bytes=PAYLOAD_BYTES)
            )
            progress(f"channels: {name}, {_rate(found[-1], counts, 'received_at'):,.0f} received a second")
            bare = await _order(pair, "bare", counts, window=size.messages, payload_bytes=WIRE_BYTES)
            alone.append(_rate(bare, counts, "received_at"))
            bare_seconds += sum(answer["cpu_seconds"] for answer in bare)
    used = relay.cpu_times().since(before)
    sent = sum(counts) * size.rounds
    again = sum(answer["retransmissions"] for answers in found for answer in answers)
    limit, limit_name = statistics.median(alone), "as many and as large, without a channel"
    measures = []
    for key, what in (("received", "received"), ("acknowledged", "acknowledged")):
        rounds = [_rate(answers, counts, f"{key}_at") for answers in found]
        # Senders have measured acknowledgements; receivers have measured how long messages were on their way.
        times = [answer[key] for answers in found for answer in answers if answer[key]]
        measures.append(
            Measure(
                "channels",
                f"{name}: sent to {what}",
                statistics.median(rounds),
                "/s",
                limit=limit,
                limit_name=limit_name,
                details={
                    "rounds": rounds,
                    "p50 ms": [1000 * each["p50"] for each in times],
                    "p99 ms": [1000 * each["p99"] for each in times],
                },
            )
        )
    peers = sum(answer["cpu_seconds"] for answers in found for answer in answers)
    measures.append(
        Measure(
            "channels",
            f"{name}: sent again",
            again,
            "messages",
            0.0,
            at_most=True,
            limit=sent,
            limit_name="messages sent",
            details={
                "syncs": sum(answer["syncs"] for answers in found for answer in answers),
                "CPU of both peers for a message, us": peers / sent * 1e6,
                "without a channel": bare_seconds / sent * 1e6,
                # The relay carried the bare ones too.
                "CPU of the relay for a message, us": used.relay / sent / 2 * 1e6,
            },
        )
    )
    return measures


def _rate(answers: Sequence[dict[str, float]], counts: Sequence[int], ended: str) -> float:
    began_at = min(answer["started_at"] for answer in answers)
    return sum(counts) / (max(answer[ended] for answer in answers) - began_at)


async def _blob(relay: RelayProcess, size: ChannelPlan, progress: Progress) -> list[Measure]:
    """One large payload, in many segments; the limit is its segments without a channel."""
    segments = -(-size.blob_bytes // SEGMENT_BYTES)
    found: list[list[Any]] = []
    alone: list[float] = []
    for number in range(size.rounds):
        # A new channel each time, since a newcomer to a channel gets its earlier messages.
        async with (
            ChannelProcess(relay.ws_url, f"blob-{number}", "alice") as alice,
            ChannelProcess(relay.ws_url, f"blob-{number}", "bob") as bob,
        ):
            pair = (alice, bob)
            await _order(pair, "talk", (1, 1), window=1, payload_bytes=PAYLOAD_BYTES)
            found.append(await _order(pair, "talk", (1, 0), window=1, payload_bytes=size.blob_bytes))
            wire = SEGMENT_BYTES + WIRE_BYTES - PAYLOAD_BYTES
            bare = await _order(pair, "bare", (segments, 0), window=segments, payload_bytes=wire)
            alone.append(max(answer["received_at"] for answer in bare) - bare[0]["started_at"])
            progress(f"channels: {size.blob_bytes / 1e6:g} MB in {segments} segments")
    limit = statistics.median(alone)
    again = sum(answer["retransmissions"] for answers in found for answer in answers)
    name = f"{size.blob_bytes / 1e6:g} MB"
    measures = []
    for key, what in (("received_at", "received"), ("acknowledged_at", "acknowledged")):
        rounds = [max(answer[key] for answer in answers) - answers[0]["started_at"] for answers in found]
        measures.append(
            Measure(
                "channels",
                f"{name}: sent to {what}",
                statistics.median(rounds),
                "s",
                limit=limit,
                limit_name="its segments without a channel",
                details={"rounds": rounds, "sent again": again}
                if key == "received_at"
                else {"rounds": rounds},
            )
        )
    for place, who in enumerate(("sender", "receiver")):
        peaks = [answers[place]["peak_bytes"] / 1e6 for answers in found]
        measures.append(
            Measure(
                "channels",
                f"{name}: peak memory of the {who}",
                statistics.median(peaks),
                "MB",
                limit=size.blob_bytes / 1e6,
                limit_name="the payload itself",
                details={"rounds": peaks},
            )
        )
    return measures
