"""Coverage-guided fuzzing of every decoder that sees a peer's bytes, each against its stated invariant.

    python tests/fuzz/harnesses.py NAME [-max_total_time=SECONDS] [-seed=N] [CORPUS_FOLDER]

NAME is one of `TARGETS`. An input that violates the invariant is written to a file `crash-…`, and
`python tests/fuzz/harnesses.py NAME crash-…` runs it again. The options are libFuzzer's.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

import atheris

with atheris.instrument_imports(include=["strata", "relayd", "websockets"]):
    from strata.protocol import canonical
    from strata.protocol.errors import InvalidMessage, InvalidPacket
    from strata.protocol.negentropy import MIN_FRAME_BYTES, ItemSet, NegentropyError, Reconciler
    from strata.protocol.packets import Packet
    from strata.protocol.wire import decode_client_message, encode
    from websockets.frames import Frame
    from websockets.protocol import OPEN, Protocol
    from websockets.server import ServerProtocol

    from relayd.access.auth import Authentication, Grants
    from relayd.cursor import CursorCodec, InvalidCursor
    from relayd.frames import FrameSplitter
    from relayd.sessions.actions import (
        AuthReceived,
        AuthRefused,
        CloseConnection,
        Reply,
    )
    from relayd.sessions.session import Session
from relayd.access.limits import SessionLimits

__all__ = ["TARGETS"]

CODEC = CursorCodec(bytes(32))
SERVER = "did:strata:z6MkvDqGT54cXesYGvABpF1UapVNwjCqRcafi4Px6Thv5T3Z"
FRAME_LIMIT = 4096


def canonical_parse(data: bytes) -> None:
    """Refused, or a form that is its own canonical form."""
    try:
        value, text = canonical.parse(data)
    except InvalidPacket:
        return
    assert canonical.parse(text) == (value, text)
    assert canonical.encode(value) == text


def packet_parse(data: bytes) -> None:
    """Refused, or a packet whose own bytes parse to itself."""
    try:
        packet = Packet.parse(data, max_bytes=262_144)
    except InvalidPacket:
        return
    assert Packet.parse(packet.canonical) == packet


def client_message(data: bytes) -> None:
    """Refused, or a message that survives re-encoding."""
    try:
        message = decode_client_message(data)
    except InvalidMessage:
        return
    assert decode_client_message(encode(message)) == message


def session_text(data: bytes) -> None:
    """One action for each frame, and an answer that is JSON."""
    session = Session(SessionLimits(max_subscriptions=2), CODEC, Authentication(SERVER, 120), Grants())
    for number, frame in enumerate(data.split(b"\n")):
        action: object = session.receive_text(frame, float(number))
        if isinstance(action, AuthReceived):
            action = session.begin_auth(action.message, float(number), number)
        if isinstance(action, Reply | AuthRefused | CloseConnection):
            assert json.loads(action.payload)["type"] == "ERROR"
        assert len(session.subscriptions) <= 2


def frame_reader(data: bytes) -> None:
    """The fast path yields the same frames as the library, however the bytes are cut."""
    step, stream = (data[0] % 64 + 1, data[1:]) if data else (1, b"")
    library, protocol = _server(), _server()
    library.receive_data(stream)
    expected = [_frame_parts(event) for event in library.events_received()]
    reader = FrameSplitter(protocol, FRAME_LIMIT)
    got = [
        (1, True, bytes(event)) if isinstance(event, bytes) else (event.opcode, event.fin, bytes(event.data))
        for at in range(0, len(stream), step)
        for event in reader.receive(stream[at : at + step])
    ]
    assert got == expected
    assert type(protocol.parser_exc) is type(library.parser_exc)


def _frame_parts(event: object) -> tuple[int, bool, bytes]:
    assert isinstance(event, Frame)  # an open WebSocket has no other events
    return event.opcode, event.fin, bytes(event.data)


def _server() -> ServerProtocol:
    protocol = ServerProtocol(max_size=FRAME_LIMIT)
    protocol.state = OPEN
    protocol.parser = Protocol.parse(protocol)
    next(protocol.parser)
    return protocol


ITEMS = ItemSet((number // 3, bytes([number]) * 32) for number in range(80))


def negentropy_message(data: bytes) -> None:
    """Refused, or answered in either role with a message that fits the frame and that the other side can
    read; only items that the message named are wanted."""
    reconciler = Reconciler(ITEMS, max_frame_bytes=MIN_FRAME_BYTES, shift=len(data))
    for answer_to in (reconciler.respond, lambda message: reconciler.receive(message).message):
        try:
            answer = answer_to(data)
        except NegentropyError:
            continue
        if answer is None or answer == b"\x61":
            continue
        assert len(answer) <= MIN_FRAME_BYTES
        reconciler.respond(answer)
    try:
        compared = reconciler.receive(data)
    except NegentropyError:
        return
    assert 32 * len(compared.need) <= len(data)
    ours = set(ITEMS.ids(0, len(ITEMS)))
    assert ours.issuperset(compared.have) and len(compared.have) <= len(ours)


def cursor_decode(data: bytes) -> None:
    """No text is a cursor unless `encode` made it."""
    text = data.decode("utf-8", "replace")
    for ascending in (True, False):
        try:
            position = CODEC.decode(text, ascending=ascending)
        except InvalidCursor:
            continue
        assert CODEC.encode(position, ascending=ascending) == text


TARGETS: dict[str, Callable[[bytes], None]] = {
    "canonical": canonical_parse,
    "packet": packet_parse,
    "message": client_message,
    "session": session_text,
    "frames": frame_reader,
    "cursor": cursor_decode,
    "negentropy": negentropy_message,
}


if __name__ == "__main__":
    target = TARGETS[sys.argv.pop(1)]
    atheris.Setup(sys.argv, target)
    atheris.Fuzz()
