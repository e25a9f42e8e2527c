"""The server's half of all sessions: what it accepts, what and when it acknowledges, whom it turns away."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from strata.txrx.codecs import BytesCodec
from strata.txrx.errors import CodecError
from strata.txrx.frames import Ack, Closed, Reject, encode_header, read_response
from strata.txrx.multipart import FrameReader, frame_of
from strata.txrx.receiving import ReceiverCounters, ReceivingLink, Sessions
from strata.txrx.settings import TxRxSettings

ID = 77


class PickyCodec(BytesCodec):
    """A codec that cannot read two messages: for one it raises what it should, for the other it fails."""

    def decode(self, body: bytes, parts: Any) -> bytes:
        if body == b"garbage":
            raise CodecError("no message")
        if body == b"bomb":
            raise KeyError("a fault of the codec")
        return super().decode(body, parts)


class Server:
    """What the connections of a server share, and a queue that accepts up to `room` messages."""

    def __init__(self, room: int = 1000, **settings: Any) -> None:
        self.settings = TxRxSettings(**settings)
        self.sessions: Sessions[Any] = Sessions(self.settings)
        self.counters = ReceiverCounters()
        self.queue: list[bytes] = []
        self.room = room

    def connect(self, session_id: int | None = ID, now: float = 0.0) -> Connection:
        connection = Connection(self, now)
        if session_id is not None:
            connection.send(encode_header(session_id), now=now)
        return connection


class Connection:
    """One connection, together with the sender's end of it."""

    def __init__(self, server: Server, now: float) -> None:
        self.server = server
        self.link: ReceivingLink[bytes] = ReceivingLink(
            server.sessions, PickyCodec(), server.settings, server.counters, now
        )
        self._reader = FrameReader(2000)

    def send(self, data: bytes, now: float = 0.0) -> None:
        """Let bytes arrive; the server takes what there is room for."""
        while data:
            room = self.link.get_buffer()
            count = min(len(room), len(data))
            room[:count] = data[:count]
            data = data[count:]
            self.link.buffer_updated(count, now)
            self.take(now)

    def post(self, *sequences: int, now: float = 0.0) -> None:
        """Let the messages with these numbers arrive together."""
        self.send(b"".join(message(sequence) for sequence in sequences), now)

    def take(self, now: float = 0.0) -> None:
        taken = self.link.take(self.server.room, now)
        assert len(taken) <= self.server.room
        self.server.room -= len(taken)
        self.server.queue += taken

    def answers(self) -> list[Any]:
        """What the sender has received since the last call."""
        self._reader.feed(self.link.data_to_send())
        answers = [read_response(frame) for frame in self._reader.read(1000)]
        assert self._reader.is_between_frames
        return answers


def is_blocked(connection: Connection) -> bool:
    """A function, because a type checker assumes that an attribute keeps its value between two calls."""
    return connection.link.is_blocked


def is_finished(connection: Connection) -> bool:
    """A function, for the same reason as `is_blocked`."""
    return connection.link.is_finished


def message(sequence: int, text: bytes | None = None) -> bytes:
    text = b"message %d" % sequence if text is None else text
    return b"".join(frame_of(struct.pack(">Q", sequence) + text))


def messages(*sequences: int) -> list[bytes]:
    return [b"message %d" % sequence for sequence in sequences]


LAZY: dict[str, Any] = {"message_ack_eagerly": False}


# Sequences


@pytest.mark.req("T-027", "T-029", "T-032", "T-038", "T-039")
def test_messages_are_accepted_in_sequence_and_acknowledged() -> None:
    server = Server()
    one = server.connect()
    assert one.answers() == []
    one.post(0, 1)
    one.post(2)
    assert server.queue == messages(0, 1, 2)
    assert one.answers() == [Ack(1), Ack(2)]
    assert not one.link.is_finished


