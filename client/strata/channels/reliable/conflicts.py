"""Detects another program that uses the same sender id at the same time (C-006).

SDS reports each message under this sender id that it has not sent. Most such messages are the participant's
own, from before the state was lost. A message of another program is later than the start: it names a message
of this run, or both its transport time and its Lamport time are later. A clock that is behind only delays the
detection.
"""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

from strata.channels.reliable.events import SenderIdConflict
from strata.channels.sds import SenderShared

__all__ = ["Conflicts"]

_PRESENT_MS = 600_000
"""A conflict is over when nothing has been heard of it for this time; until then it is reported once."""
_LEAST_GAP_MS = 60_000
"""The shortest time between two events about different authors: a stranger can have many names."""
_MAX_TOLD = 16
"""How many authors are remembered as told of. Whoever has more names is told of again, by the gap above."""
_FUTURE_MS = 60_000
"""A message dated further ahead was sent with another clock, perhaps by an earlier run."""


class Conflicts:
    """The conflict about one sender id, if there is one."""

    def __init__(self, sender_id: str, author: str | None, started_ms: int) -> None:
        """`author` is the transport's name for this participant."""
        self._sender_id = sender_id
        self._author = author
        self._started = started_ms
        self._last: SenderIdConflict | None = None
        self._heard_at = 0
        self._told: dict[str | None, int] = {}
        """When each author that was told of was last heard; longest ago first."""

    def current(self, now_ms: int) -> SenderIdConflict | None:
        """The current conflict, if there is one."""
        return self._last if _is_present(self._heard_at, now_ms) else None

    def heard(self, shared: SenderShared, now_ms: int) -> SenderIdConflict | None:
        """A message not sent here arrived under this sender id. Returns the conflict if it is new."""
        if not self._is_concurrent(shared, now_ms):
            return None
        was, author = self.current(now_ms), shared.origin.author
        self._heard_at = now_ms
        told_at = self._told.pop(author, None)
        if told_at is not None and _is_present(told_at, now_ms):
            self._told[author] = now_ms
            return None
        if was is not None and now_ms - was.detected_at < _LEAST_GAP_MS:
            return None
        self._told[author] = now_ms
        if len(self._told) > _MAX_TOLD:
            del self._told[next(iter(self._told))]
        whose = "of this identity" if author == self._author else f"of {author or 'another identity'}"
        self._last = SenderIdConflict(
            sender_id=self._sender_id,
            author=author,
            sds_id=shared.message_id,
            detected_at=now_ms,
            reason=(
                f"another program {whose} sends as {self._sender_id!r}, so neither hears the other: "
                "give each a sender id (or device name) and a store of its own"
            ),
        )
        return self._last

    def _is_concurrent(self, shared: SenderShared, now_ms: int) -> bool:
        if shared.follows_own:
            return True
        sent_at = shared.origin.sent_at
        if sent_at is None or shared.lamport_timestamp <= self._started:
            return False
        return self._started < sent_at * 1000 <= now_ms + _FUTURE_MS


def _is_present(heard_at: int, now_ms: int) -> bool:
    """Whether whoever was last heard at this time is still there."""
    return 0 <= now_ms - heard_at < _PRESENT_MS
