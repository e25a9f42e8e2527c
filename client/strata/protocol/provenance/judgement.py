"""Whether a packet proves the origin it claims: the table of relay.md §13, in the order of A-081.

    no header, UNKNOWN           nothing to prove
    an unknown origin            served as UNKNOWN
    AI_MODEL, HARDWARE…          the proof of the claim, which refuses the packet if it fails; then as below
    SOFTWARE and those           the client attestation: if it is missing or fails, only the claim is lost

Codes by R-217: `missing_proof` for an absent member, `invalid_issuer_chain` for a chain that is not valid,
`invalid_attestation` for failed platform evidence, and otherwise `invalid_provenance`. `detail` names the
member.
"""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Final, NoReturn

from strata.protocol import canonical, fields, ids
from strata.protocol.canonical import DEEPEST
from strata.protocol.errors import ErrorCode, InvalidPacket
from strata.protocol.packets import Packet
from strata.protocol.provenance.attestation import (
    ATTESTATION_MALFORMED,
    ATTESTATION_MISSING,
    CLIENT_KEY_UNRESOLVED,
    CLIENT_REFUSED,
    CLIENT_SIGNATURE_INVALID,
    KeysOf,
    ManifestOf,
    attestation_fault,
    read_attestation,
)
from strata.protocol.provenance.chains import CertifiedChain, follow_chain, read_chain_signature
from strata.protocol.provenance.evidence import (
    MAX_EVIDENCE_BYTES,
    EvidenceClaim,
    EvidenceVerifier,
    refuse_evidence,
)
from strata.protocol.provenance.origins import AI_MODEL, HARDWARE, ORIGIN_TYPES, UNKNOWN, header_of
from strata.protocol.provenance.serving import Downgrade
from strata.protocol.provenance.trust import ProvenanceTrust, Root
from strata.protocol.provenance.verifying import SIGNATURE_BYTES, VerifyingKey

__all__ = ["REASONS", "UNKNOWN_ORIGIN_TYPE", "claim_bytes", "evidence_nonce", "judge", "needed_dids"]

UNKNOWN_ORIGIN_TYPE: Final = "unknown_origin_type"

REASONS = (
    UNKNOWN_ORIGIN_TYPE,
    ATTESTATION_MISSING,
    ATTESTATION_MALFORMED,
    CLIENT_REFUSED,
    CLIENT_KEY_UNRESOLVED,
    CLIENT_SIGNATURE_INVALID,
)
"""Every reason that a downgrade may have; usable as the label of a metric."""

_CLAIM_MEMBERS = ("genesis_media_hash", "origin_type", "device_id", "edit_history")


def needed_dids(packet: Packet) -> tuple[str, ...]:
    """The DIDs whose keys and manifests `judge` will look up: the client's, and the device's (A-022).

    Empty for a packet that claims nothing, so that most packets need no look-up.
    """
    header = header_of(packet.value)
    claimed = header.get("origin_type") if header else None
    if header is None or claimed == UNKNOWN or claimed not in ORIGIN_TYPES:
        return ()
    attestation = read_attestation(header)
    needed = [attestation.client_id] if attestation else []
    device = header.get("device_id")
    if claimed == HARDWARE and type(device) is str and ids.is_did(device):
        needed.append(device)
    return tuple(needed)


def judge(
    packet: Packet, *, now: int, trust: ProvenanceTrust, keys_of: KeysOf, manifest_of: ManifestOf
) -> Downgrade | None:
    """Check a packet's claim about its origin, at the relay's time `now` (R-202 … R-218).

    Returns None if the claim holds, or the downgrade with which the packet is accepted. Raises
    `InvalidPacket` if a high-trust claim fails its proof, or the claim is not a string. This only computes;
    the look-ups must answer without waiting.
    """
    header = header_of(packet.value)
    claimed = header.get("origin_type") if header else None
    if header is None or claimed is None or claimed == UNKNOWN:
        return None
    if type(claimed) is not str:
        _refuse(ErrorCode.INVALID_SCHEMA, "origin_type is not a string", "origin_type")
    if claimed not in ORIGIN_TYPES:
        return Downgrade(claimed, UNKNOWN, UNKNOWN_ORIGIN_TYPE)
    if claimed == AI_MODEL:
        _check_model(header, now, trust)
    elif claimed == HARDWARE:
        _check_hardware(header, now, trust, keys_of)
    fault = attestation_fault(
        packet,
        header,
        now=now,
        clock_skew_seconds=trust.clock_skew_seconds,
        refused_clients=trust.refused_clients,
        keys_of=keys_of,
        manifest_of=manifest_of,
    )
    if fault is None:
        return None
    return Downgrade(claimed, UNKNOWN, fault, drops_client_attestation=fault != ATTESTATION_MISSING)


def claim_bytes(header: Mapping[str, object]) -> bytes:
    """The claim, as the device or the issuer of a model signs it, without absent members (R-221, A-085)."""
    members = {name: header[name] for name in _CLAIM_MEMBERS if name in header}
    return canonical.encode(members, max_depth=DEEPEST)


