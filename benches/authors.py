"""Authors of every kind, and their packets: with and without key chains, with and without a proven origin."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

from strata.protocol.documents import method_id
from strata.protocol.ids import Identity
from strata.protocol.keys import KeyChain, add_content, rotate_content
from strata.protocol.packets import MINIMAL_PROVENANCE_HEADER, Packet, build, byte_hash
from strata.protocol.provenance import AI_MODEL, SOFTWARE, ProvenanceTrust, Root, VerifyingKey, attest
from strata.protocol.provenance.chains import statement
from strata.protocol.provenance.judgement import claim_bytes
from strata.protocol.provenance.manifest import ClientKey, manifest_content

from benches.load import CONTENT_TYPE, text_of

__all__ = [
    "CLIENT",
    "TRUST",
    "chain_of",
    "client_manifest",
    "crowded_chain",
    "of_model",
    "of_software",
    "of_unknown_origin",
    "sign_by_new_keys",
    "sign_key_events",
    "sign_plain",
]

_PLAIN, _FIRST_KEY, _NEW_KEY, _OTHER = range(1, 5)
_DAY = 86_400
_BETWEEN_ROTATIONS = 1000
"""In seconds; longer than the clock skew, so that only one key is alive at a time."""


def _identity(kind: int, number: int) -> Identity:
    return Identity(bytes([kind]) + number.to_bytes(31, "big"))


CLIENT, _MODEL, _MAKER, _ROOT = (_identity(_OTHER, number) for number in range(4))
TRUST = ProvenanceTrust(model_roots=(Root.of_did(_ROOT.did),), hardware_roots=(Root.of_did(_ROOT.did),))
"""Trusts the only root that is used here."""


# Crowds of authors: `functools.partial` of these functions with `authors` makes a `Signer`.


def sign_plain(first: int, count: int, *, authors: int) -> list[Packet]:
    """Packets by `authors` authors in turn, each signed with the key in the author's DID."""
    return _posts([_identity(_PLAIN, number % authors) for number in range(first, first + count)], first)


def sign_key_events(first: int, count: int) -> list[Packet]:
    """One KEY_EVENT per author: every other author adds a key, the rest replace their first key with it."""
    now = int(time.time())
    events = []
    for number in range(first, first + count):
        author = _identity(_FIRST_KEY, number)
        key = _identity(_NEW_KEY, number).public_key
        key_id = method_id(author.did, "keys-2")
        if number % 2:
            content = add_content(key_id, key, valid_from=now)
        else:
            content = rotate_content(key_id, key, replaces=method_id(author.did), valid_from=now)
        events.append(build(author, content, timestamp=now))
    return events


def sign_by_new_keys(first: int, count: int, *, authors: int) -> list[Packet]:
    """Packets by `authors` authors in turn, each signed with the author's key from `sign_key_events`."""
    numbers = [number % authors for number in range(first, first + count)]
    signers = [
        _identity(_NEW_KEY, number).speaking_for(_identity(_FIRST_KEY, number).did) for number in numbers
    ]
    return _posts(signers, first)


def _posts(signers: Sequence[Identity], first: int) -> list[Packet]:
    now, run = int(time.time()), os.urandom(8).hex()
    return [
        build(signer, {"type": CONTENT_TYPE, "text": text_of(number, run)}, timestamp=now)
        for number, signer in enumerate(signers, first)
    ]


# Single authors.


def chain_of(events: int, now: int) -> tuple[KeyChain, Packet]:
    """A chain of `events` rotations, the last one long ago, and a packet by its newest key."""
    started_at = now - events * _BETWEEN_ROTATIONS - _BETWEEN_ROTATIONS
    keys = [_identity(_FIRST_KEY, 0)]
    did = keys[0].did
    received: list[tuple[Packet, int]] = []
    for number in range(1, events + 1):
        at = started_at + number * _BETWEEN_ROTATIONS
        key = _identity(_NEW_KEY, number).speaking_for(did)
        content = rotate_content(
            method_id(did, f"keys-{number + 1}"),
            key.public_key,
            replaces=method_id(did, f"keys-{number}"),
            valid_from=at,
        )
        received.append((build(keys[-1], content, timestamp=at), at))
        keys.append(key)
    chain = KeyChain.replay(did, received)
    assert len(chain.events) == events
    return chain, _posts(keys[-1:], 0)[0]


def crowded_chain(keys: int, now: int) -> tuple[KeyChain, Packet]:
    """A chain with `keys` live keys, and a packet by the oldest, which is tried last."""
    author = _identity(_FIRST_KEY, 0)
    received = []
    for number in range(1, keys):
        at = now - _DAY + number
        key = _identity(_NEW_KEY, number).public_key
        content = add_content(method_id(author.did, f"keys-{number + 1}"), key, valid_from=at)
        received.append((build(author, content, timestamp=at), at))
    chain = KeyChain.replay(author.did, received)
    assert len(chain.candidates(now)) == keys
    return chain, _posts([author], 0)[0]


# Origins.


def of_unknown_origin(now: int) -> Packet:
    """A packet with a provenance header that claims nothing."""
    return build(
        _identity(_PLAIN, 0), _photo(), timestamp=now, provenance_header=dict(MINIMAL_PROVENANCE_HEADER)
    )


def of_software(now: int) -> Packet:
    """A packet that its client attests."""
    return _attested({}, SOFTWARE, now)


def of_model(now: int) -> Packet:
    """A packet by a model with a chain of two statements up to the root."""
    header: dict[str, Any] = {
        "origin_type": AI_MODEL,
        "genesis_media_hash": _MEDIA_HASH,
        "edit_history": [],
        "issuer_chain": [_certified(_MAKER, _MODEL, now), _certified(_ROOT, _MAKER, now, path_length=0)],
    }
    header["issuer_signature"] = f"0x{_MODEL.sign(claim_bytes(header)).hex()}"
    return _attested(header, AI_MODEL, now)


def client_manifest(now: int) -> Packet:
    """The CLIENT_MANIFEST of the client that attests packets here."""
    key = ClientKey("current", CLIENT.public_key, now - _DAY, 0)
    return build(CLIENT, manifest_content(CLIENT.did, "bench", [key]), timestamp=now)


_MEDIA_HASH = byte_hash(b"a photo")


def _photo() -> dict[str, Any]:
    return {"type": CONTENT_TYPE, "text": text_of(0, ""), "media": [{"media_hash": _MEDIA_HASH}]}


def _certified(
    issuer: Identity, subject: Identity, now: int, *, path_length: int | None = None
) -> dict[str, str]:
    key = VerifyingKey.ed25519(subject.public_key)
    return statement(
        issuer, subject.did, key, valid_from=now - _DAY, valid_until=now + _DAY, path_length=path_length
    )


def _attested(header: dict[str, Any], origin: str, now: int) -> Packet:
    return attest(
        _identity(_PLAIN, 0),
        CLIENT,
        "1.0.0",
        _photo(),
        timestamp=now,
        origin_type=origin,
        genesis_media_hash=_MEDIA_HASH,
        header=header,
    )
