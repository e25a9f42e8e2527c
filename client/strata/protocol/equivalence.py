"""Packets that repeat another one: attestations, metrics, documents (RFC-0002 §8, decision A-037).

An attestation repeats another if author, `attestation_id` and target agree; a consensus metric if author,
target and `observed_at` do; a DID document if it is the same document, which is also how a document is found
by its hash. Such a packet has an **equivalence key**, which is stored in the duplicate index beside the
packet's id: the relay answers a second packet with the same key with OK, `duplicate_of` the first. The author
is part of the key of an attestation, so nobody can block another author's attestation by using its id first
(R-115).

relayd computes the key when it stores a packet, and the pipeline when it restores one. The cost is small for
any packet: the rules compare texts and numbers, and a document is hashed as it stands in the packet.
"""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

from blake3 import blake3

from strata.protocol import canonical
from strata.protocol.documents import published_document
from strata.protocol.packets import Packet

__all__ = ["EQUIVALENT_TYPES", "document_key", "equivalence_key"]

EQUIVALENT_TYPES = frozenset({"ATTESTATION", "CONSENSUS_METRIC", "DID_DOCUMENT"})
"""The only content types whose packets can have an equivalence key."""

_SIMPLE = frozenset({str, int, float, bool})

_DOMAIN = b"relayd equivalence 1\n"
"""No canonical packet begins like this, so no key can equal a packet id. Databases store keys, so this must
not change."""


def equivalence_key(packet: Packet) -> bytes | None:
    """The 32 bytes that two packets share if one repeats the other; None if no such rule applies."""
    if packet.content_type == "ATTESTATION":
        parts = _attestation(packet.content)
    elif packet.content_type == "CONSENSUS_METRIC":
        parts = [packet.content.get("target_packet"), packet.content.get("observed_at")]
    elif packet.content_type == "DID_DOCUMENT":
        return document_key(blake3(published_document(packet.canonical)).digest())
    else:
        return None
    if parts is None or not all(type(part) in _SIMPLE for part in parts):
        return None  # the rule does not fit its shape: only its id identifies it
    members = [packet.content_type, packet.author_id, *parts]
    return blake3(_DOMAIN + canonical.encode(members)).digest()


def document_key(digest: bytes) -> bytes:
    """The key under which a published DID document is found by the BLAKE3-256 of its canonical form."""
    return blake3(_DOMAIN + b"DID_DOCUMENT" + digest).digest()


def _attestation(content: dict[str, object]) -> list[object] | None:
    attestation = content.get("attestation")
    if type(attestation) is not dict:
        return None
    return [attestation.get("attestation_id"), content.get("target_packet")]
