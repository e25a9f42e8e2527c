"""Alice: an author with a drawer full of keys, all made from small numbers."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
from strata.protocol import packets
from strata.protocol.documents import (
    DidDocument,
    RecoveryPolicy,
    VerificationMethod,
    build_document,
    method_id,
)
from strata.protocol.errors import InvalidPacket
from strata.protocol.ids import Identity
from strata.protocol.keys import (
    KeyChain,
    KeyRules,
    add_content,
    approval_content,
    document_content,
    revoke_content,
    rotate_content,
)
from strata.protocol.packets import Packet

T = 1_760_000_000
SKEW = 300
DAY = 86_400
RULES = KeyRules(clock_skew_seconds=SKEW, recovery_delay_seconds=DAY)


@cache
def key(n: int) -> Identity:
    """The n-th key, speaking for Alice. Number 0 is the one in her DID."""
    return Identity.from_seed(bytes([n]) * 32).speaking_for(ALICE)


ALICE = Identity.from_seed(bytes(32)).did


def key_id(n: int) -> str:
    """The id of the n-th key: the DID's own key is `#keys-1` (R-060)."""
    return method_id(ALICE, f"keys-{n + 1}")


@cache
def _signed(n: int, content: str, timestamp: int, nonce: str | None) -> Packet:
    return packets.build(key(n), json.loads(content), timestamp=timestamp, nonce=nonce)


def sign(n: int, content: dict[str, Any], timestamp: int = T, nonce: str | None = None) -> Packet:
    """A packet signed by Alice's n-th key; cached, because tests with thousands of chains use the same few.

    Its nonce names the key: two keys that said the same would make packets with one id.
    """
    return _signed(n, json.dumps(content), timestamp, nonce or f"by {n}")


def post(n: int, text: str = "hello") -> Packet:
    return sign(n, {"type": "POST", "text": text})


def add(by: int, new: int, *, valid_from: int = T, **extra: Any) -> Packet:
    return sign(by, add_content(key_id(new), key(new).public_key, valid_from=valid_from, **extra))


def rotate(by: int, old: int, new: int, *, valid_from: int = T, **extra: Any) -> Packet:
    content = rotate_content(
        key_id(new), key(new).public_key, replaces=key_id(old), valid_from=valid_from, **extra
    )
    return sign(by, content)


def revoke(by: int, target: int, *, revoked_at: int = T, **extra: Any) -> Packet:
    return sign(by, revoke_content(key_id(target), revoked_at=revoked_at, **extra))


def approve(by: int, event: Packet, note: str | None = None) -> Packet:
    return sign(by, approval_content(event.packet_id, approved_at=T, note=note))


def publish(by: int, document: DidDocument) -> Packet:
    return sign(by, document_content(document))


def method(n: int, **members: Any) -> VerificationMethod:
    return VerificationMethod(key_id(n), key(n).public_key, **({"valid_from": T - DAY} | members))


def document(*methods: VerificationMethod, **members: Any) -> DidDocument:
    return build_document(ALICE, methods, **({"created_at": T} | members))


def with_recovery(threshold: int | None = 2, count: int = 3, **members: Any) -> DidDocument:
    """A document in which key 0 signs and keys 11, 12, … recover."""
    methods = [method(0), *(method(11 + i, recovery=True) for i in range(count))]
    policy = None if threshold is None else RecoveryPolicy(threshold)
    return document(*methods, **({"recovery_policy": policy} | members))


def chain(*events: tuple[Packet, int], rules: KeyRules = RULES, **known: Any) -> KeyChain:
    """Alice's chain after these packets, applied one by one; each must be valid."""
    made = KeyChain.genesis(ALICE, rules=rules, **known)
    for packet, received_at in events:
        made.verify(packet, received_at)
        made = made.apply(packet, received_at)
    return made


def refused(made: KeyChain, packet: Packet, at: int, *, ingest: bool = True) -> tuple[str, str | None]:
    """The code and detail with which a chain refuses a packet; `apply` must refuse an identity packet too."""
    with pytest.raises(InvalidPacket) as verified:
        made.verify(packet, at, ingest=ingest)
    if packet.content_type != "POST" and ingest:
        with pytest.raises(InvalidPacket) as applied:
            made.apply(packet, at)
        assert (applied.value.code, applied.value.detail) == (verified.value.code, verified.value.detail)
    return str(verified.value.code), verified.value.detail


def alive(made: KeyChain, at: int) -> set[int]:
    """The numbers of the keys that may sign packets at `at`."""
    numbers = {key(n).public_key: n for n in range(32)}
    return {numbers[public_key] for public_key in made.candidates(at)}
