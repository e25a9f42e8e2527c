"""The checks of a PUBLISH short of the signature: one fault at a time, then two at once."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any, cast

import pytest
from strata.protocol import packets
from strata.protocol.errors import ErrorCode, InvalidPacket
from strata.protocol.ids import Identity
from strata.protocol.packets import Packet

from relayd.admission.checks import judge, require_chain_room, weigh
from relayd.admission.knowledge import Known
from relayd.admission.origin import PeerOrigin
from relayd.policy import Policy
from relayd.policy.rules import Lists

NOW = 1_760_000_000
ALICE = Identity(bytes(range(32)))
MEDIA_HASH = "0x" + "ab" * 32
DAY = 86_400


def made(timestamp: int = NOW, *, expires_at: int | None = None, media: bool = False) -> Packet:
    content: dict[str, Any] = {"type": "POST", "text": "hello"}
    if media:
        content["media"] = [{"media_hash": MEDIA_HASH}]
    return packets.build(ALICE, content, timestamp=timestamp, expires_at=expires_at)


def check(packet: Packet, policy: Policy, *, max_age_seconds: int = DAY) -> None:
    weigh(packet, policy, NOW, max_age_seconds=max_age_seconds)
    judge(packet, Known(0), NOW)


def refusal(packet: Packet, policy: Policy) -> tuple[str, str | None]:
    with pytest.raises(InvalidPacket) as caught:
        check(packet, policy)
    return caught.value.code, caught.value.detail


@pytest.mark.req("R-092", "R-093", "R-095", "R-101", "R-103")
@pytest.mark.parametrize(
    ("offset", "expires_in", "code"),
    [
        (300, None, None),
        (301, None, ErrorCode.TIMESTAMP_IN_FUTURE),
        (-DAY, None, None),
        (-DAY - 1, None, ErrorCode.TIMESTAMP_TOO_OLD),
        (0, 0, None),  # served up to and including the second it names
        (0, -1, ErrorCode.PACKET_EXPIRED),
        (301, -1, ErrorCode.TIMESTAMP_IN_FUTURE),
        (-DAY - 1, -1, ErrorCode.TIMESTAMP_TOO_OLD),
    ],
)
def test_the_bounds_of_time(offset, expires_in, code):
    packet = made(NOW + offset, expires_at=None if expires_in is None else NOW + expires_in)
    if code is None:
        check(packet, Policy())
    else:
        assert refusal(packet, Policy()) == (code, None)


@pytest.mark.req("R-096")
def test_a_longer_age_limit_is_a_setting():
    old = made(NOW - 30 * 3600)
    assert refusal(old, Policy())[0] == ErrorCode.TIMESTAMP_TOO_OLD
    check(old, Policy(), max_age_seconds=2 * DAY)


@pytest.mark.req("R-185", "R-186", "R-187")
@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (Policy(Lists(blocked_authors=frozenset([ALICE.did]))), (ErrorCode.BLOCKED_AUTHOR, None)),
        (
            Policy(Lists(blocked_packet_ids=frozenset([made(media=True).packet_id]))),
            (ErrorCode.POLICY_REJECTED, "blocked_packet_id"),
        ),
        (
            Policy(Lists(blocked_media_hashes=frozenset([MEDIA_HASH]))),
            (ErrorCode.POLICY_REJECTED, "blocked_media"),
        ),
    ],
)
def test_what_the_operator_blocks(policy, expected):
    assert refusal(made(media=True), policy) == expected
    check(made(media=True), Policy())


@pytest.mark.req("R-186", "R-379")
def test_a_peer_brings_nothing_that_the_operator_blocks():
    blocked = Policy(Lists(blocked_authors=frozenset([ALICE.did])))
    origin = PeerOrigin(1, NOW, True, 7 * DAY)
    with pytest.raises(InvalidPacket) as caught:
        weigh(made(), blocked, NOW, max_age_seconds=DAY, origin=origin, witness=NOW)
    assert caught.value.code == ErrorCode.BLOCKED_AUTHOR


@pytest.mark.req("R-184")
def test_policy_comes_before_freshness_and_freshness_before_the_key():
    blocked = Policy(Lists(blocked_authors=frozenset([ALICE.did])))
    assert refusal(made(NOW + 9999), blocked)[0] == ErrorCode.BLOCKED_AUTHOR
    nameless = _with_author(made(NOW + 9999), "did:web:example.org")
    assert refusal(nameless, Policy())[0] == ErrorCode.TIMESTAMP_IN_FUTURE
    assert refusal(_with_author(made(), "did:web:example.org"), Policy()) == (
        ErrorCode.INVALID_SIGNATURE,
        "unresolved_key",
    )


def _with_author(packet: Packet, did: str) -> Packet:
    """The same packet under a DID that carries no key; the signature is not checked here."""

    class Named:
        def __init__(self) -> None:
            self.did = did

        def sign(self, message: bytes) -> bytes:
            return ALICE.sign(message)

    return packets.build(Named(), packet.content, timestamp=packet.timestamp)


@pytest.mark.parametrize("event", ["ROTATE", "REVOKE"])
def test_a_chain_that_is_full_has_room_for_a_revocation(event):
    """Someone who has stolen a key must not be able to keep it by filling the chain."""
    full = SimpleNamespace(events=[(SimpleNamespace(size_bytes=64 * 1000), 0)])
    packet = SimpleNamespace(content_type="KEY_EVENT", content={"event": event}, size_bytes=500)
    refused = contextlib.nullcontext() if event == "REVOKE" else pytest.raises(InvalidPacket)
    with refused:
        require_chain_room(cast(Any, packet), cast(Any, SimpleNamespace(chain=full)), 1000)
