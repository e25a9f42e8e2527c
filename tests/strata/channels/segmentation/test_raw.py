"""Payloads without segments, as channels of other implementations send them."""

from __future__ import annotations

from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strata.channels.segmentation import (
    PayloadTooLarge,
    Reassembled,
    Reassembler,
    Segment,
    SegmentationConfig,
    encode_segment,
    message_contents,
    message_hash,
    segment_message,
)
from strata.channels.segmentation.reassembly import whole_payload

AUTO = SegmentationConfig(segmentation="auto", segment_size_bytes=1000)
OFF = SegmentationConfig(segmentation="off", segment_size_bytes=1000)


def received(contents: list[bytes], options: SegmentationConfig) -> list[bytes]:
    reassembler = Reassembler(options)
    for number, content in enumerate(contents):
        reassembler.receive("js", f"id-{number}", content, 0)
    return [each.payload for each in reassembler.events_received() if isinstance(each, Reassembled)]


def in_a_segment(payload: bytes, digest: bytes | None = None) -> bytes:
    return encode_segment(
        Segment(entire_message_hash=digest or message_hash(payload), data_segment_count=1, payload=payload)
    )


def test_by_default_nothing_but_segments_is_sent_or_received() -> None:
    config = SegmentationConfig()
    digest, contents = message_contents(b"hello", config)
    (content,) = contents
    assert content == in_a_segment(b"hello") and digest == message_hash(b"hello")
    reassembler = Reassembler(config)
    reassembler.receive("js", "id", b"hello", 0)
    assert reassembler.events_received() == []
    assert reassembler.statistics.invalid.total() == 1


def test_auto_sends_a_small_payload_as_it_is_and_receives_both_forms() -> None:
    digest, contents = message_contents(b"hello", AUTO, request_id="r")
    assert list(contents) == [b"hello"] and digest == message_hash(b"hello")
    assert received([b"hello", in_a_segment(b"segment")], AUTO) == [b"hello", b"segment"]


def test_auto_cuts_what_is_larger_with_its_parity() -> None:
    payload = bytes(range(256)) * 10
    parity = SegmentationConfig(segmentation="auto", segment_size_bytes=1000, enable_reed_solomon=True)
    for options, pieces in ((AUTO, 3), (parity, 4)):
        digest, contents = message_contents(payload, options, request_id="r")
        made = list(contents)
        assert made == [encode_segment(each) for each in segment_message(payload, options, request_id="r")]
        assert len(made) == pieces and digest == message_hash(payload)
        assert received(made, options) == [payload]


@pytest.mark.parametrize("mode", ["off", "raw"])
def test_off_never_cuts_and_never_looks_for_segments(mode: Literal["off", "raw"]) -> None:
    options = SegmentationConfig(segmentation=mode, segment_size_bytes=1000)
    assert options == OFF and options.max_payload_bytes == 1000
    assert list(message_contents(b"x" * 1000, options)[1]) == [b"x" * 1000]
    with pytest.raises(PayloadTooLarge) as refused:
        message_contents(b"x" * 1001, options)
    assert refused.value.max_bytes == 1000
    assert received([in_a_segment(b"inside")], options) == [in_a_segment(b"inside")]


@given(
    st.one_of(
        st.binary(min_size=1, max_size=1000),
        st.builds(in_a_segment, st.binary(min_size=1, max_size=100)),
        st.builds(in_a_segment, st.binary(min_size=1, max_size=100), st.binary(min_size=32, max_size=32)),
    )
)
def test_what_auto_sends_auto_receives_even_if_it_looks_like_a_segment(payload: bytes) -> None:
    assert received(list(message_contents(payload, AUTO)[1]), AUTO) == [payload]


def test_a_segment_of_a_wrong_hash_is_a_payload_of_its_own() -> None:
    lookalike = in_a_segment(b"inside", bytes(32))
    assert received([lookalike], AUTO) == [lookalike]
    assert whole_payload(lookalike, "id", AUTO) == (lookalike, "id")
    assert whole_payload(lookalike, "id", SegmentationConfig()) is None
    assert whole_payload(in_a_segment(b"inside"), "id", OFF) == (in_a_segment(b"inside"), "id")
    assert whole_payload(in_a_segment(b"inside"), "id", AUTO) == (b"inside", None)
    assert whole_payload(b"no segment", "id", SegmentationConfig()) is None


def test_two_equal_payloads_without_segments_are_two_messages() -> None:
    reassembler = Reassembler(AUTO)
    for message_id in ("one", "two", "two"):
        reassembler.receive("js", message_id, b"ok", 0)
    found = [each for each in reassembler.events_received() if isinstance(each, Reassembled)]
    assert [each.request_id for each in found] == ["one", "two"]
    assert {each.message_hash for each in found} == {message_hash(b"ok")}


def test_a_payload_above_the_bound_is_dropped_as_a_segment_would_be() -> None:
    small = SegmentationConfig(segmentation="auto", max_segment_bytes=10)
    assert received([b"x" * 11, b"x" * 10], small) == [b"x" * 10]


def test_there_is_no_other_way() -> None:
    with pytest.raises(ValueError, match="segmentation must be one of"):
        SegmentationConfig(segmentation="sometimes")  # type: ignore[arg-type]
