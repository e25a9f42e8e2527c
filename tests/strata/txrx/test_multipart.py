"""Frames: the same in whatever pieces they arrive; bytes that a peer only announces cost nothing."""

from __future__ import annotations

import itertools
import struct
import tracemalloc
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strata.txrx.errors import ProtocolViolation
from strata.txrx.multipart import MAX_PARTS, Frame, FrameReader, FrameTooLarge, frame_of, frame_size

LIMIT = 2**21


def length(number: int) -> bytes:
    return struct.pack(">Q", number)


def stream_of(frames: Iterable[Frame]) -> bytes:
    """The bytes of frames; a frame without parts has the length zero."""
    return b"".join(b"".join(frame_of(frame[0], frame[1:])) if frame else length(0) for frame in frames)


def feed(reader: FrameReader, data: bytes, most: int = 1000) -> list[Frame]:
    """Put in what fits and read, repeatedly."""
    frames: list[Frame] = []
    left = memoryview(data)
    while left:
        room = reader.get_buffer()
        count = min(len(room), len(left))
        assert count, "a reader that has been read takes more"
        room[:count] = left[:count]
        reader.buffer_updated(count)
        left = left[count:]
        while some := reader.read(most):
            frames += some
    return frames


# Around the sizes at which a part gets its own buffer, and at which that and the shared buffer grow.
SIZES = st.one_of(
    st.integers(0, 30),
    st.sampled_from([65_535, 65_536, 65_537, 262_143, 262_144, 262_145, 300_000, 1_048_577]),
)
PARTS = st.builds(
    lambda size, filler: (bytes([filler, 255 - filler]) * (size // 2 + 1))[:size], SIZES, st.integers(0, 255)
)
FRAMES = st.lists(st.lists(PARTS, max_size=4).map(tuple), max_size=6).filter(
    lambda frames: all(sum(map(len, frame)) < LIMIT - 100 for frame in frames)
)


@pytest.mark.req("T-073", "T-080", "T-059")
@given(FRAMES, st.lists(st.integers(0, 5_000_000), max_size=12), st.integers(1, 5))
def test_frames_come_out_as_they_went_in_however_they_are_cut(
    frames: list[Frame], cuts: list[int], most: int
) -> None:
    stream = stream_of(frames)
    places = sorted({0, len(stream), *(cut % (len(stream) + 1) for cut in cuts)})
    reader = FrameReader(LIMIT)
    out = []
    for begin, end in itertools.pairwise(places):
        out += feed(reader, stream[begin:end], most)
    assert out == frames
    assert reader.is_between_frames and reader.held_bytes == 0


@pytest.mark.req("T-073", "T-074", "T-059")
def test_one_byte_at_a_time() -> None:
    frames = [(b"a",), (), (b"", b"bc", b""), (), (b"defg",)]
    reader = FrameReader(LIMIT)
    out = []
    for byte in stream_of(frames):
        out += feed(reader, bytes([byte]))
    assert out == frames


@st.composite
def numbered(draw: st.DrawFn) -> list[Frame]:
    """Messages mostly in sequence, with repetitions, gaps, parts, and frames that are not messages."""
    frames: list[Frame] = []
    due = 0
    for _ in range(draw(st.integers(0, 40))):
        number = draw(st.sampled_from([due] * 8 + [0, due + 1, 2**64 - 1]))
        due = number + 1 if number == due else due
        body = struct.pack(">Q", number) + draw(st.sampled_from([b"", b"x", b"y" * 100, b"z" * 70_000]))
        parts = draw(st.sampled_from([()] * 8 + [(b"",), (b"part", b"w" * 70_000)]))
        frames.append(draw(st.sampled_from([(body, *parts)] * 12 + [(), (b"short",)])))
    return frames


@pytest.mark.req("T-073", "T-059")
@given(numbered(), st.lists(st.integers(0, 5_000_000), max_size=6), st.integers(1, 50))
def test_the_fast_way_reads_what_the_other_one_does(frames: list[Frame], cuts: list[int], most: int) -> None:
    """Messages in sequence, as many as are complete; `read` continues with the rest."""
    stream = stream_of(frames)
    places = sorted({0, len(stream), *(cut % (len(stream) + 1) for cut in cuts)})
    reader, due = FrameReader(LIMIT), 0
    out: list[Frame] = []
    for begin, end in itertools.pairwise(places):
        data = stream[begin:end]
        while data:
            room = reader.get_buffer()
            count = min(len(room), len(data))
            room[:count], data = data[:count], data[count:]
            reader.buffer_updated(count)
            while True:
                bodies = reader.read_numbered(due, most)
                assert len(bodies) <= most
                out += [(struct.pack(">Q", due + place) + body,) for place, body in enumerate(bodies)]
                due += len(bodies)
                if not bodies:
                    some = reader.read(1)
                    out += some
                    due += sum(bool(frame) and frame[0][:8] == struct.pack(">Q", due) for frame in some)
                    if not some:
                        break
    assert out == frames
    assert reader.is_between_frames


@pytest.mark.req("T-075", "T-078")
@pytest.mark.parametrize("length_of_all", [101, 2**63, 2**64 - 1])
def test_the_fast_way_refuses_nothing_and_takes_nothing_that_the_other_one_refuses(
    length_of_all: int,
) -> None:
    reader = FrameReader(100)
    reader.feed(
        stream_of([(bytes(8) + b"x",)]) + length(length_of_all) + length(93) + bytes(7) + b"\1" + b"x" * 85
    )
    assert reader.read_numbered(0, 10) == [b"x"]
    assert reader.read_numbered(1, 10) == []
    with pytest.raises(FrameTooLarge):
        reader.read(10)


@pytest.mark.req("T-073", "T-080")
def test_the_layout() -> None:
    whole = length(8 + 2 + 8 + 3) + length(2) + b"ab" + length(3) + b"cde"
    assert b"".join(frame_of(b"ab", [b"cde"])) == whole
    assert frame_size(b"ab", [b"cde"]) == len(whole) - 8
    assert feed(FrameReader(LIMIT), whole) == [(b"ab", b"cde")]


@pytest.mark.req("T-074")
def test_a_frame_of_length_zero_is_read_as_nothing() -> None:
    assert feed(FrameReader(LIMIT), length(0) + length(8) + length(0)) == [(), (b"",)]


@pytest.mark.req("T-080")
def test_large_parts_are_written_as_they_are() -> None:
    large, small = bytes(100_000), b"s" * 10
    pieces = frame_of(b"body", [small, large, small])
    assert sum(piece is large for piece in pieces) == 1
    assert b"".join(pieces) == b"".join(frame_of(b"body", [small, bytes(bytearray(large)), small]))
    assert feed(FrameReader(LIMIT), b"".join(pieces)) == [(b"body", small, large, small)]


@pytest.mark.req("T-075", "T-078")
@pytest.mark.parametrize("announced", [101, 2**32, 2**63 - 1, 2**63, 2**64 - 1])
def test_a_frame_above_the_limit_is_refused_by_its_length_alone(announced: int) -> None:
    reader = FrameReader(100)
    reader.feed(length(announced))
    with pytest.raises(FrameTooLarge, match=rf"oversized frame \({announced}, 100\)") as caught:
        reader.read(10)
    assert (caught.value.size, caught.value.limit) == (announced, 100)
    reader.feed(length(8) + length(0))
    with pytest.raises(FrameTooLarge):  # it reads no further, and raises the same again
        reader.read(10)


@pytest.mark.req("T-075")
def test_the_limit_itself_is_allowed() -> None:
    assert feed(FrameReader(100), stream_of([(b"x" * 92,)])) == [(b"x" * 92,)]
    with pytest.raises(FrameTooLarge):
        feed(FrameReader(100), stream_of([(b"x" * 93,)]))


@pytest.mark.req("T-080", "T-075")
@pytest.mark.parametrize("size", [1, 2**32, 2**63 - 1, 2**63, 2**64 - 1])
def test_a_part_is_not_longer_than_its_frame(size: int) -> None:
    reader = FrameReader(LIMIT)
    reader.feed(length(8) + length(size))
    for _ in range(2):
        with pytest.raises(ProtocolViolation, match="longer than its frame"):
            reader.read(10)


@pytest.mark.parametrize("left", range(1, 8))
def test_a_frame_does_not_end_within_the_length_of_a_part(left: int) -> None:
    reader = FrameReader(LIMIT)
    reader.feed(length(8 + left) + length(0) + bytes(left))
    with pytest.raises(ProtocolViolation):
        reader.read(10)


def test_parts_are_limited() -> None:
    assert len(feed(FrameReader(LIMIT), stream_of([(b"",) * MAX_PARTS]))[0]) == MAX_PARTS
    reader = FrameReader(LIMIT)
    reader.feed(stream_of([(b"",) * (MAX_PARTS + 1)]))
    with pytest.raises(ProtocolViolation, match=f"more than {MAX_PARTS} parts"):
        reader.read(10)


BAD = {
    "oversized": length(2**63),
    "part too long": length(8) + length(9),
    "too many parts": stream_of([(b"",) * (MAX_PARTS + 1)]),
}


@pytest.mark.req("T-075", "T-078")
@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
@pytest.mark.parametrize(
    "before", [[(b"one",)], [(b"one",), (b"two", b"2")], [(), ()], [(b"x" * 70_000,)]], ids=len
)
def test_frames_before_a_bad_one_are_given_out_first(bad: bytes, before: list[Frame]) -> None:
    reader = FrameReader(LIMIT)
    reader.feed(stream_of(before) + bad)
    assert reader.read(10) == before
    with pytest.raises(ProtocolViolation):
        reader.read(10)


@pytest.mark.req("T-079")
def test_the_end_of_a_stream_is_orderly_between_frames_alone() -> None:
    stream = stream_of([(b"ab", b"c"), (), (b"x" * 70_000,)])
    ends = {0, 8 + 8 + 2 + 8 + 1, 8 + 8 + 2 + 8 + 1 + 8, len(stream)}
    reader = FrameReader(LIMIT)
    for place in range(len(stream)):
        if place < 80 or place > len(stream) - 5:
            assert reader.is_between_frames == (place in ends), place
        feed(reader, stream[place : place + 1])
    assert reader.is_between_frames


@pytest.mark.req("T-075")
def test_promised_gigabytes_take_no_memory() -> None:
    """A peer announces all that the limit allows and sends none of it: memory grows with what arrives."""
    limit = 2**40
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        reader = FrameReader(limit)
        assert feed(reader, length(limit) + length(limit - 8)) == []
        assert tracemalloc.get_traced_memory()[0] - before < 2**20
        assert reader.held_bytes == 0
        tracemalloc.reset_peak()
        assert feed(reader, bytes(2**20)) == []
        assert reader.held_bytes == 2**20
        assert tracemalloc.get_traced_memory()[1] - before < 8 * 2**20
    finally:
        tracemalloc.stop()


@pytest.mark.req("T-080")
def test_a_large_part_is_read_without_being_held_twice_at_the_end() -> None:
    size = 32 * 2**20
    reader = FrameReader(2 * size)
    feed(reader, length(8 + size) + length(size))
    filler = bytes(2**16)
    for _ in range(size // len(filler) - 1):
        assert feed(reader, filler) == []
    tracemalloc.start()
    try:
        ((body,),) = feed(reader, filler)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(body) == size and peak < 2**20


def test_what_stays_unread_is_bounded_by_the_buffer() -> None:
    """A caller without room for frames reads none of them; nor does the reader take more bytes then."""
    reader = FrameReader(LIMIT)
    data = stream_of([(b"x" * 100,)] * 5000)
    taken = 0
    while room := reader.get_buffer():
        count = min(len(room), len(data) - taken)
        room[:count] = data[taken : taken + count]
        reader.buffer_updated(count)
        taken += count
        assert taken < len(data)
        reader.read(0)
    assert reader.held_bytes == taken <= 2**20
    frames = []
    while some := reader.read(7):
        frames += some
    frames += feed(reader, data[taken:])
    assert frames == [(b"x" * 100,)] * 5000


def test_bytes_that_do_not_fit_are_not_taken_in_silence() -> None:
    with pytest.raises(ValueError):
        FrameReader(LIMIT).feed(bytes(2**20))


@pytest.mark.req("T-082")
def test_a_header_comes_before_the_frames() -> None:
    reader = FrameReader(LIMIT)
    assert reader.read_exactly(3) is None
    reader.feed(b"ab")
    assert reader.read_exactly(3) is None
    reader.feed(b"c" + stream_of([(b"x",)]))
    assert reader.read_exactly(3) == b"abc"
    assert reader.read(10) == [(b"x",)]
