"""Whose keys are known, and what stands when they are not: the ring, called directly."""

from __future__ import annotations

import pytest
from strata.protocol import packets
from strata.protocol.errors import InvalidPacket
from strata.protocol.ids import Identity
from strata.protocol.keys import revoke_content
from strata.relays.connection.keyring import Anchors, KeyRing

from tests.support.rotated_keys import NEW, OLD, START, rotation

NAMED = Identity.from_seed(b"\x13" * 32).speaking_for("did:strata:relay_1")


def post(author, at=START, **extra):
    return packets.build(author, {"type": "POST", "text": f"{at}"}, timestamp=at, **extra)


def revocation(at=START):
    content = revoke_content(f"{OLD.did}#keys-1", revoked_at=at)
    return packets.build(OLD, content, timestamp=at)


def ring(**options):
    return KeyRing(Anchors(), **{"max_authors": 1024, "refresh_interval": 300} | options)


def told(ring, *events, asked_at=10.0, did=OLD.did):
    ring.learn(did, ring.build(did, events), asked_at)
    return ring


@pytest.mark.req("R-075")
def test_an_author_nobody_asked_for_is_not_judged():
    assert ring().verify(post(OLD), START, 1.0) is False


@pytest.mark.req("R-336")
def test_most_authors_have_the_key_in_their_did_and_cost_an_entry():
    known = told(ring())
    assert known.verify(post(OLD), START, 1.0)
    assert known.build(OLD.did, []) is None
    with pytest.raises(InvalidPacket):
        known.verify(post(NEW), START, 1.0)


@pytest.mark.req("R-075", "R-336")
def test_key_events_count_before_what_they_allow():
    known = told(ring(), (rotation(), START))
    assert known.verify(post(NEW, START + 1), START + 1, 1.0)
    assert known.verify(post(OLD, START - 5), START - 5, 1.0)
    with pytest.raises(InvalidPacket) as caught:
        known.verify(post(OLD, START + 1000), START + 1000, 1.0)
    assert caught.value.code == "key_expired"


@pytest.mark.req("R-337")
def test_a_revoked_key_counts_for_what_was_received_before_and_for_nothing_after():
    known = told(ring(), (rotation(), START), (revocation(START + 10), START + 10))
    assert known.verify(post(OLD, START + 5), START + 5, 1.0)
    with pytest.raises(InvalidPacket) as caught:
        known.verify(post(OLD, START + 11), START + 11, 1.0)
    assert caught.value.code == "key_revoked"


@pytest.mark.req("R-337")
def test_a_revocation_that_came_later_does_not_rewrite_history():
    """A-029: it is dated back to before the packet, but was not known when the packet was received."""
    known = told(ring(), (rotation(), START), (revocation(START + 1), START + 100))
    assert known.verify(post(OLD, START + 5), START + 5, 1.0)
    with pytest.raises(InvalidPacket):
        known.verify(post(OLD, START + 101), START + 101, 1.0)


@pytest.mark.req("R-075")
def test_a_verdict_stands_only_if_the_relay_was_asked_after_the_packet_came():
    known = told(ring(), asked_at=10)
    assert known.verify(post(NEW), START, arrived_at=11) is False
    told(known, (rotation(), START), asked_at=11)
    assert known.verify(post(NEW), START, arrived_at=11)
    forged = post(Identity.generate().speaking_for(OLD.did))
    with pytest.raises(InvalidPacket):
        known.verify(forged, START, arrived_at=11)


@pytest.mark.req("R-075")
def test_an_identity_packet_that_passes_by_counts_for_what_follows():
    known = told(ring(), asked_at=10)
    assert known.verify(rotation(), START, arrived_at=9)
    assert known.verify(post(NEW, START + 1), START + 1, arrived_at=9), "and nobody had to be asked"


@pytest.mark.req("R-337")
@pytest.mark.parametrize("events", [(), ((rotation(), START),)], ids=["plain", "chain"])
def test_expiry_is_judged_by_the_time_of_receipt(events):
    known = told(ring(), *events)
    packet = post(OLD, START - 5, expires_at=START)
    assert known.verify(packet, START, 99.0)
    with pytest.raises(InvalidPacket) as caught:
        known.verify(packet, START + 1, 99.0)
    assert caught.value.code == "packet_expired", "which no question to the relay could change"


