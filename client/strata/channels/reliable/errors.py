"""The errors that calls of a channel raise. Later failures are reported as events (C-011)."""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

from collections.abc import Mapping, Sequence

from strata.protocol.errors import StrataError

__all__ = [
    "AlreadyOpen",
    "ChannelFailed",
    "ChannelNotOpen",
    "EmptyPayload",
    "EncodingFailed",
    "EventsMissed",
    "InvalidConfiguration",
    "InvalidEnvelope",
    "MessageTooLarge",
    "NotSent",
    "NotStarted",
    "ReliableError",
    "RequestIdInUse",
    "SegmentDoesNotFit",
    "UnknownChannel",
]


class ReliableError(StrataError):
    """A channel could not do what a call requested; nothing was sent. The root of all errors of channels."""


class NotStarted(ReliableError):
    """The channel is stopped: `start` it first (C-016)."""

    def __str__(self) -> str:
        return "the channel is not started: call start(), or open it with `async with`"


class ChannelNotOpen(ReliableError):
    """The channel was closed, or never opened."""

    def __str__(self) -> str:
        return "the channel is not open"


class ChannelFailed(ReliableError):
    """A task of the channel ended with an error, and the channel is closed. The cause is that error.

    Stored state stays for the next opening.
    """

    def __init__(self, task: str, error: BaseException) -> None:
        super().__init__(task, error)
        self.task = task
        """A description of the task that ended."""
        self.error = error
        self.__cause__ = error

    def again(self) -> ChannelFailed:
        """A copy to raise again; a single object would collect a traceback each time it is raised."""
        return ChannelFailed(self.task, self.error)

    def __str__(self) -> str:
        return f"the channel is closed, because {self.task} failed: {self.error!r}"


class NotSent(ReliableError):
    """Messages that a program waited for are not out. They are given by request id.

    A message in `requests` may be out after all if the transport has not answered. A message in `refused`
    will never go out.
    """

    def __init__(self, requests: tuple[str, ...], refused: Mapping[str, str] | None = None) -> None:
        super().__init__(requests, refused)
        self.requests = requests
        """The messages that still wait, or whose outcome is unknown, in the order in which they were sent."""
        self.refused = dict(refused or {})
        """The messages that were permanently refused, with the reasons."""

    def __str__(self) -> str:
        parts = []
        if self.requests:
            parts.append(f"{len(self.requests)} messages have not gone out ({_some(self.requests)})")
        if self.refused:
            named = [f"{request_id}: {reason}" for request_id, reason in self.refused.items()]
            parts.append(f"{len(self.refused)} messages were refused ({_some(named)})")
        return "; ".join(parts)


class RequestIdInUse(ReliableError, ValueError):
    """A program gave one request id to two different messages."""

    def __init__(self, request_id: str) -> None:
        super().__init__(request_id)
        self.request_id = request_id

    def __str__(self) -> str:
        return f"the request id {self.request_id!r} was given to a message with another content before"


class AlreadyOpen(ReliableError):
    """This participant already has the channel open, on this node or with this store (C-009)."""

    def __init__(self, channel_id: str, sender_id: str) -> None:
        super().__init__(channel_id, sender_id)
        self.channel_id = channel_id
        self.sender_id = sender_id

    def __str__(self) -> str:
        return (
            f"{self.sender_id!r} has the channel {self.channel_id!r} open on this node or with this store "
            "already: close it first, or give this one a sender id of its own"
        )


class UnknownChannel(ReliableError):
    """An envelope names a channel that is not open here, or that several participants have open (C-013)."""

    def __init__(self, channel_id: str) -> None:
        super().__init__(channel_id)
        self.channel_id = channel_id

    def __str__(self) -> str:
        return f"no channel {self.channel_id!r} is open here, or more than one"


class InvalidConfiguration(ReliableError, ValueError):
    """Arguments or settings that are unusable, or that contradict those of the node's other channels."""


class InvalidEnvelope(ReliableError, ValueError):
    """An envelope that contradicts its channel (C-014)."""


class EmptyPayload(ReliableError, ValueError):
    """A message without content (C-015)."""

    def __str__(self) -> str:
        return "a message needs content"


class EncodingFailed(ReliableError):
    """The encoder failed, so this chunk fails permanently (C-044). The cause is the encoder's own error."""

    def __str__(self) -> str:
        return f"the encoder failed: {self.__cause__!r}"


class MessageTooLarge(ReliableError, ValueError):
    """An ephemeral message that does not fit into one transport message (C-179)."""

    def __init__(self, size_bytes: int, max_bytes: int) -> None:
        super().__init__(size_bytes, max_bytes)
        self.size_bytes = size_bytes
        self.max_bytes = max_bytes

    def __str__(self) -> str:
        return f"{self.size_bytes} bytes are too many for an ephemeral message: it may have {self.max_bytes}"


class SegmentDoesNotFit(ReliableError, ValueError):
    """A full segment would not fit into one transport message (C-035)."""

    def __init__(self, segment_size_bytes: int, largest: int) -> None:
        super().__init__(segment_size_bytes, largest)
        self.segment_size_bytes = segment_size_bytes
        self.largest = largest
        """The largest `segment_size_bytes` that works with these settings; 0 if none does."""

    def __str__(self) -> str:
        return (
            f"segments of {self.segment_size_bytes} bytes do not fit into this transport's messages with "
            f"these settings: set segment_size_bytes to at most {self.largest}"
        )


class EventsMissed(ReliableError):
    """A program did not read an iterator of events for so long that the oldest events were dropped."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.count = count

    def __str__(self) -> str:
        return f"{self.count} events were dropped: this iterator was not read for too long"


def _some(names: Sequence[str]) -> str:
    """The first few names."""
    return ", ".join(names[:5]) + (", …" if len(names) > 5 else "")
