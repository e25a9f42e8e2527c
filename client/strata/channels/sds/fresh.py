"""Own messages as they travel, from being made to going out: nearly all are asked for once, and soon."""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

from collections import OrderedDict

__all__ = ["Fresh"]

_MAX_BYTES = 4 << 20


class Fresh:
    """A few megabytes of them; beyond it the oldest are made again from what is kept of them anyway."""

    def __init__(self) -> None:
        self._messages: OrderedDict[str, bytes] = OrderedDict()
        self._size_bytes = 0

    def put(self, message_id: str, data: bytes) -> None:
        """Keep a message."""
        self._messages[message_id] = data
        self._size_bytes += len(data)
        while self._size_bytes > _MAX_BYTES:
            self._size_bytes -= len(self._messages.popitem(last=False)[1])

    def get(self, message_id: str) -> bytes | None:
        """A message, if it is kept."""
        return self._messages.get(message_id)

    def discard(self, message_id: str) -> None:
        """It has gone out, or never will."""
        data = self._messages.pop(message_id, None)
        if data is not None:
            self._size_bytes -= len(data)
