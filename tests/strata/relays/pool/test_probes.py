from __future__ import annotations

import random

import pytest
from strata.protocol import packets
from strata.protocol.packets import Packet
from strata.relays.conduct import Aspect
from strata.relays.pool import probes
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


def widely_held(*numbers: int, named: bool = True) -> KnownPackets:
    """Packets that b, c and d have served."""
    it = known()
    for n in numbers:
        for url in "bcd":
            it.seen(packet(n), url, T, named=named)
    return it


def common(it: KnownPackets, url: str = "x") -> set[Packet]:
    """Return the packets that a relay is asked for although it did not have them."""
    probes = [it.choose(url, T) for _ in range(50)]
    return {
        each.packet for each in probes if each is not None and url not in it._held[each.packet.digest].holders
    }


@pytest.mark.req("R-343")
def test_a_relay_is_asked_for_what_several_others_have_of_an_author_of_its_whom_the_client_named():
    it = widely_held(1)
    assert not common(it), "the relay may not take this author"
    it.seen(packet(2), "x", T)
    assert common(it) == {packet(1)}
    probe = next(each for each in iter(lambda: it.choose("x", T), None) if each.packet == packet(1))
    assert probe.kind is Aspect.CONSISTENCY
    it.forget("d")
    assert not common(it)


@pytest.mark.req("R-343")
def test_what_a_stranger_publishes_elsewhere_obliges_no_relay():
    it = widely_held(1, named=False)
    it.seen(packet(2), "x", T)
    assert not common(it)
    it.seen(packet(1), "b", T, acknowledged=True, named=True)
    assert not common(it), "nor what this client publishes elsewhere"


@pytest.mark.req("R-343")
def test_an_author_who_leaves_a_relay_out_counts_against_it_once():
    it = widely_held(1, 2, 3)
    it.seen(packet(4), "x", T)
    it.seen(packet(4), "y", T)
    assert common(it) == common(it, "y") == {packet(1), packet(2), packet(3)}
    it.lacked(packet(1), "x")
    assert not common(it)
    assert common(it, "y"), "another relay has lacked nothing"


def test_gaps_are_forgotten_some_day(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(probes, "_MOST_GAPS", 3)
    it = widely_held(1)
    for n in range(9):
        it.lacked(packet(1), f"x{n}")
    assert len(it._gaps) == 3


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
