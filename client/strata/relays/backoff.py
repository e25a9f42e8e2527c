"""How long to wait before trying again: full jitter, as pure functions (R-338, R-339)."""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

from collections.abc import Callable

__all__ = ["MAX_RETRY_AFTER_SECONDS", "Backoff", "after_retry_after", "full_jitter", "retry_delay"]

MAX_RETRY_AFTER_SECONDS = 3600
"""The longest wait for requests that have no deadline; a relay that asks for a longer one has refused."""

_MAX_DOUBLINGS = 32
_SPREAD = 0.2
_FOREVER_SECONDS = 2**31


def full_jitter(attempt: int, *, base: float, cap: float, random: Callable[[], float]) -> float:
    """Seconds to wait before attempt number `attempt` (from 0), uniform over [0, min(cap, base·2^attempt)).

    The wait is drawn from the whole interval, so that clients that were disconnected together do not
    reconnect together. `random` gives values in [0, 1).
    """
    return random() * min(cap, base * 2.0 ** min(attempt, _MAX_DOUBLINGS))


def after_retry_after(retry_after: int, *, random: Callable[[], float]) -> float:
    """Seconds to wait if the peer said how long: never less, and up to a fifth more (R-338)."""
    # A peer may send any integer: a negative one, or one too large for a float.
    return min(max(retry_after, 0), _FOREVER_SECONDS) * (1.0 + _SPREAD * random())


def retry_delay(
    attempt: int, retry_after: int | None, *, base: float, cap: float, random: Callable[[], float]
) -> float:
    """Seconds to wait before a request is sent again: at least what the peer asked for, if it did."""
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
        """Start again from the shortest wait, after a successful connection."""
        self._attempt = 0
