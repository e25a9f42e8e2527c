"""Payloads are split as the documents specify."""

from __future__ import annotations

import pytest
from strata.channels.segmentation import (
    ParityUnavailable,
    PayloadTooLarge,
    SegmentationConfig,
    decode_segment,
    encode_segment,
    segment_counts,
    segment_message,
)
from strata.channels.segmentation.parity import load_codec

needs_codec = pytest.mark.skipif(load_codec() is None, reason="the parity extra is not installed")


@pytest.mark.req("C-190", "C-191", "C-218")
def test_default_segment_size() -> None:
    config = SegmentationConfig()
    assert segment_counts(1, config) == (1, 0)
    assert segment_counts(102_400, config) == (1, 0)
    assert segment_counts(102_401, config) == (2, 0)
    sizes = [len(segment.payload) for segment in segment_message(b"x" * 250_000, config)]
    assert sizes == [102_400, 102_400, 45_200]


@pytest.mark.req("C-196", "C-201")
def test_255_segments_are_sent_and_no_more() -> None:
    config = SegmentationConfig(segment_size_bytes=4)
    assert config.max_payload_bytes == 1020
    assert len(list(segment_message(b"x" * 1020, config))) == 255
    with pytest.raises(PayloadTooLarge) as caught:
        segment_message(b"x" * 1021, config)
    assert (caught.value.payload_bytes, caught.value.max_bytes) == (1021, 1020)
    assert "1021" in str(caught.value)


@needs_codec
@pytest.mark.req("C-196", "C-201")
def test_parity_counts_towards_the_limit() -> None:
    config = SegmentationConfig(segment_size_bytes=4, enable_reed_solomon=True)
    assert config.max_payload_bytes == 226 * 4  # 226 + ceil(28.25) = 255
    assert segment_counts(226 * 4, config) == (226, 29)
    with pytest.raises(PayloadTooLarge):
        segment_counts(226 * 4 + 1, config)


def test_what_cannot_be_sent() -> None:
    with pytest.raises(ValueError):
        segment_message(b"", SegmentationConfig())
    with pytest.raises(ValueError):
        segment_message(b"x", SegmentationConfig(), request_id="x" * 129)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("segment_size_bytes", 0),
        ("parity_rate", 0.0),
        ("parity_rate", 1.5),
        ("parity_rate", float("nan")),
        ("reassembly_timeout_ms", 0),
        ("max_partial_bytes", -1),
    ],
)
def test_settings_that_cannot_work(name: str, value: float) -> None:
    with pytest.raises(ValueError):
        SegmentationConfig(**{name: value})  # type: ignore[arg-type]


@needs_codec
@pytest.mark.req("C-193", "C-214", "C-215")
def test_fields_of_data_and_parity() -> None:
    config = SegmentationConfig(segment_size_bytes=100, enable_reed_solomon=True, parity_rate=0.5)
    segments = [
        decode_segment(encode_segment(segment))
        for segment in segment_message(b"x" * 250, config, request_id="r")
    ]
    assert [segment.index for segment in segments] == [0, 1, 2, 3, 4]
    assert {(s.data_segment_count, s.parity_segment_count, s.request_id) for s in segments} == {(3, 2, "r")}
    data, coded = segments[:3], segments[3:]
    assert [len(segment.payload) for segment in data] == [100, 100, 50]
    assert not any(s.is_parity or s.parity_segment_index or s.original_length for s in data)
    assert [(s.is_parity, s.parity_segment_index, s.data_segment_index) for s in coded] == [
        (True, 0, 0),
        (True, 1, 0),
    ]
    assert [(len(s.payload), s.original_length) for s in coded] == [(128, 250), (128, 250)]


@needs_codec
@pytest.mark.req("C-216")
@pytest.mark.parametrize(
    ("data", "rate", "parity_count"),
    [(1, 0.125, 1), (8, 0.125, 1), (9, 0.125, 2), (100, 0.07, 7), (10, 1.0, 10), (1, 0.001, 1)],
)
def test_parity_is_rounded_up(data: int, rate: float, parity_count: int) -> None:
    config = SegmentationConfig(segment_size_bytes=64, enable_reed_solomon=True, parity_rate=rate)
    assert segment_counts(data * 64, config) == (data, parity_count)


@pytest.mark.req("C-212")
def test_parity_is_off_by_default() -> None:
    assert SegmentationConfig().enable_reed_solomon is False
    assert SegmentationConfig().parity_rate == 0.125


@pytest.mark.req("C-213")
def test_parity_without_its_library_is_refused_at_creation(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ImportError(name)

    load_codec.cache_clear()
    try:
        with monkeypatch.context() as patch:
            patch.setattr("strata.channels.segmentation.parity.importlib.import_module", missing)
            with pytest.raises(ParityUnavailable, match="parity"):
                SegmentationConfig(enable_reed_solomon=True)
    finally:
        load_codec.cache_clear()
