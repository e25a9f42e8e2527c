"""Keys that change while packets are on their way: no packet judged by the old ones slips in."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
import time
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from strata.protocol.documents import VerificationMethod, build_document, method_id
from strata.protocol.errors import ErrorCode, InvalidPacket
from strata.protocol.ids import Identity
from strata.protocol.keys import KeyRules, add_content, document_content, revoke_content, rotate_content
from strata.protocol.packets import Packet

from relayd.admission import check_runner, checks, loading, pipeline
from relayd.admission.request import PublishRequest
from tests.relayd.admission.admission_rig import ALICE, NOW, FakeLog, Peer, Rig, made, signed

BOB = Identity(bytes(32))
SECOND = Identity(bytes([7]) * 32)
FIRST_KEY = method_id(ALICE.did)
SECOND_KEY = method_id(ALICE.did, "keys-2")


@dataclasses.dataclass(frozen=True)
class Holder:
    """Another key that speaks for Alice."""

    key: Identity
    did: str = ALICE.did

    def sign(self, message: bytes) -> bytes:
        return self.key.sign(message)


ALICE_2 = Holder(SECOND)


def revoked(by=ALICE, *, nonce: str | None = None):
    return signed(by, revoke_content(FIRST_KEY, revoked_at=NOW - 1), nonce=nonce)


def rotated(*, valid_from: int = NOW):
    content = rotate_content(SECOND_KEY, SECOND.public_key, replaces=FIRST_KEY, valid_from=valid_from)
    return signed(ALICE, content)


def added(*, valid_from: int = NOW):
    return signed(ALICE, add_content(SECOND_KEY, SECOND.public_key, valid_from=valid_from))


@pytest.mark.req("R-069", "R-074", "R-076")
async def test_a_publish_right_behind_its_key_s_revocation_is_refused(rig):
    peer = Peer()
    rig.publish(peer, made(1), "before")
    rig.publish(peer, revoked(), "revoke")
    rig.publish(peer, made(2), "behind")
    answers = await rig.answers(peer, 3)
    assert answers == [("before", "ok"), ("revoke", "ok"), ("behind", ErrorCode.KEY_REVOKED)]


@pytest.mark.req("R-074")
async def test_a_key_signs_right_behind_the_event_that_adds_it(rig):
    peer = Peer()
    rig.publish(peer, added(), "add")
    rig.publish(peer, made(1, author=ALICE_2), "new key")
    rig.publish(peer, made(2), "old key")
    assert await rig.answers(peer, 3) == [("add", "ok"), ("new key", "ok"), ("old key", "ok")]


@pytest.mark.req("R-074")
async def test_other_sessions_wait_for_the_author_s_event_and_other_authors_do_not(rig):
    one, two, three = Peer(), Peer(), Peer()
    rig.publish(one, revoked(), "revoke")
    await rig.queued(1)
    rig.publish(two, made(1), "alice")
    rig.publish(three, made(2, author=BOB), "bob")
    await rig.queued(2)
    assert not two.answers and [request.client_msg_id for _, request in rig.log.queue] == ["revoke", "bob"]
    assert await rig.answers(two, 1) == [("alice", ErrorCode.KEY_REVOKED)]
    assert (one.answers, three.answers) == ([("revoke", "ok")], [("bob", "ok")])


@pytest.mark.req("R-074")
async def test_what_an_event_holds_up_is_answered_in_time_though_the_feed_does_not_bring_the_event():
    rig = Rig(publish_timeout=0.05)
    one, two = Peer(), Peer()
    rig.publish(one, revoked(), "revoke")
    await rig.queued(1)
    (packet, request), *_ = rig.log.queue
    entry = rig.log.append(packet, rig.now)
    assert entry is not None
    rig.admission.committed(request, rig.now, duplicate=False)
    for name in ("first", "second"):  # which have not waited too long at the first check
        rig.admission.submit(PublishRequest(made(1), name, two.lane, time.monotonic()))
    async with asyncio.timeout(20):
        while len(two.answers) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert two.answers == [("first", ErrorCode.INTERNAL_ERROR), ("second", ErrorCode.INTERNAL_ERROR)]
    assert two.errors["first"].detail == "store_unavailable"
    assert (rig.admission.pending, rig.admission.pending_bytes) == (0, 0)
    # Publishing stays blocked until the feed has delivered it: nothing is judged by the earlier keys.
    rig.publish(two, made(1), "third")
    rig.observe([entry])
    assert (await rig.answers(two, 3))[2] == ("third", ErrorCode.KEY_REVOKED)
    await rig.close()


@pytest.mark.req("R-074")
async def test_what_an_event_holds_up_too_long_is_answered_a_few_at_a_time():
    rig = Rig(publish_timeout=60.0)
    rig.admission._slices.seconds = 0.0  # a turn of the loop has time for one of them
    one, crowd = Peer(), [Peer() for _ in range(20)]
    rig.publish(one, revoked(), "revoke")
    await rig.queued(1)
    for peer in crowd:
        rig.publish(peer, made(1), "held up")
    await rig.settled()
    rig.admission._give_overdue_up()
    rig.admission._be_patient()  # as for an event that arrives between two turns
    timer = rig.admission._patience
    for turn in range(1, 200):
        answered = sum(len(peer.answers) for peer in crowd)
        assert answered <= 2 * turn
        await asyncio.sleep(0)
    assert answered == 20
    assert timer is not None and timer.cancelled(), "one timer alone looks for them"
    await rig.close()


@pytest.mark.req("R-074")
async def test_those_who_have_waited_for_an_event_go_on_a_few_at_a_time(rig, monkeypatch):
    rig.admission._slices.seconds = 0.0  # a turn of the loop has time for one of them
    one, crowd = Peer(), [Peer() for _ in range(20)]
    rig.publish(one, revoked(), "revoke")
    await rig.queued(1)
    for number, peer in enumerate(crowd):
        rig.publish(peer, made(number), "held up")
    await rig.settled()
    turn, turns = 0, []
    genuine = rig.admission._lanes._judge

    def judge(request: PublishRequest) -> None:
        turns.append(turn)
        genuine(request)

    monkeypatch.setattr(rig.admission._lanes, "_judge", judge)
    rig.commit()
    async with asyncio.timeout(20):
        while not all(peer.answers for peer in crowd):
            turn += 1
            await asyncio.sleep(0)
    assert len(turns) == 20 and max(map(turns.count, turns)) <= 2
    assert {peer.answers[0] for peer in crowd} == {("held up", ErrorCode.KEY_REVOKED)}


@pytest.mark.req("R-047")
async def test_few_chains_are_read_for_packets_that_wait_together(rig, monkeypatch):
    monkeypatch.setattr(loading, "_CHAINS_TOGETHER", 2)
    authors, peer = [Identity(bytes([seed]) * 32) for seed in range(40, 45)], Peer()
    rig.elsewhere(
        *(
            signed(author, add_content(method_id(author.did, "keys-2"), SECOND.public_key, valid_from=NOW))
            for author in authors
        )
    )
    rig.identities._chains.clear()
    for author in authors:
        rig.publish(peer, made(1, author=author), author.did)
    assert [outcome for _, outcome in await rig.answers(peer, 5)] == ["ok"] * 5
    assert sorted(map(len, rig.log.reads)) == [1, 2, 2]


@pytest.mark.req("R-047", "R-200")
async def test_those_whose_keys_cannot_be_read_are_answered_a_few_at_a_time(rig, monkeypatch):
    rig.elsewhere(added())
    rig.identities._chains.clear()
    rig.admission._slices.seconds = 0.0
    turn, turns = 0, []
    genuine = rig.admission._loading._go_on

    def go_on(request: PublishRequest, refusal: InvalidPacket | None) -> None:
        turns.append(turn)
        genuine(request, refusal)

    monkeypatch.setattr(rig.admission._loading, "_go_on", go_on)
    rig.log.gate.clear()
    crowd = [Peer() for _ in range(20)]
    for number, peer in enumerate(crowd):
        rig.publish(peer, made(number), "waits")
    rig.log.down = True
    rig.log.gate.set()
    async with asyncio.timeout(20):
        while not all(peer.answers for peer in crowd):
            turn += 1
            await asyncio.sleep(0)
    assert len(turns) == 20 and max(map(turns.count, turns)) <= 2
    assert {peer.errors["waits"].detail for peer in crowd} == {"store_unavailable"}


@pytest.mark.req("R-074")
async def test_what_has_waited_for_an_event_for_a_short_time_waits_on(rig):
    one, two = Peer(), Peer()
    rig.publish(one, revoked(), "revoke")
    await rig.queued(1)
    rig.admission.submit(PublishRequest(made(1), "alice", two.lane, time.monotonic()))
    await rig.settled()
    rig.admission._give_overdue_up()
    assert await rig.answers(two, 1) == [("alice", ErrorCode.KEY_REVOKED)]


@pytest.mark.req("R-074")
async def test_another_event_of_the_author_lets_nobody_pass_the_one_on_its_way(rig):
    one, two = Peer(), Peer()
    rig.publish(one, revoked(), "revoke")
    await rig.queued(1)
    rig.publish(two, made(1), "alice")
    await rig.settled()
    rig.elsewhere(added())
    await rig.settled()
    assert len(rig.log.queue) == 1
    assert await rig.answers(two, 1) == [("alice", ErrorCode.KEY_REVOKED)]


@pytest.mark.req("R-074")
async def test_an_event_that_is_not_stored_bars_nobody(rig):
    peer = Peer()
    rig.publish(peer, revoked(), "revoke")
    rig.publish(peer, made(1), "behind")
    await rig.queued(1)
    (_, request), *_ = rig.log.queue
    rig.log.queue.clear()
    rig.admission.failed(request, InvalidPacket(ErrorCode.INTERNAL_ERROR, "lost"))
    assert await rig.answers(peer, 2) == [("revoke", ErrorCode.INTERNAL_ERROR), ("behind", "ok")]


@pytest.mark.req("R-074")
@pytest.mark.parametrize("moment", ["verifying", "queued"])
async def test_what_another_process_has_revoked_is_judged_again(rig, moment):
    peer = Peer()
    rig.publish(peer, made(1), "mine")
    rig.publish(peer, made(2, author=BOB), "bob's")
    if moment == "queued":
        await rig.queued(2)
    rig.elsewhere(revoked())
    answers = await rig.answers(peer, 2)
    assert sorted(answers) == [("bob's", "ok"), ("mine", ErrorCode.KEY_REVOKED)]
    assert rig.admission.pending == rig.admission.pending_bytes == 0


@pytest.mark.req("R-074")
async def test_who_is_refused_by_keys_of_a_moment_ago_is_judged_again(rig):
    peer = Peer()
    rig.publish(peer, made(1, author=ALICE_2), "new key")
    rig.elsewhere(added())
    assert await rig.answers(peer, 1) == [("new key", "ok")]


@pytest.mark.req("R-074")
async def test_a_change_that_does_not_concern_the_packet_refuses_nothing(rig):
    peer = Peer()
    rig.publish(peer, made(1), "mine")
    await rig.queued(1)
    rig.elsewhere(signed(BOB, revoke_content(method_id(BOB.did), revoked_at=NOW - 1)), added())
    assert await rig.answers(peer, 1) == [("mine", "ok")]


@pytest.mark.req("R-074", "R-111")
async def test_an_event_whose_first_append_was_lost_sight_of_is_a_duplicate(rig):
    """The outcome was unknown, the feed has delivered it since: it must not be judged by its own effect."""
    peer = Peer()
    event = revoked()
    rig.publish(peer, event, "revoke")
    await rig.queued(1)
    rig.elsewhere(event)
    assert await rig.answers(peer, 1) == [("revoke", "duplicate")]


@pytest.mark.req("R-072")
async def test_a_rotated_key_ends_and_its_successor_begins(rig):
    peer = Peer()
    rig.publish(peer, rotated(), "rotate")
    await rig.answers(peer, 1)
    rig.now += 301  # the skew is over
    rig.publish(peer, made(1, timestamp=rig.now), "old")
    rig.publish(peer, made(2, timestamp=rig.now, author=ALICE_2), "new")
    answers = await rig.answers(peer, 3)
    assert sorted(answers[1:]) == [("new", "ok"), ("old", ErrorCode.KEY_EXPIRED)]


@pytest.mark.req("R-056")
async def test_chains_survive_a_restart_and_are_read_once(rig):
    peer = Peer()
    rig.publish(peer, revoked(), "revoke")
    await rig.answers(peer, 1)
    again = Rig(log=rig.log)
    await again.identities.open()
    late = [Peer() for _ in range(5)]
    for number, one in enumerate(late):
        again.publish(one, made(number), str(number))
    for number, one in enumerate(late):
        assert await again.answers(one, 1) == [(str(number), ErrorCode.KEY_REVOKED)]
    assert rig.log.reads == [[ALICE.did]]
    await again.close()


@pytest.mark.req("R-321")
async def test_who_has_many_chains_read_pays_for_them_and_stands_behind_others(rig):
    authors = [Identity(bytes([n]) * 32) for n in range(10, 51)]
    for author in authors:
        rig.elsewhere(signed(author, revoke_content(method_id(author.did), revoked_at=NOW - 1)))
    again = Rig(log=rig.log)
    await again.identities.open()
    rig.log.gate.clear()
    greedy, modest = Peer(), Peer()
    for number, author in enumerate(authors[1:]):
        again.publish(greedy, made(number, author=author), str(number))
    await rig.log.asked.wait()
    greedy.owes = 100.0
    again.publish(modest, made(1, author=authors[0]), "modest")
    await asyncio.sleep(0)
    rig.log.gate.set()
    await again.answers(greedy, 40)
    assert [len(read) for read in rig.log.reads] == [1, 1, 16, 16, 7] and rig.log.reads[1] == [authors[0].did]
    assert {what for _, what in modest.answers + greedy.answers} == {ErrorCode.KEY_REVOKED}
    assert greedy.checked_seconds > modest.checked_seconds > 0
    await again.close()


@pytest.mark.req("R-056", "R-200")
async def test_keys_that_cannot_be_read_refuse_for_now(rig):
    rig.elsewhere(revoked())
    again = Rig(log=rig.log)
    await again.identities.open()
    rig.log.down = True
    peer = Peer()
    again.publish(peer, made(1), "m")
    assert await again.answers(peer, 1) == [("m", ErrorCode.INTERNAL_ERROR)]
    assert peer.errors["m"].detail == "store_unavailable"
    rig.log.down = False
    again.publish(peer, made(2), "n")
    assert (await again.answers(peer, 2))[1] == ("n", ErrorCode.KEY_REVOKED)
    await again.close()


@pytest.mark.req("R-056", "R-074")
async def test_what_the_feed_brings_during_a_read_is_not_lost(rig):
    rig.elsewhere(added())
    again = Rig(log=rig.log)
    await again.identities.open()
    rig.log.gate.clear()
    peer = Peer()
    again.publish(peer, made(1), "m")
    await rig.log.asked.wait()
    again.elsewhere(revoked())  # after the rows of the read were chosen
    rig.log.gate.set()
    assert await again.answers(peer, 1) == [("m", ErrorCode.KEY_REVOKED)]
    await again.close()


@pytest.mark.req("R-088", "R-190")
async def test_a_recovery_event_is_queued_and_becomes_effective_by_itself():
    recovery = Identity(bytes([9]) * 32)
    document = _document_with(recovery)
    rig = Rig(rules=KeyRules(recovery_delay_seconds=3600))
    peer = Peer()
    rig.publish(peer, signed(ALICE, document_content(document)), "document")
    assert await rig.answers(peer, 1) == [("document", "ok")]
    event = signed(
        Holder(recovery),
        rotate_content(SECOND_KEY, SECOND.public_key, replaces=FIRST_KEY, valid_from=NOW),
    )
    rig.publish(peer, event, "recover")
    assert (await rig.answers(peer, 2))[1] == ("recover", "queued")
    rig.publish(peer, made(1, author=ALICE_2), "too early")
    assert (await rig.answers(peer, 3))[2][1] != "ok"
    rig.now += 3600
    rig.publish(peer, made(2, timestamp=rig.now, author=ALICE_2), "in effect")
    assert (await rig.answers(peer, 4))[3] == ("in effect", "ok")
    await rig.close()


def _document_with(recovery: Identity):
    return build_document(
        ALICE.did,
        [
            VerificationMethod(FIRST_KEY, ALICE.public_key, NOW - 100),
            VerificationMethod(
                method_id(ALICE.did, "recovery-1"), recovery.public_key, NOW - 100, recovery=True
            ),
        ],
        created_at=NOW - 100,
    )


@pytest.mark.req("R-062", "R-063")
async def test_a_key_that_ends_before_its_packet_is_committed_is_no_key(rig):
    """The log's time is the time of the commit: a reader judges by that, and must reach the same result."""
    peer = Peer()
    rig.publish(peer, rotated(valid_from=NOW - 299), "rotate")
    await rig.answers(peer, 1)
    rig.publish(peer, made(1), "in the last second")
    await rig.queued(1)
    rig.now += 2
    assert (await rig.answers(peer, 2))[1] == ("in the last second", ErrorCode.KEY_EXPIRED)