@pytest.mark.req("R-055")
def test_a_did_without_a_key_needs_an_anchor():
    packet = post(NAMED)
    with pytest.raises(InvalidPacket) as caught:
        told(ring(), did=NAMED.did).verify(packet, START, 1.0)
    assert caught.value.detail == "unresolved_key"
    anchored = KeyRing(Anchors(keys={NAMED.did: NAMED.public_key}), max_authors=1024, refresh_interval=300)
    assert told(anchored, did=NAMED.did).verify(packet, START, 1.0)


def test_keys_are_asked_for_again_now_and_then():
    known = told(ring(refresh_interval=300), asked_at=10)
    known.verify(post(OLD), START, arrived_at=310)
    assert known.stale == set()
    known.verify(post(OLD), START, arrived_at=311)
    assert known.stale == {OLD.did}
    known.stale.clear()
    known.verify(post(OLD), START, arrived_at=312)
    assert known.stale == set(), "once"
    told(known, asked_at=312)
    known.verify(post(OLD), START, arrived_at=700)
    assert known.stale == {OLD.did}


def test_a_question_that_came_to_nothing_is_asked_again_after_the_next_interval():
    known = told(ring(refresh_interval=300), asked_at=10)
    for arrived_at in (311, 612, 913):  # the relay was unreachable each time
        known.verify(post(OLD), START, arrived_at=arrived_at)
        assert known.stale == {OLD.did}
        known.stale.clear()
        known.verify(post(OLD), START, arrived_at=arrived_at + 299)
        assert known.stale == set()


@pytest.mark.req("R-075", "R-076")
@pytest.mark.parametrize("earlier", [(), ((rotation(START - 9), START - 9),)])
def test_a_revocation_that_comes_while_the_answer_is_read_stands(earlier):
    known = told(ring(), *earlier, asked_at=10)
    assert known.verify(revocation(START), START, arrived_at=401)
    told(known, *earlier, asked_at=400)  # the relay answered before it received the revocation
    with pytest.raises(InvalidPacket) as caught:
        known.verify(post(OLD, START + 5), START + 5, arrived_at=400)
    assert caught.value.code == "key_revoked"
    told(known, *earlier, asked_at=402)
    assert known.verify(post(OLD, START), START, arrived_at=402), "its word counts of what it was asked later"


def test_a_chain_without_end_fails_closed():
    known = ring()
    known.learn(OLD.did, None, 10, is_overgrown=True)
    with pytest.raises(InvalidPacket) as caught:
        known.verify(post(OLD), START, 1.0)
    assert caught.value.detail == "too_many_key_events"


def test_the_least_recently_met_are_forgotten():
    known = ring(max_authors=2)
    others = [Identity.generate().did for _ in range(2)]
    told(known)
    told(known, did=others[0])
    known.verify(post(OLD), START, 1.0)
    told(known, did=others[1])
    assert OLD.did in known and others[0] not in known and len(known) == 2


def test_a_chain_can_be_looked_at():
    assert ring().chain(OLD.did) is None
    assert told(ring()).chain(OLD.did).candidates(START) == (OLD.public_key,)


# Packets inside other packets.


@pytest.mark.req("C-294")
def test_a_packet_inside_another_is_judged_by_the_keys_of_its_own_time():
    known = told(ring(), (rotation(START), START), asked_at=10.0)
    assert known.vouches(post(OLD, START - 1000), 1.0) is True
    assert known.vouches(post(NEW, START + 1000), 1.0) is True
    assert known.vouches(post(NEW, START - 5), 1.0) is True, "the author's clock is behind the relay's"
    assert known.vouches(post(OLD, START + 1000), 1.0) is False
    assert known.vouches(post(NEW, START - 1000), 1.0) is False
    stranger = Identity.from_seed(b"\x14" * 32).speaking_for(OLD.did)
    assert known.vouches(post(stranger), 1.0) is False


@pytest.mark.req("C-294")
def test_a_key_that_was_revoked_vouches_for_nothing_however_it_dates_back():
    known = told(ring(), (rotation(START), START), (revocation(START + 10), START + 10))
    assert known.vouches(post(OLD, START - 1000), 1.0) is False
    assert known.vouches(post(NEW, START + 1000), 1.0) is True


@pytest.mark.req("C-294")
def test_the_relay_is_asked_about_an_author_it_was_not_asked_about_lately():
    assert ring().vouches(post(OLD), 1.0) is None
    known = told(ring(), asked_at=10.0)
    assert known.vouches(post(OLD), 11.0) is True, "what verifies needs no question"
    assert known.vouches(post(NEW), 11.0) is None
    assert known.vouches(post(NEW), 9.0) is False
