"""play-integrity: Google vouches that an app is the one from its store, on a sound device (R-224).

The payload is the integrity token, decrypted, as a signed JWT in its compact form. These are checked:

* the signature, under one of the configured keys and with the algorithm of that key;
* `requestDetails.nonce` (or `requestHash`) is the nonce of this claim;
* `requestDetails.requestPackageName` is an expected package, or one of the manifest;
* `appIntegrity.appRecognitionVerdict` is `PLAY_RECOGNIZED`;
* `deviceIntegrity.deviceRecognitionVerdict` reaches the configured threshold.
"""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

import enum
from collections.abc import Iterable

import msgspec

from strata.protocol import fields
from strata.protocol.provenance.evidence import EvidenceClaim, refuse_evidence

try:
    import jwt
    from cryptography.hazmat.primitives.asymmetric import ec, rsa
    from cryptography.hazmat.primitives.serialization import load_der_public_key
except ImportError as error:
    raise ImportError(
        "platform evidence needs further libraries: pip install strata-sdk[provenance]"
    ) from error

__all__ = ["DeviceVerdict", "PlayIntegrityVerifier"]

_NONCE_BYTES = 32


class DeviceVerdict(enum.IntEnum):
    """The platform's verdict on a device, the weakest first."""

    MEETS_BASIC_INTEGRITY = 1
    MEETS_DEVICE_INTEGRITY = 2
    MEETS_STRONG_INTEGRITY = 3


class PlayIntegrityVerifier:
    """Verifies play-integrity evidence.

    `keys` are the public keys of the signer (DER, SubjectPublicKeyInfo; P-256 or RSA), `packages` the names
    of the expected apps, `threshold` the weakest device verdict accepted. Raises `ValueError` for a key of
    another kind.
    """

    format = "play-integrity"

    def __init__(
        self,
        *,
        keys: Iterable[bytes],
        packages: Iterable[str] = (),
        threshold: DeviceVerdict = DeviceVerdict.MEETS_DEVICE_INTEGRITY,
    ) -> None:
        self._keys = tuple(_signing_key(der) for der in keys)
        self._packages = frozenset(packages)
        self._threshold = threshold

    def verify(self, payload: bytes, *, nonce: bytes | None, claim: EvidenceClaim, now: int) -> None:
        """Check the token as the module says. Raises `InvalidPacket` (`invalid_attestation`)."""
        if nonce is None:
            refuse_evidence("the evidence is bound to no claim", "nonce_missing")
        verdict = self._open(payload)
        request = _object(verdict, "requestDetails")
        stated = request.get("nonce") or request.get("requestHash")
        if fields.base64url(stated, _NONCE_BYTES) != nonce:
            refuse_evidence("the token was made for another claim", "nonce_mismatch")
        packages = self._packages if claim.app_ids is None else claim.app_ids
        if request.get("requestPackageName") not in tuple(packages):
            refuse_evidence("the token speaks for another app", "app_mismatch")
        if _object(verdict, "appIntegrity").get("appRecognitionVerdict") != "PLAY_RECOGNIZED":
            refuse_evidence("the app is not the one from the store", "app_not_recognized")
        device = _object(verdict, "deviceIntegrity").get("deviceRecognitionVerdict")
        labels = device if type(device) is list else [device]
        enough = [verdict.name for verdict in DeviceVerdict if verdict >= self._threshold]
        if not any(label in enough for label in labels):
            refuse_evidence("the device falls short of the threshold", "device_verdict")

    def _open(self, token: bytes) -> dict[str, object]:
        """Verify the token's signature and return its claims."""
        for key, algorithm in self._keys:
            try:
                # Only the signature: the library would judge times by its own clock.
                body = jwt.PyJWS().decode(token, key, algorithms=[algorithm])
                claims = msgspec.json.decode(body)
            except (jwt.PyJWTError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ValueError):
                continue
            if type(claims) is dict:
                return claims
        refuse_evidence("the token is not signed by a known key", "token_signature")


def _signing_key(der: bytes) -> tuple[ec.EllipticCurvePublicKey | rsa.RSAPublicKey, str]:
    """A key and the only algorithm for it: the token must not choose how it is checked."""
    key = load_der_public_key(der)
    if isinstance(key, ec.EllipticCurvePublicKey) and isinstance(key.curve, ec.SECP256R1):
        return key, "ES256"
    if isinstance(key, rsa.RSAPublicKey):
        return key, "RS256"
    raise ValueError("a signer of integrity tokens has a P-256 or RSA key")


def _object(members: dict[str, object], name: str) -> dict[str, object]:
    value = members.get(name)
    if type(value) is not dict:
        refuse_evidence(f"the token has no {name}", "malformed_evidence")
    result: dict[str, object] = value
    return result