KINDS = ("post", "post", "add", "revoke", "elsewhere", "by second")


@pytest.mark.slow
@pytest.mark.req("R-074", "R-133", "R-192")
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from(KINDS)), max_size=20))
def test_the_log_holds_nothing_that_its_own_order_forbids(script):
    """Whatever is in flight at the same time: replaying the log in order admits every packet in it."""

    async def main() -> None:
        rig = Rig(log=FakeLog())
        peers = [Peer() for _ in range(3)]
        sent = 0
        for number, (peer, kind) in enumerate(script):
            match kind:
                case "elsewhere":
                    rig.elsewhere(
                        signed(ALICE, revoke_content(FIRST_KEY, revoked_at=NOW - 1), nonce=str(number))
                    )
                    continue
                case "add":
                    raw = signed(ALICE, add_content(SECOND_KEY, SECOND.public_key, valid_from=NOW)).canonical
                case "revoke":
                    raw = revoked(ALICE_2, nonce=str(number)).canonical
                case "by second":
                    raw = made(number, author=ALICE_2)
                case _:
                    raw = made(number)
            sent += 1
            rig.publish(peers[peer], raw, str(number))
        await rig.until(lambda: sum(len(peer.answers) for peer in peers) == sent)
        assert (rig.admission.pending, rig.admission.pending_bytes) == (0, 0)
        judge = Rig(log=FakeLog())
        witness = Peer()
        foreign = {e.packet.packet_id for e in rig.log.entries} - {_digest(raw) for raw in rig.log.received}
        for entry in rig.log.entries:
            if entry.packet.packet_id in foreign:
                judge.elsewhere(Packet.parse(entry.packet.body))
                continue
            before = len(witness.answers)
            judge.publish(witness, entry.packet.body, "w")
            assert (await judge.answers(witness, before + 1))[-1][1] in ("ok", "queued")
        await judge.close()
        await rig.close()

    asyncio.run(main())