@pytest.mark.req("T-030", "T-032")
def test_what_came_before_is_ignored() -> None:
    server = Server()
    one = server.connect()
    one.post(0, 1, 0, 1, 1, 2, 0)
    assert server.queue == messages(0, 1, 2)
    assert server.counters.duplicates == 4 and server.counters.messages_accepted == 3
    assert not one.link.is_finished


@pytest.mark.req("T-030")
def test_a_repeated_message_is_not_even_decoded() -> None:
    server = Server()
    one = server.connect()
    one.post(0)
    one.send(message(0, b"bomb"))
    assert not one.link.is_finished and server.queue == messages(0)


@pytest.mark.req("T-031")
@pytest.mark.parametrize("sequence", [3, 4, 2**64 - 1])
def test_a_gap_rejects_the_session_and_keeps_what_came_before(sequence: int) -> None:
    server = Server()
    one = server.connect()
    one.post(0, 1, sequence, 2)
    assert server.queue == messages(0, 1)
    assert one.answers() == [Ack(1), Reject(f"message {sequence} came where 2 was expected")]
    assert one.link.is_finished
    one.post(2)
    assert server.queue == messages(0, 1) and one.answers() == []


@pytest.mark.req("T-036")
def test_a_session_that_is_not_known_has_to_begin_at_0() -> None:
    """As after a restart of the server."""
    server = Server()
    one = server.connect()
    one.post(5)
    (answer,) = one.answers()
    assert isinstance(answer, Reject) and "not known here" in answer.reason
    assert server.queue == [] and one.link.is_finished


@pytest.mark.req("T-033", "T-028", "T-032")
def test_each_session_has_its_own_sequence() -> None:
    server = Server()
    many = [server.connect(session_id) for session_id in range(100)]
    for sequence in range(3):
        for one in many:
            one.send(message(sequence, b"%d of %d" % (sequence, many.index(one))))
    for number, one in enumerate(many):
        own = [text for text in server.queue if text.endswith(b" of %d" % number)]
        assert own == [b"%d of %d" % (sequence, number) for sequence in range(3)]
        assert one.answers()[-1] == Ack(2)
    assert server.counters.sessions == server.counters.connections == len(server.sessions) == 100


@pytest.mark.req("T-059")
def test_the_wire_may_be_cut_anywhere() -> None:
    server = Server()
    one = server.connect(None)
    for byte in encode_header(ID) + message(0) + message(1, b"") + message(2):
        one.send(bytes([byte]))
    assert server.queue == [b"message 0", b"", b"message 2"]
    assert one.answers() == [Ack(0), Ack(1), Ack(2)]


# Sessions and connections


@pytest.mark.req("T-034", "T-044", "T-055")
def test_a_reconnection_goes_on_where_it_was_and_hears_the_last_acknowledgement_at_once() -> None:
    server = Server()
    one = server.connect()
    one.post(0, 1, 2)  # the acknowledgement is lost with the connection
    one.link.connection_lost(1.0)
    two = server.connect(now=2.0)
    assert two.answers() == [Ack(2)]
    two.post(1, 2, 3, now=2.0)
    assert server.queue == messages(0, 1, 2, 3)
    assert two.answers() == [Ack(3)]
    assert server.counters.sessions == 1 and server.counters.connections == 2


@pytest.mark.req("T-037")
def test_the_newest_connection_of_a_session_is_the_one() -> None:
    """A sender that reconnects does not wait for the detection that its old connection is dead."""
    server = Server()
    one = server.connect()
    one.post(0)
    one.answers()
    two = server.connect()
    assert two.link.superseded is one.link and one.link.is_finished
    one.post(1)
    assert server.queue == messages(0) and one.answers() == []
    two.post(1)
    assert server.queue == messages(0, 1)
    one.link.connection_lost(1.0)
    server.sessions.handle_timer(1e9)
    two.post(2)
    assert server.queue == messages(0, 1, 2), "the end of the old connection is not that of the session"
    assert two.answers() == [Ack(0), Ack(1), Ack(2)]