def evidence_nonce(header: Mapping[str, object]) -> bytes:
    """The nonce of evidence in a header: SHA-256(`genesis_id` ‖ `genesis_media_hash`), both as text."""
    parts = (header.get("genesis_id"), header.get("genesis_media_hash"))
    return hashlib.sha256("".join(part for part in parts if type(part) is str).encode()).digest()


def _check_model(header: Mapping[str, object], now: int, trust: ProvenanceTrust) -> None:
    """R-214: check the chain to a model root, and a signature over the claim by a key of that chain."""
    chain = _follow(header, trust.model_roots, now, trust)
    signature = _signature(read_chain_signature(header), "issuer_signature")
    # The key may be the model's or that of an issuer above it, which could have certified another model key.
    if not _signed(header, signature, chain.keys):
        _refuse(ErrorCode.INVALID_PROVENANCE, "the issuer's signature does not verify", "issuer_signature")
    evidence = header.get("attestation_evidence")
    if type(evidence) is dict and _verifier(evidence, trust) is not None:
        _check_evidence(header, evidence, now, trust)


def _check_hardware(header: Mapping[str, object], now: int, trust: ProvenanceTrust, keys_of: KeysOf) -> None:
    """R-215: check the device's signature, by a key that a hardware maker vouches for, and the evidence."""
    device = header.get("device_id")
    if device is None:
        _refuse(ErrorCode.MISSING_PROOF, "the claim needs a device_id", "device_id")
    signature = _signature(header.get("device_signature"), "device_signature")
    chain = _follow(header, trust.hardware_roots, now, trust)
    if device != chain.subject:
        _refuse(ErrorCode.INVALID_ISSUER_CHAIN, "issuer_chain does not begin at device_id", "device_mismatch")
    key = chain.keys[0]
    known = chain.names_subject or (ids.is_did(device) and key.value in keys_of(device, now))
    if not known:
        # A certificate for another name proves nothing about this device.
        _refuse(ErrorCode.INVALID_PROVENANCE, "device_id does not resolve to a key", "unresolved_device")
    if not _signed(header, signature, (key,)):
        _refuse(ErrorCode.INVALID_PROVENANCE, "the device's signature does not verify", "device_signature")
    evidence = header.get("attestation_evidence")
    if evidence is not None:
        _check_evidence(header, evidence, now, trust)


def _follow(
    header: Mapping[str, object], roots: Sequence[Root], now: int, trust: ProvenanceTrust
) -> CertifiedChain:
    return follow_chain(
        header.get("issuer_chain"), roots, now=now, clock_skew_seconds=trust.clock_skew_seconds
    )


def _signature(value: object, name: str) -> bytes:
    if value is None:
        _refuse(ErrorCode.MISSING_PROOF, f"the claim needs {name}", name)
    signature = fields.hex_bytes(value, SIGNATURE_BYTES)
    if signature is None:
        _refuse(ErrorCode.INVALID_PROVENANCE, f"{name} is not 0x and 128 hex digits", name)
    return signature


def _signed(header: Mapping[str, object], signature: bytes, keys: tuple[VerifyingKey, ...]) -> bool:
    message = claim_bytes(header)
    return any(key.verify(message, signature) for key in keys)


def _check_evidence(header: Mapping[str, Any], evidence: object, now: int, trust: ProvenanceTrust) -> None:
    """R-222: check the evidence; without a verifier for its format it is refused."""
    members = evidence if type(evidence) is dict else {}
    verifier = _verifier(members, trust)
    if verifier is None:
        refuse_evidence("no verifier for this format of evidence is installed", "unsupported_format")
    payload = fields.base64url(members.get("payload"), MAX_EVIDENCE_BYTES)
    if not payload:
        refuse_evidence("the evidence has no payload in base64url", "malformed_evidence")
    nonce = _nonce(header, members)
    claim = EvidenceClaim(header["origin_type"], header.get("genesis_media_hash"))
    verifier.verify(payload, nonce=nonce, claim=claim, now=now)


def _verifier(evidence: Mapping[str, object], trust: ProvenanceTrust) -> EvidenceVerifier | None:
    kind = evidence.get("format")
    return trust.evidence.get(kind) if type(kind) is str else None


def _nonce(header: Mapping[str, object], evidence: Mapping[str, object]) -> bytes | None:
    """The nonce to which the evidence must be bound, or None if it states none. Refuses a wrong one."""
    if evidence.get("nonce") is None:
        return None
    expected = evidence_nonce(header)
    if fields.base64url(evidence["nonce"], len(expected)) != expected:
        refuse_evidence("the nonce is not the one of this claim", "nonce_mismatch")
    return expected


def _refuse(code: ErrorCode, reason: str, detail: str) -> NoReturn:
    raise InvalidPacket(code, reason, detail=detail)
