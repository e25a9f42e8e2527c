"""c2pa: a content credential, made by a camera or a generator, for the media in question (R-225).

The payload is a C2PA manifest store in JUMBF. For its active manifest, which is the last one, these are
checked:

* the claim signature (COSE_Sign1, detached, over the claim; ES256, ES384 or EdDSA) is by a certificate
  that leads to the configured trust list;
* every assertion that the claim lists is in the store, with the hash in the claim (SHA-256, 384 or 512);
* its actions say that the media was created in the way that the packet claims: by capture for
  HARDWARE_SECURE_ENCLAVE, by a trained model for AI_MODEL.

Not checked are the hard binding to the media, which takes their bytes, ingredients and older manifests, time
stamps and revocation. The certificate must be valid when the packet is judged.
"""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from strata.protocol.errors import InvalidPacket
from strata.protocol.provenance import x509 as paths
from strata.protocol.provenance.evidence import EvidenceClaim, refuse_evidence
from strata.protocol.provenance.evidence.cbor import decode, decode_map
from strata.protocol.provenance.evidence.jumbf import SuperBox, parse
from strata.protocol.provenance.origins import AI_MODEL, HARDWARE
from strata.protocol.provenance.trust import Root

try:
    import cbor2
    from cryptography import x509
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec, ed25519
    from cryptography.hazmat.primitives.asymmetric.utils import encode_dss_signature
except ImportError as error:
    raise ImportError(
        "platform evidence needs further libraries: pip install strata-sdk[provenance]"
    ) from error

__all__ = ["C2paVerifier"]

_COSE_SIGN1 = b"\xd2"
"""The tag 18, which may precede the signature."""
_ALGORITHM, _CERTIFICATES = 1, 33
_ES256, _EDDSA, _ES384 = -7, -8, -35
_HASHES = {"sha256": hashlib.sha256, "sha384": hashlib.sha384, "sha512": hashlib.sha512}
_MAX_ASSERTIONS = 256

_SOURCES = "http://cv.iptc.org/newscodes/digitalsourcetype/"
_ORIGIN_SOURCES = {
    HARDWARE: frozenset({_SOURCES + "digitalCapture", _SOURCES + "computationalCapture"}),
    AI_MODEL: frozenset(
        {_SOURCES + "trainedAlgorithmicMedia", _SOURCES + "compositeWithTrainedAlgorithmicMedia"}
    ),
}
"""How an action's `digitalSourceType` maps to the origins of a packet."""


class _Signature(NamedTuple):
    protected: bytes
    algorithm: object
    certificates: list[bytes]
    value: bytes


class C2paVerifier:
    """Verifies c2pa evidence against a trust list: the certificates (DER) of the issuers of signers."""

    format = "c2pa"

    def __init__(self, *, roots: Iterable[bytes]) -> None:
        self._roots = tuple(Root(certificate=der) for der in roots)

    def verify(self, payload: bytes, *, nonce: bytes | None, claim: EvidenceClaim, now: int) -> None:
        """Check the manifest as the module says. Raises `InvalidPacket` (`invalid_attestation`).

        The format has no nonce.
        """
        store = parse(payload)
        if not store.boxes:
            refuse_evidence("the manifest store is empty", "malformed_evidence")
        manifest = store.boxes[-1]
        text = _claim_text(manifest)
        self._check_signature(text, manifest, now)
        _check_actions(_bound_assertions(decode_map(text), manifest), claim.origin_type)

    def _check_signature(self, text: bytes, manifest: SuperBox, now: int) -> None:
        box = manifest.child("c2pa.signature")
        signature = _read_signature(box.contents.get("cbor", b"") if box else b"")
        try:
            leaf = paths.validate_path(signature.certificates, self._roots, now=now)
        except InvalidPacket as error:
            refuse_evidence(error.reason, error.detail or "certificate_path")
        # RFC 9052 §4.4: the context, the protected header, no further data, and the claim itself.
        message = cbor2.dumps(["Signature1", signature.protected, b"", text])
        if not _verify(leaf, signature, message):
            refuse_evidence("the claim is not signed by its certificate", "claim_signature")


