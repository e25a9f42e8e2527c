"""apple-app-attest: a genuine Apple device vouches that its app is genuine (R-223).

The payload is the CBOR attestation object of DCAppAttestService. These are checked:

* the certificates of the statement lead to a configured App Attest root;
* the leaf's extension 1.2.840.113635.100.8.2 holds SHA-256(authData ‖ nonce), where the nonce is the
  client data hash that the app passed in, so the evidence belongs to this claim and no other;
* `rpIdHash` is SHA-256 of an expected App ID (`TEAMID.bundle.id`), or of a bundle id of the manifest;
* the counter is 0, as it is in an attestation, and the credential id is the hash of the leaf's key;
* the key was made in the expected environment, which is production unless configured otherwise.

The receipt is not checked: only Apple's servers know its risk metric.
"""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import NamedTuple

from strata.protocol.errors import InvalidPacket
from strata.protocol.provenance import x509 as paths
from strata.protocol.provenance.evidence import EvidenceClaim, refuse_evidence
from strata.protocol.provenance.evidence.cbor import decode_map
from strata.protocol.provenance.trust import Root

try:
    from cryptography import x509
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
except ImportError as error:
    raise ImportError(
        "platform evidence needs further libraries: pip install strata-sdk[provenance]"
    ) from error

__all__ = ["AppAttestVerifier"]

_NONCE_EXTENSION = x509.ObjectIdentifier("1.2.840.113635.100.8.2")
# SEQUENCE (36 bytes) { [1] EXPLICIT (34) { OCTET STRING (32) } }: DER has no other way to write it.
_NONCE_PREFIX = bytes.fromhex("3024a1220420")
_PRODUCTION = b"appattest".ljust(16, b"\x00")
_DEVELOPMENT = b"appattestdevelop"

_RP_ID_HASH = slice(0, 32)
_COUNTER = slice(33, 37)
_AAGUID = slice(37, 53)
_CREDENTIAL_LENGTH = slice(53, 55)
_CREDENTIAL_AT = 55
_CREDENTIAL_BYTES = 32


class _AuthenticatorData(NamedTuple):
    rp_id_hash: bytes
    counter: int
    environment: bytes
    credential_id: bytes


class AppAttestVerifier:
    """Verifies apple-app-attest evidence against `roots` (DER). `app_ids` are the expected App IDs.

    `development` also accepts attestations of development builds.
    """

    format = "apple-app-attest"

    def __init__(
        self, *, roots: Iterable[bytes], app_ids: Iterable[str] = (), development: bool = False
    ) -> None:
        self._roots = tuple(Root(certificate=der) for der in roots)
        self._app_ids = frozenset(app_ids)
        self._environments = {_PRODUCTION, _DEVELOPMENT} if development else {_PRODUCTION}

    def verify(self, payload: bytes, *, nonce: bytes | None, claim: EvidenceClaim, now: int) -> None:
        """Check the attestation object as the module says. Raises `InvalidPacket` (`invalid_attestation`)."""
        if nonce is None:
            refuse_evidence("the evidence is bound to no claim", "nonce_missing")
        attestation = decode_map(payload)
        statement, data = attestation.get("attStmt"), attestation.get("authData")
        foreign = attestation.get("fmt") != "apple-appattest"
        if foreign or not isinstance(statement, dict) or not isinstance(data, bytes):
            refuse_evidence("the payload is not an App Attest object", "malformed_evidence")
        authenticator = _read_authenticator_data(data)
        leaf = self._leaf(statement.get("x5c"), now)
        if _nonce_of(leaf) != hashlib.sha256(data + nonce).digest():
            refuse_evidence("the evidence was made for another claim", "nonce_mismatch")
        app_ids = self._app_ids if claim.app_ids is None else claim.app_ids
        if authenticator.rp_id_hash not in {hashlib.sha256(app.encode()).digest() for app in app_ids}:
            refuse_evidence("the evidence speaks for another app", "app_mismatch")
        if authenticator.counter != 0:
            refuse_evidence("the counter of an attestation is 0", "counter")
        if authenticator.environment not in self._environments:
            refuse_evidence("the key was made in another environment", "environment")
        if authenticator.credential_id != _key_id(leaf):
            refuse_evidence("the credential is not the attested key", "credential_mismatch")

    def _leaf(self, certificates: object, now: int) -> x509.Certificate:
        if type(certificates) is not list or not all(type(der) is bytes for der in certificates):
            refuse_evidence("the statement carries no certificates", "malformed_evidence")
        try:
            return paths.validate_path(certificates, self._roots, now=now)
        except InvalidPacket as error:
            refuse_evidence(error.reason, error.detail or "certificate_path")


def _read_authenticator_data(data: bytes) -> _AuthenticatorData:
    """The fixed part of WebAuthn's authenticator data (§6.1 there), with the attested credential."""
    if len(data) < _CREDENTIAL_AT + _CREDENTIAL_BYTES:
        refuse_evidence("authData is too short", "malformed_evidence")
    if int.from_bytes(data[_CREDENTIAL_LENGTH], "big") != _CREDENTIAL_BYTES:
        refuse_evidence("the credential id is not a hash", "malformed_evidence")
    return _AuthenticatorData(
        data[_RP_ID_HASH],
        int.from_bytes(data[_COUNTER], "big"),
        data[_AAGUID],
        data[_CREDENTIAL_AT : _CREDENTIAL_AT + _CREDENTIAL_BYTES],
    )


def _nonce_of(leaf: x509.Certificate) -> bytes | None:
    try:
        extension = leaf.extensions.get_extension_for_oid(_NONCE_EXTENSION).value
    except x509.ExtensionNotFound:
        return None
    body = extension.value if isinstance(extension, x509.UnrecognizedExtension) else b""
    return body.removeprefix(_NONCE_PREFIX) if body.startswith(_NONCE_PREFIX) else None


def _key_id(leaf: x509.Certificate) -> bytes | None:
    """SHA-256 of the leaf's public key as an uncompressed point, which is App Attest's name for the key."""
    key = leaf.public_key()
    try:
        point = key.public_bytes(Encoding.X962, PublicFormat.UncompressedPoint)
    except ValueError:  # not a key on a curve
        return None
    return hashlib.sha256(point).digest()
