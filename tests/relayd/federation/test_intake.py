"""How far a peer was read, and the effect of each refusal on it."""

from __future__ import annotations

import pytest
from strata.protocol.errors import ErrorCode, InvalidPacket

from relayd.federation.intake import (
    MAX_ATTEMPTS,
    Intake,
    Item,
    PeerVerdict,
    is_keepable,
    is_suspicious,
    judge_refusal,
    retry_delay,
)
from tests.support.made_packets import make, new_identity

NOW = 1_000


@pytest.mark.req("R-364")
def test_the_cursor_passes_nothing_without_a_verdict():
    intake = Intake("0")
    items = [intake.add(b"%d" % n, 100 + n, str(n)) for n in range(1, 6)]
    intake.settle(items[1], NOW)
    intake.settle(items[3], NOW)
    assert intake.cursor == "0"
    # With the batch that stores the first, it gets to the third, which waits; with both, to the end.
    assert intake.cursor_with({items[0]}) == "2"
    assert intake.cursor_with({items[0], items[2]}) == "4"
    assert intake.cursor_with(set(items)) == "5"
    intake.settle(items[0], NOW)
    assert (intake.cursor, len(intake)) == ("2", 3)
    assert intake.last_witness == 102
    intake.settle(items[0], NOW)
    assert intake.cursor == "2"


def test_an_event_without_a_cursor_moves_none():
    intake = Intake(None)
    first, second = intake.add(b"", 2**60, None), intake.add(b"", -(2**70), "b")
    cursors = [intake.cursor]
    for item in (first, second):
        intake.settle(item, NOW)
        cursors.append(intake.cursor)
    assert cursors == [None, None, "b"]
    assert intake.last_witness == NOW, "and no time is still to come"


def test_the_window_is_bounded_by_packets_and_by_bytes():
    intake = Intake(None)
    while intake.has_room:
        intake.add(b"x", 1, None)
    assert len(intake) == 256
    intake = Intake(None)
    large = intake.add(bytes(8 * 2**20), 1, None)
    assert not intake.has_room
    intake.settle(large, NOW)
    intake.add(bytes(8 * 2**20 - 1), 1, None)
    assert intake.has_room


def test_a_packet_that_waits_holds_up_only_the_cursor():
    """A stranger's packet from the future would hold up its peer, if the clocks of the two differ."""
    intake = Intake("0")
    waiting = intake.add(b"wait", 1, "1")
    for n in range(2, 8193):
        assert intake.has_room and intake.is_half_full is (n > 4096)
        intake.settle(intake.add(bytes(4096), n, str(n)), NOW)
    assert not intake.has_room, "after a restart, all these are read again"
    assert intake.cursor == "0" and intake.cursor_with({waiting}) == "8192"
    intake.settle(waiting, NOW)
    assert (intake.cursor, len(intake), intake.has_room) == ("8192", 0, True)


def test_packets_that_wait_leave_their_places_to_others():
    """A stranger can publish hundreds a second, each as far in the future as the peer takes them."""
    intake = Intake("0")
    waiting, rooms = [], []
    for _ in range(8191):
        waiting.append(intake.add(bytes(4096), 1, "1"))
        intake.wait(waiting[-1])
        rooms.append(intake.has_room)
    assert all(rooms)
    under_way = [intake.add(b"x", 1, "1")]
    assert (intake.has_room, intake.may_resume) == (False, True)
    for item in waiting[:255]:
        intake.resume(item)
    assert (intake.has_room, intake.may_resume) == (False, False)
    for item in [*under_way, *waiting]:
        intake.settle(item, NOW)
    assert (len(intake), intake.has_room, intake.cursor) == (0, True, "1")
    assert (intake._under_way, intake._bytes, intake._waiting_bytes) == (0, 0, 0)


def test_packets_that_wait_are_bounded_by_bytes():
    intake, half = Intake(None), 0
    while intake.has_room:
        half += not intake.is_half_full
        intake.wait(intake.add(bytes(2**20), 1, None))
    assert (len(intake), half) == (32, 16)


PACKET = make(new_identity())


def refusal(code: ErrorCode, detail: str | None = None) -> InvalidPacket:
    return InvalidPacket(code, "because", detail=detail)


def test_the_last_witness_is_the_last_of_all():
    intake = Intake("c")
    for at in (50, 40, 60, 45, 0):
        intake.settle(intake.add(b"", at, None), NOW)
    assert intake.last_witness == 60
    assert intake.cursor == intake.cursor_with(()) == "c"
    waiting = intake.add(b"", 1, None)
    assert intake.cursor_with({waiting}) == "c"


