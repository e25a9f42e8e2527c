"""When a received message was sent, by its sender's clock: no byte on the wire says that alone."""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

from strata.channels.sds.config import FAR_AHEAD_MS

__all__ = ["date_of_sending"]

_LEAST_CLOCK_MS = 1_500_000_000_000
"""Lamport times below this are counters of other implementations, and no times."""


def date_of_sending(lamport: int | None, transmitted_at: int | None, now_ms: int) -> int | None:
    """Unix milliseconds: the earlier of two times that are never too early. None for nonsense.

    A Lamport time is the sender's clock, unless that was behind others'. A transmission, in Unix seconds, may
    come long after the sending.
    """
    latest = now_ms + FAR_AHEAD_MS if transmitted_at is None else transmitted_at * 1000 + 999
    if lamport is not None and _LEAST_CLOCK_MS <= lamport <= latest:
        sent_at = lamport
    elif transmitted_at is not None:
        sent_at = transmitted_at * 1000
    else:
        return None
    return sent_at if sent_at <= now_ms + FAR_AHEAD_MS else None