@pytest.mark.req("T-037")
def test_a_superseded_connection_waits_for_no_room() -> None:
    server = Server(room=1)
    one = server.connect()
    one.post(0, 1)
    assert is_blocked(one)
    two = server.connect()
    assert not is_blocked(one) and one.link.is_finished
    server.room = 5
    one.take()
    two.post(1)
    assert server.queue == messages(0, 1)


@pytest.mark.req("T-035")
def test_sessions_without_connection_are_forgotten_in_time() -> None:
    server = Server(session_timeout=120)
    connections = [server.connect(session_id) for session_id in range(3)]
    for one in connections:
        one.post(0)
    assert server.sessions.get_timer() is None
    connections[0].link.connection_lost(10.0)
    connections[1].link.connection_lost(20.0)
    assert server.sessions.get_timer() == 130.0
    server.sessions.handle_timer(129.9)
    assert len(server.sessions) == 3
    server.sessions.handle_timer(130.0)
    assert len(server.sessions) == 2 and server.sessions.get_timer() == 140.0
    again = server.connect(1, now=139.0)
    assert again.answers() == [Ack(0)] and server.sessions.get_timer() is None
    server.sessions.handle_timer(1e9)
    assert len(server.sessions) == 2, "those with a connection are not forgotten"
    again.link.connection_lost(1e9)
    assert server.sessions.get_timer() == 1e9 + 120
    late = server.connect(0, now=1e9)
    late.post(1)
    assert isinstance(late.answers()[-1], Reject)


@pytest.mark.req("T-035")
def test_a_server_that_was_not_running_gives_its_sessions_their_time_again() -> None:
    server = Server(session_timeout=120)
    for session_id in range(2):
        one = server.connect(session_id)
        one.post(0)
        one.link.connection_lost(float(session_id))
    server.sessions.handle_timer(1000.0)
    assert len(server.sessions) == 2 and server.sessions.get_timer() == 1120.0
    back = server.connect(0, now=1001.0)
    back.post(0)
    assert server.queue == messages(0, 0) and Ack(0) in back.answers()


@pytest.mark.req("T-074", "T-103")
@pytest.mark.parametrize("settings", [{}, LAZY])
def test_a_sender_that_has_closed_with_an_empty_frame_is_forgotten_at_once(settings: dict[str, Any]) -> None:
    server = Server(**settings)
    one = server.connect()
    one.post(0, 1)
    one.send(struct.pack(">Q", 0) + message(2))
    assert one.answers()[-1] == Ack(1) and one.link.is_finished
    assert server.queue == messages(0, 1) and len(server.sessions) == 0
    one.link.connection_lost(1.0)
    assert server.sessions.get_timer() is None


@pytest.mark.req("T-035")
def test_a_session_that_took_nothing_is_forgotten_at_once() -> None:
    server = Server()
    one = server.connect()
    assert len(server.sessions) == 1
    one.link.connection_lost(1.0)
    assert len(server.sessions) == 0 and server.sessions.get_timer() is None


@pytest.mark.req("T-035")
def test_the_number_of_sessions_is_bounded() -> None:
    server = Server(max_sessions=2, session_timeout=120)
    for session_id in (1, 2):
        server.connect(session_id).post(0)
    three = server.connect(3)
    three.post(0)
    (answer,) = three.answers()
    assert isinstance(answer, Reject) and "too many sessions" in answer.reason
    assert three.link.is_finished and len(server.queue) == 2 and server.counters.rejects_sent == 1
    three.link.connection_lost(0.0)
    again = server.connect(1)
    again.post(1)
    assert len(server.queue) == 3, "a known one may come again"
    again.link.connection_lost(0.0)
    server.sessions.handle_timer(120.0)
    server.connect(3, now=120.0).post(0)
    assert len(server.queue) == 4


@pytest.mark.req("T-049", "T-031")
def test_a_rejected_session_that_comes_back_is_rejected_again() -> None:
    server = Server()
    one = server.connect()
    one.post(0, 2)
    one.link.connection_lost(1.0)
    two = server.connect(now=2.0)
    two.post(1, now=2.0)
    assert two.answers() == [Ack(0), Reject("message 2 came where 1 was expected")]
    assert two.link.is_finished and server.queue == messages(0)


