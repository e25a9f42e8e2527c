"""Recovery keys: what they may sign, how long they wait, and who can stop them."""

from __future__ import annotations

import sys
from types import FrameType

import pytest
from strata.protocol.documents import RecoveryPolicy, key_multibase
from strata.protocol.errors import InvalidPacket
from strata.protocol.keys import KeyChain, KeyRules, Use, approval_content
from strata.protocol.keys.recovery import Electors, PendingEvent

from tests.support.alice import (
    ALICE,
    DAY,
    RULES,
    T,
    add,
    alive,
    approve,
    chain,
    document,
    key,
    key_id,
    method,
    post,
    publish,
    refused,
    revoke,
    rotate,
    sign,
    with_recovery,
)

RECOVER = rotate(11, 0, 1, valid_from=T)
TWO_OF_THREE = [with_recovery()]
NO_DELAY = KeyRules(recovery_delay_seconds=0)


@pytest.mark.req("R-079")
def test_a_recovery_key_counts_only_while_it_is_declared_and_unrevoked():
    assert refused(chain(), RECOVER, T) == ("invalid_signature", None)
    made = chain((revoke(0, 11), T), documents=TWO_OF_THREE)
    assert refused(made, RECOVER, T + 1) == ("key_revoked", None)
    pending = chain((rotate(12, 0, 1), T), documents=TWO_OF_THREE)
    assert refused(pending.apply(revoke(0, 11), T + 1), approve(11, pending.events[0][0]), T + 2) == (
        "key_revoked",
        None,
    )


@pytest.mark.req("R-080")
@pytest.mark.parametrize("packet", [post(11), publish(11, with_recovery())])
def test_a_recovery_key_signs_nothing_else(packet):
    made = chain(documents=TWO_OF_THREE)
    assert refused(made, packet, T) == ("invalid_signature", "recovery_key_not_allowed")
    with pytest.raises(InvalidPacket) as refusal:
        made.verify_auth(b"c", key(11).sign(b"c"), T)
    assert (refusal.value.code, refusal.value.detail) == ("invalid_signature", "recovery_key_not_allowed")


@pytest.mark.req("R-080")
def test_being_listed_for_assertion_does_not_make_a_recovery_key_a_signing_key():
    listed = [key_id(0), key_id(11)]
    made = chain(documents=[with_recovery(assertion=listed, authentication=listed)])
    assert refused(made, post(11), T) == ("invalid_signature", "recovery_key_not_allowed")
    assert made.candidates(T, Use.AUTH) == (key(0).public_key,)


@pytest.mark.req("R-084", "R-086", "R-087", "R-088")
def test_two_of_three_recover_after_the_delay():
    made = chain((RECOVER, T), documents=TWO_OF_THREE)
    assert made.is_pending(RECOVER.packet_id, T)
    made = made.apply(approve(12, RECOVER), T + 5)
    # The threshold is met; the delay applies all the same.
    assert made.is_pending(RECOVER.packet_id, T + DAY - 1)
    assert alive(made, T + DAY - 1) == {0}
    # No further message is needed.
    assert not made.is_pending(RECOVER.packet_id, T + DAY)
    assert alive(made, T + DAY) == {1}
    made.verify(post(1), T + DAY)
    assert refused(made, post(0), T + DAY)[0] == "key_expired"


@pytest.mark.req("R-084")
def test_the_delay_alone_is_not_enough():
    made = chain((RECOVER, T), documents=TWO_OF_THREE)
    assert made.is_pending(RECOVER.packet_id, T + 100 * DAY)
    made = made.apply(approve(13, RECOVER), T + 100 * DAY)
    assert alive(made, T + 100 * DAY) == {1}
    # For a reader, it took effect then and not earlier.
    assert refused(made, post(1), T + 100 * DAY - 1, ingest=False) == ("invalid_signature", None)
    made.verify(post(1), T + 100 * DAY, ingest=False)


@pytest.mark.req("R-082")
def test_approvals_by_one_key_count_once():
    first, second = approve(11, RECOVER), approve(11, RECOVER, note="again")
    made = chain((RECOVER, T), (first, T + 1), (second, T + 2), documents=TWO_OF_THREE)
    assert made.is_pending(RECOVER.packet_id, T + 2 * DAY)


