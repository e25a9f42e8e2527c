"""The fast path for text frames agrees with the library, however the bytes are cut."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from websockets.client import ClientProtocol
from websockets.exceptions import PayloadTooBig
from websockets.frames import Frame, Opcode
from websockets.protocol import CLIENT, OPEN, Protocol
from websockets.server import ServerProtocol

from relayd.frames import FrameSplitter, text_frame

MAX_SIZE = 70_000


def server() -> ServerProtocol:
    protocol = ServerProtocol(max_size=MAX_SIZE)
    protocol.state = OPEN
    protocol.parser = Protocol.parse(protocol)
    next(protocol.parser)
    return protocol


def sent(*frames: Frame) -> bytes:
    return b"".join(frame.serialize(mask=True, extensions=[]) for frame in frames)


def parts(event: object) -> tuple[Opcode, bool, bytes]:
    assert isinstance(event, Frame)
    return event.opcode, event.fin, bytes(event.data)


def plain(events):
    return [("text", bytes(event)) if isinstance(event, bytes) else parts(event) for event in events]


payloads = st.one_of(
    st.binary(max_size=200),
    st.sampled_from([b"", b"x" * 125, b"x" * 126, b"x" * 65_535, b"x" * 65_536]),
)
frames = st.one_of(
    payloads.map(lambda data: [Frame(Opcode.TEXT, data)]),
    st.binary(max_size=125).map(lambda data: [Frame(Opcode.PING, data)]),
    st.tuples(payloads, st.binary(max_size=50)).map(
        lambda parts: [
            Frame(Opcode.TEXT, parts[0][:500], fin=False),
            Frame(Opcode.PING, b"between"),
            Frame(Opcode.CONT, parts[1]),
        ]
    ),
    st.binary(max_size=50).map(lambda data: [Frame(Opcode.BINARY, data)]),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(frames, max_size=6), st.lists(st.integers(1, 4000), max_size=12))
def test_the_same_events_as_the_library_for_any_frames_and_any_cuts(groups, cuts):
    stream = sent(*(frame for group in groups for frame in group))
    library = server()
    library.receive_data(stream)
    expected = [
        ("text", data) if opcode is Opcode.TEXT and fin else (opcode, fin, data)
        for opcode, fin, data in map(parts, library.events_received())
    ]
    protocol = server()
    reader = FrameSplitter(protocol, MAX_SIZE)
    got = []
    at = 0
    for cut in [*cuts, len(stream)]:
        got += reader.receive(stream[at : at + cut])
        at += cut
    told = [
        event.data if isinstance(event, Frame) and event.opcode is Opcode.TEXT and event.fin else event
        for event in got
    ]
    assert plain([bytes(e) if isinstance(e, bytearray | memoryview) else e for e in told]) == expected
    assert protocol.data_to_send() == library.data_to_send()  # pongs
    assert protocol.state is library.state


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=400), st.integers(1, 50))
def test_arbitrary_bytes_are_judged_as_the_library_judges_them(data, step):
    library = server()
    library.receive_data(data)
    protocol = server()
    reader = FrameSplitter(protocol, MAX_SIZE)
    for at in range(0, len(data), step):
        reader.receive(data[at : at + step])
    assert type(protocol.parser_exc) is type(library.parser_exc)
    assert protocol.state is library.state


@pytest.mark.req("R-123")
def test_an_oversized_frame_is_refused_from_its_header():
    protocol = server()
    reader = FrameSplitter(protocol, MAX_SIZE)
    header = sent(Frame(Opcode.TEXT, b"x" * (MAX_SIZE + 1)))[:14]
    assert reader.receive(header) == []
    assert isinstance(protocol.parser_exc, PayloadTooBig)


@given(payloads)
def test_a_text_frame_is_what_a_client_reads(payload):
    client = ClientProtocol.__new__(ClientProtocol)
    Protocol.__init__(client, CLIENT)
    client.receive_data(text_frame(payload))
    (event,) = client.events_received()
    assert parts(event) == (Opcode.TEXT, True, payload)


@pytest.mark.req("R-128")
@pytest.mark.parametrize("cut", range(1, 9))
def test_a_frame_cut_behind_its_header_is_not_taken_for_the_start_of_another(cut):
    # The mask looks like the head of a text frame: found by fuzzing.
    ping = b"\x89\x82" + b"\x81\x80ab" + b"xy"
    protocol = server()
    reader = FrameSplitter(protocol, MAX_SIZE)
    events = reader.receive(ping[:cut]) + reader.receive(ping[cut:] + sent(Frame(Opcode.TEXT, b"text")))
    assert [bytes(e) if isinstance(e, bytes) else e.opcode for e in events] == [Opcode.PING, b"text"]


@pytest.mark.req("R-321")
@pytest.mark.parametrize(
    ("opcode", "most"),
    [(Opcode.PING, 32), (Opcode.BINARY, 32), (Opcode.TEXT, 256)],
    ids=lambda value: str(value),
)
def test_what_the_library_reads_comes_in_smaller_parts(opcode: Opcode, most: int):
    reader = FrameSplitter(server(), MAX_SIZE)
    counts = [len(reader.receive(sent(*[Frame(opcode, b"x")] * 1000)))]
    while reader.has_more:
        counts.append(len(reader.receive(b"")))
    assert sum(counts) == 1000
    assert max(counts) == most