@pytest.mark.req("R-381")
@pytest.mark.parametrize(
    ("error", "raw", "verdict"),
    [
        # Only the peer can be responsible for these.
        (refusal(ErrorCode.INVALID_SIGNATURE, "packet_id_mismatch"), PACKET.canonical, PeerVerdict.FORGED),
        (refusal(ErrorCode.INVALID_SCHEMA), PACKET.canonical.replace(b"hello", b"hallo"), PeerVerdict.FORGED),
        # An author may have made these, and other relays may have other rules.
        (refusal(ErrorCode.INVALID_SCHEMA), PACKET.canonical, PeerVerdict.SKIPPED),
        (refusal(ErrorCode.POLICY_REJECTED), PACKET.canonical, PeerVerdict.SKIPPED),
        (refusal(ErrorCode.BLOCKED_AUTHOR), PACKET.canonical, PeerVerdict.SKIPPED),
        (refusal(ErrorCode.PACKET_EXPIRED), PACKET.canonical, PeerVerdict.SKIPPED),
        (refusal(ErrorCode.TIMESTAMP_TOO_OLD), PACKET.canonical, PeerVerdict.SKIPPED),
        (refusal(ErrorCode.RATE_LIMITED, "trust_budget"), PACKET.canonical, PeerVerdict.SKIPPED),
        # The author's keys may still come.
        (refusal(ErrorCode.INVALID_SIGNATURE), PACKET.canonical, PeerVerdict.KEYS),
        (refusal(ErrorCode.INVALID_SIGNATURE, "unresolved_key"), PACKET.canonical, PeerVerdict.KEYS),
        (refusal(ErrorCode.KEY_REVOKED), PACKET.canonical, PeerVerdict.KEYS),
        (refusal(ErrorCode.KEY_NOT_YET_VALID), PACKET.canonical, PeerVerdict.KEYS),
        # Nothing was judged.
        (refusal(ErrorCode.INTERNAL_ERROR, "store_unavailable"), PACKET.canonical, PeerVerdict.LATER),
        (refusal(ErrorCode.TIMESTAMP_IN_FUTURE), PACKET.canonical, PeerVerdict.LATER),
    ],
)
def test_what_a_refusal_means(error, raw, verdict):
    item = Item(raw, 0, "c")
    assert judge_refusal(item, error) is verdict


def test_keys_are_fetched_once_and_our_own_faults_hold_up_nothing_for_ever():
    item = Item(PACKET.canonical, 0, "c")
    item.asked_for_keys = True
    for error in (refusal(ErrorCode.KEY_REVOKED), refusal(ErrorCode.INVALID_SIGNATURE)):
        assert judge_refusal(item, error) is PeerVerdict.SKIPPED
    assert judge_refusal(item, refusal(ErrorCode.INVALID_SIGNATURE, "unresolved_key")) is PeerVerdict.SKIPPED
    item.attempts = MAX_ATTEMPTS - 1
    for code in (ErrorCode.INTERNAL_ERROR, ErrorCode.TIMESTAMP_IN_FUTURE):
        assert judge_refusal(item, refusal(code)) is PeerVerdict.LATER
    item.attempts = MAX_ATTEMPTS
    assert judge_refusal(item, refusal(ErrorCode.TIMESTAMP_IN_FUTURE)) is PeerVerdict.SKIPPED
    assert judge_refusal(item, refusal(ErrorCode.INTERNAL_ERROR)) is PeerVerdict.SKIPPED
    # While the database is away nothing is skipped, however long that takes.
    assert judge_refusal(item, refusal(ErrorCode.INTERNAL_ERROR, "queue_full")) is PeerVerdict.LATER


def test_when_a_packet_is_tried_again():
    item = Item(PACKET.canonical, 0, "c")
    assert retry_delay(item, None, refusal(ErrorCode.INTERNAL_ERROR), 0) == 0.5
    item.attempts = 100
    assert retry_delay(item, None, refusal(ErrorCode.INTERNAL_ERROR), 0) == 32
    future = refusal(ErrorCode.TIMESTAMP_IN_FUTURE)
    assert retry_delay(item, PACKET, future, PACKET.timestamp - 400) == 100
    assert retry_delay(item, PACKET, future, 0) == 7200
    assert retry_delay(item, PACKET, future, PACKET.timestamp) == 1, "and not in the past"
    assert retry_delay(item, None, future, 0) == retry_delay(
        item, PACKET, refusal(ErrorCode.INTERNAL_ERROR), 0
    )


def test_what_may_be_the_authors_doing_is_suspicious_and_what_this_relay_declines_is_not():
    suspicious = [ErrorCode.INVALID_SCHEMA, ErrorCode.KEY_REVOKED, ErrorCode.INVALID_SIGNATURE]
    ours = [ErrorCode.POLICY_REJECTED, ErrorCode.TIMESTAMP_TOO_OLD, ErrorCode.PACKET_EXPIRED]
    assert [is_suspicious(refusal(code)) for code in (*suspicious, *ours)] == [True] * 3 + [False] * 3


@pytest.mark.parametrize(
    ("cursor", "keepable"),
    [(None, True), ("", True), ("1:2", True), ("x" * 4096, True), ("x" * 4097, False), ("a\0", False)],
)
def test_a_cursor_that_the_database_cannot_keep(cursor, keepable):
    assert is_keepable(cursor) is keepable
