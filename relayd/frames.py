"""Text frames of the WebSocket protocol, built and parsed directly (RFC 6455 §5.2).

The library's frame parser and serialiser cost several microseconds per frame, which a relay pays for every
packet. This file is the only place that goes below the library's API: whole, final, masked text frames are
taken straight from the received bytes; everything else — handshake, control frames, fragments, a frame
that breaks a rule — goes to the library's protocol, which still decides what is legal. That is sound
because a whole text frame outside a fragmented message changes no state of that protocol.

One read of a socket may hold forty thousand frames of six bytes, so the number taken at once is limited.
"""

from __future__ import annotations

from typing import Final

from websockets.frames import Frame, Opcode
from websockets.protocol import OPEN
from websockets.server import ServerProtocol

try:
    from websockets.speedups import apply_mask
except ImportError:  # a platform without the compiled extension
    from websockets.utils import apply_mask

__all__ = ["FrameSplitter", "text_frame", "text_frame_header"]

_WHOLE_TEXT: Final = 0x80 | Opcode.TEXT
_MASKED: Final = 0x80
_MIDDLING: Final = _MASKED | 126
_RESERVED: Final = 0x70
_OPCODES: Final = frozenset(Opcode)
_MOST_FRAMES: Final = 256
"""Frames taken by one `receive`: half a millisecond of work."""
_FRAMES_OF_THE_LIBRARY: Final = 8
"""A frame that the library reads counts as this many."""


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


class FrameSplitter:
    """Splits what a client sent into whole text payloads and frames for the library.

    At most one frame of `max_size` bytes is buffered here: a longer one goes to the library as it arrives,
    which refuses it by its header. Frames that one `receive` leaves over are also kept for the next one;
    `has_more` is then true, and until it is false the caller must not read from the socket.
    """

    __slots__ = ("_failing", "_max_size", "_needed", "_pending", "_protocol", "has_more")

    def __init__(self, protocol: ServerProtocol, max_size: int) -> None:
        self._protocol = protocol
        self._max_size = max_size
        self._pending = bytearray()
        self._needed = 0
        self._failing = False
        self.has_more = False
        """Whether whole frames may be waiting: call `receive` again, with no data, in a later step."""

    @property
    def held_bytes(self) -> int:
        """The number of bytes waiting here, for the rest of their frame or for their turn."""
        return len(self._pending)

    def forget(self) -> None:
        """Drop everything that waits here: the socket is gone."""
        self._pending = bytearray()
        self.has_more = False

    def receive(self, data: bytes) -> list[bytes | Frame]:
        """Return text payloads as bytes and other frames as `Frame`, in the order they were sent.

        After our own close frame, everything but the peer's close frame is ignored.
        """
        if self._pending:
            self._pending += data
            if len(self._pending) < self._needed:
                return []  # without parsing again: a frame that trickles in costs each byte once
            data = bytes(self._pending)
            self._pending.clear()
        protocol = self._protocol
        events: list[bytes | Frame] = []
        at, end, looked_at = 0, len(data), 0
        self.has_more = False
        while at < end and protocol.close_rcvd is None and not self._failing:
            if looked_at >= _MOST_FRAMES:
                self._pending += memoryview(data)[at:]
                self._needed = 0
                self.has_more = True
                return events
            looked_at += 1
            if end - at > 8 and data[at] == _WHOLE_TEXT and data[at + 1] == _MIDDLING:
                # Nearly every frame is of this kind: 126 bytes to 64 KiB of whole text.
                start = at + 8
                stop = start + (data[at + 2] << 8 | data[at + 3])
                if stop <= end and stop - start <= self._max_size and protocol.current_size is None:
                    if protocol.state is OPEN:
                        events.append(apply_mask(data[start:stop], data[start - 4 : start]))
                    at = stop
                    continue
            start, stop = self._frame_at(data, at)
            if stop > end:
                if start:  # legal so far: wait for the rest of it
                    self._pending += data[at:]
                    self._needed = stop - at
                    return events
                # Illegal by its header: the library says so, at once or when it has the frame.
                self._failing = True
                break
            if protocol.state is not OPEN and data[at] & 0x0F != Opcode.CLOSE:
                pass
            elif data[at] == _WHOLE_TEXT and protocol.current_size is None:
                events.append(apply_mask(data[start:stop], data[start - 4 : start]))
            else:
                # Only whole frames, so that the library's parser always stands between frames, where a text
                # frame may bypass it. Its buffer would not show that: it can be empty in mid-frame too.
                self._hand_over(data[at:stop], events)
                looked_at += _FRAMES_OF_THE_LIBRARY - 1
            at = stop
        if at < end:
            self._hand_over(data[at:], events)
        return events

    def _hand_over(self, data: bytes, events: list[bytes | Frame]) -> None:
        self._protocol.receive_data(data)
        events += [event for event in self._protocol.events_received() if isinstance(event, Frame)]

    def _frame_at(self, data: bytes, at: int) -> tuple[int, int]:
        """Where the payload of the frame at `at` starts and stops, as far as its header has arrived.

        A start of 0 with a stop beyond the data means that the library refuses the frame by its header.
        """
        available = len(data) - at
        if available < 2:
            return at + 2, at + 2
        length = data[at + 1] - _MASKED
        if length < 0 or data[at] & _RESERVED or data[at] & 0x0F not in _OPCODES:
            return 0, at + available + 1
        start = at + 6
        if length >= 126:
            # The length is checked before the mask has arrived, as the library does.
            start = at + (8 if length == 126 else 14)
            if len(data) < start - 4:
                return start - 4, start - 4
            length = int.from_bytes(data[at + 2 : start - 4], "big")
        if length > self._max_size - (self._protocol.current_size or 0):
            return 0, at + available + 1
        return start, start + length
