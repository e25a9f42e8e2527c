"""Messages under our sender id that were not sent here: another participant may use the id (C-006)."""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

from collections import deque

from strata.channels.sds.events import Origin, SenderShared
from strata.channels.sds.log import MessageLog
from strata.channels.sds.messages import Kind, SdsMessage

__all__ = ["OwnName"]

_REMEMBERED = 256
"""How many own syncs and withdrawn messages are recognised when they come back, and how many reports wait."""


class OwnName:
    """Messages sent under our sender id that nothing else keeps, and reports of those received under it."""

    def __init__(self, log: MessageLog, own_count: int) -> None:
        """`own_count` is the number of own messages before this run."""
        self._log = log
        self._own_before = own_count
        self._syncs: deque[int] = deque(maxlen=_REMEMBERED)
        self._withdrawn: deque[str] = deque(maxlen=_REMEMBERED)
        self._reports: deque[SenderShared] = deque(maxlen=_REMEMBERED)

    def sync_sent(self, lamport: int) -> None:
        """Note that we send a sync; its Lamport time identifies it."""
        self._syncs.append(lamport)

    def withdrawn(self, message_id: str) -> None:
        """Note that one of our messages was forgotten, though it may have gone out."""
        self._withdrawn.append(message_id)

    def heard(self, message: SdsMessage, origin: Origin) -> bool:
        """Report a message under our id that is not in the log, unless it was sent here; True if reported."""
        lamport = message.lamport_timestamp or 0
        if message.kind is Kind.EPHEMERAL:
            return False  # none is kept to compare with
        if message.message_id in self._withdrawn or lamport in self._syncs:
            return False
        named = map(self._log.get, message.history_ids)
        follows_own = any(entry is not None and entry.own > self._own_before for entry in named)
        self._reports.append(SenderShared(message.message_id, lamport, follows_own, origin))
        return True

    def take(self) -> list[SenderShared]:
        """Remove and return the latest reports."""
        reports = list(self._reports)
        self._reports.clear()
        return reports