def _digest(body: bytes) -> bytes:
    return Packet.parse(body).digest


@pytest.fixture
def judged(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bool]]:
    """The type of each packet judged, and whether that happened on the loop."""
    seen: list[tuple[str, bool]] = []

    def judge(packet: Packet, *arguments: Any, **members: Any) -> bool:
        seen.append((packet.content_type, threading.current_thread() is threading.main_thread()))
        return checks.judge(packet, *arguments, **members)

    monkeypatch.setattr(check_runner, "judge", judge)
    return seen


def events(count: int) -> list[Packet]:
    """Key events that change nothing."""
    content = {"type": "KEY_EVENT", "event": "NOOP", "key_id": FIRST_KEY}
    return [signed(ALICE, content, nonce=f"nonce-{number:03}") for number in range(count)]


@pytest.mark.req("R-074")
async def test_a_chain_sent_in_one_breath_is_judged_once_and_on_no_thread(rig, judged):
    peer, other = Peer(), Peer()
    for number, event in enumerate(events(10)):
        rig.publish(peer, event, str(number))
    for number in range(10, 13):
        rig.publish(peer, made(number), str(number))
    rig.publish(other, made(99, author=BOB), "other")
    assert await rig.answers(peer, 13) == [(str(number), "ok") for number in range(13)]
    assert other.answers == [("other", "ok")]
    assert sorted(judged) == [("KEY_EVENT", True)] * 10 + [("POST", True)] * 4
    assert not peer.lane.changing, "nothing is kept of a lane that is empty"


