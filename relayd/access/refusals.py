"""How often one connection may be refused before it is closed.

Answering a refused message costs the relay more than sending it costs the peer, and a peer that has reached a
limit can go on forever. So each connection has a budget of refusals, which refills evenly. It is large
enough for a client that errs now and then, or that has a burst of publishes in flight when it reaches a
limit.
"""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

from strata.protocol.errors import ErrorCode

from relayd.access.limits import Budget

__all__ = ["Refusals"]


class Refusals:
    """The refusals of one connection: at most `limit` in each window; 0 sets no limit."""

    __slots__ = ("_budget",)

    def __init__(self, limit: int, window_seconds: int) -> None:
        self._budget = Budget(limit, window_seconds) if limit else None

    def is_one_too_many(self, code: ErrorCode, now: float) -> bool:
        """Count a refusal with this code; `now` is monotonic. A fault of the relay itself is not counted."""
        if self._budget is None or code is ErrorCode.INTERNAL_ERROR:
            return False
        return not self._budget.take(now)
