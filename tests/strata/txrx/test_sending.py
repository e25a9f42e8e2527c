"""The sender's half of a session: bytes in, bytes out, and every message ends as delivered or returned."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from strata.txrx.codecs import BytesCodec
from strata.txrx.errors import (
    CodecError,
    DeliveryStatus,
    DeliveryTimeout,
    ErrorKind,
    OutboxFull,
    OversizedMessage,
    ProtocolViolation,
    TxRxClosed,
)
from strata.txrx.frames import Ack, Closed, Reject, encode_response, read_header
from strata.txrx.multipart import MAX_PARTS, FrameReader, frame_of
from strata.txrx.sending import Returned, SendingSession
from strata.txrx.settings import TxRxSettings

ID, NEXT_ID = 77, 78


def session_of(
    *, codec: Any = None, posts: int = 0, connected: bool = False, **settings: Any
) -> SendingSession[Any, Any]:
    session: SendingSession[Any, Any] = SendingSession(ID, codec or BytesCodec(), TxRxSettings(**settings))
    if posts:
        post(session, *range(posts))
    if connected:
        session.connection_made(0.0)
        session.data_to_send()
    return session


def post(session: SendingSession[Any, Any], *numbers: int, now: float = 0.0) -> None:
    """Post messages that contain their number, which is also their token."""
    for number in numbers:
        session.post(b"message %d" % number, number)
    session.mark(now)


def hear(session: SendingSession[Any, Any], *responses: Any, now: float = 0.0) -> None:
    data = b"".join(one if isinstance(one, bytes) else encode_response(one) for one in responses)
    room = session.get_buffer()
    room[: len(data)] = data
    session.buffer_updated(len(data), now)


def written(session: SendingSession[Any, Any], most_bytes: int = 256 * 1024) -> list[int]:
    """Return the sequences that are written now; a header counts as -1."""
    data = b"".join(session.data_to_send(most_bytes))
    sequences = []
    if data.startswith(b"STRX"):
        assert read_header(data[:13]) == session.session_id
        sequences.append(-1)
        data = data[13:]
    reader = FrameReader(2**20)
    reader.feed(data)
    for frame in reader.read(10_000):
        (sequence,) = struct.unpack_from(">Q", frame[0])
        assert len(frame) > 1 or frame[0][8:] == b"message %d" % sequence
        sequences.append(sequence)
    assert reader.is_between_frames
    return sequences


def came_back(session: SendingSession[Any, Any]) -> list[tuple[int | None, DeliveryStatus]]:
    return [(returned.token, returned.delivery) for returned in session.take_returned()]


def is_open(session: SendingSession[Any, Any]) -> bool:
    """A function, because a type checker assumes that an attribute keeps its value between two calls."""
    return session.closed is None


def is_dead(session: SendingSession[Any, Any]) -> bool:
    """A function, for the same reason as `is_open`."""
    return session.is_dead


# Sequences, acknowledgements


@pytest.mark.req("T-027", "T-029", "T-034")
def test_messages_are_numbered_from_0_in_the_order_of_posting() -> None:
    session = session_of(posts=3)
    assert session.data_to_send() == [], "there is no connection"
    session.connection_made(0)
    assert written(session) == [-1, 0, 1, 2]
    post(session, 3)
    assert written(session) == [3]
    assert written(session) == []


@pytest.mark.req("T-045", "T-040")
def test_one_acknowledgement_covers_everything_below() -> None:
    session = session_of(posts=1000, connected=True)
    assert session.take_delivered() == []
    hear(session, Ack(998))
    assert session.take_delivered() == list(range(999))
    assert (session.unacked_size, session.pending) == (1, 1)
    hear(session, Ack(999))
    assert session.take_delivered() == [999]
    assert (session.unacked_size, session.pending, session.take_delivered()) == (0, 0, [])


@pytest.mark.req("T-040")
def test_acknowledgements_that_are_repeated_or_go_back_change_nothing() -> None:
    session = session_of(posts=5, connected=True)
    hear(session, Ack(2), Ack(2), Ack(0), Ack(1))
    assert session.take_delivered() == [0, 1, 2]
    assert (session.closed, session.pending) == (None, 2)
    assert session.counters.acks_received == 4 and session.counters.messages_delivered == 3
    hear(session, Ack(4), Ack(4), Ack(0))
    assert session.take_delivered() == [3, 4] and session.closed is None


@pytest.mark.req("T-049", "T-066")
@pytest.mark.parametrize("sequence", [2, 3, 2**63, 2**64 - 1])
def test_an_acknowledgement_of_what_was_never_sent_closes_the_session(sequence: int) -> None:
    session = session_of(posts=2, connected=True)
    post(session, 2)  # accepted, but not written
    hear(session, Ack(0), Ack(sequence))
    assert isinstance(session.closed, ProtocolViolation)
    assert session.take_delivered() == [0]
    assert came_back(session) == [(1, DeliveryStatus.UNKNOWN), (2, DeliveryStatus.NOT_DELIVERED)]


@pytest.mark.req("T-059")
def test_responses_may_come_in_any_pieces() -> None:
    session = session_of(posts=3, connected=True)
    for byte in encode_response(Ack(0)) + encode_response(Ack(2)):
        hear(session, bytes([byte]))
    assert session.take_delivered() == [0, 1, 2]


@pytest.mark.parametrize(
    "garbage",
    [b"\xff" * 16, struct.pack(">QQ", 9, 1) + b"\7", struct.pack(">Q", 0), b"HTTP/1.1 400 Bad Request\r\n"],
)
def test_a_peer_that_does_not_speak_the_wire_closes_the_session(garbage: bytes) -> None:
    session = session_of(posts=1, connected=True)
    hear(session, garbage)
    assert isinstance(session.closed, ProtocolViolation) and session.closed.kind is ErrorKind.IO
    assert came_back(session) == [(0, DeliveryStatus.UNKNOWN)]


@pytest.mark.req("T-054")
def test_outbox_and_unacked_can_be_looked_at() -> None:
    session = session_of(posts=10)
    assert (session.outbox_size, session.unacked_size, session.pending) == (10, 0, 10)
    session.connection_made(0)
    assert written(session, most_bytes=1) == [-1, 0], "at least one, however large"
    assert (session.outbox_size, session.unacked_size) == (9, 1)
    written(session)
    assert (session.outbox_size, session.unacked_size) == (0, 10)
    hear(session, Ack(3))
    assert (session.outbox_size, session.unacked_size, session.pending) == (0, 6, 6)


# Connections come and go


@pytest.mark.req("T-055", "T-062", "T-034", "T-027")
def test_a_new_connection_sends_everything_unacknowledged_again_before_what_is_new() -> None:
    session = session_of(posts=4, connected=True)
    post(session, 4)
    hear(session, Ack(1))
    session.connection_lost(NEXT_ID)
    assert (session.outbox_size, session.unacked_size, session.is_connected) == (3, 0, False)
    post(session, 5)
    session.connection_made(1)
    assert written(session) == [-1, 2, 3, 4, 5]
    assert session.session_id == ID
    assert session.counters.retransmits == 2 and session.counters.connections == 2


@pytest.mark.req("T-062")
def test_a_lost_acknowledgement_makes_nothing_pending_for_good() -> None:
    """It comes on the next connection, before anything is sent again, and covers what waits to be sent."""
    session = session_of(posts=4, connected=True)
    session.connection_lost(NEXT_ID)
    session.connection_made(1)
    hear(session, Ack(2))
    assert session.take_delivered() == [0, 1, 2]
    assert written(session) == [-1, 3], "what has been acknowledged does not go again"
    hear(session, Ack(3))
    assert session.take_delivered() == [3] and session.pending == 0


@pytest.mark.req("T-062")
def test_an_acknowledgement_may_be_ahead_of_what_has_gone_out_again() -> None:
    session = session_of(posts=4, connected=True)
    session.connection_lost(NEXT_ID)
    session.connection_made(1)
    assert written(session, most_bytes=1) == [-1, 0]
    hear(session, Ack(2))
    assert session.take_delivered() == [0, 1, 2] and session.closed is None
    assert written(session) == [3]


@pytest.mark.req("T-034")
def test_each_connection_begins_with_one_header() -> None:
    session = session_of(posts=1)
    session.connection_made(0)  # lost before anything is written
    session.connection_lost(NEXT_ID)
    session.connection_made(1)
    assert written(session) == [-1, 0]


@pytest.mark.req("T-055")
def test_many_cut_connections_keep_the_order() -> None:
    session = session_of(posts=9)
    for cut in range(1, 6):
        session.connection_made(cut)
        assert written(session, most_bytes=1) == [-1, cut - 1]
        assert written(session, most_bytes=1) == [cut]
        hear(session, Ack(cut - 1))
        session.connection_lost(NEXT_ID)
    session.connection_made(9)
    assert written(session) == [-1, 5, 6, 7, 8]


@pytest.mark.req("T-102")
def test_with_nothing_pending_the_next_connection_begins_a_new_session() -> None:
    session = session_of(posts=3, connected=True)
    hear(session, Ack(2))
    session.connection_lost(NEXT_ID)
    session.post(b"message 0", "again")
    session.mark(5)
    session.connection_made(5)
    assert session.session_id == NEXT_ID
    assert written(session) == [-1, 0]
    hear(session, Ack(0))
    assert session.take_delivered() == [0, 1, 2, "again"]


@pytest.mark.req("T-103")
def test_only_a_sender_with_everything_acknowledged_says_farewell() -> None:
    session = session_of(posts=2, connected=True)
    assert session.farewell() == b""
    hear(session, Ack(0))
    assert session.farewell() == b""
    hear(session, Ack(1))
    assert session.farewell() == bytes(8)
    session.connection_lost(NEXT_ID)
    assert session.farewell() == b""


def test_posting_to_a_closed_session_again_and_again_keeps_nothing() -> None:
    session = session_of()
    session.close(TxRxClosed("over"))
    for _ in range(3):
        with pytest.raises(TxRxClosed) as refused:
            session.post(b"message")
        assert len(refused.traceback) == 2  # this function, and `post`


def test_a_server_that_acknowledges_late_is_not_silent() -> None:
    session = session_of(posts=1, connected=True, link_timeout=1.0, message_ack_time_interval=5.0)
    session.handle_timer(9.9)
    assert not session.is_dead
    session.handle_timer(10.0)
    assert session.is_dead


def test_bytes_of_a_response_that_was_cut_are_forgotten() -> None:
    session = session_of(posts=2, connected=True)
    hear(session, encode_response(Ack(1))[:9])
    session.connection_lost(NEXT_ID)
    session.connection_made(1)
    hear(session, Ack(0))
    assert session.take_delivered() == [0] and session.closed is None


# The ends of a session


@pytest.mark.req("T-049", "T-066")
@pytest.mark.parametrize("last", [Reject("no such session"), Closed("gone")], ids=str)
def test_reject_and_closed_end_it_and_return_everything_in_order(last: Reject | Closed) -> None:
    session = session_of(posts=4, connected=True)
    post(session, 4, 5)
    hear(session, Ack(1), last, Ack(5))
    assert isinstance(session.closed, TxRxClosed) and last.reason in session.closed.reason
    assert session.take_delivered() == [0, 1], "what comes after it is not heard"
    assert came_back(session) == [(number, DeliveryStatus.NOT_DELIVERED) for number in (2, 3, 4, 5)]
    assert came_back(session) == [], "once"
    assert (session.pending, session.outbox_size, session.unacked_size) == (0, 0, 0)
    assert session.data_to_send() == [] and not session.is_connected


@pytest.mark.req("T-019")
def test_the_very_message_comes_back() -> None:
    session = session_of()
    message = b"the very one"
    session.post(message, "token")
    error = TxRxClosed("closed by its owner")
    session.close(error)
    session.close(TxRxClosed("again"))
    assert session.closed is error
    (returned,) = session.take_returned()
    assert returned == Returned(message, "token", error, DeliveryStatus.NOT_DELIVERED)
    assert returned.message is message


@pytest.mark.req("T-010")
def test_a_closed_session_takes_no_message() -> None:
    session = session_of()
    session.close(TxRxClosed("over"))
    with pytest.raises(TxRxClosed, match="over"):
        session.post(b"late")
    assert session.counters.messages_refused == 1 and session.take_returned() == []


@pytest.mark.req("T-068")
@pytest.mark.parametrize("known", [False, True])
def test_what_an_earlier_server_may_have_taken_is_unknown(known: bool) -> None:
    """The second connection may lead to another server: its refusal says nothing about what the first took.

    Even its acknowledgement does not, as long as it could be for messages that it was sent itself.
    """
    session = session_of(posts=3, connected=True)
    session.connection_lost(NEXT_ID)
    post(session, 3)
    session.connection_made(1)
    session.data_to_send()
    post(session, 4)
    hear(session, *[Ack(0)] * known, Reject("not known here"))
    lost = [(number, DeliveryStatus.UNKNOWN) for number in (0, 1, 2)]
    assert came_back(session) == [
        *lost[known:],
        (3, DeliveryStatus.NOT_DELIVERED),
        (4, DeliveryStatus.NOT_DELIVERED),
    ]


def test_a_server_that_goes_on_where_it_was_vouches_for_all() -> None:
    """It has acknowledged on both connections, so no other server can have taken anything."""
    session = session_of(posts=3, connected=True)
    hear(session, Ack(0))
    session.connection_lost(NEXT_ID)
    session.connection_made(1)
    session.data_to_send()
    hear(session, Ack(0), Closed("gone"))
    assert came_back(session) == [(1, DeliveryStatus.NOT_DELIVERED), (2, DeliveryStatus.NOT_DELIVERED)]


@pytest.mark.req("T-068")
def test_that_of_an_earlier_server_stays_unknown_on_later_connections() -> None:
    session = session_of(posts=3, connected=True)
    session.connection_lost(NEXT_ID)
    for now in (1, 2):
        session.connection_made(now)
        session.data_to_send()
        hear(session, Ack(0))
        if now == 1:
            session.connection_lost(NEXT_ID)
    hear(session, Closed("gone"))
    assert came_back(session) == [(1, DeliveryStatus.UNKNOWN), (2, DeliveryStatus.UNKNOWN)]


@pytest.mark.req("T-068")
def test_a_server_that_has_acknowledged_vouches_for_its_own_connection_alone() -> None:
    """The next one may be another, which refuses what the first may have taken and could not acknowledge."""
    session = session_of(posts=3, connected=True)
    hear(session, Ack(0))
    session.connection_lost(NEXT_ID)
    session.connection_made(1)
    session.data_to_send()
    hear(session, Reject("not known here"))
    assert came_back(session) == [(1, DeliveryStatus.UNKNOWN), (2, DeliveryStatus.UNKNOWN)]


# Time


@pytest.mark.req("T-065", "T-066")
def test_the_oldest_unsent_message_may_become_so_old() -> None:
    session = session_of(message_delivery_timeout=30)
    post(session, 0, 1, now=100.0)
    post(session, 2, now=110.0)
    assert session.get_timer() == 130.0
    session.handle_timer(129.9)
    assert is_open(session)
    session.handle_timer(130.0)
    assert isinstance(session.closed, DeliveryTimeout) and session.closed.kind is ErrorKind.TIMEOUT
    assert came_back(session) == [(number, DeliveryStatus.NOT_DELIVERED) for number in (0, 1, 2)]
    assert session.get_timer() is None


@pytest.mark.req("T-065", "T-066", "T-068")
def test_the_oldest_unacknowledged_message_may_become_so_old() -> None:
    """The age of a message counts from when it was posted, not from when it was written (A-163)."""
    session = session_of(message_delivery_timeout=30, link_timeout=1000)
    post(session, 0, now=100.0)
    session.connection_made(105.0)
    session.data_to_send()
    post(session, 1, now=106.0)
    session.handle_timer(129.9)
    assert session.closed is None and session.get_timer() == 130.0
    session.handle_timer(130.0)
    assert came_back(session) == [(0, DeliveryStatus.UNKNOWN), (1, DeliveryStatus.NOT_DELIVERED)]


@pytest.mark.req("T-065")
def test_an_acknowledgement_makes_the_next_message_the_oldest() -> None:
    session = session_of(message_delivery_timeout=30, link_timeout=1000)
    post(session, 0, 1, now=100.0)
    post(session, 2, now=120.0)
    session.connection_made(120.0)
    session.data_to_send()
    hear(session, Ack(0), now=121.0)
    assert session.get_timer() == 130.0
    hear(session, Ack(1), now=122.0)
    assert session.get_timer() == 150.0
    session.handle_timer(149.9)
    assert session.closed is None
    session.handle_timer(150.0)
    assert came_back(session) == [(2, DeliveryStatus.UNKNOWN)]


@pytest.mark.req("T-065")
def test_a_reconnection_makes_nothing_younger() -> None:
    session = session_of(message_delivery_timeout=30)
    post(session, 0, now=100.0)
    for now in (101.0, 110.0, 129.0):
        session.connection_made(now)
        session.data_to_send()
        session.connection_lost(NEXT_ID)
    session.handle_timer(130.0)
    assert isinstance(session.closed, DeliveryTimeout)


@pytest.mark.req("T-067")
def test_an_idle_session_never_times_out() -> None:
    session = session_of(message_delivery_timeout=30, link_timeout=10)
    assert session.get_timer() is None
    session.connection_made(0.0)
    session.data_to_send()
    post(session, 0, now=0.0)
    session.data_to_send()
    hear(session, Ack(0), now=1.0)
    assert session.get_timer() is None
    session.handle_timer(1e9)
    assert session.closed is None and not session.is_dead
    post(session, 1, now=1e9)
    session.data_to_send()
    session.handle_timer(1e9 + 9)
    assert session.closed is None and not session.is_dead, "silence counts while something is due"


@pytest.mark.req("T-062")
def test_a_connection_that_stays_silent_is_given_up() -> None:
    session = session_of(message_delivery_timeout=30, link_timeout=10)
    post(session, 0, now=100.0)
    session.connection_made(101.0)
    session.data_to_send()
    assert session.get_timer() == 111.0
    session.handle_timer(110.9)
    assert not is_dead(session)
    session.handle_timer(111.0)
    assert is_dead(session) and is_open(session)
    post(session, 1, now=111.0)
    assert session.data_to_send() == []
    session.connection_lost(NEXT_ID)
    session.connection_made(112.0)
    assert not is_dead(session) and written(session) == [-1, 0, 1]


def test_a_connection_that_is_heard_is_not_given_up() -> None:
    session = session_of(message_delivery_timeout=30, link_timeout=10)
    post(session, 0, 1, now=0.0)
    session.connection_made(0.0)
    session.data_to_send()
    hear(session, Ack(0), now=9.0)
    hear(session, Ack(0), now=18.0)
    session.handle_timer(27.9)
    assert not session.is_dead
    session.handle_timer(28.0)
    assert session.is_dead


def test_a_slow_connection_is_not_given_up_while_it_takes_bytes() -> None:
    """Writing a large message may exceed the permitted silence; an acknowledgement is due only afterwards."""
    session = session_of(message_delivery_timeout=115, link_timeout=10)
    for before in range(2):  # the same on a second connection, whatever was left over from the first
        start = before * 40.0
        if not before:
            session.post(bytes(1_000_000), 0)
            session.mark(start)
        session.connection_made(start)
        session.data_to_send()
        for seconds, unwritten in ((10, 900_000), (20, 500_000), (30, 1)):
            session.handle_timer(start + seconds, unwritten)
            assert not is_dead(session)
        session.handle_timer(start + 39.9, 1)
        assert not is_dead(session)
        session.handle_timer(start + 40.0, 1)
        assert is_dead(session), "it takes no more"
        session.connection_lost(NEXT_ID)
    for start in (80.0, 100.0):
        session.connection_made(start)
        unwritten = sum(map(len, session.data_to_send()))
        session.handle_timer(start + 10.0, unwritten)
        assert is_dead(session), "it has taken nothing at all"
        session.connection_lost(NEXT_ID)


def test_bytes_that_the_system_has_taken_say_nothing_of_the_peer() -> None:
    session = session_of(posts=1, connected=True, link_timeout=10)
    session.handle_timer(10.0, 0)
    assert session.is_dead


# What is refused at post


@pytest.mark.req("T-077")
def test_an_oversized_message_is_refused_and_the_session_goes_on() -> None:
    session = session_of(codec_max_frame_length=100)
    session.post(b"x" * 84, 0)
    with pytest.raises(OversizedMessage, match=r"oversized frame \(101, 100\)") as caught:
        session.post(b"x" * 85, 1)
    assert (caught.value.size, caught.value.limit) == (101, 100)
    session.post(b"y", 2)
    session.mark(0)
    session.connection_made(0)
    reader = FrameReader(100)
    reader.feed(b"".join(session.data_to_send())[13:])
    assert reader.read(10) == [(bytes(8) + b"x" * 84,), (bytes(7) + b"\1" + b"y",)]
    assert session.counters.messages_refused == 1 and session.counters.messages_posted == 2


@pytest.mark.req("T-077", "T-075")
def test_parts_count_for_the_size() -> None:
    session = session_of(codec_max_frame_length=20_000)
    session.post(bytes(20_000 - 24), 0)
    with pytest.raises(OversizedMessage, match=r"\(20001, 20000\)"):
        session.post(bytes(20_001 - 24), 1)
    session.mark(0)
    session.connection_made(0)
    reader = FrameReader(20_000)
    reader.feed(b"".join(session.data_to_send())[13:])
    assert [len(part) for part in reader.read(10)[0]] == [8, 20_000 - 24]


class PartsCodec:
    """A message is a number of parts."""

    def encode(self, message: int) -> tuple[bytes, list[bytes]]:
        return b"", [b""] * message

    def decode(self, body: bytes, parts: Any) -> int:
        return len(parts)


def test_more_parts_than_a_frame_may_have_are_refused() -> None:
    """The other end would take them for an attack and end the session."""
    session = session_of(codec=PartsCodec())
    with pytest.raises(CodecError, match=f"{MAX_PARTS} parts"):
        session.post(MAX_PARTS)
    session.post(MAX_PARTS - 1)
    session.connection_made(0)
    reader = FrameReader(2**20)
    reader.feed(b"".join(session.data_to_send())[13:])
    assert len(reader.read(1)[0]) == MAX_PARTS
    assert session.counters.messages_refused == 1


@pytest.mark.req("T-002", "T-008")
def test_whatever_a_codec_raises_is_a_refusal() -> None:
    class Own(BytesCodec):
        def encode(self, message: bytes) -> Any:
            raise KeyError(message)

    session = session_of(codec=Own(), connected=True)
    with pytest.raises(CodecError, match="KeyError"):
        session.post(b"message", 0)
    assert session.pending == 0 and session.statistics().messages_refused == 1


@pytest.mark.req("T-002")
def test_what_the_codec_refuses_takes_no_sequence() -> None:
    session = session_of(posts=1)
    with pytest.raises(CodecError):
        session.post("text")
    post(session, 1)
    session.connection_made(0)
    assert written(session) == [-1, 0, 1]


@pytest.mark.req("T-056")
def test_an_outbox_with_a_limit_refuses_what_is_beyond() -> None:
    session = session_of(posts=2, outbox_limit=2)
    with pytest.raises(OutboxFull, match="outbox full"):
        session.post(b"third")
    session.connection_made(0)
    session.data_to_send()
    post(session, 2, 3)
    with pytest.raises(OutboxFull):
        session.post(b"fifth")
    assert session.pending == 4 and session.counters.messages_refused == 2


@pytest.mark.req("T-056")
def test_without_a_limit_the_outbox_has_none() -> None:
    session = session_of(posts=100_000)
    assert session.outbox_size == 100_000


# Writing, counting


@pytest.mark.req("T-085")
def test_small_frames_are_joined_and_large_parts_are_not() -> None:
    session = session_of()
    large = bytes(100_000)
    for message in (b"a", b"b", large, b"c"):
        session.post(message)
    session.connection_made(0)
    pieces = session.data_to_send()
    assert len(pieces) == 3 and pieces[0].startswith(b"STRX") and pieces[1] is large
    parts = frame_of(struct.pack(">Q", 2), [large])
    assert b"".join(pieces).count(b"".join(parts)) == 1


def test_what_is_written_at_once_is_bounded() -> None:
    session = session_of()
    for _ in range(1000):
        session.post(bytes(1000))
    session.connection_made(0)
    sizes = []
    while pieces := session.data_to_send(10_000):
        sizes.append(sum(map(len, pieces)))
    assert max(sizes) < 10_000 + 1024 + 13 and sum(sizes) == 13 + 1000 * 1024


@pytest.mark.req("T-100")
def test_what_is_counted() -> None:
    session = session_of()
    post(session, *range(4), now=0.5)
    session.connection_made(0.5)
    session.data_to_send()
    hear(session, Ack(1), now=2.5)
    hear(session, Ack(1), now=9.0)
    session.connection_lost(NEXT_ID)
    session.connection_made(3)
    for _ in range(2):  # one message at a time
        session.data_to_send(1)
    session.handle_timer(30.5)
    counters = session.statistics()
    assert (counters.messages_posted, counters.messages_delivered, counters.messages_returned) == (4, 2, 2)
    assert (counters.frames_sent, counters.retransmits, counters.connections) == (6, 2, 2)
    assert counters.bytes_sent == 6 * (8 + 8 + 8 + 9)
    assert (counters.bytes_received, counters.acks_received) == (50, 2)
    assert counters.ack_delay_seconds == 2.0


@pytest.mark.req("T-067", "T-100")
def test_whoever_asks_for_the_counters_changes_nothing() -> None:
    session = session_of()
    session.post(b"message", 0)
    assert session.statistics().messages_posted == 1
    # A scraping thread must not date a message: the sending thread may have seen it acknowledged already.
    assert (session.is_marked, session.get_timer()) == (False, None)
    session.mark(1.0)
    assert (session.is_marked, session.get_timer()) == (True, 31.0)
    assert session.statistics().messages_posted == session.statistics().messages_posted == 1
