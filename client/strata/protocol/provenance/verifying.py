"""Keys of devices, models and their issuers: Ed25519, as everywhere, and ECDSA P-256, as in hardware."""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from strata.protocol import ids

__all__ = ["SIGNATURE_BYTES", "VerifyingKey"]

SIGNATURE_BYTES = 64
"""The size of both kinds of signature: R ‖ S of Ed25519, r ‖ s of ECDSA (relay.md §2)."""

_UNCOMPRESSED_BYTES, _COMPRESSED_BYTES = 65, 33


@dataclass(frozen=True, slots=True)
class VerifyingKey:
    """A public key: 32 bytes for Ed25519, a point in SEC1 form for P-256."""

    algorithm: Literal["ed25519", "p256"]
    value: bytes

    @classmethod
    def ed25519(cls, value: bytes) -> VerifyingKey:
        """An Ed25519 key of 32 bytes."""
        return cls("ed25519", value)

    @classmethod
    def read(cls, text: object) -> VerifyingKey | None:
        """A key as statements spell it: `0x` and hex, or base58btc multibase for Ed25519. None otherwise."""
        if type(text) is not str or len(text) > 2 + 2 * _UNCOMPRESSED_BYTES:
            return None
        if text.startswith("z"):
            key = ids.public_key_from_did(f"did:strata:{text}") if ids.is_did(f"did:strata:{text}") else None
            return None if key is None else cls.ed25519(key)
        try:
            value = bytes.fromhex(text[2:]) if text.startswith("0x") else b""
        except ValueError:
            return None
        if len(value) == ids.PUBLIC_KEY_BYTES:
            return cls.ed25519(value)
        if len(value) in (_UNCOMPRESSED_BYTES, _COMPRESSED_BYTES):
            return cls("p256", value)
        return None

    def verify(self, message: bytes, signature: bytes) -> bool:
        """Whether `signature` (64 bytes) is a signature by this key over `message`.

        Raises `ImportError` for a P-256 key if the extra `strata-sdk[provenance]` is not installed.
        """
        if self.algorithm == "ed25519":
            return ids.verify(self.value, message, signature)
        from strata.protocol.provenance.p256 import verify_p256

        return verify_p256(self.value, message, signature)