@pytest.mark.req("R-083")
def test_approvals_change_nothing_by_themselves():
    ordinary = add(0, 1)
    made = chain(
        (ordinary, T), (approve(11, ordinary), T + 1), (approve(12, ordinary), T + 1), documents=TWO_OF_THREE
    )
    assert made.keys(T + 2 * DAY) == chain((ordinary, T), documents=TWO_OF_THREE).keys(T + 2 * DAY)
    waiting = chain(
        (RECOVER, T), (approve(11, RECOVER), T + 1), (approve(12, RECOVER), T + 1), documents=TWO_OF_THREE
    )
    assert waiting.keys(T + 2) == chain(documents=TWO_OF_THREE).keys(T + 2)


@pytest.mark.req("R-081")
def test_an_approval_names_a_valid_event_and_is_signed_by_an_eligible_key():
    made = chain((RECOVER, T), documents=TWO_OF_THREE)
    assert refused(made, approve(12, add(0, 7)), T + 1) == ("invalid_schema", "unknown_target")
    assert refused(made, approve(12, post(0)), T + 1) == ("invalid_schema", "unknown_target")
    assert refused(made, approve(0, RECOVER), T + 1) == ("invalid_signature", "recovery_key_required")
    named = [with_recovery(recovery_policy=RecoveryPolicy(1, (key_id(11), key_id(12))))]
    assert refused(chain((RECOVER, T), documents=named), approve(13, RECOVER), T + 1) == (
        "invalid_signature",
        "recovery_key_not_eligible",
    )


@pytest.mark.req("R-081")
@pytest.mark.parametrize(
    "change", [{"target_event": None}, {"target_event": "0x12"}, {"approved_at": None}, {"note": 5}]
)
def test_a_malformed_approval_is_refused(change):
    content = approval_content(RECOVER.packet_id, approved_at=T) | change
    made = chain((RECOVER, T), documents=TWO_OF_THREE)
    assert refused(made, sign(12, content), T + 1) == ("invalid_schema", None)


@pytest.mark.req("R-084")
def test_a_signer_the_policy_does_not_name_is_not_counted():
    named = [with_recovery(recovery_policy=RecoveryPolicy(1, (key_id(12),)))]
    made = chain((RECOVER, T), documents=named)
    assert made.is_pending(RECOVER.packet_id, T + DAY)
    assert alive(made.apply(approve(12, RECOVER), T + 1), T + DAY) == {1}


@pytest.mark.req("R-085")
@pytest.mark.parametrize("threshold", [0, -1, 4, None, 1.5, True, "2"])
def test_a_policy_that_cannot_be_met_fails_closed(threshold):
    known = with_recovery(recovery_policy=None, extra={"recovery_policy": {"threshold": threshold}})
    made = chain(documents=[known])
    assert refused(made, RECOVER, T) == ("invalid_signature", "recovery_policy_invalid")
    assert refused(made, approve(11, RECOVER), T) == ("invalid_signature", "recovery_policy_invalid")


@pytest.mark.req("R-085")
@pytest.mark.parametrize(
    "policy", ["two", {"threshold": 1, "key_ids": "all"}, {"threshold": 1, "key_ids": [5]}]
)
def test_a_policy_of_another_shape_fails_closed(policy):
    made = chain(documents=[with_recovery(recovery_policy=None, extra={"recovery_policy": policy})])
    assert refused(made, RECOVER, T) == ("invalid_signature", "recovery_policy_invalid")


@pytest.mark.req("R-085")
def test_only_declared_recovery_keys_are_eligible():
    named = [with_recovery(recovery_policy=RecoveryPolicy(2, (key_id(0), key_id(11), key_id(30))))]
    assert refused(chain(documents=named), RECOVER, T) == ("invalid_signature", "recovery_policy_invalid")


@pytest.mark.req("R-086")
def test_without_a_policy_one_recovery_key_waits_for_the_delay_alone():
    made = chain((RECOVER, T), documents=[with_recovery(threshold=None)])
    assert alive(made, T + DAY - 1) == {0}
    assert alive(made, T + DAY) == {1}


