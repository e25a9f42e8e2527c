"""The checks that depend on a packet's `content.type`: those of relay.md §14 and no more (R-039).

A packet of a type without rules here is stored and served unchanged (R-038). Targets need not be known:
whether a packet is admitted must not depend on what arrived before it (R-253, A-093).
"""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NoReturn
from urllib.parse import urlsplit

from strata.protocol import canonical, fields, ids
from strata.protocol.canonical import DEEPEST
from strata.protocol.errors import ErrorCode, InvalidPacket
from strata.protocol.packets import Packet
from strata.protocol.provenance.manifest import CLIENT_MANIFEST, check_manifest

__all__ = [
    "attestation_signature_holds",
    "check_content",
    "has_checks",
    "trust_strength",
]

_Keys = Sequence[bytes]

DESCRIPTOR_VERSION = 1


def check_content(packet: Packet, author_keys: _Keys = ()) -> None:
    """Check the content of a packet whose signature has been verified (R-030).

    `author_keys` are the author's Ed25519 keys that are valid now; without keys, signatures inside the
    content are not verified. Raises `InvalidPacket`: `invalid_schema` with the faulty member as `detail`, or
    `invalid_signature` for the inner signature of an attestation.
    """
    check = _CHECKS.get(packet.content_type)
    if check is not None:
        check(packet, author_keys)


def has_checks(packet: Packet) -> bool:
    """Whether `check_content` has rules for packets of this type."""
    return packet.content_type in _CHECKS


def trust_strength(packet: Packet) -> float | None:
    """The strength of a TRUST_EDGE, which is taken from its author's budget (R-242); None for other packets.

    A revocation takes nothing from a budget and returns nothing to it.
    """
    if packet.content_type != "TRUST_EDGE":
        return None
    return fields.number(packet.content.get("strength"))


def attestation_signature_holds(attestation: dict[str, object], keys: _Keys) -> bool:
    """Whether the inner signature of an attestation object is by one of these keys (R-254; vector V6)."""
    signature = fields.hex_bytes(attestation.get("signature"), ids.SIGNATURE_BYTES)
    if signature is None:
        return False
    signed = {name: member for name, member in attestation.items() if name != "signature"}
    return _verifies(canonical.encode(signed, max_depth=DEEPEST), signature, keys)


def _check_trust_edge(packet: Packet, keys: _Keys) -> None:
    content = packet.content
    _same_author(packet, "from")
    strength = trust_strength(packet)
    if strength is None or not 0 <= strength <= 1:
        _refuse("strength is not a number from 0 to 1", "strength")
    if not _is_did(content.get("to")):
        _refuse("to is not a DID", "to")
    if content.get("edge_signature") is not None:
        _check_edge_signature(packet, keys)


def _check_edge_signature(packet: Packet, keys: _Keys) -> None:
    """R-240, A-031: the signature covers the packet without `packet_id`, `signature` and `edge_signature`."""
    signature = fields.hex_bytes(packet.content["edge_signature"], ids.SIGNATURE_BYTES)
    signed = canonical.without(packet.signed_bytes, "content", "edge_signature")
    if signature is None or (keys and not _verifies(signed, signature, keys)):
        _refuse("edge_signature is not the author's over this packet", "edge_signature")


def _check_trust_revocation(packet: Packet, keys: _Keys) -> None:
    _same_author(packet, "from")


def _check_correction(packet: Packet, keys: _Keys) -> None:
    _target(packet)
    if packet.content.get("action") not in ("replace", "retract"):
        _refuse("action is neither replace nor retract", "action")


