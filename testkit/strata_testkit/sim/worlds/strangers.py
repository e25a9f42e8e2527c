"""Worlds with a stranger who forges messages: anybody can write to a topic."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass

from strata.channels.messaging.values import NodeMessageReceived, ReceivedEnvelope
from strata.channels.sds import HistoryEntry, SdsMessage
from strata.channels.segmentation.messages import Segment, encode_segment, message_hash

from strata_testkit.sim.bounds import Bounds
from strata_testkit.sim.network import EPOCH
from strata_testkit.sim.simulation import CHANNEL_ID, TOPIC, Simulation
from strata_testkit.sim.worlds.kinds import World, WorldSize, talk

__all__ = ["forged"]


@dataclass(frozen=True, slots=True)
class Forgers:
    """While people talk, a stranger writes messages that no participant would."""

    forgeries: int
    past: int
    """Old messages that the relays have, which a forgery may make people read again."""

    async def __call__(self, run: Simulation) -> None:
        """The scenario."""
        if self.past:
            for each in run.participants:
                each.kill()
            await asyncio.sleep(max(0.0, run.play(self.past) + 60 - run.network.time()))
            run.missed += self.past * len(run.participants)
            for each in run.participants:
                await each.start()
            await asyncio.sleep(60)
        talking = asyncio.ensure_future(talk(run, 12, 120))
        try:
            for _ in range(self.forgeries):
                await asyncio.sleep(run.rng.expovariate(self.forgeries / 120))
                self._forge(run)
            await talking
        finally:
            talking.cancel()
        await asyncio.sleep(60)
        # A message that is named but does not exist is looked for once, in everything that the relays have by
        # now, including the requests for it, and not a second time.
        run.missed += len(run.participants) * max(len(relay.stored) for relay in run.network.relays)

    def _forge(self, run: Simulation) -> None:
        network, rng = run.network, run.rng
        payload = rng.choice((_sync, _content, _foreign, _garbage, _replay))(run, rng)
        network.counts["forgeries"] += 1
        envelope = ReceivedEnvelope(
            content_topic=TOPIC, payload=payload, author="mallory", timestamp=int(EPOCH + network.time())
        )
        event = NodeMessageReceived(network.hash_of(payload), envelope)
        for relay in network.relays:
            network.publish("mallory", relay, event, lambda: None)


def _unknown(rng: random.Random, most: int) -> tuple[HistoryEntry, ...]:
    hint = rng.choice((None, rng.randbytes(32)))
    return tuple(
        HistoryEntry(rng.randbytes(32).hex(), hint, rng.choice((None, "p0", "nobody")))
        for _ in range(rng.randint(1, most))
    )


def _lamport(run: Simulation, rng: random.Random) -> int:
    now = int((EPOCH + run.network.time()) * 1000)
    return rng.choice((now, now, now + 1_000, max(1, now - 86_400_000), 2**63))


def _sync(run: Simulation, rng: random.Random) -> bytes:
    """A sync that names messages that do not exist."""
    return SdsMessage("mallory", "x", CHANNEL_ID, _lamport(run, rng), _unknown(rng, 20)).encode()


def _said(run: Simulation, rng: random.Random, sender_id: str, named: tuple[HistoryEntry, ...]) -> bytes:
    payload = b"forged " + rng.randbytes(6).hex().encode()
    segment = Segment(
        entire_message_hash=message_hash(payload),
        data_segment_count=1,
        payload=payload,
        request_id=rng.randbytes(16).hex(),
    )
    return SdsMessage(
        sender_id,
        rng.randbytes(32).hex(),
        CHANNEL_ID,
        _lamport(run, rng),
        named,
        content=encode_segment(segment),
    ).encode()


def _content(run: Simulation, rng: random.Random) -> bytes:
    """A message that follows messages that do not exist."""
    return _said(run, rng, "mallory", _unknown(rng, 3))


def _foreign(run: Simulation, rng: random.Random) -> bytes:
    """A message in somebody else's name."""
    return _said(run, rng, rng.choice(run.participants).name, ())


def _garbage(run: Simulation, rng: random.Random) -> bytes:
    return rng.randbytes(rng.randint(1, 300))


def _replay(run: Simulation, rng: random.Random) -> bytes:
    """A message that was sent before, again."""
    stored = list(rng.choice(run.network.relays).stored.values())
    return rng.choice(stored).message.payload if stored else b"\0"


def forged(rng: random.Random, size: WorldSize) -> World:
    """Forged syncs and dependencies, foreign names, garbage, and replays."""
    past = rng.choice((0, rng.randint(20, max(21, size.gap // 2))))
    forgers = Forgers(rng.randint(3, 20), past)
    participants, relays = rng.randint(2, 4), rng.randint(1, 2)
    bounds = Bounds(
        agree_within=3_000,
        reads_per_missed=1.0 * relays,  # participants have a place in each relay's log
        entries=1_500,
        idle_minutes=1.0,
        idle_repeats_per_minute=2.0,
    )
    return World(
        forgers,
        bounds,
        participants=participants,
        relays=relays,
        # Messages that do not exist are given up sooner; until then they are asked for.
        options={"lost_message_timeout_ms": 60_000},
    )
