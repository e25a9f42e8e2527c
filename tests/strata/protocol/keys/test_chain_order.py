"""A chain depends only on what was received and when."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strata.protocol import canonical
from strata.protocol.errors import InvalidPacket
from strata.protocol.keys import KeyChain
from strata.protocol.packets import Packet

from tests.support.alice import (
    ALICE,
    DAY,
    RULES,
    T,
    add,
    alive,
    approve,
    chain,
    key,
    post,
    refused,
    revoke,
    rotate,
    sign,
    with_recovery,
)

DOCUMENT = with_recovery()
RECOVER = rotate(11, 0, 9)
EVENTS = [
    add(0, 1),
    add(0, 2, valid_from=T + 3),
    add(1, 3),
    rotate(1, 0, 4, valid_from=T + 2),
    rotate(4, 1, 5),
    add(0, 5),
    revoke(0, 1, revoked_at=T - 1),
    revoke(1, 1, revoked_at=T + 1),
    revoke(0, 0, revoked_at=T - 1),
    revoke(0, 9),
    RECOVER,
    approve(12, RECOVER),
    approve(13, RECOVER),
    add(7, 8),
]
RECEIVED = st.lists(
    st.tuples(st.sampled_from(EVENTS), st.integers(T, T + 4)),
    max_size=10,
    unique_by=lambda one: one[0].packet_id,
)


def one_by_one(received: list[tuple[Packet, int]]) -> tuple[KeyChain, list[tuple[Packet, int]]]:
    """Do what a relay does: apply each in turn, refuse what does not hold. Also return what was accepted."""
    made, accepted = KeyChain.genesis(ALICE, documents=[DOCUMENT], rules=RULES), []
    for packet, received_at in received:
        try:
            made = made.apply(packet, received_at)
        except InvalidPacket:
            continue
        accepted.append((packet, received_at))
    return made, accepted


def replayed(received: list[tuple[Packet, int]]) -> KeyChain:
    return KeyChain.replay(ALICE, received, documents=[DOCUMENT], rules=RULES)


def same(one: KeyChain, other: KeyChain) -> bool:
    moments = [*range(T - 1, T + 7), T + DAY, T + DAY + 4, T + 2 * DAY]
    return one.events == other.events and all(
        one.keys(at) == other.keys(at) and one.candidates(at) == other.candidates(at) for at in moments
    )


@pytest.mark.req("R-074")
@given(RECEIVED, st.randoms(use_true_random=False))
def test_the_order_in_which_packets_are_handed_over_does_not_matter(received, random):
    shuffled = received.copy()
    random.shuffle(shuffled)
    assert same(replayed(received), replayed(shuffled))


@pytest.mark.req("R-074")
@given(RECEIVED)
def test_applying_one_by_one_and_replaying_agree(received):
    received.sort(key=lambda one: one[1])
    made, accepted = one_by_one(received)
    assert same(made, replayed(accepted))


@pytest.mark.req("R-074")
@given(RECEIVED, st.integers(0, 10))
def test_a_relay_that_restarts_goes_on_with_the_same_chain(received, cut):
    received.sort(key=lambda one: one[1])
    made, _ = one_by_one(received)
    before, accepted = one_by_one(received[:cut])
    after = replayed(accepted)
    for packet, received_at in received[cut:]:
        try:
            after = after.apply(packet, received_at)
        except InvalidPacket:
            continue
    assert same(made, after)
    assert same(before, replayed(accepted))


@pytest.mark.req("R-074")
@given(RECEIVED)
def test_every_packet_of_a_chain_verifies_at_its_time(received):
    made = replayed(received)
    for packet, received_at in made.events:
        made.verify(packet, received_at, ingest=False)


@pytest.mark.req("R-076")
@given(RECEIVED, st.sampled_from([0, 1, 2, 3, 4, 5, 9]), st.integers(T, T + 2 * DAY))
def test_a_revoked_key_signs_nothing_any_more(received, n, at):
    made = replayed(received)
    ended = {
        state.public_key for state in made.keys(at) if state.revoked_at is not None and at > state.revoked_at
    }
    if key(n).public_key in ended:
        for packet in (post(n), add(n, 20), revoke(n, n)):
            if packet.packet_id not in {p.packet_id for p, _ in made.events}:
                with pytest.raises(InvalidPacket):
                    made.verify(packet, max(at, T + 4))


@pytest.mark.req("R-074")
def test_an_event_follows_the_one_that_introduces_its_key_or_one_it_names():
    first, second, third = add(0, 1), rotate(1, 0, 2), revoke(0, 1, revoked_at=T + 9)
    for received in ([first, second, third], [third, second, first]):
        made = KeyChain.replay(ALICE, [(packet, T) for packet in received], rules=RULES)
        assert {packet for packet, _ in made.events} == {first, second, third}
        assert made.events[0][0] == first


@pytest.mark.req("R-074")
def test_within_a_second_the_smallest_id_comes_first():
    one, other = sorted((add(0, 1, valid_from=T - n) for n in (1, 2)), key=lambda packet: packet.packet_id)
    made = KeyChain.replay(ALICE, [(other, T), (one, T)], rules=RULES)
    assert made.events == ((one, T),)
    # The packet with the larger id came first and was accepted; the one with the smaller id replaces it.
    assert chain((other, T)).events == ((other, T),)
    with pytest.raises(InvalidPacket):
        chain((other, T)).apply(one, T)  # applied after the other, it names a known key


@pytest.mark.req("R-074", "R-076")
def test_no_smaller_id_lets_a_revoked_key_sign_in_the_second_of_its_revocation():
    made = chain((revoke(0, 0, revoked_at=T - 1), T))
    for n in range(1, 8):
        assert refused(made, add(0, n), T) == ("key_revoked", None)


def test_an_older_packet_from_another_relay_finds_its_place():
    made = chain((add(0, 1), T), (revoke(0, 0, revoked_at=T), T + 100))
    made = made.apply(add(0, 2), T + 50)
    assert [received_at for _, received_at in made.events] == [T, T + 50, T + 100]
    assert alive(made, T + 101) == {1, 2}
    with pytest.raises(InvalidPacket):
        made.apply(add(0, 3), T + 101)


def test_a_spoilt_copy_keeps_no_genuine_packet_out():
    genuine = add(0, 1)
    spoilt = Packet.parse(canonical.encode(genuine.value | {"signature": add(0, 2).signature}))
    assert spoilt.packet_id == genuine.packet_id
    made = KeyChain.replay(ALICE, [(spoilt, T - 5), (spoilt, T), (genuine, T)], rules=RULES)
    assert made.events == ((genuine, T),)
    with pytest.raises(InvalidPacket):
        made.verify(spoilt, T)
    with pytest.raises(InvalidPacket):
        made.verify(spoilt, T, ingest=False)


def test_of_two_packets_with_one_id_one_counts():
    content = {"type": "RECOVERY_APPROVAL", "target_event": RECOVER.packet_id, "approved_at": T}
    one, other = (sign(n, content, nonce="the same") for n in (12, 13))
    assert one.packet_id == other.packet_id
    made = KeyChain.replay(
        ALICE, [(RECOVER, T), (one, T + 1), (other, T + 1)], documents=[DOCUMENT], rules=RULES
    )
    assert len(made.events) == 2
    assert made.apply(other, T + 2) is made


def test_what_is_not_whole_or_not_hers_is_kept_out():
    broken = sign(0, {"type": "KEY_EVENT", "event": "ADD"})
    made = KeyChain.replay(
        ALICE, [(broken, T), (add(0, 1), T), (add(0, 1), T + 5), (add(7, 8), T)], rules=RULES
    )
    assert made.events == ((add(0, 1), T),)