@pytest.mark.req("R-086")
def test_a_delay_of_nothing_is_allowed():
    made = chain((RECOVER, T), documents=[with_recovery(threshold=1)], rules=NO_DELAY)
    assert not made.is_pending(RECOVER.packet_id, T)
    made.verify(post(1), T)


OVERRIDES = {
    "a rotation of the same key": rotate(0, 0, 2),
    "the same key for itself": add(0, 1, valid_from=T + 5),
    "a veto": revoke(0, 1),
    "a revocation of the same key": revoke(0, 0, revoked_at=T + 10 * DAY),
}


@pytest.mark.req("R-086")
@pytest.mark.parametrize("event", OVERRIDES.values(), ids=OVERRIDES)
def test_a_live_key_overrides_what_is_pending(event):
    made = chain((RECOVER, T), (approve(12, RECOVER), T + 1), (event, T + DAY - 1), documents=TWO_OF_THREE)
    assert not made.is_pending(RECOVER.packet_id, T + DAY - 1)
    others = () if event is OVERRIDES["a veto"] else ((event, T + DAY - 1),)  # a veto alone names no key
    assert made.keys(T + 2 * DAY) == chain(*others, documents=TWO_OF_THREE).keys(T + 2 * DAY)
    assert refused(made, approve(13, RECOVER), T + DAY) == ("invalid_schema", "unknown_target")


@pytest.mark.req("R-086")
def test_once_it_has_taken_effect_nothing_overrides_it():
    made = chain((RECOVER, T), (approve(12, RECOVER), T + 1), documents=TWO_OF_THREE)
    late = rotate(0, 0, 2)
    assert refused(made, late, T + DAY)[0] == "key_expired"
    assert late.packet_id not in {packet.packet_id for packet, _ in made.events}


@pytest.mark.req("R-086")
def test_in_the_skew_after_it_the_old_key_cannot_take_it_back():
    event = rotate(11, 0, 1, valid_from=T + DAY)
    made = chain((event, T), (approve(12, event), T + 1), documents=TWO_OF_THREE)
    made = made.apply(add(0, 5), T + DAY)  # the old key may still sign
    assert refused(made, add(0, 1), T + DAY) == ("invalid_schema", "key_known")
    assert alive(made, T + 2 * DAY) == {1, 5}


@pytest.mark.req("R-086")
def test_an_event_about_other_keys_overrides_nothing():
    made = chain((RECOVER, T), (approve(12, RECOVER), T + 1), (add(0, 5), T + 2), documents=TWO_OF_THREE)
    assert alive(made, T + DAY) == {1, 5}


@pytest.mark.req("R-079", "R-086")
def test_revoking_the_recovery_key_stops_what_it_signed_and_what_it_approved():
    signed = chain(
        (RECOVER, T), (approve(12, RECOVER), T + 1), (approve(13, RECOVER), T + 1), documents=TWO_OF_THREE
    )
    assert alive(signed.apply(revoke(0, 11), T + 2), T + DAY) == {0}
    approved = chain((RECOVER, T), (approve(12, RECOVER), T + 1), documents=TWO_OF_THREE)
    assert alive(approved.apply(revoke(0, 12), T + 2), T + DAY) == {0}


@pytest.mark.req("R-079", "R-088")
def test_an_event_is_judged_by_the_moment_it_falls_due_whenever_anybody_looks():
    ends_later = revoke(0, 11, revoked_at=T + DAY + 10)
    made = chain((RECOVER, T), (approve(12, RECOVER), T + 1), (ends_later, T + 2), documents=TWO_OF_THREE)
    assert alive(made, T + 2 * DAY) == {1}
    assert alive(made, T + DAY) == {1}
    ends_before = revoke(0, 11, revoked_at=T + DAY - 10)
    made = chain((RECOVER, T), (approve(12, RECOVER), T + 1), (ends_before, T + 2), documents=TWO_OF_THREE)
    assert alive(made, T + 2 * DAY) == {0}


