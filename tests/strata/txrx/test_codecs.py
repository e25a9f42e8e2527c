"""Codecs: what goes in comes out, large bytes uncopied; both ends refuse what is not a message."""

from __future__ import annotations

import datetime
import random
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strata.txrx.codecs import PART_BYTES, BytesCodec, MessageCodec, MsgpackCodec, codec_for
from strata.txrx.errors import CodecError, ErrorKind
from strata.txrx.multipart import MAX_PARTS


class Inner(msgspec.Struct):
    blob: bytes
    note: str = ""


class Outer(msgspec.Struct):
    number: int
    inner: Inner
    blobs: list[bytes] = []
    named: dict[str, bytes] = {}
    maybe: bytes | None = None


class Circle(msgspec.Struct, tag=True):
    radius: float


class Image(msgspec.Struct, tag=True):
    pixels: bytes


SHAPE: Any = Circle | Image
"""`type[T]` does not accept a union."""


class Choosy(msgspec.Struct):
    number: int

    def __post_init__(self) -> None:
        if self.number < 0:
            raise KeyError(self.number)


@dataclass
class Sample:
    at: datetime.datetime
    values: list[float] = field(default_factory=list)
    raw: bytes = b""


def round_trip(codec: Any, message: Any) -> Any:
    """Encode and decode; return the message, the size of the body in bytes and the number of parts."""
    body, parts = codec.encode(message)
    return codec.decode(bytes(body), [bytes(part) for part in parts]), len(body), len(parts)


# Sizes around the limit from which bytes become a part.
SIZES = st.one_of(st.integers(0, 40), st.integers(PART_BYTES - 2, PART_BYTES + 2))
BLOBS = st.builds(lambda size, filler: bytes([filler]) * size, SIZES, st.integers(0, 255))
INNER = st.builds(Inner, BLOBS, st.text(max_size=5))
OUTER = st.builds(
    Outer,
    number=st.integers(-(2**63), 2**64 - 1),
    inner=INNER,
    blobs=st.lists(BLOBS, max_size=4),
    named=st.dictionaries(st.text(max_size=3), BLOBS, max_size=3),
    maybe=st.none() | BLOBS,
)
SAMPLES = st.builds(
    Sample,
    at=st.datetimes(timezones=st.just(datetime.UTC)),
    values=st.lists(st.floats(allow_nan=False), max_size=3),
    raw=BLOBS,
)


@pytest.mark.req("T-084", "T-080")
@given(OUTER)
def test_structs_come_back(message: Outer) -> None:
    came, body_bytes, part_count = round_trip(MsgpackCodec(Outer), message)
    assert came == message
    blobs = [message.inner.blob, *message.blobs, *message.named.values(), message.maybe or b""]
    assert part_count == sum(len(blob) >= PART_BYTES for blob in blobs)
    assert body_bytes < 200 + sum(len(blob) + 5 for blob in blobs if len(blob) < PART_BYTES) + 6 * part_count


@pytest.mark.req("T-084")
@given(SAMPLES)
def test_dataclasses_come_back(message: Sample) -> None:
    assert round_trip(MsgpackCodec(Sample), message)[0] == message


@pytest.mark.req("T-084")
@given(st.one_of(st.builds(Circle, st.floats(allow_nan=False)), st.builds(Image, BLOBS)))
def test_unions_come_back(message: Circle | Image) -> None:
    assert round_trip(codec_for(SHAPE), message)[0] == message


@given(BLOBS)
def test_bytes_come_back(message: bytes) -> None:
    came, body_bytes, part_count = round_trip(codec_for(bytes), message)
    assert came == message
    assert (body_bytes, part_count) == ((len(message), 0) if len(message) < PART_BYTES else (0, 1))


@pytest.mark.parametrize(
    ("message_type", "message"),
    [
        (str, "ä" * PART_BYTES),
        (int, 2**64 - 1),
        (list[bytes], [b"x", bytes(PART_BYTES), bytes(PART_BYTES)]),
        (dict[int, bytes], {1: bytes(PART_BYTES)}),
        (tuple[bytes, int], (bytes(PART_BYTES), 1)),
        (bytearray, bytearray(PART_BYTES)),
        (bytearray, bytearray(b"x")),
        (set[int], {1, 2}),
        (Any, {"a": [1, None, bytes(PART_BYTES)]}),
        (None | int, None),
    ],
    ids=lambda value: getattr(value, "__name__", type(value).__name__),
)
def test_other_types_come_back(message_type: Any, message: Any) -> None:
    came = round_trip(codec_for(message_type), message)[0]
    assert came == message and type(came) is type(message)


