"""Admission with a fake log behind it: exactly one answer each, in order, and duplicates before refusals."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
import time
import tracemalloc
from typing import Any

import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from strata.protocol import canonical, packets
from strata.protocol.documents import method_id
from strata.protocol.errors import ErrorCode
from strata.protocol.ids import Identity
from strata.protocol.keys import revoke_content
from strata.protocol.packets import Packet

from relayd.admission.budgets import TrustAct
from relayd.admission.checks import weigh
from relayd.admission.parsing_apart import ApartParser
from relayd.admission.request import PublishRequest
from relayd.policy import Plugins, Policy, PolicyRequest
from relayd.policy.rules import Lists
from tests.relayd.admission.admission_rig import ALICE, NOW, Peer, Rig, made, signed, tampered


def blocking(*authors: Identity) -> Policy:
    return Policy(Lists(blocked_authors=frozenset(author.did for author in authors)))


@pytest.mark.req("R-133", "R-192")
async def test_a_session_s_packets_enter_the_log_in_the_order_sent(rig):
    peer = Peer()
    # Large ones are parsed on threads and small ones on the loop: the order must survive the difference.
    raws = [made(number, padding=40_000 if number % 3 == 0 else 0) for number in range(60)]
    for number, raw in enumerate(raws):
        rig.publish(peer, raw, str(number))
    await rig.until(lambda: len(peer.answers) == 60)
    assert rig.log.received == raws
    assert [name for name, _ in peer.answers] == [str(number) for number in range(60)]


async def test_whoever_publishes_one_packet_does_not_wait_for_the_checks_of_who_publishes_many(rig):
    many, one = Peer(), Peer()
    rig.publish(one, made(0), "to have the keys in memory")
    await rig.answers(one, 1)
    for number in range(1, 41):
        rig.publish(many, made(number), str(number))
    rig.publish(one, made(41), "one")
    await asyncio.sleep(0)  # at the end of a step of the loop they are distributed
    assert rig.log.received[1:] == [made(41)]
    await rig.answers(many, 40)
    assert rig.log.received[2:] == [made(number) for number in range(1, 41)]


async def test_admission_is_busy_while_a_publish_waits_and_a_moment_longer(rig):
    assert not rig.admission.is_busy()
    peer = Peer()
    rig.publish(peer, made(1), "long ago")  # by the monotonic clock
    assert rig.admission.is_busy()
    await rig.until(lambda: len(peer.answers) == 1)
    assert not rig.admission.is_busy()
    rig.admission.submit(PublishRequest(made(2), "now", peer.lane, time.monotonic() + 60))
    await rig.until(lambda: len(peer.answers) == 2)
    assert rig.admission.is_busy()


def many_values(number: int) -> bytes:
    return signed(ALICE, {"type": "POST", "values": [number] * 2_000}).canonical


async def test_packets_of_many_values_are_parsed_apart():
    apart = ApartParser(max_bytes=262_144, max_depth=64, max_values=32_768)
    rig, peer, other = Rig(apart=apart), Peer(), Peer()
    raws = {"good": many_values(1), "spoiled": many_values(2)[:-1]}
    for name, raw in raws.items():
        rig.publish(peer, raw, name)
    rig.publish(other, made(3), "small")
    await rig.until(lambda: len(peer.answers) + len(other.answers) == 3)
    assert dict(peer.answers) == {"good": "ok", "spoiled": ErrorCode.INVALID_SCHEMA}
    assert rig.log.stored.keys() >= {Packet.parse(raws["good"]).digest}
    assert peer.errors["spoiled"].detail == "malformed_json"
    await rig.close()


async def test_a_packet_whose_parser_is_lost_is_answered_and_the_next_one_is_stored():
    apart = ApartParser(max_bytes=262_144, max_depth=64, max_values=32_768)
    rig, peer = Rig(apart=apart), Peer()
    rig.publish(peer, many_values(1), "before")
    await rig.until(lambda: len(peer.answers) == 1)
    (process,) = (each for each in psutil.Process().children() if each.nice() > psutil.Process().nice())
    process.suspend()  # or the loss may be noticed before the packet, which a new process then gets
    rig.publish(peer, many_values(2), "lost")
    rig.publish(peer, made(3), "behind it")
    await asyncio.sleep(0.1)
    process.kill()
    await rig.until(lambda: len(peer.answers) == 3)
    rig.publish(peer, many_values(2), "again")
    await rig.until(lambda: len(peer.answers) == 4)
    assert dict(peer.answers) == {
        "before": "ok",
        "lost": ErrorCode.INTERNAL_ERROR,
        "behind it": "ok",
        "again": "ok",
    }
    assert rig.caught == ["publish"]
    assert rig.admission.pending == rig.admission.pending_bytes == 0
    await rig.close()


@pytest.mark.slow
@pytest.mark.req("R-321")
@pytest.mark.parametrize("value", [[], {}, {"a": 0}, [0], [[[]]], 1.5, "ab", "y" * 1500, 0])
@pytest.mark.parametrize("size", [2_000, 60_000])
async def test_a_packet_under_way_counts_with_the_memory_that_it_takes(value, size):
    """A packet of many small values takes up to thirty times its bytes."""
    times = size // (len(canonical.encode(value)) + 1)
    raw = signed(ALICE, {"type": "POST", "values": [value] * times}).canonical
    tracemalloc.start()
    texts = [bytes(bytearray(raw)) for _ in range(10)]
    requests = [PublishRequest(text, None, Peer().lane, 0.0) for text in texts]
    for request in requests:
        request.parsed(Packet.parse(request.raw))
    taken = tracemalloc.get_traced_memory()[0] / 10
    tracemalloc.stop()
    assert taken < requests[0].held_bytes < 16 * taken


@pytest.mark.req("R-321")
async def test_a_packet_of_many_values_fills_the_queue_as_its_memory_does(rig):
    peer = Peer()
    rig.admission._limits = dataclasses.replace(rig.admission._limits, publish_queue_bytes=2**20)
    rig.publish(peer, signed(ALICE, {"type": "POST", "values": [[]] * 10_000}), "many")
    assert rig.admission.is_full()
    await rig.answers(peer, 1)
    assert not rig.admission.is_full() and rig.admission.pending_bytes == 0


@pytest.mark.req("R-321")
async def test_a_crowd_that_waits_for_room_is_told_of_it_a_few_at_a_time(rig):
    told: list[Peer] = []

    class Waiting(Peer):
        def room_again(self) -> None:
            told.append(self)
            if len(told) == 15:
                rig.admission.pending_bytes += 2**40  # those told so far have filled the room

    crowd = [Waiting() for _ in range(20)]
    for peer in crowd:
        rig.admission.hold(peer)
    rig.admission.release(crowd[0])
    rig.admission._slices.seconds = 0.0  # a turn of the loop has time for one of them
    one = Peer()
    rig.publish(one, tampered(made(1)), "ends")
    await rig.answers(one, 1)
    for turn in range(1, 100):
        assert len(told) <= 2 * turn + 2
        await asyncio.sleep(0)
    assert told == crowd[1:16]
    rig.admission.pending_bytes -= 2**40
    rig.publish(one, tampered(made(2)), "ends")
    await rig.answers(one, 2)
    for _ in range(100):
        await asyncio.sleep(0)
    assert told == crowd[1:] and not rig.admission._held.members


@pytest.mark.req("R-192")
async def test_a_batch_of_one_session_is_answered_in_full(rig):
    # Two verdicts of one lane in one batch of the pool: the first removes both from the lane.
    peers = [Peer() for _ in range(4)]
    for number in range(200):
        rig.publish(peers[number % 4], made(number), str(number))
    await rig.until(lambda: sum(len(peer.answers) for peer in peers) == 200)
    assert rig.admission.pending == 0
    assert rig.admission.pending_bytes == 0


@pytest.mark.req("R-110", "R-111")
async def test_two_sessions_publish_one_packet_at_once_and_both_get_ok(rig):
    one, two = Peer(), Peer()
    raw = made(1)
    rig.publish(one, raw, "a")
    rig.publish(two, raw, "b")
    await rig.until(lambda: len(one.answers) + len(two.answers) == 2)
    assert sorted([*one.answers, *two.answers], key=lambda a: a[1]) in (
        [("b", "duplicate"), ("a", "ok")],
        [("a", "duplicate"), ("b", "ok")],
    )
    assert len(rig.log.stored) == 1


@pytest.mark.req("R-184")
@pytest.mark.parametrize("fault", ["blocked", "stale", "signature"])
async def test_a_duplicate_is_ok_whatever_a_later_check_would_say(rig, fault):
    peer = Peer()
    stale = fault == "stale"
    raw = made(1, timestamp=NOW - 99_999 if stale else NOW)
    digest = packets.Packet.parse(raw).digest
    rig.log.stored[digest] = (1, NOW - 50)  # known to the index, but not in this process's memory
    if fault == "blocked":
        rig.admission.policy = blocking(ALICE)
    if fault == "signature":
        raw = tampered(raw)
    rig.publish(peer, raw, "m")
    await rig.until(lambda: len(peer.answers) == 1)
    assert peer.answers == [("m", "duplicate")]


@pytest.mark.req("R-112", "R-184")
async def test_a_known_id_over_another_body_is_refused(rig):
    peer = Peer()
    raw = made(1)
    rig.publish(peer, raw, "first")
    await rig.until(lambda: len(peer.answers) == 1)
    rig.publish(peer, raw.replace(b'"number":1', b'"number":2'), "second")
    await rig.until(lambda: len(peer.answers) == 2)
    assert peer.answers == [("first", "ok"), ("second", ErrorCode.INVALID_SIGNATURE)]


@pytest.mark.req("R-030", "R-182")
async def test_a_bad_signature_reaches_neither_log_nor_memory(rig):
    peer = Peer()
    raw = made(1)
    rig.publish(peer, tampered(raw), "bad")
    await rig.until(lambda: len(peer.answers) == 1)
    assert peer.answers == [("bad", ErrorCode.INVALID_SIGNATURE)]
    assert not rig.log.stored
    rig.publish(peer, raw, "good")
    await rig.until(lambda: len(peer.answers) == 2)
    assert peer.answers[1] == ("good", "ok")


@pytest.mark.req("R-200")
async def test_a_refusal_needs_no_database(rig):
    rig.log.down = True
    peer = Peer()
    rig.publish(peer, made(1, timestamp=NOW - 99_999), "m")
    await rig.until(lambda: len(peer.answers) == 1)
    assert peer.answers == [("m", ErrorCode.TIMESTAMP_TOO_OLD)]


@pytest.mark.req("R-321")
async def test_a_packet_of_too_many_values_is_refused_before_it_is_read(rig, monkeypatch):
    peer = Peer()
    monkeypatch.setattr(canonical, "_decode", None)
    rig.publish(peer, b'{"content":[' + b"1e-9," * 32_768 + b"1]}", "m")
    await rig.until(lambda: len(peer.answers) == 1)
    assert peer.answers == [("m", ErrorCode.INVALID_SCHEMA)]
    assert peer.errors["m"].detail == "too_many_values"


@pytest.mark.req("R-121", "R-122")
@pytest.mark.parametrize("type_", ["KEY_EVENT", "CLIENT_MANIFEST", "RELAY_DESCRIPTOR"])
async def test_packets_that_are_kept_for_ever_have_a_size_limit_of_their_own(rig, type_):
    peer = Peer()
    rig.publish(peer, signed(ALICE, {"type": type_, "event": "NOTE", "x": "x" * 17_000}), "m")
    assert await rig.answers(peer, 1) == [("m", ErrorCode.PACKET_TOO_LARGE)]
    assert peer.errors["m"].max_bytes == 16_384


async def test_a_chain_has_room_for_so_many_bytes_and_for_a_revocation(rig):
    peer = Peer()
    ids = method_id(ALICE.did)
    for n in range(66):
        note = {"type": "KEY_EVENT", "event": "NOTE", "key_id": ids, "x": "x" * 15_900, "n": n}
        rig.now = NOW + n
        rig.publish(peer, signed(ALICE, note, timestamp=NOW + n), str(n))
        answers = await rig.answers(peer, n + 1)
    assert answers[-1] == ("65", ErrorCode.POLICY_REJECTED)
    assert peer.errors["65"].detail == "too_many_key_bytes"
    rig.publish(peer, signed(ALICE, revoke_content(ids, revoked_at=NOW + 70), timestamp=NOW + 65), "revoke")
    assert (await rig.answers(peer, 67))[-1] == ("revoke", "ok")


async def test_a_chain_that_another_process_fills_meanwhile_has_no_room(rig):
    def note(n: int) -> Packet:
        content = {"type": "KEY_EVENT", "event": "NOTE", "key_id": method_id(ALICE.did), "n": n}
        return signed(ALICE, content | {"x": "x" * 15_900}, timestamp=NOW + n)

    peer = Peer()
    for rig.now in range(NOW, NOW + 63):
        rig.publish(peer, note(rig.now - NOW), str(rig.now))
        await rig.answers(peer, rig.now - NOW + 1)
    rig.now += 1
    rig.publish(peer, note(64), "last")
    await rig.queued(1)
    rig.elsewhere(note(65))
    assert (await rig.answers(peer, 64))[-1] == ("last", ErrorCode.POLICY_REJECTED)
    assert peer.errors["last"].detail == "too_many_key_bytes"


async def test_only_packets_that_cost_little_are_read_on_the_loop(rig, monkeypatch):
    read_on: list[threading.Thread] = []

    def noted(packet: Packet, policy: Policy, now: int, **age: Any) -> None:
        read_on.append(threading.current_thread())
        weigh(packet, policy, now, **age)

    monkeypatch.setattr("relayd.admission.check_runner.weigh", noted)
    peer = Peer()
    texts: list[dict[str, object]] = [{"text": "x" * 4000}, {"list": [1.5] * 600}, {"text": "x" * 20_000}]
    for number, content in enumerate(texts):
        rig.publish(peer, signed(ALICE, {"type": "POST", **content}), f"m{number}")
        await rig.until(lambda: len(peer.answers) == len(read_on) == number + 1)  # noqa: B023
    assert [thread is threading.main_thread() for thread in read_on] == [True, False, False]


@pytest.mark.req("R-192", "R-199", "R-200")
async def test_a_fault_of_ours_is_one_internal_error(rig, monkeypatch):
    def broken(*_: object) -> bool:
        raise RuntimeError("secret detail")

    monkeypatch.setattr("relayd.admission.checks.verify_signature", broken)
    peer, other = Peer(), Peer()
    rig.publish(peer, made(1), "m")
    rig.publish(other, b"{}", "n")
    await rig.until(lambda: len(peer.answers) + len(other.answers) == 2)
    assert peer.answers == [("m", ErrorCode.INTERNAL_ERROR)]
    assert other.answers == [("n", ErrorCode.INVALID_SCHEMA)]


async def test_a_repeat_needs_no_signature_check(rig, monkeypatch):
    peer = Peer()
    rig.publish(peer, made(1), "first")
    await rig.until(lambda: len(peer.answers) == 1)
    monkeypatch.setattr("relayd.admission.checks.verify_signature", None)
    rig.publish(peer, made(1), "again")
    await rig.until(lambda: len(peer.answers) == 2)
    assert peer.answers == [("first", "ok"), ("again", "duplicate")]
    assert len(rig.log.lookups) == 1


@pytest.mark.req("R-189")
async def test_what_only_the_process_remembers_is_no_duplicate(rig):
    peer = Peer()
    rig.publish(peer, made(1), "first")
    await rig.until(lambda: len(peer.answers) == 1)
    rig.log.stored.clear()  # an older copy of the database was restored
    for name, down in (("again", False), ("later", True)):
        rig.log.down = down
        rig.publish(peer, made(1), name)
        await rig.until(lambda: peer.answers[-1][0] == name)  # noqa: B023
    # Not even if the index cannot be queried: then the writer finds out.
    assert peer.answers == [("first", "ok"), ("again", "ok"), ("later", "duplicate")]
    assert len(rig.log.received) == 3
    rig.publish(peer, tampered(made(1)), "tampered")
    rig.log.stored.clear()
    await rig.until(lambda: len(peer.answers) == 4)
    assert peer.answers[-1] == ("tampered", ErrorCode.INVALID_SIGNATURE)


KINDS = ("good", "repeat", "large", "tampered", "wrong_id", "stale", "blocked", "garbage")
BOB = Identity(bytes(32))


def _raw(kind: str, number: int) -> bytes:
    match kind:
        case "repeat":
            return made(0)
        case "large":
            return made(number, padding=20_000)
        case "tampered":
            return tampered(made(number))
        case "wrong_id":
            return made(number).replace(b'"type":"POST"', b'"type":"PAST"')
        case "stale":
            return made(number, timestamp=NOW - 99_999)
        case "blocked":
            return made(number, author=BOB)
        case "garbage":
            return b'{"packet_id":7}'
    return made(number)


@pytest.mark.slow
@pytest.mark.req("R-133", "R-192")
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from(KINDS)), max_size=25))
def test_any_mixture_from_any_sessions_gets_one_answer_each_in_order_of_acceptance(script):
    async def main() -> None:
        rig = Rig()
        rig.admission.policy = blocking(BOB)
        peers = [Peer() for _ in range(3)]
        for number, (peer, kind) in enumerate(script):
            rig.publish(peers[peer], _raw(kind, number), str(number))
        await rig.until(lambda: sum(len(peer.answers) for peer in peers) == len(script))
        for index, peer in enumerate(peers):
            sent = [str(number) for number, (owner, _) in enumerate(script) if owner == index]
            assert sorted(name or "" for name, _ in peer.answers) == sorted(sent)
            stored = [int(name or "") for name, what in peer.answers if what == "ok"]
            assert stored == sorted(stored)
        kinds = {str(number): kind for number, (_, kind) in enumerate(script)}
        answers = {name or "": what for peer in peers for name, what in peer.answers}
        expected = {
            "tampered": ErrorCode.INVALID_SIGNATURE,
            "wrong_id": ErrorCode.INVALID_SIGNATURE,
            "stale": ErrorCode.TIMESTAMP_TOO_OLD,
            "blocked": ErrorCode.BLOCKED_AUTHOR,
            "garbage": ErrorCode.INVALID_SCHEMA,
        }
        for name, kind in kinds.items():
            if kind not in expected:
                assert answers[name] in ("ok", "duplicate")
            elif name == "0" and answers[name] == "duplicate":
                # It has the id of every repeat, and one of these reached the log before it was judged.
                assert kind in ("tampered", "wrong_id")
                assert "repeat" in kinds.values()
            else:
                assert answers[name] == expected[kind]
        assert (rig.admission.pending, rig.admission.pending_bytes) == (0, 0)
        await rig.close()

    asyncio.run(main())


@pytest.mark.req("R-214", "R-242")
@pytest.mark.parametrize("first", ["good", "tampered"])
async def test_what_leaves_the_lane_with_others_of_its_batch_has_met_every_check(first):
    """The threads have finished a whole batch before the loop has looked at its first packet."""
    asked: list[str] = []

    async def plugin(request: PolicyRequest) -> None:
        asked.append(request.packet.packet_id)

    for plugins in (Plugins(), Plugins({"asked": plugin})):
        rig, peer = Rig(plugins=plugins, budgets={TrustAct.STRONG_EDGES: 1}), Peer()
        edge = {"type": "TRUST_EDGE", "from": ALICE.did, "to": BOB.did, "strength": 0.9, "created_at": NOW}
        rig.publish(peer, _raw(first, 1), "first")
        rig.publish(
            peer, signed(ALICE, {"type": "POST"}, provenance_header={"origin_type": "AI_MODEL"}), "origin"
        )
        for number in range(3):
            rig.publish(peer, signed(ALICE, {**edge, "number": number}), f"edge {number}")
        good = made(2)
        rig.publish(peer, good, "good")
        answers = dict(await rig.answers(peer, 6))
        assert answers["origin"] == ErrorCode.MISSING_PROOF
        assert [answers[f"edge {number}"] for number in range(3)].count("ok") == 1
        assert answers["good"] == "ok"
        await rig.close()
    assert packets.Packet.parse(good).packet_id in asked


@pytest.mark.req("R-133")
async def test_a_plug_in_hears_who_the_session_was_when_it_sent_the_packet():
    """The AUTH that follows a PUBLISH may be done before the packet has been judged."""
    asked: dict[object, str | None] = {}

    async def plugin(request: PolicyRequest) -> None:
        asked[request.packet.content["number"]] = request.identity

    rig, peer = Rig(plugins=Plugins({"asked": plugin})), Peer()
    rig.publish(peer, made(1, padding=20_000), "before")  # large, so it goes to a thread
    peer.lane.identity = ALICE.did
    rig.publish(peer, made(2), "after")
    await rig.answers(peer, 2)
    assert asked == {1: None, 2: ALICE.did}
    await rig.close()
