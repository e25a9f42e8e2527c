"""Client attestation: the software that made a packet vouches for the origin that it claims (RFC-0002 §11).

The software signs SHA-256(preimage ‖ origin_type ‖ genesis_media_hash), where the preimage is the canonical
packet without `packet_id`, `signature` and the attestation itself, and the other two are the members' text
(A-078). A failed attestation never causes the packet to be refused, only the claim to be lost (R-207).
"""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, NamedTuple, cast

from strata.protocol import canonical, fields, ids, packets
from strata.protocol.canonical import DEEPEST
from strata.protocol.packets import Packet
from strata.protocol.provenance.manifest import client_keys
from strata.protocol.provenance.origins import UNKNOWN

__all__ = [
    "ATTESTATION_MALFORMED",
    "ATTESTATION_MISSING",
    "CLIENT_KEY_UNRESOLVED",
    "CLIENT_REFUSED",
    "CLIENT_SIGNATURE_INVALID",
    "ClientAttestation",
    "KeysOf",
    "ManifestOf",
    "attest",
    "attestation_fault",
    "platform_nonce",
    "preimage",
    "read_attestation",
]

KeysOf = Callable[[str, int], tuple[bytes, ...]]
"""The Ed25519 keys that may sign for a DID at a time, newest first; empty for a DID that does not resolve."""

ManifestOf = Callable[[str], Packet | None]
"""The newest CLIENT_MANIFEST of a client's DID, or None (R-236)."""

ATTESTATION_MISSING: Final = "client_attestation_missing"
ATTESTATION_MALFORMED: Final = "client_attestation_malformed"
CLIENT_REFUSED: Final = "client_refused"
CLIENT_KEY_UNRESOLVED: Final = "client_key_unresolved"
CLIENT_SIGNATURE_INVALID: Final = "client_signature_invalid"

_is_semantic_version = re.compile(
    r"(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)(-[0-9A-Za-z.-]+)?(\+[0-9A-Za-z.-]+)?", re.ASCII
).fullmatch


class ClientAttestation(NamedTuple):
    """The members of a well-formed `client_attestation`."""

    client_id: str
    client_version: str
    signature: bytes
    platform_attestation: dict[str, object] | None


def read_attestation(header: Mapping[str, object]) -> ClientAttestation | None:
    """The header's client attestation; None if it is missing or malformed."""
    value = header.get("client_attestation")
    if type(value) is not dict:
        return None
    client_id, version = value.get("client_id"), value.get("client_version")
    signature = fields.hex_bytes(value.get("client_signature"), ids.SIGNATURE_BYTES)
    if type(client_id) is not str or not ids.is_did(client_id) or type(version) is not str or not signature:
        return None
    platform = value.get("platform_attestation")
    return ClientAttestation(client_id, version, signature, platform if type(platform) is dict else None)


def attestation_fault(
    packet: Packet,
    header: Mapping[str, object],
    *,
    now: int,
    clock_skew_seconds: int,
    refused_clients: frozenset[str],
    keys_of: KeysOf,
    manifest_of: ManifestOf,
) -> str | None:
    """Why the packet's client attestation does not hold, or None if it does (R-205 … R-207, R-231, R-232)."""
    if header.get("client_attestation") is None:
        return ATTESTATION_MISSING
    attestation = read_attestation(header)
    if attestation is None:
        return ATTESTATION_MALFORMED
    if attestation.client_id in refused_clients:
        return CLIENT_REFUSED
    manifest = manifest_of(attestation.client_id)
    keys: Iterable[bytes]
    if manifest is not None:
        keys = client_keys(manifest, now, clock_skew_seconds)
    else:
        keys = keys_of(attestation.client_id, now)  # the client's own key, if it has no manifest
    text = canonical.without(packet.signed_bytes, "provenance_header", "client_attestation")
    message = _signing_digest(text, header)
    fault = CLIENT_KEY_UNRESOLVED
    for key in keys:
        if ids.verify(key, message, attestation.signature):
            return None
        fault = CLIENT_SIGNATURE_INVALID
    return fault


