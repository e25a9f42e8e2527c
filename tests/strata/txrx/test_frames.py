"""Headers, responses and messages on the wire; the expected bytes are written here by hand."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from strata.txrx.codecs import BytesCodec
from strata.txrx.errors import ProtocolViolation
from strata.txrx.frames import (
    HEADER_BYTES,
    MAX_RESPONSE_BYTES,
    Ack,
    Closed,
    Reject,
    Response,
    encode_header,
    encode_response,
    read_header,
    read_response,
)
from strata.txrx.multipart import FrameReader
from strata.txrx.sending import SendingSession
from strata.txrx.settings import TxRxSettings


@pytest.mark.req("T-034", "T-082")
def test_a_connection_begins_with_magic_session_and_version() -> None:
    assert encode_header(0x0102030405060708) == b"STRX\1\2\3\4\5\6\7\x08\1"
    assert read_header(b"STRX\1\2\3\4\5\6\7\x08\1") == 0x0102030405060708
    assert HEADER_BYTES == 13


@pytest.mark.req("T-034")
@given(st.integers(0, 2**64 - 1))
def test_any_session_id_comes_back(session_id: int) -> None:
    assert read_header(bytearray(encode_header(session_id))) == session_id


@pytest.mark.req("T-082")
@pytest.mark.parametrize(
    ("header", "says"),
    [
        (b"STRY" + bytes(8) + b"\1", "does not begin as a Tx begins it"),
        (b"GET / HTTP/1.", "does not begin as a Tx begins it"),
        (bytes(13), "does not begin as a Tx begins it"),
        (b"STRX" + bytes(8) + b"\0", "version 0"),
        (b"STRX" + bytes(8) + b"\2", "version 2"),
    ],
)
def test_other_magic_and_other_versions_are_refused(header: bytes, says: str) -> None:
    with pytest.raises(ProtocolViolation, match=says):
        read_header(header)


RESPONSES = [
    (Ack(0), b"\0\0\0\0\0\0\0\x11\0\0\0\0\0\0\0\x09\0\0\0\0\0\0\0\0\0"),
    (Ack(258), b"\0\0\0\0\0\0\0\x11\0\0\0\0\0\0\0\x09\0\0\0\0\0\0\0\1\2"),
    (Reject("no"), b"\0\0\0\0\0\0\0\x0b\0\0\0\0\0\0\0\3\1no"),
    (Closed("ä"), b"\0\0\0\0\0\0\0\x0b\0\0\0\0\0\0\0\3\2\xc3\xa4"),
    (Closed(""), b"\0\0\0\0\0\0\0\x09\0\0\0\0\0\0\0\1\2"),
]


@pytest.mark.req("T-048", "T-073", "T-080")
@pytest.mark.parametrize(("response", "golden"), RESPONSES, ids=str)
def test_responses_on_the_wire(response: Response, golden: bytes) -> None:
    assert encode_response(response) == golden
    reader = FrameReader(MAX_RESPONSE_BYTES)
    reader.feed(golden)
    (frame,) = reader.read(10)
    assert read_response(frame) == response


@pytest.mark.req("T-048")
@example(Reject, "x" * 1025)
@example(Closed, "ä" * 10_000)
@given(st.sampled_from([Reject, Closed]), st.text(st.characters(), max_size=2000))
def test_any_reason_fits_into_what_a_sender_reads(kind: type[Reject | Closed], reason: str) -> None:
    """Longer reasons are cut, perhaps within a character, and text that cannot be encoded is replaced."""
    frame = encode_response(kind(reason))
    reader = FrameReader(MAX_RESPONSE_BYTES)
    reader.feed(frame)
    came = read_response(reader.read(1)[0])
    assert type(came) is kind
    if len(reason.encode(errors="replace")) <= 1024:
        assert came.reason == reason.encode(errors="replace").decode()
    else:
        assert came.reason[:200] == reason.encode(errors="replace").decode()[:200]


@pytest.mark.req("T-048")
@pytest.mark.parametrize(
    "frame",
    [
        (),
        (b"",),
        (b"\3",),
        (b"\0",),
        (b"\0" + bytes(7),),
        (b"\0" + bytes(9),),
        (b"\0" + bytes(8), b""),
        (b"\1", b"x"),
    ],
    ids=str,
)
def test_what_is_no_response_is_refused(frame: tuple[bytes, ...]) -> None:
    with pytest.raises(ProtocolViolation):
        read_response(frame)


@pytest.mark.req("T-081", "T-073", "T-080", "T-029", "T-034")
def test_messages_on_the_wire() -> None:
    """The body begins with the sequence, from 0; large bytes are a separate part."""
    session: SendingSession[bytes, None] = SendingSession(5, BytesCodec(), TxRxSettings())
    large = bytes(range(256)) * 64
    session.post(b"one")
    session.post(b"")
    session.post(large)
    session.mark(0)
    session.connection_made(0)
    assert b"".join(session.data_to_send()) == b"".join(
        (
            b"STRX\0\0\0\0\0\0\0\5\1",
            b"\0\0\0\0\0\0\0\x13\0\0\0\0\0\0\0\x0b\0\0\0\0\0\0\0\0one",
            b"\0\0\0\0\0\0\0\x10\0\0\0\0\0\0\0\x08\0\0\0\0\0\0\0\1",
            b"\0\0\0\0\0\0\x40\x18\0\0\0\0\0\0\0\x08\0\0\0\0\0\0\0\2\0\0\0\0\0\0\x40\0",
            large,
        )
    )
