"""A policy plug-in for relayd: limits the packets of one author in a minute, whichever session sends them.

The relay's own limits apply to a session. This one applies to an author in all sessions of a process, which
is needed with a gateway that publishes for many people.
"""

from __future__ import annotations

import os
from collections import Counter

from strata.protocol.errors import ErrorCode

from relayd.policy import PolicyRequest, Refusal

__all__ = ["AuthorQuota", "author_quota"]

_WINDOW_SECONDS = 60


class AuthorQuota:
    """Counts the packets of each author in the current minute and refuses those above the limit.

    It is asynchronous, so it runs on the relay's event loop and needs no lock; it never waits, so it delays
    nothing else. A plain function would run on threads, where it may block.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._minute = 0
        self._counts: Counter[str] = Counter()

    async def __call__(self, request: PolicyRequest) -> Refusal | None:
        minute, second = divmod(request.received_at, _WINDOW_SECONDS)
        if minute != self._minute:
            self._minute, self._counts = minute, Counter()
        author = request.packet.author_id
        self._counts[author] += 1
        if self._counts[author] <= self._most:
            return None
        return Refusal(
            ErrorCode.RATE_LIMITED,
            f"this relay takes {self._most} packets of an author in a minute",
            detail="author_quota",
            retry_after=_WINDOW_SECONDS - second,
        )


author_quota = AuthorQuota(int(os.environ.get("AUTHOR_QUOTA", "30")))
"""The object that the entry point names: relayd calls it with every packet that has passed all other checks.
"""
