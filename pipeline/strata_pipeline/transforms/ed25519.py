"""Ed25519 signatures in bulk, with the verdicts of `strata.protocol.ids.verify`, sooner.

An audit does little else than verify, and the library that decides everywhere is not the fastest. Another is
asked first. Whatever it does not accept, and all that the two could see differently, goes to the one that
decides (decision 121).
"""

from __future__ import annotations

from solders.pubkey import Pubkey
from solders.signature import Signature
from strata.protocol import ids

__all__ = ["verify"]

_FULL = b"\xff" * 30
"""Bytes 1 to 30 of a number from the field's order up, little-endian: of what is no canonical encoding."""


def verify(public_key: bytes, message: bytes, signature: bytes) -> bool:
    """Whether `signature` is that of `message` under `public_key`: what `ids.verify` says of them (R-025)."""
    if len(public_key) != ids.PUBLIC_KEY_BYTES or len(signature) != ids.SIGNATURE_BYTES:
        return False
    # Both refuse S beyond the order, and a key or R of small order, and both ask for R = S·B − h·A without
    # a cofactor. Only of a point that is not in its one encoding they need not think the same.
    if public_key[1:31] != _FULL and signature[1:31] != _FULL:
        told = Signature.from_bytes(signature)
        if told.verify(Pubkey.from_bytes(public_key), message):
            return True
    return ids.verify(public_key, message, signature)