@pytest.mark.req("R-069")
def test_a_recovery_key_may_propose_its_own_revocation():
    event = revoke(11, 11)
    made = chain((event, T), documents=[with_recovery(threshold=None)])
    assert made.is_pending(event.packet_id, T)
    assert refused(made, rotate(11, 0, 1), T + DAY) == ("key_revoked", None)


def test_of_two_pending_events_for_one_key_the_first_to_fall_due_wins():
    one, other = rotate(11, 0, 1), rotate(11, 0, 1, valid_from=T + 1)
    made = chain((one, T), (other, T + 1), documents=[with_recovery(threshold=None)])
    after = made.keys(T + 2 * DAY)
    assert [state.introduced_by for state in after if state.introduced_by] == [one.packet_id]
    assert not made.is_pending(other.packet_id, T + 2 * DAY)


def test_what_recovery_adds_is_no_recovery_key():
    made = chain((add(11, 1), T), documents=[with_recovery(threshold=None)])
    made.verify(post(1), T + DAY)


def test_an_unknown_event_by_a_recovery_key_is_not_pending():
    packet = sign(11, {"type": "KEY_EVENT", "event": "FREEZE", "key_id": f"{ALICE}#keys-1"})
    assert not chain((packet, T), documents=TWO_OF_THREE).is_pending(packet.packet_id, T)


def test_two_keys_with_one_public_key_are_no_document():
    with pytest.raises(InvalidPacket, match="one key"):
        document(method(0), method(1), type(method(0))(key_id(11), key(1).public_key, T, recovery=True))


def test_events_that_wait_for_ever_cost_no_more_than_others():
    """A reader of a chain gets each event; judging all pending events again for each once froze a relay."""
    events = [(revoke(11, 0, revoked_at=T + n), T + n) for n in range(60)]
    made = KeyChain.replay(ALICE, events, documents=TWO_OF_THREE, rules=RULES)
    at = T + 2 * DAY
    assert made.pending(at) == {packet.packet_id for packet, _ in events}
    judged = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal judged
        judged += event == "call" and frame.f_code is PendingEvent.is_approved.__code__

    sys.setprofile(count)
    try:
        assert all(made.is_pending(packet.packet_id, at + n) for n, (packet, _) in enumerate(events))
        assert len(made.keys(at)) == 4
    finally:
        sys.setprofile(None)
    assert judged == 0


def test_what_is_pending_follows_the_time_however_it_is_asked():
    """The last answer is cached, and must not be returned for a time at which it does not hold."""
    events = [(rotate(11, 0, 1, valid_from=T), T), (revoke(12, 0, revoked_at=T), T + 10)]
    made = KeyChain.replay(ALICE, events, documents=[with_recovery(threshold=1)], rules=RULES)
    first, second = (packet.packet_id for packet, _ in events)
    for at, waiting in [
        (T + DAY - 1, {first, second}),
        (T + DAY, {second}),
        (T + DAY + 9, {second}),
        (T + DAY + 10, set()),
        (T + DAY + 5, {second}),
        (T + 20, {first, second}),
    ]:
        assert made.pending(at) == waiting, at


def test_a_policy_names_keys_by_their_spelling_too():
    spelled = f"{ALICE}#{key_multibase(key(12).public_key)}"
    policy = RecoveryPolicy(2, (key_id(11), spelled, f"{ALICE}#nobody"))
    made = chain((RECOVER, T), documents=[with_recovery(recovery_policy=policy)])
    assert refused(made, approve(13, RECOVER), T + 1) == ("invalid_signature", "recovery_key_not_eligible")
    assert not made.apply(approve(12, RECOVER), T + 1).is_pending(RECOVER.packet_id, T + DAY)


def test_an_electorate_changes_with_a_revocation_and_not_before():
    keys = chain((revoke(0, 12, revoked_at=T + 10), T), documents=TWO_OF_THREE).keys(T)
    electors = Electors(keys, TWO_OF_THREE[0].recovery_policy)
    for moment, count in [(T, 3), (T + 10, 3), (T + 11, 2), (T + 99, 2), (T + 5, 3)]:
        fresh = Electors(keys, TWO_OF_THREE[0].recovery_policy).at(moment)
        assert electors.at(moment) == fresh
        assert len(fresh.eligible) == count
