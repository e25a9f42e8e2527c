"""SDS-R: times and groups by hashes, and the two buffers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strata.channels.sds import HistoryEntry, Participant, SdsConfig, SdsMessage
from strata.channels.sds.repair import (
    RepairBuffers,
    eligible,
    hash64,
    request_offset,
    response_groups,
    response_offset,
)

ROOT = Path(__file__).parents[4]
VECTORS = json.loads((ROOT / "docs/requirements/vectors/sds_js.json").read_text())["repair_numbers"]["values"]
W3_ID = "5e44db411d8182597dfe499092c836ecb77603aead6fc6ed34ec4f2d082d085b"


@pytest.mark.req("C-155", "C-156", "C-157", "C-158")
def test_the_numbers_of_the_document() -> None:
    assert hash64("bob", W3_ID) == 15720092810659242141
    assert request_offset("bob", W3_ID, 30_000, 300_000) == 192_141
    assert hash64("bob") ^ hash64("alice") == 12280807185182410357
    assert response_offset("bob", "alice", W3_ID, 300_000) == 188_069
    assert response_offset("alice", "alice", W3_ID, 300_000) == 0
    assert eligible("bob", "alice", W3_ID, 1)
    assert not eligible("bob", "alice", W3_ID, 2)
    assert not eligible("bob", "alice", W3_ID, 3)
    assert [hash64(who, W3_ID) % 2 for who in ("bob", "alice")] == [1, 0]


@pytest.mark.req("C-156", "C-157", "C-158")
@pytest.mark.parametrize("vector", VECTORS)
def test_the_numbers_of_the_javascript_package(vector: dict[str, Any]) -> None:
    own, sender, message = vector["participant_id"], vector["sender_id"], vector["message_id"]
    config = vector["repair_config"]
    t_min, t_max = config.get("tMin", 30_000), config.get("tMax", 120_000)
    assert request_offset(own, message, t_min, t_max) == vector["t_req_offset_ms"]
    assert response_offset(own, sender, message, t_max) == vector["t_resp_offset_ms"]
    groups = config.get("numResponseGroups", 1)
    assert eligible(own, sender, message, groups) == vector["in_response_group"]


@pytest.mark.req("C-147")
@pytest.mark.parametrize(("participants", "groups"), [(1, 1), (127, 1), (128, 2), (255, 2), (256, 3)])
def test_groups_by_expected_participants(participants: int, groups: int) -> None:
    assert response_groups(participants) == groups


@pytest.mark.req("C-158")
@given(st.text(max_size=9), st.text(min_size=1, max_size=9), st.text(max_size=9), st.integers(1, 9))
def test_a_message_is_its_senders_to_answer_for_and_that_of_a_group(
    own: str, sender: str, message: str, groups: int
) -> None:
    assert eligible(sender, sender, message, groups)
    same = hash64(own, message) % groups == hash64(sender, message) % groups
    assert eligible(own, sender, message, groups) == same


@pytest.mark.req("C-161")
def test_without_a_sender_only_a_single_group_answers() -> None:
    assert eligible("bob", None, W3_ID, 1)
    assert not any(eligible(f"bob {number}", None, W3_ID, 2) for number in range(20))


def wanted(buffers: RepairBuffers, count: int) -> list[str]:
    ids = [f"missing {number}" for number in range(count)]
    for message_id in ids:
        buffers.want(HistoryEntry(message_id), 0)
    return sorted(ids, key=lambda each: request_offset("bob", each, 30_000, 120_000))


@pytest.mark.req("C-143", "C-148")
def test_requests_go_out_three_at_a_time_in_the_order_of_their_times() -> None:
    buffers = RepairBuffers("bob", SdsConfig())
    order = wanted(buffers, 5)
    assert buffers.take_requests(29_999) == ()
    first = buffers.take_requests(120_000)
    assert [entry.message_id for entry in first] == order[:3]
    assert [entry.message_id for entry in buffers.take_requests(120_000)] == order[3:]


@pytest.mark.req("C-150")
def test_a_request_is_made_again_until_the_message_comes() -> None:
    buffers = RepairBuffers("bob", SdsConfig())
    (message_id,) = wanted(buffers, 1)
    assert len(buffers.take_requests(120_000)) == 1
    assert buffers.take_requests(120_001) == ()
    assert len(buffers.take_requests(240_000)) == 1
    buffers.received(message_id)
    assert buffers.take_requests(10**9) == ()


@pytest.mark.req("C-153")
def test_what_another_asks_for_need_not_be_asked_for() -> None:
    buffers = RepairBuffers("bob", SdsConfig())
    (message_id,) = wanted(buffers, 1)
    assert buffers.asked_by_other(message_id, 10)
    assert message_id not in buffers.requests
    assert buffers.take_unanswered(120_009) == []
    assert buffers.take_unanswered(120_010) == [message_id]


def test_an_answer_is_given_once_until_anybody_may_ask_again() -> None:
    buffers = RepairBuffers("alice", SdsConfig())
    assert buffers.answer(W3_ID, "alice", "alice", 0)
    assert not buffers.answer(W3_ID, "alice", "alice", 0)
    assert buffers.take_responses(0) == [W3_ID]
    assert not buffers.answer(W3_ID, "alice", "alice", 29_999)
    assert buffers.answer(W3_ID, "alice", "alice", 30_000)


@pytest.mark.req("C-095")
def test_both_buffers_are_bounded_and_repair_can_be_off() -> None:
    buffers = RepairBuffers("bob", SdsConfig(max_repair_buffer=2))
    wanted(buffers, 9)
    assert len(buffers.requests) == 2
    assert [buffers.answer(str(number), "alice", "alice", 0) for number in range(3)] == [True, True, False]
    off = RepairBuffers("bob", SdsConfig(enable_repair=False))
    wanted(off, 1)
    assert not off.answer("m", "alice", "alice", 0)
    assert off.take_requests(10**9) == ()


@pytest.mark.req("C-143", "C-152")
def test_what_had_no_room_in_the_buffer_is_asked_for_once_there_is() -> None:
    config = SdsConfig(max_repair_buffer=2, sync_min_interval_ms=0)
    bob = Participant("room", "bob", config, now_ms=0, random=lambda: 0.5)

    def say(message_id: str, *history: str) -> None:
        entries = tuple(map(HistoryEntry, history))
        bob.receive(SdsMessage("alice", message_id, "room", 1, entries, content=b"x").encode(), 0)

    for number in range(4):
        say(f"message {number}", f"gap {number}")
    assert sorted(bob.repair_requests()) == ["gap 0", "gap 1"]
    say("gap 0")
    say("gap 1")
    bob.handle_timer(5_000)
    assert sorted(bob.repair_requests()) == ["gap 2", "gap 3"]
