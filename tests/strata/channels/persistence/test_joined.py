"""SDS and reassembly over one store: restarts at any step do not change the result (C-211, C-257)."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from strata.channels.persistence import (
    Change,
    ChannelState,
    ParticipantKey,
    Persistence,
    SqlitePersistence,
    sds_changes,
)
from strata.channels.sds import Delivered, Participant, SdsConfig
from strata.channels.segmentation import (
    Reassembled,
    Reassembler,
    SegmentationConfig,
    encode_segment,
    segment_message,
)

ALICE = ParticipantKey("room", "alice")
CONFIG = SegmentationConfig(segment_size_bytes=16)
START = 1_760_000_000_000


class Receiver:
    """Alice's side of a channel: each step is one transaction, as in the channel's engine."""

    def __init__(self, store: Persistence, state: ChannelState, now: int) -> None:
        self.store = store
        self.sds = Participant("room", "alice", SdsConfig(), now_ms=now, random=lambda: 0.5, state=state.sds)
        self.reassembler = Reassembler(
            CONFIG, segments=state.segments.values(), finished=state.segments_finished.values()
        )

    @classmethod
    async def open(cls, store: Persistence, now: int) -> Receiver:
        return cls(store, ChannelState.read(await store.load(ALICE)), now)

    def step(self, data: bytes, now: int) -> tuple[list[Change], list[bytes]]:
        """Return the changes and payloads that one message leads to; nothing is written or delivered yet."""
        # Timers due at the start first: a restored participant checks at once what can be delivered.
        self.sds.handle_timer(now)
        self.sds.receive(data, now)
        for event in self.sds.events():
            if isinstance(event, Delivered):
                self.reassembler.receive(event.sender_id, event.message_id, event.content, now)
        payloads = [e.payload for e in self.reassembler.events_received() if isinstance(e, Reassembled)]
        return [*sds_changes(self.sds.changes()), *self.reassembler.changes_to_store()], payloads


@pytest.mark.req("C-211", "C-249", "C-255", "C-257")
@pytest.mark.parametrize("seed", range(5))
async def test_restarts_lose_and_repeat_nothing(seed: int, tmp_path: Path) -> None:
    source = random.Random(seed)
    bob = Participant("room", "bob", SdsConfig(), now_ms=START, random=lambda: 0.5, track_changes=False)
    sent = [f"message {number} ".encode() * source.randrange(1, 9) for number in range(12)]
    sent += [b"ok", b"ok"]
    wire: list[bytes] = []
    for payload in sent:
        for segment in segment_message(payload, CONFIG):
            now = START + len(wire)
            message = bob.wrap(encode_segment(segment), now, now * 1_000_000)
            bob.dispatched(message.message_id, now, None)
            wire.append(message.encode())
    # Reordered, and each message twice.
    arriving = wire + source.sample(wire, len(wire))
    for _ in range(3):
        place = source.randrange(len(arriving) - 5)
        arriving[place : place + 5] = reversed(arriving[place : place + 5])

    store = await SqlitePersistence.open(tmp_path / "channels.db", synchronous="NORMAL")
    alice = await Receiver.open(store, START)
    received: list[bytes] = []
    lamport = 0
    arriving.append(wire[0])  # already known: all that it can release was due before
    for number, data in enumerate(arriving):
        changes, payloads = alice.step(data, START + number)
        fate = source.random()
        if fate < 0.15:
            # The process ends before the step is written: it was not reported, so the sender sends it again.
            arriving.append(data)
        else:
            await store.apply(ALICE, changes)
            received += payloads
            lamport = alice.sds.lamport
        if fate < 0.3:
            await store.close()
            store = await SqlitePersistence.open(tmp_path / "channels.db", synchronous="NORMAL")
            alice = await Receiver.open(store, START + number)
            assert alice.sds.lamport >= lamport
    assert received == sent
    assert alice.reassembler.statistics.partial_messages == 0
    assert ChannelState.read(await store.load(ALICE)).segments == {}
    await store.close()
