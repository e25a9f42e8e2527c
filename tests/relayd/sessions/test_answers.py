"""The relay's answers, as a peer reads them."""

from __future__ import annotations

import json

import pytest
from strata.protocol.errors import ErrorCode, InvalidMessage, InvalidPacket

from relayd.access.limits import Excess
from relayd.sessions.answers import (
    closed_by_operator_payload,
    error_payload,
    frame_too_large_payload,
    limited_payload,
    missing_payload,
    ok_payload,
    read_failure_payload,
    refusal_payload,
    too_many_payload,
)


@pytest.mark.req("R-110", "R-136")
def test_the_answers_to_a_publish_that_is_stored():
    assert json.loads(ok_payload("0xab", 5, "m", duplicate=False)) == {
        "type": "OK",
        "packet_id": "0xab",
        "status": "ACCEPTED",
        "client_msg_id": "m",
        "received_at": 5,
    }
    assert json.loads(ok_payload("0xab", 5, None, duplicate=True)) == {
        "type": "OK",
        "packet_id": "0xab",
        "status": "ACCEPTED",
        "received_at": 5,
        "duplicate": True,
    }


@pytest.mark.req("R-113")
def test_the_answer_to_what_says_the_same_as_another_names_that_one():
    answer = json.loads(ok_payload("0xab", 5, None, duplicate=True, duplicate_of=b"\xcd" * 32))
    assert answer["duplicate_of"] == "0x" + "cd" * 32 and answer["duplicate"] is True


@pytest.mark.req("R-088", "R-190")
def test_what_waits_is_queued():
    assert json.loads(ok_payload("0xab", 5, None, duplicate=False, queued=True))["status"] == "QUEUED"


@pytest.mark.req("R-209")
def test_annotations_are_passed_on_to_the_letter():
    annotations = b'{"provenance":{"x":1.0,"y":"\xc3\xa9","z":[1e21,10000000000000000000000]}}'
    payload = ok_payload("0xab", 5, None, duplicate=False, annotations=annotations)
    assert b'"relay_annotations":' + annotations + b"}" in payload


@pytest.mark.req("R-195")
def test_the_answers_to_a_publish_that_is_not():
    large = InvalidPacket(ErrorCode.PACKET_TOO_LARGE, "too large", max_bytes=9)
    assert json.loads(refusal_payload(large, "m")) == {
        "type": "ERROR",
        "code": "packet_too_large",
        "reason": "too large",
        "client_msg_id": "m",
        "max_bytes": 9,
    }
    over = InvalidPacket(
        ErrorCode.RATE_LIMITED, "too many", detail="d", retry_after=7, limit=50, window_seconds=86_400
    )
    assert json.loads(refusal_payload(over, None)) == {
        "type": "ERROR",
        "code": "rate_limited",
        "reason": "too many",
        "detail": "d",
        "retry_after": 7,
        "limit": 50,
        "remaining": 0,
        "window_seconds": 86_400,
    }


@pytest.mark.req("R-195")
def test_every_error_has_a_code_and_a_reason():
    payloads = [
        error_payload(InvalidMessage("bad", detail="d", client_msg_id="m")),
        missing_payload("publish", "m"),
        limited_payload("publish", Excess(5, 60, 12), "m"),
        too_many_payload(64, "m", "s"),
        frame_too_large_payload(1024),
        read_failure_payload("s", "m"),
    ]
    for payload in payloads:
        error = json.loads(payload)
        assert error["type"] == "ERROR"
        assert error["code"] in set(ErrorCode)
        assert error["reason"]


@pytest.mark.req("R-315")
@pytest.mark.parametrize("limit", ["publish", "subscribe", "backfill", "auth"])
def test_a_limit_is_told_whole(limit):
    error = json.loads(limited_payload(limit, Excess(5, 60, 12), "m", "s"))
    assert (error["retry_after"], error["limit"], error["remaining"], error["window_seconds"]) == (
        12,
        5,
        0,
        60,
    )
    assert (error["client_msg_id"], error["subscription_id"]) == ("m", "s")


@pytest.mark.req("R-186")
def test_who_is_sent_away_by_an_operator_hears_so():
    answer = json.loads(closed_by_operator_payload())
    assert (answer["code"], answer["detail"]) == ("policy_rejected", "closed_by_operator")
    assert "operator" in answer["reason"]


@pytest.mark.req("R-122")
def test_who_is_refused_for_the_size_of_a_packet_hears_the_limit():
    error = InvalidPacket(ErrorCode.PACKET_TOO_LARGE, "too large", max_bytes=262_144)
    assert json.loads(refusal_payload(error, "m"))["max_bytes"] == 262_144
    assert json.loads(frame_too_large_payload(262_144))["max_bytes"] == 262_144
