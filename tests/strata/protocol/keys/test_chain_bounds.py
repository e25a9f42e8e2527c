"""How much one author can make others store, and how much a stranger can make them compute."""

from __future__ import annotations

import pytest
from strata.protocol import ids, packets
from strata.protocol.documents import MAX_METHODS, method_id
from strata.protocol.errors import InvalidPacket
from strata.protocol.ids import Identity
from strata.protocol.keys import MAX_CHAIN_EVENTS, KeyChain, add_content
from strata.protocol.keys.ledger import MAX_CHAIN_EVENTS_A_SECOND
from strata.protocol.keys.states import MAX_DEAD_KEYS_TRIED
from strata.protocol.packets import Packet

from tests.support.alice import (
    ALICE,
    DAY,
    RULES,
    T,
    add,
    alive,
    chain,
    document,
    key,
    method,
    post,
    refused,
    revoke,
    rotate,
    sign,
    with_recovery,
)


def freeze(n: int) -> Packet:
    """Return the cheapest event: it has no effect."""
    return sign(0, {"type": "KEY_EVENT", "event": "FREEZE", "key_id": method_id(ALICE), "n": n})


@pytest.fixture(scope="module")
def full() -> KeyChain:
    return KeyChain.replay(ALICE, [(freeze(n), T + n) for n in range(MAX_CHAIN_EVENTS + 5)], rules=RULES)


def test_a_chain_has_an_end(full):
    assert len(full.events) == MAX_CHAIN_EVENTS
    assert refused(full, add(0, 1), T + DAY) == ("policy_rejected", "too_many_key_events")


def test_a_key_can_be_revoked_even_then(full):
    after = full.apply(revoke(0, 0, revoked_at=T), T + DAY)
    assert refused(after, post(0), T + DAY) == ("key_revoked", None)
    later = full.apply(revoke(0, 0, revoked_at=T + 2 * DAY), T + DAY)
    # But only once: a key cannot be revoked repeatedly.
    assert refused(later, revoke(0, 0, revoked_at=T), T + DAY + 1) == (
        "policy_rejected",
        "too_many_key_events",
    )


def test_so_has_a_second():
    made = chain()
    for n in range(MAX_CHAIN_EVENTS_A_SECOND):
        made = made.apply(freeze(n), T)
    assert refused(made, freeze(99), T) == ("policy_rejected", "too_many_key_events")
    made.apply(freeze(99), T + 1)
    made.apply(revoke(0, 0), T)


def spare(n: int) -> Packet:
    identity = Identity.from_seed(n.to_bytes(32, "big"))
    content = add_content(method_id(ALICE, f"spare-{n}"), identity.public_key, valid_from=T)
    return sign(0, content)


def test_live_keys_are_few_and_recovery_has_room_of_its_own():
    made = chain(documents=[with_recovery(threshold=None)])
    for n in range(1, MAX_METHODS):
        made = made.apply(spare(n), T + n)
    assert len(made.candidates(T + 50)) == MAX_METHODS
    assert refused(made, add(0, 1), T + 50) == ("policy_rejected", "too_many_keys")
    recovered = made.apply(rotate(11, 0, 2), T + 50)
    assert 2 in {n for n in range(3) if key(n).public_key in recovered.candidates(T + 50 + DAY)}
    freed = made.apply(revoke(0, 0, revoked_at=T + 60), T + 50)
    assert refused(freed, add(0, 1), T + 60) == ("policy_rejected", "too_many_keys")


def test_a_document_lists_few_methods():
    with pytest.raises(InvalidPacket, match="more than 16"):
        document(method(0), *(method(n) for n in range(1, MAX_METHODS + 1)))
    document(
        *(method(n) for n in range(MAX_METHODS)),
        *(method(n, recovery=True) for n in range(MAX_METHODS, 2 * MAX_METHODS)),
    )


def test_a_strangers_packet_is_tried_against_few_dead_keys(monkeypatch):
    events = []
    for n in range(1, 3 * MAX_DEAD_KEYS_TRIED):
        events += [(spare(n), T + 2 * n), (_revoke_spare(n), T + 2 * n + 1)]
    made = KeyChain.replay(ALICE, events, rules=RULES)
    assert len(made.events) == len(events)
    tried = []
    verify = ids.verify

    def counted(key, text, signature):
        tried.append(key)
        return verify(key, text, signature)

    monkeypatch.setattr(ids, "verify", counted)
    assert refused(made, post(30), T + DAY) == ("invalid_signature", None)
    assert len(tried) <= 1 + MAX_DEAD_KEYS_TRIED


def _revoke_spare(n: int) -> Packet:
    content = {
        "type": "KEY_EVENT",
        "event": "REVOKE",
        "key_id": method_id(ALICE, f"spare-{n}"),
        "revoked_at": T,
    }
    return sign(0, content)


def test_replaying_checks_each_signature_once_for_each_key_tried(monkeypatch):
    received = [(add(0, 1), T), (add(0, 2), T), (rotate(1, 0, 3), T), (revoke(2, 1, revoked_at=T + 9), T + 1)]
    tried = []
    verify = ids.verify

    def counted(key, text, signature):
        tried.append((key, signature))
        return verify(key, text, signature)

    monkeypatch.setattr(ids, "verify", counted)
    made = KeyChain.replay(ALICE, received, rules=RULES)
    assert len(made.events) == 4
    made.keys(T + 5), made.candidates(T + 5), alive(made, T)
    assert len(tried) == len(set(tried))


def test_candidates_are_remembered_for_as_long_as_they_hold(monkeypatch):
    made = chain((add(0, 1, valid_from=T + 1000), T), (revoke(0, 0, revoked_at=T + 2000), T + 1))
    asked = []
    make = KeyChain._make_window

    def counted(self, at, *rest, **options):
        asked.append(at)
        return make(self, at, *rest, **options)

    monkeypatch.setattr(KeyChain, "_make_window", counted)
    for at in (T + 2, T + 3, T + 699, T + 700, T + 1500, T + 2000, T + 2001, T + DAY - 1, T + 2):
        made.candidates(at)
    assert asked == [T + 2, T + 700, T + 2001]


def test_a_packet_of_the_chain_is_not_verified_again(monkeypatch):
    made = chain((add(0, 1), T))
    monkeypatch.setattr(ids, "verify", lambda *_: pytest.fail("verified again"))
    made.verify(add(0, 1), T)
    made.verify(add(0, 1), T, ingest=False)


def test_events_of_another_author_are_not_looked_at(monkeypatch):
    stranger = Identity.from_seed(b"x" * 32)
    packet = packets.build(stranger, {"type": "KEY_EVENT", "event": "FREEZE", "key_id": "k"}, timestamp=T)
    monkeypatch.setattr(ids, "verify", lambda *_: pytest.fail("verified"))
    assert not KeyChain.replay(ALICE, [(packet, T)], rules=RULES).events