@pytest.mark.req("R-074")
async def test_what_stands_behind_an_event_that_is_refused_is_judged_all_the_same(rig, judged):
    peer = Peer()
    (good, bad) = events(2)
    signature = good.signature
    rig.publish(peer, bad.canonical.replace(bad.signature.encode(), signature.encode()), "bad")
    rig.publish(peer, made(1), "behind")
    rig.publish(peer, good, "good")
    rig.publish(peer, made(2), "last")
    answers = await rig.answers(peer, 4)
    assert dict(answers) == {
        "bad": ErrorCode.INVALID_SIGNATURE,
        "behind": "ok",
        "good": "ok",
        "last": "ok",
    }
    assert len(judged) == 4


async def test_a_lane_that_is_never_empty_forgets_whose_keys_it_has_changed(rig):
    peer = Peer()
    content = {"type": "KEY_EVENT", "event": "NOOP", "key_id": FIRST_KEY}
    stuck = PublishRequest(b"", None, peer.lane, 0.0)  # stays behind them without a verdict
    for number in range(40):
        author = Identity(number.to_bytes(32, "big"))
        rig.publish(peer, signed(author, content), str(number))
        if stuck in peer.lane.requests:
            peer.lane.requests.remove(stuck)
        peer.lane.requests.append(stuck)
        await rig.answers(peer, number + 1)
        assert peer.lane.requests and len(peer.lane.changing) <= 6


