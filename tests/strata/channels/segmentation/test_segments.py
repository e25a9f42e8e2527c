"""Segments as bytes: the vectors, and every rule by which one is refused."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strata.channels.segmentation import (
    InvalidSegment,
    Segment,
    SegmentationConfig,
    SegmentFault,
    decode_segment,
    encode_segment,
    message_hash,
    segment_message,
)

HELLO = Segment(
    entire_message_hash=message_hash(b"hello relay"), data_segment_count=1, payload=b"hello relay"
)
W1 = bytes.fromhex(
    "0a208b21b2b925bbac93c5c8e100229d278e1042c002b56d23934ee712f4427be8c41801220b68656c6c6f2072656c6179"
)
W2_HEAD = "0a20f8da54b5a7dd75028acb077ee61e8dde47ed37c746703ce764edf4a789eb2103"
W2_TAILS = ("1803220461626364", "10011803220465666768", "100218032202696a")


def changed(**fields: object) -> bytes:
    return encode_segment(dataclasses.replace(HELLO, **fields))  # type: ignore[arg-type]


def refused(data: bytes) -> SegmentFault:
    with pytest.raises(InvalidSegment) as caught:
        decode_segment(data)
    return caught.value.fault


@pytest.mark.req("C-187", "C-188", "C-189")
def test_vector_w1() -> None:
    assert [encode_segment(s) for s in segment_message(b"hello relay", SegmentationConfig())] == [W1]
    assert decode_segment(W1) == HELLO
    empty = "c5d2460186f7233c927e7db2dcc703c0e500b653ca82273b7bfad8045d85a470"
    assert message_hash(b"").hex() == empty


@pytest.mark.req("C-187", "C-190", "C-192")
def test_vector_w2() -> None:
    segments = list(segment_message(b"abcdefghij", SegmentationConfig(segment_size_bytes=4)))
    assert [encode_segment(segment).hex() for segment in segments] == [W2_HEAD + tail for tail in W2_TAILS]
    decoded = [decode_segment(bytes.fromhex(W2_HEAD + tail)) for tail in W2_TAILS]
    assert [(s.data_segment_index, s.data_segment_count) for s in decoded] == [(0, 3), (1, 3), (2, 3)]


@pytest.mark.req("C-187")
def test_additive_fields_have_their_numbers_and_are_optional() -> None:
    with_both = changed(request_id="r", original_length=11)
    assert with_both == W1 + bytes.fromhex("ca3e0172") + bytes.fromhex("d03e0b")
    segment = decode_segment(with_both)
    assert (segment.request_id, segment.original_length) == ("r", 11)
    plain = decode_segment(W1)
    assert (plain.request_id, plain.original_length) == (None, None)


def test_unknown_fields_are_skipped() -> None:
    assert decode_segment(W1 + bytes.fromhex("f83e01") + bytes.fromhex("5a03616263")) == HELLO


@pytest.mark.req("C-194")
@pytest.mark.parametrize("length", [0, 31, 33])
def test_hash_length(length: int) -> None:
    assert refused(changed(entire_message_hash=b"h" * length)) is SegmentFault.HASH_LENGTH


@pytest.mark.req("C-195")
def test_no_data_segments() -> None:
    assert refused(changed(data_segment_count=0)) is SegmentFault.NO_DATA_SEGMENTS


@pytest.mark.req("C-196")
def test_at_most_256_segments_are_accepted() -> None:
    decode_segment(changed(data_segment_count=256, data_segment_index=255))
    decode_segment(changed(data_segment_count=200, parity_segment_count=56))
    assert refused(changed(data_segment_count=257)) is SegmentFault.TOO_MANY_SEGMENTS
    assert refused(changed(data_segment_count=200, parity_segment_count=57)) is SegmentFault.TOO_MANY_SEGMENTS
    assert refused(changed(data_segment_count=2**32 - 1)) is SegmentFault.TOO_MANY_SEGMENTS


@pytest.mark.req("C-197")
def test_data_index_is_below_the_count() -> None:
    decode_segment(changed(data_segment_count=3, data_segment_index=2))
    for index in (3, 2**32 - 1):
        fault = refused(changed(data_segment_count=3, data_segment_index=index))
        assert fault is SegmentFault.INDEX_OUT_OF_RANGE


@pytest.mark.req("C-198")
def test_parity_index_is_below_a_count_above_zero() -> None:
    decode_segment(changed(is_parity=True, parity_segment_count=2, parity_segment_index=1))
    for count, index in ((0, 0), (2, 2)):
        data = changed(is_parity=True, parity_segment_count=count, parity_segment_index=index)
        assert refused(data) is SegmentFault.INDEX_OUT_OF_RANGE


@pytest.mark.req("C-199")
def test_roles_do_not_mix() -> None:
    both = changed(data_segment_count=3, data_segment_index=1, is_parity=True, parity_segment_count=2)
    assert refused(both) is SegmentFault.MIXED_ROLES
    assert refused(changed(parity_segment_count=2, parity_segment_index=1)) is SegmentFault.MIXED_ROLES


@pytest.mark.req("C-302")
def test_what_the_documents_do_not_bound() -> None:
    assert refused(changed(payload=b"")) is SegmentFault.NO_PAYLOAD
    decode_segment(changed(request_id="ü" * 64))
    assert refused(changed(request_id="ü" * 64 + "x")) is SegmentFault.REQUEST_ID_LENGTH
    too_short = changed(data_segment_count=3, original_length=2)
    assert refused(too_short) is SegmentFault.ORIGINAL_LENGTH


@pytest.mark.parametrize("data", [b"\xff", W1[:-1], b"\x0a\xff\xff\xff\xff\x0f", W1 + b"\xca\x3e\x01\xff"])
def test_undecodable(data: bytes) -> None:
    assert refused(data) is SegmentFault.UNDECODABLE
    assert "undecodable" in str(InvalidSegment(SegmentFault.UNDECODABLE))


@pytest.mark.req("C-302")
@given(
    st.one_of(
        st.binary(max_size=80),
        st.builds(lambda cut, tail: W1[:cut] + tail, st.integers(0, 49), st.binary(max_size=20)),
    )
)
def test_any_bytes_are_a_valid_segment_or_refused(data: bytes) -> None:
    try:
        segment = decode_segment(data)
    except InvalidSegment:
        return
    assert decode_segment(encode_segment(segment)) == segment