@pytest.mark.req("T-049", "T-031")
def test_a_session_that_was_rejected_before_it_brought_anything_is_rejected_again() -> None:
    server = Server()
    one = server.connect()
    one.post(2)
    one.link.connection_lost(1.0)
    two = server.connect(now=2.0)
    two.post(0, now=2.0)
    assert two.answers() == [Reject("the session is not known here, and begins with 2")]
    assert two.link.is_finished and server.queue == []


@pytest.mark.req("T-082")
@pytest.mark.parametrize(
    "header", [b"STRY" + bytes(8) + b"\1", b"STRX" + bytes(8) + b"\2", b"GET / HTTP/1.1\r\n"]
)
def test_whoever_does_not_speak_the_wire_is_cut_off_without_an_answer(header: bytes) -> None:
    server = Server()
    stranger = server.connect(None)
    stranger.send(header + message(0))
    assert stranger.link.is_finished and stranger.answers() == [] and stranger.link.session_id is None
    assert len(server.sessions) == 0 and server.queue == []
    assert server.counters.broken_connections == 1
    server.connect().post(0)
    assert server.queue == messages(0), "the server lives"


# Acknowledgements


@pytest.mark.req("T-041")
def test_an_acknowledgement_after_so_many_messages() -> None:
    server = Server(message_ack_every_n_messages=3, message_ack_time_interval=0.5, **LAZY)
    one = server.connect()
    one.post(0)
    one.post(1)
    assert one.answers() == []
    one.post(2)
    assert one.answers() == [Ack(2)]
    one.post(3, 4)
    assert one.answers() == [], "it counts from the last one"
    one.post(5)
    assert one.answers() == [Ack(5)]


@pytest.mark.req("T-041", "T-042")
def test_an_acknowledgement_after_so_long_though_nothing_more_comes() -> None:
    server = Server(message_ack_every_n_messages=1000, message_ack_time_interval=0.5, **LAZY)
    one = server.connect()
    one.post(0, now=10.0)
    one.post(1, now=10.4)
    assert one.answers() == [] and one.link.get_timer() == 10.5
    one.link.handle_timer(10.49)
    assert one.answers() == []
    one.link.handle_timer(10.5)
    assert one.answers() == [Ack(1)] and one.link.get_timer() is None
    one.post(2, now=20.0)
    assert one.link.get_timer() == 20.5


@pytest.mark.req("T-041")
def test_a_time_that_has_come_is_not_missed_while_messages_arrive() -> None:
    server = Server(message_ack_every_n_messages=1000, message_ack_time_interval=0.5, **LAZY)
    one = server.connect()
    one.post(0, now=10.0)
    one.post(1, now=10.6)
    assert one.answers() == [Ack(1)]


@pytest.mark.req("T-041", "T-040")
def test_eagerly_what_arrives_together_is_acknowledged_at_once() -> None:
    server = Server(room=5000, message_ack_every_n_messages=1000)
    one = server.connect()
    one.post(*range(200))
    assert one.answers() == [Ack(199)]
    one.post(200)
    assert one.answers() == [Ack(200)] and one.link.get_timer() is None


@pytest.mark.req("T-044")
def test_repetitions_are_acknowledged_again_eagerly() -> None:
    server = Server()
    one = server.connect()
    one.post(0, 1)
    one.post(0)
    one.post(1)
    assert one.answers() == [Ack(1)] * 3
    one.send(message(2)[:20])
    assert one.answers() == [], "once for each"


@pytest.mark.req("T-044")
def test_repetitions_are_acknowledged_again_in_time() -> None:
    server = Server(message_ack_every_n_messages=2, message_ack_time_interval=0.5, **LAZY)
    one = server.connect()
    one.post(0, 1)
    assert one.answers() == [Ack(1)]
    one.post(0, now=7.0)
    assert one.answers() == [] and one.link.get_timer() == 7.5
    one.link.handle_timer(7.5)
    assert one.answers() == [Ack(1)]


