"""An audit's signature checks have the same verdicts as everybody else's."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strata.protocol import ids
from strata_pipeline.transforms import ed25519

from tests.support import curve

VECTORS = json.loads(
    (Path(__file__).parents[2] / "strata/protocol/vectors.json").read_text("utf-8"),
)["ed25519"]


@pytest.mark.req("R-025")
@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: vector["name"])
def test_pinned_verdicts_hold(vector: dict[str, Any]) -> None:
    key, message, signature = (bytes.fromhex(vector[name]) for name in ("public_key", "message", "signature"))
    assert ed25519.verify(key, message, signature) is vector["valid"]


@given(st.binary(min_size=32, max_size=32), st.binary(), st.integers(0, 95), st.integers(0, 255))
def test_a_changed_byte_is_found(seed: bytes, message: bytes, place: int, bits: int) -> None:
    identity = ids.Identity(seed)
    told = bytearray(identity.public_key + identity.sign(message))
    told[place] ^= bits
    assert ed25519.verify(bytes(told[:32]), message, bytes(told[32:])) is (bits == 0)


def _at_the_edge() -> Iterator[tuple[bytes, bytes, bytes]]:
    """Keys, messages and signatures on which verifiers disagree."""
    drawn = random.Random(25)
    for _ in range(60):
        secret, nonce, message = drawn.randrange(1, 2**20), drawn.randrange(1, 2**20), drawn.randbytes(4)
        own, commitment = curve.times(secret, curve.BASE), curve.times(nonce, curve.BASE)
        for beside in (0, 4, drawn.randrange(8)):
            for under in (0, 4, drawn.randrange(8)):
                [key] = curve.encodings(curve.add(own, curve.SMALL[beside]))
                [r] = curve.encodings(curve.add(commitment, curve.SMALL[under]))
                signature = curve.signed(secret, nonce, message, key=key, r=r)
                scalar = int.from_bytes(signature[32:], "little") + curve.ORDER
                yield key, message, signature
                yield key, message, r + scalar.to_bytes(32, "little")
    small = [encoding for point in curve.SMALL for encoding in curve.encodings(point)]
    for key in small:
        for r in small:
            for scalar in (0, curve.ORDER):
                yield key, b"any", r + scalar.to_bytes(32, "little")
    [key] = curve.encodings(curve.BASE)
    for r in small:
        yield key, b"any", curve.signed(1, 0, b"any", key=key, r=r)
    for y in range(19):
        for sign in (0, 1):
            point = curve.point_at(y, sign)
            for spelling in [] if point is None else curve.encodings(point):
                yield spelling, b"any", key + bytes(32)
                yield key, b"any", spelling + bytes(32)


@pytest.mark.req("R-025")
def test_no_verdict_differs_at_the_edge_of_the_curve() -> None:
    accepted = 0
    for key, message, signature in _at_the_edge():
        verdict = ids.verify(key, message, signature)
        assert ed25519.verify(key, message, signature) is verdict, (key.hex(), message, signature.hex())
        accepted += verdict
    assert (
        accepted > 60
    )  # honest signatures, and keys with a part of small order that the message happens to miss


@pytest.mark.parametrize(("key", "signature"), [(31, 64), (33, 64), (32, 63), (32, 65), (0, 0)])
def test_wrong_lengths_fail(key: int, signature: int) -> None:
    assert not ed25519.verify(bytes(key), b"", bytes(signature))