@pytest.mark.req("T-084")
@pytest.mark.parametrize("beside", [b"small", bytes(PART_BYTES)])
def test_a_time_whose_type_is_not_told_comes_back_whatever_is_beside_it(beside: bytes) -> None:
    at = datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC)
    message: dict[str, Any] = {"at": at, "image": beside}
    assert round_trip(codec_for(dict[str, Any]), message)[0] == message


class Foreign(msgspec.Struct):
    raw: msgspec.Raw
    extension: msgspec.msgpack.Ext
    beside: bytes = b""


@pytest.mark.parametrize("beside", [b"", bytes(PART_BYTES)])
def test_what_only_messagepack_has_comes_back_whatever_is_beside_it(beside: bytes) -> None:
    extension = msgspec.msgpack.Ext(1, bytes(4))
    codec = MsgpackCodec(Foreign)
    found = codec.decode(*codec.encode(Foreign(msgspec.Raw(b"\x01"), extension, beside)))
    assert bytes(found.raw) == b"\x01" and found.extension == extension and found.beside == beside


@pytest.mark.req("T-080")
def test_large_bytes_are_not_copied() -> None:
    """The same objects, both on encoding and on decoding."""
    large, other = bytes(PART_BYTES), bytes(5 * PART_BYTES)
    codec = MsgpackCodec(Outer)
    body, parts = codec.encode(Outer(1, Inner(large), blobs=[other]))
    assert parts[0] is large and parts[1] is other
    arrived = [bytes(bytearray(part)) for part in parts]
    came = codec.decode(body, arrived)
    assert came.inner.blob is arrived[0] and came.blobs[0] is arrived[1]
    assert BytesCodec().encode(large)[1][0] is large
    assert BytesCodec().decode(b"", [large]) is large


@pytest.mark.req("T-080")
def test_64_mebibytes_in_a_field_take_no_memory_of_their_own() -> None:
    message = Inner(bytes(64 * 2**20))
    codec = MsgpackCodec(Inner)
    tracemalloc.start()
    try:
        body, parts = codec.encode(message)
        came = codec.decode(body, parts)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert came.blob is message.blob
    assert peak < 2**20


def test_what_can_change_after_it_was_posted_is_copied() -> None:
    ways: list[tuple[MessageCodec[Any], Callable[[Any], Any]]] = [
        (MsgpackCodec(Inner), Inner),
        (BytesCodec(), lambda value: value),
    ]
    for codec, wrap in ways:
        for size in (10, PART_BYTES):
            buffer = bytearray(b"a" * size)
            for value in (buffer, memoryview(buffer)):
                body, parts = codec.encode(wrap(value))
                buffer[:] = b"b" * size
                assert b"b" not in body.replace(b"blob", b"") and all(b"b" not in part for part in parts)
                buffer[:] = b"a" * size


def test_more_large_fields_than_a_frame_has_parts_go_in_the_body() -> None:
    message = [bytes(PART_BYTES)] * (MAX_PARTS + 5)
    codec = MsgpackCodec(list[bytes])
    body, parts = codec.encode(message)
    assert len(parts) == MAX_PARTS - 1, "the body is one, too"
    assert codec.decode(body, parts) == message


@pytest.mark.req("T-002")
@pytest.mark.parametrize(
    ("message_type", "message"),
    [
        (Inner, Inner("text")),  # type: ignore[arg-type]
        (Inner, Inner(None)),  # type: ignore[arg-type]
        (Inner, Inner(b"", 5)),  # type: ignore[arg-type]
        (Inner, Inner(bytes(PART_BYTES), 5)),  # type: ignore[arg-type]
        (Inner, Inner(b"", "\ud800")),
        (Inner, Circle(1.0)),
        (Inner, None),
        (Outer, Outer(2**64, Inner(b""))),
        (Outer, Outer("1", Inner(b""))),  # type: ignore[arg-type]
        (Outer, Outer(1, Inner(b""), blobs=[bytes(PART_BYTES), 1])),  # type: ignore[list-item]
        (Outer, Outer(1, object())),  # type: ignore[arg-type]
        (SHAPE, Inner(b"")),
        (list[int], [1, "2"]),
        (str, "x" * PART_BYTES + "\ud800"),
        (msgspec.Raw, msgspec.Raw(b"\xc1")),
        (Sample, Sample("yesterday")),  # type: ignore[arg-type]
        (bytes, "text"),
        (bytes, 5),
        (bytes, None),
        (bytes, [1, 2]),
    ],
    ids=lambda value: getattr(value, "__name__", type(value).__name__),
)
def test_what_is_no_message_of_the_channel_is_refused_at_post(message_type: Any, message: Any) -> None:
    with pytest.raises(CodecError) as caught:
        codec_for(message_type).encode(message)
    assert caught.value.kind is ErrorKind.CODEC


