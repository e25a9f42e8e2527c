"""ECDSA over P-256, the signatures of secure hardware. Needs `cryptography`, so it is imported on demand."""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

try:
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.asymmetric.utils import encode_dss_signature
except ImportError as error:
    raise ImportError(
        "keys of secure hardware need a further library: pip install strata-sdk[provenance]"
    ) from error

__all__ = ["verify_p256"]

_COORDINATE_BYTES = 32


def verify_p256(point: bytes, message: bytes, signature: bytes) -> bool:
    """Whether `signature` is an ECDSA signature by this key over SHA-256 of `message`.

    `signature` is r ‖ s, of 32 bytes each; `point` is the key in SEC1 form, compressed or not.
    """
    if len(signature) != 2 * _COORDINATE_BYTES:
        return False
    r = int.from_bytes(signature[:_COORDINATE_BYTES], "big")
    s = int.from_bytes(signature[_COORDINATE_BYTES:], "big")
    try:
        key = ec.EllipticCurvePublicKey.from_encoded_point(ec.SECP256R1(), point)
        key.verify(encode_dss_signature(r, s), message, ec.ECDSA(hashes.SHA256()))
    except (ValueError, InvalidSignature):
        return False
    return True
