"""Length-prefixed multipart frames, without I/O (T-073 … T-080; decision A-154).

    frame   = length (8 bytes, big endian), then that many bytes:
    payload = part length (8 bytes, big endian, top bit clear), part, part length, part, …

The first part is the body. A frame of length zero has no parts, and is valid. A `FrameReader` is filled like
a `BufferedProtocol` (`get_buffer`, `buffer_updated`). It never waits, so cancelling cannot lose bytes. It
allocates memory for bytes that have arrived, and never for lengths that a peer has only announced.
"""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

import io
from collections.abc import Sequence
from struct import Struct
from typing import TypeAlias

from strata.txrx.errors import ProtocolViolation

__all__ = [
    "EMPTY_FRAME",
    "LARGE",
    "MAX_PARTS",
    "Frame",
    "FrameReader",
    "FrameTooLarge",
    "frame_of",
    "frame_size",
]

Frame: TypeAlias = Sequence[bytes]
"""Body and parts."""

MAX_PARTS = 1024
"""The most parts in a frame: even a small part costs memory."""
LENGTH = Struct(">Q")
EMPTY_FRAME = LENGTH.pack(0)
_TWO = Struct(">QQ").unpack_from
_ONE = LENGTH.unpack_from
_THREE = Struct(">QQQ").unpack_from
_PREFIX = LENGTH.size

_BUFFER = 256 * 1024
_SMALL_BUFFER = 8 * 1024
"""A reader's first buffer; it gets `_BUFFER` after a read has filled this one. Most connections are quiet."""
LARGE = 64 * 1024
"""A part of this size or more is written uncopied, and read into its own buffer …"""
_FIRST = 256 * 1024
_GROWTH = 4
"""… which begins with `_FIRST` bytes, and grows by this factor when it is full."""


class FrameTooLarge(ProtocolViolation):
    """A peer announced a frame above the limit."""

    def __init__(self, size: int, limit: int) -> None:
        super().__init__(f"oversized frame ({size}, {limit})")
        self.size, self.limit = size, limit


def frame_size(body: bytes, parts: Frame) -> int:
    """The length in the prefix of a frame with these parts."""
    return _PREFIX + len(body) + sum(_PREFIX + len(part) for part in parts)


def frame_of(body: bytes, parts: Frame = ()) -> list[bytes]:
    """The bytes of a frame, as pieces: large parts are not copied."""
    pieces = [LENGTH.pack(frame_size(body, parts)) + LENGTH.pack(len(body)) + body]
    for part in parts:
        prefix = LENGTH.pack(len(part))
        if len(part) < LARGE:
            pieces[-1] += prefix + part
        else:
            pieces[-1] += prefix
            pieces += [part, b""]
    return [piece for piece in pieces if piece]


