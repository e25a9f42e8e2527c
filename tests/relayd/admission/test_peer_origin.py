"""The time at which a packet of a peer is judged (R-369, R-370)."""

from __future__ import annotations

import dataclasses

import pytest
from strata.protocol import packets
from strata.protocol.errors import ErrorCode, InvalidPacket

from relayd.admission.checks import to_store, weigh
from relayd.admission.origin import PeerOrigin, check_age, witness_of
from relayd.policy import Policy
from tests.support.made_packets import new_identity

NOW = 1_760_000_000
DAY = 86_400


def packet(age: int, kind: str = "POST", expires_in: int | None = None):
    return packets.build(
        new_identity(),
        {"type": kind, "text": "x"},
        timestamp=NOW - age,
        expires_at=None if expires_in is None else NOW + expires_in,
    )


def origin(received_at: int, *, trusted: bool = True) -> PeerOrigin:
    return PeerOrigin(1, received_at, trusted, 7 * DAY)


@pytest.mark.req("R-369")
@pytest.mark.parametrize(
    ("said", "counts"),
    [
        (NOW - DAY, NOW - DAY),
        (NOW - DAY - 300, NOW - DAY - 300),
        (NOW - DAY - 301, None),
        (NOW + 300, NOW),  # the peer's clock is fast: nothing is received in the future
        (NOW + 301, None),
        (0, None),
        (-(2**70), None),
        (2**70, None),
    ],
)
def test_a_peers_word_counts_within_bounds(said, counts):
    assert witness_of(packet(DAY), origin(said), NOW) == counts
    assert witness_of(packet(DAY), origin(said, trusted=False), NOW) is None


def judged(age: int, said: int, **members) -> str | None:
    made = packet(age, **members)
    from_peer = origin(said)
    witness = witness_of(made, from_peer, NOW)
    try:
        check_age(made, from_peer, witness, NOW, max_age_seconds=DAY)
    except InvalidPacket as error:
        return str(error.code.value)
    return None


@pytest.mark.req("R-370")
def test_age_is_judged_when_the_first_relay_received_it():
    assert judged(3 * DAY, NOW - 3 * DAY) is None
    assert judged(8 * DAY, NOW - 8 * DAY) == "timestamp_too_old"
    # It was already too old when the peer claims to have received it, or the peer's claim does not count.
    assert judged(3 * DAY, NOW - DAY) == "timestamp_too_old"
    assert judged(3 * DAY, 0) == "timestamp_too_old"
    assert judged(3 * DAY, NOW - 3 * DAY, expires_in=-1) == "packet_expired"
    assert judged(-301, NOW) == "timestamp_in_future"


def test_packets_that_carry_keys_may_have_any_age():
    assert judged(400 * DAY, NOW - 400 * DAY, kind="KEY_EVENT") is None
    assert judged(400 * DAY, 0, kind="KEY_EVENT") is None


@pytest.mark.req("R-367", "R-375")
def test_what_a_peer_brings_is_stored_with_its_witness_and_its_peer():
    made = packet(5)
    theirs = to_store(made, None, PeerOrigin(7, NOW - 5, True, 7 * DAY), NOW - 5)
    assert (theirs.witnessed_at, theirs.ingest_peer) == (NOW - 5, 7)
    ours = to_store(made, None)
    assert (ours.witnessed_at, ours.ingest_peer, ours.body) == (None, None, theirs.body)


@pytest.mark.req("R-360", "R-379")
@pytest.mark.parametrize("types", [(), ("POST", "NOTE"), ("NOTE",)])
@pytest.mark.parametrize("with_others", [True, False])
@pytest.mark.parametrize("with_own", [True, False])
def test_a_peer_brings_nothing_that_it_was_not_asked_for(types, with_others, with_own):
    made = packet(0)
    authors = ["did:strata:zOther"] * with_others + [made.author_id] * with_own
    asked = dataclasses.replace(origin(NOW), types=frozenset(types), authors=frozenset(authors))
    is_asked = types != ("NOTE",) and (with_own or not with_others)
    try:
        weigh(made, Policy(), NOW, max_age_seconds=DAY, origin=asked, witness=NOW)
    except InvalidPacket as error:
        assert (is_asked, error.code, error.detail) == (False, ErrorCode.POLICY_REJECTED, "not_asked_for")
    else:
        assert is_asked