def _claim_text(manifest: SuperBox) -> bytes:
    for label in ("c2pa.claim.v2", "c2pa.claim"):
        box = manifest.child(label)
        if box is not None and "cbor" in box.contents:
            return box.contents["cbor"]
    refuse_evidence("the manifest has no claim", "malformed_evidence")


def _read_signature(data: bytes) -> _Signature:
    value = decode(data.removeprefix(_COSE_SIGN1))
    if type(value) is not list or len(value) != 4:
        refuse_evidence("the claim signature is not a COSE_Sign1", "malformed_evidence")
    protected, unprotected, payload, signature = value
    if type(protected) is not bytes or type(signature) is not bytes or payload is not None:
        refuse_evidence("the claim signature is not a detached COSE_Sign1", "malformed_evidence")
    header: dict[object, object] = decode_map(protected)
    certificates = header.get(_CERTIFICATES)
    if certificates is None and type(unprotected) is dict:
        certificates = unprotected.get(_CERTIFICATES, unprotected.get("x5chain"))
    chain = [certificates] if type(certificates) is bytes else certificates
    if type(chain) is not list or not all(type(der) is bytes for der in chain):
        refuse_evidence("the claim signature carries no certificates", "malformed_evidence")
    return _Signature(protected, header.get(_ALGORITHM, 0), chain, signature)


def _verify(leaf: x509.Certificate, signature: _Signature, message: bytes) -> bool:
    key = leaf.public_key()
    try:
        if isinstance(key, ed25519.Ed25519PublicKey) and signature.algorithm == _EDDSA:
            key.verify(signature.value, message)
            return True
        if isinstance(key, ec.EllipticCurvePublicKey):
            digest = _curve_hash(key, signature.algorithm)
            half = len(signature.value) // 2
            if digest is None or 8 * half < key.key_size or 8 * half >= key.key_size + 8:
                return False
            r = int.from_bytes(signature.value[:half], "big")
            s = int.from_bytes(signature.value[half:], "big")
            key.verify(encode_dss_signature(r, s), message, ec.ECDSA(digest))
            return True
    except InvalidSignature:
        return False
    return False


def _curve_hash(key: ec.EllipticCurvePublicKey, algorithm: object) -> hashes.HashAlgorithm | None:
    if algorithm == _ES256 and isinstance(key.curve, ec.SECP256R1):
        return hashes.SHA256()
    if algorithm == _ES384 and isinstance(key.curve, ec.SECP384R1):
        return hashes.SHA384()
    return None


def _bound_assertions(claim: dict[object, object], manifest: SuperBox) -> Iterator[SuperBox]:
    """The assertions that the claim lists, each after its hash has been compared."""
    store = manifest.child("c2pa.assertions")
    listed: list[object] = []
    for name in ("assertions", "created_assertions", "gathered_assertions"):
        entries = claim.get(name)
        listed += entries if type(entries) is list else []
    if store is None or not 0 < len(listed) <= _MAX_ASSERTIONS:
        refuse_evidence("the claim lists no assertions", "malformed_evidence")
    for entry in listed:
        members = entry if type(entry) is dict else {}
        url, expected = members.get("url"), members.get("hash")
        label = url.rpartition("/")[2] if type(url) is str else ""
        box = store.child(label)
        algorithm = members.get("alg", claim.get("alg", "sha256"))
        make = _HASHES.get(algorithm) if type(algorithm) is str else None
        if box is None or make is None or make(box.body).digest() != expected:
            refuse_evidence("an assertion is not what the claim says", "assertion_mismatch")
        yield box


def _check_actions(assertions: Iterator[SuperBox], origin_type: str) -> None:
    """Refuse unless some action says that the media was made as the packet claims. Reads all assertions."""
    sources = _ORIGIN_SOURCES.get(origin_type, frozenset())
    found = False
    for box in assertions:
        if not box.label.startswith("c2pa.actions"):
            continue
        actions = decode_map(box.contents.get("cbor", b"")).get("actions")
        for action in actions if type(actions) is list else ():
            if type(action) is dict and action.get("action") == "c2pa.created":
                source = action.get("digitalSourceType")
                found = found or (type(source) is str and source in sources)
    if not found:
        refuse_evidence("no assertion speaks for the claimed origin", "origin_mismatch")
