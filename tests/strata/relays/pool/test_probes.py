from __future__ import annotations

import random

import pytest
from strata.protocol import packets
from strata.protocol.packets import Packet
from strata.relays.conduct import Aspect
from strata.relays.pool.probes import KnownPackets

from tests.support.simulated_relays import ME, packet
from tests.support.virtual_time import START

T = float(START)


def known(seed: int = 1) -> KnownPackets:
    return KnownPackets(random=random.Random(seed).random)


def chosen(it: KnownPackets, at: float) -> Packet:
    """Return the packet chosen for a probe of relay a."""
    probe = it.choose("a", at)
    assert probe is not None
    return probe.packet


@pytest.mark.req("R-343")
def test_a_relay_is_asked_for_what_it_had_itself_or_what_several_others_have():
    it = known()
    assert it.choose("a", T) is None
    it.seen(packet(1), "a", T)
    probe = it.choose("a", T)
    assert probe is not None and (probe.packet, probe.kind) == (packet(1), Aspect.CONSISTENCY)
    it.seen(packet(1), "a", T, acknowledged=True)
    probe = it.choose("a", T)
    assert probe is not None and (probe.packet, probe.kind) == (packet(1), Aspect.PRESENCE)
    assert it.choose("x", T) is None, "one relay's having it obliges no other"
    for url in "bc":
        it.seen(packet(1), url, T)
    probe = it.choose("x", T)
    assert probe is not None and probe.kind is Aspect.CONSISTENCY
    it.forget("c")
    assert it.choose("x", T) is None


@pytest.mark.req("R-343")
def test_the_choice_is_random():
    it = known()
    for n in range(50):
        it.seen(packet(n), "a", T)
    assert len({chosen(it, T).packet_id for _ in range(200)}) > 25


def test_what_a_relay_may_have_dropped_is_not_asked_for():
    it = known()
    it.seen(packet(1), "a", T)
    assert it.choose("a", T + 3601) is None
    expiring = packets.build(ME, {"type": "POST"}, timestamp=START, expires_at=START + 9)
    it = known()
    it.seen(expiring, "a", T)
    assert it.choose("a", T) is None


@pytest.mark.slow
def test_memory_is_bounded_and_holds_recent_packets():
    it = known()
    for n in range(9000):
        it.seen(packet(n), "a", T + n)
    assert len(it._held) == len(it._slots) == 512
    assert any(chosen(it, T + 9000) in {packet(n) for n in range(8000, 9000)} for _ in range(50))
