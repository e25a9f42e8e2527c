"""Text frames of the WebSocket protocol, made and taken apart without ceremony (RFC 6455 §5.2).

The library's frame parser and serialiser cost several microseconds for each frame, which a relay pays for
every packet. This file is the only place that goes below its API: whole, final, masked text frames are
taken straight from the received bytes; everything else — handshake, control frames, fragments, a frame
that breaks a rule — goes to the library's protocol, which stays the judge of what is legal. That is sound
because a whole text frame outside a fragmented message changes no state of that protocol.
"""

from __future__ import annotations

from typing import Final

from websockets.frames import Frame, Opcode
from websockets.protocol import OPEN
from websockets.server import ServerProtocol

try:
    from websockets.speedups import apply_mask
except ImportError:  # a platform without the compiled part
    from websockets.utils import apply_mask

__all__ = ["FrameReader", "text_frame", "text_frame_header"]

_WHOLE_TEXT: Final = 0x80 | Opcode.TEXT
_MASKED: Final = 0x80


def text_frame_header(length: int) -> bytes:
    """The header of an unmasked, final text frame with `length` bytes of payload."""
    if length < 126:
        return bytes((_WHOLE_TEXT, length))
    if length < 65_536:
        return b"\x81\x7e" + length.to_bytes(2, "big")
    return b"\x81\x7f" + length.to_bytes(8, "big")


def text_frame(payload: bytes) -> bytes:
    """A whole text frame as a server sends it."""
    return text_frame_header(len(payload)) + payload


class FrameReader:
    """Splits what a client sent into whole text payloads and frames for the library.

    At most one frame of `max_size` bytes is buffered here: a longer one goes to the library as it comes,
    which refuses it from its header.
    """

    __slots__ = ("_max_size", "_needed", "_pending", "_protocol")

    def __init__(self, protocol: ServerProtocol, max_size: int) -> None:
        self._protocol = protocol
        self._max_size = max_size
        self._pending = bytearray()
        self._needed = 0

    def receive(self, data: bytes) -> list[bytes | Frame]:
        """Text payloads as bytes and other frames as `Frame`, in the order they were sent."""
        if self._pending:
            self._pending += data
            if len(self._pending) < self._needed:
                return []  # without looking again: a trickled frame costs each byte once
            data = bytes(self._pending)
            self._pending.clear()
        protocol = self._protocol
        events: list[bytes | Frame] = []
        at, end = 0, len(data)
        if protocol.state is OPEN and protocol.current_size is None and not protocol.reader.buffer:
            at = self._take_text_frames(data, events)
        if at < end and not self._pending:
            protocol.receive_data(data[at:] if at else data)
            events += [event for event in protocol.events_received() if isinstance(event, Frame)]
        return events

    def _take_text_frames(self, data: bytes, events: list[bytes | Frame]) -> int:
        """Take whole text frames off the front; return where the first other thing begins."""
        at, end = 0, len(data)
        while at < end:
            if data[at] != _WHOLE_TEXT:
                return at
            if end - at < 2:
                self._keep(data, at, 2)
                return at
            length = data[at + 1] - _MASKED
            if length < 0:
                return at  # not masked: the library will say so
            start = at + 6
            if length == 126:
                start, length = at + 8, int.from_bytes(data[at + 2 : at + 4], "big")
            elif length == 127:
                start, length = at + 14, int.from_bytes(data[at + 2 : at + 10], "big")
            if start > end:
                self._keep(data, at, start - at)
                return at
            if length > self._max_size:
                return at
            stop = start + length
            if stop > end:
                self._keep(data, at, stop - at)
                return at
            events.append(apply_mask(data[start:stop], data[start - 4 : start]))
            at = stop
        return at

    def _keep(self, data: bytes, at: int, needed: int) -> None:
        self._pending += data[at:]
        self._needed = needed
