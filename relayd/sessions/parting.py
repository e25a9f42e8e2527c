"""How long a socket that is about to end still has: the deadlines of its end, without I/O or clock.

A peer has some seconds to answer our close, and as long again to take what waits when the socket is closed.
The reader of an HTTP response may take longer, as long as it keeps reading, because the line may be slow.
Between the last word and the end the socket lingers: it is read from, and what is read is discarded.
"""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final

__all__ = ["Due", "Parting"]

_CLOSE_TIMEOUT: Final = 5.0
"""How long a peer may take to answer our close, in seconds."""
_ANSWER_TIMEOUT: Final = 15.0
_ANSWER_PART: Final = 16 * 1024
"""Within `_ANSWER_TIMEOUT` the reader of an HTTP response must take this many bytes of it: about a kilobyte a
second is a slow line, and less is a dead one."""
_LONGEST_LINGER: Final = 2.0
"""The longest time that a socket is read from after the last word, in seconds."""


class Due(enum.Enum):
    """What to do with a socket that is about to end."""

    NOTHING = enum.auto()
    CLOSE = enum.auto()
    """It has lingered long enough."""
    ABORT = enum.auto()
    """The peer's time is over."""


@dataclass(slots=True)
class Parting:
    """The end of one socket, once it has begun; all times are monotonic seconds."""

    most_bytes: int
    """The most bytes read from the peer while the socket lingers."""
    discarded: int = 0
    """The bytes read and discarded so far."""
    _abort_at: float | None = None
    _answer_left: int = 0
    _lingers_until: float | None = None

    @property
    def has_begun(self) -> bool:
        """Whether the socket is about to end."""
        return self._abort_at is not None or self.is_lingering

    @property
    def is_lingering(self) -> bool:
        """Whether the last word has been sent."""
        return self._lingers_until is not None

    def begin(self, now: float) -> None:
        """The close has begun: the peer has `_CLOSE_TIMEOUT` to answer it."""
        self._abort_at = now + _CLOSE_TIMEOUT

    def answered(self, waiting_bytes: int) -> None:
        """An HTTP response was written, and this many bytes of it have not left."""
        self._answer_left = waiting_bytes

    def linger(self, now: float) -> None:
        """The last word has been sent: start to linger."""
        self._lingers_until = now + _LONGEST_LINGER

    def discard(self, size: int) -> bool:
        """Count bytes that came meanwhile. Returns whether they exceed what is read from a peer."""
        self.discarded += size
        return self.discarded > self.most_bytes

    def closed(self, now: float) -> None:
        """The socket is closed; what waits to be sent may still leave."""
        self._abort_at = now + (_ANSWER_TIMEOUT if self._answer_left else _CLOSE_TIMEOUT)

    def check(self, now: float, *, waiting_bytes: int, is_closed: bool) -> Due:
        """Look at the deadlines; called about once a second."""
        if self._lingers_until is not None and not is_closed:
            return Due.CLOSE if now >= self._lingers_until else Due.NOTHING
        if waiting_bytes <= self._answer_left - _ANSWER_PART:
            self._answer_left = waiting_bytes
            self._abort_at = now + _ANSWER_TIMEOUT
        return Due.ABORT if self._abort_at is not None and now >= self._abort_at else Due.NOTHING