@pytest.mark.req("T-044")
def test_a_reconnection_that_sends_nothing_is_told_in_time() -> None:
    server = Server(message_ack_every_n_messages=1000, message_ack_time_interval=0.5, **LAZY)
    one = server.connect()
    one.post(0)
    one.link.connection_lost(1.0)
    two = server.connect(now=2.0)
    two.link.handle_timer(2.5)
    assert two.answers() == [Ack(0)]


@pytest.mark.req("T-043", "T-024")
def test_closing_acknowledges_what_is_outstanding_and_says_so() -> None:
    server = Server(message_ack_every_n_messages=1000, message_ack_time_interval=1000, **LAZY)
    one = server.connect()
    one.post(0, 1, 2)
    assert one.answers() == []
    one.link.close("the receiver is gone")
    assert one.answers() == [Ack(2), Closed("the receiver is gone")]
    assert one.link.is_finished and one.link.get_timer() is None
    one.link.close("again")
    one.post(3)
    assert one.answers() == [] and server.queue == messages(0, 1, 2)


@pytest.mark.req("T-024")
def test_closing_tells_those_too_who_have_not_said_who_they_are() -> None:
    one = Server().connect(None)
    one.link.close("gone")
    assert one.answers() == [Closed("gone")]


# A full queue


@pytest.mark.req("T-039", "T-050", "T-051")
def test_what_there_is_no_room_for_is_neither_taken_nor_acknowledged_nor_lost() -> None:
    server = Server(room=2)
    one = server.connect()
    one.post(0, 1, 2, 3, 4)
    assert server.queue == messages(0, 1)
    assert one.answers() == [Ack(1)]
    assert one.link.is_blocked and server.counters.queue_full == 1
    one.take()
    assert server.queue == messages(0, 1) and one.answers() == [] and server.counters.queue_full == 1
    server.room = 2
    one.take()
    assert server.queue == messages(0, 1, 2, 3) and one.answers() == [Ack(3)] and one.link.is_blocked
    server.room = 2
    one.take()
    assert server.queue == messages(0, 1, 2, 3, 4) and one.answers() == [Ack(4)] and not one.link.is_blocked


@pytest.mark.req("T-039", "T-051")
def test_before_waiting_for_room_what_was_accepted_is_acknowledged() -> None:
    """Not after N or T: if the queue stayed full, senders would give up messages that it holds."""
    server = Server(room=2, message_ack_every_n_messages=1000, message_ack_time_interval=1000, **LAZY)
    one = server.connect()
    one.post(0, 1, 2)
    assert one.link.is_blocked and one.answers() == [Ack(1)]


def test_a_sender_that_has_to_wait_hears_that_the_server_lives() -> None:
    server = Server(room=1, message_ack_time_interval=0.5)
    one = server.connect()
    one.post(0, 1, now=10.0)
    assert one.answers() == [Ack(0)] and one.link.get_timer() == 10.5
    one.link.handle_timer(10.5)
    assert one.answers() == [Ack(0)] and one.link.get_timer() == 11.0
    one.link.handle_timer(1000.0)
    assert not one.link.is_finished, "it is not the sender who is slow"


@pytest.mark.req("T-053")
def test_one_that_stops_within_a_frame_holds_up_nobody() -> None:
    server = Server()
    stalled, other = server.connect(1), server.connect(2)
    stalled.send(message(0)[:20])
    other.post(0, 1)
    assert server.queue == messages(0, 1) and other.answers() == [Ack(1)]


# Bad input


