"""Decoding of untrusted CBOR in evidence."""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

from strata.protocol.provenance.evidence import refuse_evidence

try:
    import cbor2
except ImportError as error:
    raise ImportError(
        "platform evidence needs a further library: pip install strata-sdk[provenance]"
    ) from error

__all__ = ["MAX_CBOR_DEPTH", "decode", "decode_map"]

MAX_CBOR_DEPTH = 32


def decode(data: bytes) -> object:
    """The value of one CBOR item. Tags that have no Python type keep their number (`cbor2.CBORTag`).

    Raises `InvalidPacket` (`invalid_attestation`) if the bytes are not CBOR, nest too deeply or repeat a key.
    """
    try:
        return cbor2.loads(data, max_depth=MAX_CBOR_DEPTH, allow_duplicate_keys=False)
    except (cbor2.CBORDecodeError, ValueError, TypeError, OverflowError, RecursionError):
        refuse_evidence("the evidence is not CBOR", "malformed_evidence")


def decode_map(data: bytes) -> dict[object, object]:
    """Do as `decode`, for an item that must be a map."""
    value = decode(data)
    if type(value) is not dict:
        refuse_evidence("the evidence is not a CBOR map", "malformed_evidence")
    result: dict[object, object] = value
    return result