def _check_attestation(packet: Packet, keys: _Keys) -> None:
    target = _target(packet)
    attestation = packet.content.get("attestation")
    if type(attestation) is not dict:
        _refuse("attestation is not an object", "attestation")
    for name in ("attestation_id", "attestor_id", "subject"):
        if type(attestation.get(name)) is not str:
            _refuse(f"attestation.{name} is not a string", name)
    if attestation["attestor_id"] != packet.author_id:
        _refuse("attestation.attestor_id is not the author", "attestor_id")
    if attestation.get("target_packet") != target:
        _refuse("attestation.target_packet is not content.target_packet", "target_packet")
    confidence = fields.number(attestation.get("confidence"))
    if confidence is None or not 0 <= confidence <= 1:
        _refuse("attestation.confidence is not a number from 0 to 1", "confidence")
    if fields.integer(attestation.get("issued_at")) is None:
        _refuse("attestation.issued_at is not an integer", "issued_at")
    signature = fields.hex_bytes(attestation.get("signature"), ids.SIGNATURE_BYTES)
    if signature is None:
        _refuse("attestation.signature is not 0x and 128 hex digits", "signature")
    signed = canonical.part(packet.canonical, "content", "attestation") or b""
    if keys and not _verifies(canonical.without(signed, "signature"), signature, keys):
        raise InvalidPacket(
            ErrorCode.INVALID_SIGNATURE,
            "the signature of the attestation is not the attestor's",
            detail="attestation_signature",
        )


def _check_metric(packet: Packet, keys: _Keys) -> None:
    _same_author(packet, "source_id")
    _target(packet)
    if type(packet.content.get("metrics")) is not dict:
        _refuse("metrics is not an object", "metrics")


def _check_config(packet: Packet, keys: _Keys) -> None:
    content = packet.content
    if content.get("config_type") == "REPLICATION_POLICY_V1":
        _same_author(packet, "relay_id")
    scope = content.get("scope")
    if scope == "SERVICE_CONFIG":
        _same_author(packet, "provider_id")
    elif scope == "BOOTSTRAP_SNAPSHOT":
        _same_author(packet, "source_id")
        issued_at = _integer(content, "issued_at")
        if _integer(content, "expires_at") <= issued_at:
            _refuse("expires_at is not after issued_at", "expires_at")


def _check_descriptor(packet: Packet, keys: _Keys) -> None:
    _same_author(packet, "relay_id")
    if fields.integer(packet.content.get("descriptor_version")) != DESCRIPTOR_VERSION:
        _refuse(f"descriptor_version is not {DESCRIPTOR_VERSION}", "descriptor_version")
    if not is_websocket_url(packet.content.get("ws_endpoint")):
        _refuse("ws_endpoint is not a ws:// or wss:// URL", "ws_endpoint")


def _check_client_manifest(packet: Packet, keys: _Keys) -> None:
    check_manifest(packet)


_CHECKS: dict[str, Callable[[Packet, _Keys], None]] = {
    "TRUST_EDGE": _check_trust_edge,
    "TRUST_REVOCATION": _check_trust_revocation,
    "CORRECTION": _check_correction,
    "ATTESTATION": _check_attestation,
    "CONSENSUS_METRIC": _check_metric,
    "CONFIG": _check_config,
    "RELAY_DESCRIPTOR": _check_descriptor,
    CLIENT_MANIFEST: _check_client_manifest,
}


def is_websocket_url(value: object) -> bool:
    """Whether the value is an absolute ws or wss URL without a fragment (RFC 6455 §3)."""
    if type(value) is not str or not value.isascii() or not value.isprintable() or " " in value:
        return False
    try:
        url = urlsplit(value)
        return url.scheme in ("ws", "wss") and bool(url.hostname) and url.port != 0 and "#" not in value
    except ValueError:  # a port that is not a number, or an unmatched bracket
        return False


def _same_author(packet: Packet, name: str) -> None:
    if packet.content.get(name) != packet.author_id:
        _refuse(f"{name} is not the author", name)


def _target(packet: Packet) -> str:
    target = packet.content.get("target_packet")
    if type(target) is not str or not fields.is_content_id(target):
        _refuse("target_packet is not a packet id", "target_packet")
    return target


def _integer(content: dict[str, object], name: str) -> int:
    value = fields.integer(content.get(name))
    if value is None:
        _refuse(f"{name} is not an integer", name)
    return value


def _is_did(value: object) -> bool:
    return type(value) is str and ids.is_did(value)


def _verifies(message: bytes, signature: bytes, keys: _Keys) -> bool:
    return any(ids.verify(key, message, signature) for key in keys)


def _refuse(reason: str, detail: str) -> NoReturn:
    raise InvalidPacket(ErrorCode.INVALID_SCHEMA, reason, detail=detail)
