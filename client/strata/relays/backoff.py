"""How long to wait before trying again: full jitter, pure (R-338, R-339)."""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

from collections.abc import Callable

__all__ = ["MAX_RETRY_AFTER_SECONDS", "Backoff", "after_retry_after", "full_jitter", "retry_delay"]

MAX_RETRY_AFTER_SECONDS = 3600
"""The longest wait without a deadline of its own; a relay that asks for a longer one has refused."""

_MAX_DOUBLINGS = 32
_SPREAD = 0.2
_FOREVER_SECONDS = 2**31


def full_jitter(attempt: int, *, base: float, cap: float, random: Callable[[], float]) -> float:
    """Seconds to wait before attempt number `attempt` (from 0): even over [0, min(cap, base·2^attempt)).

    The whole interval is drawn from, so that clients cut off together do not come back together.
    `random` gives values in [0, 1).
    """
    return random() * min(cap, base * 2.0 ** min(attempt, _MAX_DOUBLINGS))


def after_retry_after(retry_after: int, *, random: Callable[[], float]) -> float:
    """Seconds to wait when the peer said when to come back: never less, up to a fifth more (R-338)."""
    # Whatever integer a peer sends: below zero, or beyond what a float can hold.
    return min(max(retry_after, 0), _FOREVER_SECONDS) * (1.0 + _SPREAD * random())


def retry_delay(
    attempt: int, retry_after: int | None, *, base: float, cap: float, random: Callable[[], float]
) -> float:
    """Seconds to wait before a request goes out again: no less than the peer has asked for, if it has."""
    backoff = full_jitter(attempt, base=base, cap=cap, random=random)
    return backoff if retry_after is None else max(backoff, after_retry_after(retry_after, random=random))


class Backoff:
    """Successive waits between attempts to connect."""

    __slots__ = ("_attempt", "_base", "_cap", "_random")

    def __init__(self, *, base: float, cap: float, random: Callable[[], float]) -> None:
        self._base = base
        self._cap = cap
        self._random = random
        self._attempt = 0

    def next_delay(self) -> float:
        """The next wait in seconds; its upper bound doubles each time."""
        delay = full_jitter(self._attempt, base=self._base, cap=self._cap, random=self._random)
        self._attempt += 1
        return delay

    def reset(self) -> None:
        """Begin again from the shortest wait, after a connection that was worth having."""
        self._attempt = 0