@pytest.mark.req("T-002")
def test_what_contains_itself_is_refused() -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(CodecError):
        MsgpackCodec(list[Any]).encode(endless)


def test_without_validation_the_other_end_finds_out() -> None:
    codec = MsgpackCodec(Inner, validate=False)
    for wrong in (Inner("text"), Inner("x" * PART_BYTES), Inner(bytes(PART_BYTES), 5)):  # type: ignore[arg-type]
        body, parts = codec.encode(wrong)
        with pytest.raises(CodecError):
            codec.decode(body, parts)


PART_0 = msgspec.msgpack.Ext(1, bytes(4))


@pytest.mark.req("T-083", "T-084")
@pytest.mark.parametrize(
    ("body", "parts"),
    [
        (b"", []),
        (b"", [b"part"]),
        (b"\xc1", []),
        (b"\x80", []),
        (b"\x80 and more", []),
        (b"\x91" * 100_000, []),
        (b"\x91" * 100_000, [b"part"]),
        (b"\xdf\xff\xff\xff\xff", []),
        (b"\x81\xa4blob\xc6\xff\xff\xff\xff", []),
        (b"\x82\xa4blob\xc4\0\xa4note\xa1\xff", []),
        (b"\x82\xa4blob\xc4\0\xa4note\xa1\xff", [b"part"]),
        (msgspec.msgpack.encode({"blob": PART_0}), []),
        (msgspec.msgpack.encode({"blob": msgspec.msgpack.Ext(1, b"\0\0\0\1")}), [b"part"]),
        (msgspec.msgpack.encode({"blob": msgspec.msgpack.Ext(1, b"\xff" * 4)}), [b"part"]),
        (msgspec.msgpack.encode({"blob": msgspec.msgpack.Ext(1, b"\0")}), [b"part"]),
        (msgspec.msgpack.encode({"blob": msgspec.msgpack.Ext(1, bytes(8))}), [b"part"]),
        (msgspec.msgpack.encode({"blob": msgspec.msgpack.Ext(2, bytes(4))}), [b"part"]),
        (msgspec.msgpack.encode({"blob": b"", "note": PART_0}), [b"text"]),
        (msgspec.msgpack.encode(PART_0), [msgspec.msgpack.encode({"blob": b""})]),
    ],
    ids=lambda value: str(value[:12]),
)
def test_hostile_bodies_and_references_are_refused(body: bytes, parts: list[bytes]) -> None:
    with pytest.raises(CodecError):
        MsgpackCodec(Inner).decode(body, parts)


@pytest.mark.parametrize(("body", "parts"), [(b"x", [b"y"]), (b"", [b"x", b"y"]), (b"", [b"x"] * 3)])
def test_bytes_have_a_body_or_a_part(body: bytes, parts: list[bytes]) -> None:
    with pytest.raises(CodecError):
        BytesCodec().decode(body, parts)


@pytest.mark.req("T-083")
@pytest.mark.parametrize("message_type", [Inner, Outer, Sample, SHAPE, dict[Any, Any], set[Any], Any, Choosy])
def test_no_bytes_raise_anything_else(message_type: Any) -> None:
    """Any bytes from a peer give a message or a `CodecError`; another error would end more than a session."""
    codec = codec_for(message_type)
    whole = [msgspec.msgpack.encode(Outer(1, Inner(b"x"), [b"y"], {"z": b""})), b"\x81\xa6number\xff"]
    opcodes = b"\xc4\x80\x81\x82\x90\x91\xa1\xa2\xc7\xd4\xd6\xd7\xd8\xff\0\1\5"
    chance = random.Random(8)
    refused = 0
    for _ in range(4000):
        if chance.random() < 0.5:
            body = bytearray(chance.choice(opcodes) for _ in range(chance.randrange(14)))
        else:
            body = bytearray(chance.choice(whole))
            for _ in range(chance.randrange(3)):
                body[chance.randrange(len(body))] = chance.choice(opcodes)
        try:
            codec.decode(bytes(body), chance.choice([(), (b"part",)]))
        except CodecError:
            refused += 1
    assert refused > 100


def test_a_codec_of_ones_own_is_taken_as_it_is() -> None:
    class Shouting:
        def encode(self, message: str) -> tuple[bytes, tuple[bytes, ...]]:
            return message.upper().encode(), ()

        def decode(self, body: bytes, parts: Any) -> str:
            return body.decode()

    codec = Shouting()
    assert codec_for(codec) is codec


def test_types_that_cannot_be_described_are_refused_at_once() -> None:
    with pytest.raises(CodecError, match="cannot be sent"):
        codec_for(Circle | Inner)  # type: ignore[arg-type]