@pytest.mark.req("T-072", "T-078")
@pytest.mark.parametrize(
    ("garbage", "says"),
    [
        (b"\xff" * 16, "oversized frame"),
        (struct.pack(">Q", 2**63), "oversized frame"),
        (struct.pack(">Q", 64 * 2**20 + 1), "oversized frame"),
        (struct.pack(">QQ", 8, 0), "without a sequence"),
        (struct.pack(">QQ", 15, 7) + bytes(7), "without a sequence"),
        (struct.pack(">QQ", 8, 1), "longer than its frame"),
        (message(2, b"garbage"), "no message"),
        (message(2, b"bomb"), "undecodable: KeyError"),
        (b"".join(frame_of(struct.pack(">Q", 2) + b"x", [b"y"])), "a body or one part"),
    ],
    ids=lambda value: str(value)[:25],
)
def test_an_undecodable_frame_ends_its_session_with_reject_and_not_the_server(
    garbage: bytes, says: str
) -> None:
    server = Server(room=100)
    good, bad = server.connect(1), server.connect(2)
    good.post(0)
    bad.send(message(0) + message(1) + garbage + message(2))
    assert server.queue == messages(0, 0, 1), "what came before it was accepted"
    ack, reject = bad.answers()
    assert ack == Ack(1)
    assert isinstance(reject, Reject) and says in reject.reason
    assert bad.link.is_finished and server.counters.rejects_sent == 1
    assert server.counters.messages_accepted == 3
    good.post(1)
    assert good.answers()[-1] == Ack(1)


@pytest.mark.req("T-072")
def test_refusing_a_session_from_outside_acknowledges_first() -> None:
    server = Server(message_ack_every_n_messages=1000, **LAZY)
    one = server.connect()
    one.post(0)
    one.link.refuse("enough")
    one.link.refuse("again")
    assert one.answers() == [Ack(0), Reject("enough")] and one.link.is_finished


# Time, and ends of connections


@pytest.mark.req("T-079")
def test_the_end_within_a_frame_is_counted_as_an_error_and_the_session_goes_on() -> None:
    server = Server()
    one = server.connect()
    one.send(message(0) + message(1)[:-1])
    one.link.connection_lost(1.0)
    assert server.counters.broken_connections == 1
    two = server.connect()
    two.post(1)
    assert server.queue == messages(0, 1)
    two.link.connection_lost(2.0)
    assert server.counters.broken_connections == 1, "between frames it is an orderly end"


def test_a_peer_that_stops_within_a_frame_is_given_up() -> None:
    server = Server(idle_frame_timeout=30)
    one = server.connect()
    one.send(message(0) + message(1)[:12], now=10.0)
    assert one.link.get_timer() == 40.0
    one.send(message(1)[12:15], now=35.0)
    one.link.handle_timer(40.0)
    assert not is_finished(one) and one.link.get_timer() == 65.0
    one.link.handle_timer(65.0)
    assert is_finished(one) and one.link.get_timer() is None
    assert server.counters.broken_connections == 1
    one.link.handle_timer(1000.0)
    assert server.counters.broken_connections == 1


@pytest.mark.parametrize("sent", [b"", encode_header(ID)[:12]])
def test_a_peer_that_does_not_say_who_it_is_is_given_up(sent: bytes) -> None:
    server = Server(idle_frame_timeout=30)
    one = server.connect(None, now=10.0)
    one.send(sent, now=10.0)
    assert one.link.get_timer() == 40.0
    one.link.handle_timer(39.9)
    assert not one.link.is_finished
    one.link.handle_timer(40.0)
    assert one.link.is_finished


def test_a_peer_that_is_silent_between_frames_may_stay() -> None:
    one = Server().connect()
    one.post(0)
    assert one.link.get_timer() is None
    one.link.handle_timer(1e9)
    assert not one.link.is_finished


@pytest.mark.req("T-100")
def test_what_is_counted() -> None:
    server = Server(room=2)
    one = server.connect()
    one.post(0, 0, 1, 2)
    counters = server.counters
    assert (counters.connections, counters.sessions, counters.messages_accepted) == (1, 1, 2)
    assert (counters.duplicates, counters.acks_sent, counters.queue_full) == (1, 1, 1)
    assert (counters.frames_received, counters.bytes_received) == (3, 13 + 4 * (8 + 8 + 8 + 9))