class FrameReader:
    """Takes bytes and returns whole frames. After an error it reads no further."""

    __slots__ = (
        "_buffer",
        "_end",
        "_frame_left",
        "_is_filled",
        "_large",
        "_limit",
        "_parts",
        "_start",
        "_view",
    )

    def __init__(self, max_frame_length: int) -> None:
        self._limit = max_frame_length
        self._buffer = bytearray(_SMALL_BUFFER)
        self._view = memoryview(self._buffer)
        self._start = self._end = 0
        self._is_filled = False
        self._frame_left: int | None = None
        """How many bytes of the current frame have not been read as parts; None between frames."""
        self._parts: list[bytes] = []
        self._large: _LargePart | None = None

    @property
    def is_between_frames(self) -> bool:
        """Whether the stream may end here without an error (T-079)."""
        return self._frame_left is None and self._start == self._end

    @property
    def held_bytes(self) -> int:
        """The number of bytes that have been read and are not yet part of a returned frame."""
        large = 0 if self._large is None else self._large.filled
        return self._end - self._start + large + sum(map(len, self._parts))

    def get_buffer(self, sizehint: int = -1) -> memoryview:
        """The buffer for the next bytes: room for at least one, unless whole frames wait for `read`."""
        if self._large is not None and not self._large.is_full:
            return self._large.get_buffer()
        if self._start == self._end:
            self._start = self._end = 0
            if self._is_filled:
                self._enlarge()
        elif self._is_filled:
            self._enlarge()
        elif len(self._buffer) - self._end < LARGE:
            # Move the rest of the last read: with small frames, this is less than one frame.
            rest = self._end - self._start
            self._buffer[:rest] = self._buffer[self._start : self._end]
            self._start, self._end = 0, rest
        return self._view[self._end :]

    def _enlarge(self) -> None:
        rest = self._view[self._start : self._end]
        self._buffer = bytearray(_BUFFER)
        self._view = memoryview(self._buffer)
        self._view[: len(rest)] = rest
        self._start, self._end = 0, len(rest)
        self._is_filled = False

    def buffer_updated(self, count: int) -> None:
        """Report that `count` bytes were put into the buffer."""
        if self._large is not None and not self._large.is_full:
            self._large.filled += count
        else:
            self._end += count
            self._is_filled = self._end == len(self._buffer) == _SMALL_BUFFER

    def discard(self) -> None:
        """Drop the bytes that have not been read and the partial frame. No frames are read afterwards."""
        self._start = self._end = 0
        self._is_filled = False
        self._frame_left = self._large = None
        self._parts.clear()

    def feed(self, data: bytes) -> None:
        """Copy bytes into the buffer, for other streams. Raises `ValueError` if they do not fit."""
        if self._large is None and len(self._buffer) - self._end < len(data):
            self._enlarge()
        self.get_buffer()[: len(data)] = data
        self.buffer_updated(len(data))

    def read_exactly(self, count: int) -> bytes | None:
        """Read the first `count` bytes, before any frame; None until they have arrived."""
        assert self._frame_left is None and count <= _BUFFER
        if self._end - self._start < count:
            return None
        self._start += count
        return bytes(self._view[self._start - count : self._start])

    def read(self, most: int) -> list[Frame]:
        """Read up to `most` whole frames, in order. Raises `ProtocolViolation` for a bad frame.

        The frames before a bad one are returned first; the next call raises the error.
        """
        frames: list[Frame] = []
        while len(frames) < most:
            left = self._frame_left
            if left is None:
                self._read_small(frames, most)
                if len(frames) == most:
                    break
                left = self._begin(frames)
                if left is None:
                    break
            if not self._read_part(frames, left):
                break
        return frames

    def read_numbered(self, first: int, most: int) -> list[bytes]:
        """Read up to `most` messages with the sequences from `first` on; return them without the sequence.

        This is the fast path. It takes the next frames as long as each is whole in the buffer, has one part,
        and begins with the expected sequence. All other frames are left to `read`.
        """
        messages: list[bytes] = []
        start = self._start
        if self._frame_left is not None or self._end - start < 24:
            return messages
        size = 8 + _ONE(self._buffer, start)[0]
        if start + size > self._end or size > LARGE:
            return messages
        # Copy many frames at once, since slicing bytes takes half as long as bytes of a view. If all frames
        # have the same size, the copy is no larger than the messages returned.
        data = bytes(self._view[start : min(self._end, start + min(most * size, LARGE))])
        at, end, limit, append = 0, len(data), self._limit, messages.append
        for due in range(first, first + most):
            if end - at < 24:
                break
            length, body, number = _THREE(data, at)
            stop = at + 8 + length
            if number != due or stop > end or length != body + 8 or body < 8 or length > limit:
                break
            append(data[at + 24 : stop])
            at = stop
        self._start = start + at
        return messages

    def _read_small(self, frames: list[Frame], most: int) -> None:
        """Read frames that are whole in the buffer and have one part, as nearly all frames do."""
        buffer, view, start, end = self._buffer, self._view, self._start, self._end
        append, limit = frames.append, self._limit
        for _ in range(most - len(frames)):
            if end - start < 16:
                break
            length, body = _TWO(buffer, start)
            stop = start + 8 + length
            if stop > end or length != body + 8 or length > limit:
                break
            append((bytes(view[start + 16 : stop]),))
            start = stop
        self._start = start

    def _begin(self, frames: list[Frame]) -> int | None:
        """Read the length of a frame; None if bytes are missing, or if `frames` must be returned before the
        error for a bad length."""
        if self._end - self._start < _PREFIX:
            return None
        (length,) = _ONE(self._buffer, self._start)
        if length > self._limit:
            if not frames:
                raise FrameTooLarge(length, self._limit)
            return None
        self._start += _PREFIX
        self._frame_left = length
        return int(length)

    def _read_part(self, frames: list[Frame], left: int) -> bool:
        """Read a part of the current frame, or end the frame; False if bytes are missing."""
        if self._large is not None:
            if not self._large.is_full or self._start == self._end:
                return False
            self._parts.append(self._large.take(self._buffer[self._start]))
            self._start += 1
            self._large = None
        if left == 0:
            frames.append(tuple(self._parts))
            self._parts.clear()
            self._frame_left = None
            return True
        if self._end - self._start < min(_PREFIX, left):
            return False
        size = _ONE(self._buffer, self._start)[0] if left >= _PREFIX else left
        if size > left - _PREFIX or len(self._parts) == MAX_PARTS:
            if frames:
                return False
            many = len(self._parts) == MAX_PARTS
            raise ProtocolViolation(
                f"a frame of more than {MAX_PARTS} parts" if many else "a part that is longer than its frame"
            )
        here = self._end - self._start - _PREFIX
        if size > LARGE and here < size:
            begun = self._start + _PREFIX
            self._large = _LargePart(size, self._view[begun : self._end])
            self._start = self._end
        elif here < size:
            return False
        else:
            begun = self._start + _PREFIX
            self._start = begun + size
            self._parts.append(bytes(self._view[begun : self._start]))
        self._frame_left = left - _PREFIX - size
        return True


class _LargePart:
    """A part that is read into its own buffer, which becomes the part without a copy.

    The last byte is read separately. The caller of `get_buffer` holds a view of the buffer while it reads,
    and a buffer with a view cannot be handed over.
    """

    __slots__ = ("_bytes", "_room", "_size", "_view", "filled")

    def __init__(self, size: int, beginning: memoryview) -> None:
        self._size = size
        self._make(min(size, max(_FIRST, len(beginning))))
        self.filled = len(beginning)
        self._view[: self.filled] = beginning

    @property
    def is_full(self) -> bool:
        return self.filled == self._size - 1

    def get_buffer(self) -> memoryview:
        if self.filled == self._room:
            before = self._view
            self._make(min(self._size, self._room * _GROWTH))
            self._view[: self.filled] = before
            before.release()
        return self._view[self.filled : self._size - 1]

    def take(self, last: int) -> bytes:
        self._view[-1] = last
        self._view.release()
        return self._bytes.getvalue()

    def _make(self, room: int) -> None:
        # `getvalue` of a BytesIO that fills its buffer returns the buffer itself. The buffer begins as zeros,
        # which the system maps to memory only when they are written.
        room = self._size if room == self._size - 1 else room
        self._room = room
        self._bytes = io.BytesIO(bytes(room))
        self._view = self._bytes.getbuffer()