def preimage(value: Mapping[str, object]) -> bytes:
    """The canonical packet without `packet_id`, `signature` and `provenance_header.client_attestation`."""
    rest = {name: member for name, member in value.items() if name not in ("packet_id", "signature")}
    header = rest.get("provenance_header")
    if type(header) is dict and "client_attestation" in header:
        rest["provenance_header"] = {
            name: member for name, member in header.items() if name != "client_attestation"
        }
    return canonical.encode(rest, max_depth=DEEPEST)


def platform_nonce(value: Mapping[str, object]) -> bytes:
    """The nonce of a platform attestation: SHA-256(preimage ‖ first `media_hash`) (R-233, A-078)."""
    content = cast("dict[str, list[dict[str, str]] | None]", value["content"])
    media = content.get("media")
    first = media[0].get("media_hash", "") if media else ""
    return hashlib.sha256(preimage(value) + first.encode()).digest()


def _signing_digest(text: bytes, header: Mapping[str, Any]) -> bytes:
    origin = header.get("origin_type") or ""
    genesis = header.get("genesis_media_hash") or ""  # null is the empty text
    return hashlib.sha256(text + origin.encode() + genesis.encode()).digest()


def attest(
    author: ids.Signer,
    client: ids.Signer,
    client_version: str,
    content: Mapping[str, object],
    *,
    timestamp: int,
    origin_type: str,
    genesis_media_hash: str | None = None,
    header: Mapping[str, object] | None = None,
    platform_attestation: Callable[[bytes], Mapping[str, object]] | None = None,
    expires_at: int | None = None,
    nonce: str | None = None,
    extra: Mapping[str, object] | None = None,
    max_bytes: int = packets.DEFAULT_MAX_PACKET_BYTES,
) -> Packet:
    """Make and sign a packet that claims an origin, with the attestation that such a claim needs (R-230).

    `client` signs as the software, `author` as the person. The client's DID becomes `client_id`, and its key
    must be in its CLIENT_MANIFEST or in the DID itself. `header` adds members of the provenance header such
    as `edit_history` or `issuer_chain`. `platform_attestation` receives the nonce (R-233) and returns the
    evidence. Raises `ValueError` for the claim UNKNOWN, which needs no attestation, and for a version that is
    not a semantic version, and `InvalidPacket` as `packets.build` does.
    """
    if origin_type == UNKNOWN:
        raise ValueError("a packet of unknown origin carries no client attestation")
    if not _is_semantic_version(client_version):
        raise ValueError("client_version is not a semantic version")
    claim = {"genesis_media_hash": None, "edit_history": [], **(header or {}), "origin_type": origin_type}
    if genesis_media_hash is not None:
        claim["genesis_media_hash"] = genesis_media_hash
    claim.pop("client_attestation", None)
    # The members as `packets.build` will write them, so that the author signs only once, at the end.
    unsigned: dict[str, object] = {
        **(extra or {}),
        "version": packets.VERSION,
        "timestamp": timestamp,
        "author_id": author.did,
        "content": dict(content),
        "provenance_header": claim,
        **({} if expires_at is None else {"expires_at": expires_at}),
        **({} if nonce is None else {"nonce": nonce}),
    }
    attestation: dict[str, object] = {
        "client_id": client.did,
        "client_version": client_version,
        "client_signature": f"0x{client.sign(_signing_digest(preimage(unsigned), claim)).hex()}",
    }
    if platform_attestation is not None:
        attestation["platform_attestation"] = dict(platform_attestation(platform_nonce(unsigned)))
    return packets.build(
        author,
        content,
        timestamp=timestamp,
        expires_at=expires_at,
        nonce=nonce,
        provenance_header={**claim, "client_attestation": attestation},
        extra=extra,
        max_bytes=max_bytes,
    )