async def test_events_of_an_author_with_many_keys_are_judged_on_a_thread(rig, judged, monkeypatch):
    monkeypatch.setattr(pipeline, "_FEW_KEYS", 1)
    rig.elsewhere(added())
    peer = Peer()
    (event,) = events(1)
    rig.publish(peer, event, "event")
    assert await rig.answers(peer, 1) == [("event", "ok")]
    rig.publish(peer, made(1), "post")
    assert await rig.answers(peer, 2) == [("event", "ok"), ("post", "ok")]
    assert judged == [("KEY_EVENT", False), ("POST", False)]


@pytest.mark.req("R-074", "R-099", "R-337")
@pytest.mark.parametrize("steps", [(7200, 0), (0, 7200)])
async def test_a_packet_is_stored_only_if_it_is_valid_as_of_the_time_that_the_log_gives(rig, steps):
    """The clock steps between the checks and the append: what was valid then is not valid now."""
    peer = Peer()
    checked_at, stored_at = (NOW + step for step in steps)
    rig.publish(peer, added(valid_from=checked_at), "add")
    await rig.answers(peer, 1)
    rig.now = checked_at
    signer = ALICE_2 if checked_at > stored_at else ALICE
    expires_at = NOW + 3600 if stored_at > checked_at else None
    rig.publish(peer, signed(signer, {"type": "POST"}, expires_at=expires_at), "post")
    await rig.queued(1)
    rig.now = stored_at
    code = ErrorCode.KEY_NOT_YET_VALID if checked_at > stored_at else ErrorCode.PACKET_EXPIRED
    assert (await rig.answers(peer, 2))[-1] == ("post", code)
