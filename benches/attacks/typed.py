"""Packets of types that the relay itself interprets: identities, manifests, trust."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any, Final

from strata.protocol.ids import Identity
from strata.protocol.packets import build

from benches.attacks.attacker import Attack, Attacker, stranger
from benches.load import publish_frame

__all__ = ["ATTACKS", "key_event"]


def _signed(identity: Identity, content: Mapping[str, Any], **members: Any) -> bytes:
    made = build(
        identity, content, timestamp=int(time.time()), nonce=os.urandom(8).hex(), max_bytes=2**20, **members
    )
    return publish_frame(made.canonical)


def key_event(identity: Identity, size_bytes: int) -> bytes:
    """A KEY_EVENT that changes nothing and carries about `size_bytes` of other content."""
    content = {"type": "KEY_EVENT", "event": "NOOP", "key_id": f"{identity.did}#key-1"}
    return _signed(identity, {**content, "x": [{}] * (size_bytes // 3)})


def _edge(identity: Identity, padding: int = 0) -> bytes:
    content = {"type": "TRUST_EDGE", "from": identity.did, "to": stranger().did, "strength": 0.1}
    return _signed(identity, {**content, "x": "x" * padding})


def _revocation(identity: Identity) -> bytes:
    return _signed(identity, {"type": "TRUST_REVOCATION", "from": identity.did, "strength": "x"})


def _manifest(identity: Identity, size_bytes: int) -> bytes:
    key = {"key_id": "k", "public_key": "0x" + "5a" * 32, "valid_from": 0, "valid_until": 0}
    content = {"type": "CLIENT_MANIFEST", "client_id": identity.did, "name": "n", "public_keys": [key]}
    return _signed(identity, {**content, "x": [{}] * (size_bytes // 3)})


def _attested(client_id: str) -> bytes:
    attestation = {
        "client_id": client_id,
        "client_version": "1",
        "key_id": "k",
        "signed_at": int(time.time()),
        "signature": "0x" + "5a" * 64,
    }
    header = {"origin_type": "SOFTWARE", "edit_history": [], "client_attestation": attestation}
    return _signed(stranger(), {"type": "POST", "text": ""}, provenance_header=header, allow_unattested=True)


async def _unreadable_revocations(attacker: Attacker) -> None:
    """Revocations whose strength is not a number: the second makes the relay read the first."""
    identity = stranger()
    await attacker.open()
    attacker.prepare(_revocation(identity))
    await attacker.hear()
    while True:
        attacker.do(_revocation(identity))
        await attacker.rest()


async def _large_edges(attacker: Attacker) -> None:
    """A few large edges, then small ones: the budget check of each counts the edges before it."""
    identity = stranger()
    await attacker.open()
    for _ in range(10):
        attacker.prepare(_edge(identity, 200_000))
    while True:
        attacker.do(_edge(identity))
        await attacker.rest()


async def _large_key_events(attacker: Attacker) -> None:
    await attacker.open()
    while True:
        attacker.do(key_event(stranger(), 15_000))
        await attacker.rest()


async def _long_chains(attacker: Attacker) -> None:
    """One identity after another, with a chain of key events and then a packet by it."""
    await attacker.open()
    while True:
        identity = stranger()
        post = _signed(identity, {"type": "POST", "text": ""})
        attacker.do(b"".join(key_event(identity, 30) for _ in range(10)) + post)
        await attacker.rest()


async def _manifests(attacker: Attacker) -> None:
    """Large manifests of one client, and packets that claim to come from it."""
    client = stranger()
    await attacker.open()
    while True:
        attacker.do(_manifest(client, 15_000) + _attested(client.did))
        await attacker.rest()


async def _unknown_clients(attacker: Attacker) -> None:
    await attacker.open()
    while True:
        attacker.do(b"".join(_attested(stranger().did) for _ in range(5)))
        await attacker.rest()


async def _documents(attacker: Attacker) -> None:
    """DID documents that are too large, by unknown authors."""
    await attacker.open()
    while True:
        identity = stranger()
        methods = [{"id": f"{identity.did}#{number}", "type": "x"} for number in range(500)]
        document = {"id": identity.did, "verificationMethod": methods}
        attacker.do(_signed(identity, {"type": "DID_DOCUMENT", "document": document}))
        await attacker.rest()


ATTACKS: Final[Mapping[str, Attack]] = {
    "unreadable revocations": _unreadable_revocations,
    "large trust edges": _large_edges,
    "large key events": _large_key_events,
    "chains of key events": _long_chains,
    "manifests": _manifests,
    "unknown clients": _unknown_clients,
    "DID documents": _documents,
}
