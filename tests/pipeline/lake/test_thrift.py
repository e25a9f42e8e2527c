"""Thrift's compact protocol, decoded within bounds."""

from __future__ import annotations

import random
import tracemalloc

import pytest
from strata_pipeline.lake.thrift import decode

from tests.support.footers import encode

TOLD = {
    "1I": -1,
    "2L": 2**63 - 1,
    "3L": -(2**63),
    "4S": b"x" * 300,
    "5B": True,
    "6B": False,
    "7A": [{"1S": b""}] * 20,
    "8A": [True, False],
    "9A": [1, -200, 2**40],
    "26R": {"1R": {}, "2H": -(2**15), "3Y": 7},
}


def test_what_was_encoded_is_decoded_from_any_place():
    assert decode(b"before" + encode(TOLD) + b"after", 6) == (TOLD, 6 + len(encode(TOLD)))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x15",  # no number
        b"\x18\x7f\x00",  # a binary beyond the end
        b"\x19\xfc" + b"\xff" * 4 + b"\x0f",  # a list of more structs than there are bytes
        b"\x19\xf1" + b"\xff" * 4 + b"\x0f",  # and of booleans
        b"\x15\x02\x05\x02\x02\x00",  # a member twice
        b"\x14" + b"\xff\xff\x7f" + b"\x00",  # a number that is too large for its type
        b"\x16" + b"\xff" * 20 + b"\x00",  # and one without end
        b"\x17" + bytes(8) + b"\x00",  # a double
        b"\x1b\x00\x00",  # a map
        b"\x1c" * 50,  # nested without end
        b"\x19\x19" * 50,
    ],
)
def test_anything_else_is_refused(data):
    with pytest.raises(ValueError):
        decode(data)


@pytest.mark.parametrize(
    "one", [b"\x00", b"\x15\x02\x00", b"\x19\x0c\x00"], ids=["empty", "a number", "a list"]
)
def test_memory_is_bounded_before_it_is_needed(one):
    """One byte can stand for a value that takes a hundred."""
    size = 2**20 + 1
    length = bytes([size & 127 | 128, size >> 7 & 127 | 128, size >> 14])
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="more than 1,048,576 values"):
            decode(b"\x19\xfc" + length + one * size + b"\x00")
        assert tracemalloc.get_traced_memory()[1] < 2**23
    finally:
        tracemalloc.stop()


def test_whatever_the_bytes_are_they_are_decoded_or_refused():
    chance, whole = random.Random(1), encode(TOLD)
    for _ in range(3_000):
        spoiled = bytearray(whole[: chance.randrange(len(whole) + 1)])
        for _ in range(chance.choice([1, 5])):
            if spoiled:
                spoiled[chance.randrange(len(spoiled))] = chance.randrange(256)
        try:
            _, end = decode(bytes(spoiled))
        except ValueError:
            continue
        assert end <= len(spoiled)
