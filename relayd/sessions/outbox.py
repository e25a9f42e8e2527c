"""The bytes on their way to one peer: frames waiting for the end of a step, and those its transport holds.

Frames collect here and leave in one write at the end of each step. While the transport holds more than
`outbound_queue_bytes`, the outbox is paused: it takes no live feed, and callers that can wait, wait for
`writable`.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from typing import Final, cast

from relayd import failpoints
from relayd.metrics import Tally

__all__ = ["SocketOutbox"]

_WITHDRAWAL_TIMEOUT: Final = 1.0
"""How long withdrawn bytes may still take to leave, in seconds."""
_PART_BYTES: Final = 16 * 1024
"""The most bytes that are written at once over TLS. That transport passes each write on as a whole to one
that nobody can ask how much waits in it, and stops once 64 KiB wait there. Written at once, a megabyte that
no reader takes would look as if it had left."""


class SocketOutbox:
    """The bytes for one peer; calls `wants_flush` at the first frame of a step, to be written at its end."""

    __slots__ = (
        "_bytes",
        "_frames",
        "_is_shut",
        "_limit",
        "_part_bytes",
        "_resumed",
        "_tally",
        "_wants_flush",
        "_withdrawn",
        "_written",
        "events_sent",
        "is_paused",
        "transport",
    )

    def __init__(self, limit: int, tally: Tally, wants_flush: Callable[[SocketOutbox], None]) -> None:
        # What each delivery needs is held here rather than looked up: it runs once for each subscriber.
        self._limit = limit
        self._tally = tally
        self._wants_flush = wants_flush
        self._frames: list[bytes] = []
        self._bytes = 0
        self._written = 0
        # Pairs: up to which byte, and until when those bytes may leave; the earliest first.
        self._withdrawn: tuple[tuple[int, float], ...] = ()
        self._is_shut = False
        self._resumed: asyncio.Future[None] | None = None
        self.is_paused = False
        """Whether the transport's buffer is full."""
        self.events_sent = 0
        """The number of EVENTs of live feeds that were taken."""
        self.transport: asyncio.Transport = cast(asyncio.Transport, None)
        self._part_bytes = sys.maxsize

    def attach(self, transport: asyncio.Transport) -> None:
        """Set the transport, before anything is queued."""
        self.transport = transport
        if transport.get_extra_info("ssl_object") is not None:
            self._part_bytes = _PART_BYTES

    @property
    def held_bytes(self) -> int:
        """The bytes that have not left yet."""
        return self._bytes + self.transport.get_write_buffer_size()

    def queue(self, frames: bytes) -> None:
        """Add whole frames; they are written when the step ends."""
        queued = self._frames
        if not queued:
            self._wants_flush(self)
        queued.append(frames)
        self._bytes += len(frames)

    def deliver(self, frames: bytes, events: int) -> bool:
        """Queue EVENTs of a live feed if there is room for them; False means that nothing was queued."""
        if self.is_paused or self._bytes > self._limit:
            return False
        # As in `queue`, without the call: this runs once for each subscriber of each batch.
        queued = self._frames
        if not queued:
            self._wants_flush(self)
        queued.append(frames)
        self._bytes += len(frames)
        self.events_sent += events
        return True

    def flush(self) -> None:
        """Write in one piece what is queued, or drop it if nothing may follow what was written."""
        queued = self._frames
        if not queued:
            return
        if failpoints.ARMED:
            failpoints.hit("sessions.write")
        data = queued[0] if len(queued) == 1 else b"".join(queued)
        queued.clear()
        self._bytes = 0
        if not self._is_shut:
            if len(data) <= self._part_bytes:  # as in `write`, without the call
                self.transport.write(data)
            else:
                self._write_parts(data)
            self._written += len(data)
            self._tally.bytes_sent += len(data)

    def write(self, data: bytes) -> None:
        """Write this at once, ahead of anything that is queued."""
        self._write_parts(data)
        self._written += len(data)

    def _write_parts(self, data: bytes) -> None:
        whole = memoryview(data)
        for start in range(0, len(data), self._part_bytes):
            self.transport.write(whole[start : start + self._part_bytes])

    def shut(self) -> None:
        """Nothing that is queued from now on may follow what was written. Idempotent."""
        self._is_shut = True

    def end(self) -> None:
        """The socket is gone: drop what is queued at once."""
        self._frames.clear()
        self._is_shut = True

    def abort(self) -> None:
        """Drop the socket: what was queued is lost, so its peer must not wait for it."""
        self.transport.abort()

    def pause(self) -> None:
        """The transport's buffer is full."""
        self.is_paused = True

    def resume(self) -> None:
        """The transport has room."""
        self.is_paused = False
        if self._resumed is not None and not self._resumed.done():
            self._resumed.set_result(None)
        self._resumed = None

    async def writable(self) -> None:
        """Wait until the transport has room. Cancelling it changes nothing."""
        while self.is_paused:
            if self._resumed is None:
                self._resumed = asyncio.get_running_loop().create_future()
            await asyncio.shield(self._resumed)

    def withdraw(self, now: float) -> None:
        """Anything queued before now that still waits must leave within a second, or not at all.

        Further calls do not extend the time of what has already been withdrawn.
        """
        self.flush()
        waits = self.transport.get_write_buffer_size() > 0
        if waits and (not self._withdrawn or self._withdrawn[-1][0] < self._written):
            self._withdrawn += ((self._written, now + _WITHDRAWAL_TIMEOUT),)

    def is_late(self, now: float) -> bool:
        """Whether withdrawn bytes are still waiting after their time is over."""
        if not self._withdrawn:
            return False
        left = self._written - self.transport.get_write_buffer_size()
        self._withdrawn = tuple(each for each in self._withdrawn if each[0] > left)
        return bool(self._withdrawn) and now >= self._withdrawn[0][1]
