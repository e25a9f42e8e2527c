"""The Reed–Solomon code of the `parity` extra: which one it is, and that it is pinned."""

from __future__ import annotations

import hashlib

import pytest
from strata.channels.segmentation import parity
from strata.channels.segmentation.parity import load_codec, require_codec, shard_bytes

needs_codec = pytest.mark.skipif(load_codec() is None, reason="the parity extra is not installed")


@pytest.mark.req("C-213")
@pytest.mark.parametrize(("longest", "shard"), [(1, 64), (64, 64), (65, 128), (102_400, 102_400)])
def test_shards_are_multiples_of_64_bytes(longest: int, shard: int) -> None:
    assert shard_bytes(longest) == shard


@needs_codec
@pytest.mark.req("C-213")
def test_the_parity_of_fixed_shards() -> None:
    """Recorded once: another code or another field could not read the parity that peers have stored."""
    shards = [hashlib.sha512(bytes([index])).digest() for index in range(5)]
    coded = require_codec().encode(shards, 2)
    assert [len(shard) for shard in coded] == [64, 64]
    assert (
        hashlib.sha256(b"".join(coded)).hexdigest()
        == "6e518cf5b701caad7993bde06f3d85c22907768a67fd9d9d0945b7ddcd7ac11b"
    )
    # With one data shard the code is a copy, in Leopard as in any other code of this kind.
    assert require_codec().encode(shards[:1], 1) == shards[:1]


@needs_codec
def test_too_few_shards_are_a_value_error() -> None:
    shards = [bytes([index]) * 64 for index in range(4)]
    coded = require_codec().encode(shards, 2)
    restored = require_codec().recover(4, 2, {1: shards[1], 2: shards[2]}, dict(enumerate(coded)))
    assert restored == {0: shards[0], 3: shards[3]}
    with pytest.raises(ValueError):
        require_codec().recover(4, 2, {1: shards[1]}, dict(enumerate(coded)))


@pytest.mark.req("C-213")
def test_the_documentation_says_with_whom_it_is_compatible() -> None:
    text = " ".join((parity.__doc__ or "").split())
    assert "GF(2^16)" in text and "GF(2^8)" in text and "reed-solomon-simd" in text
