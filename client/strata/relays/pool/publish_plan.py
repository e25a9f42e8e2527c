"""One publish to several relays: where to send next, and when it is done. No I/O, no clock.

The packet goes to the `copies` best relays at once. Whenever one fails, the next best takes its place. While
copies are missing, one more relay is tried after 1 s, then after 2 s more, then 4 s, and so on (C-273). A
dead relay therefore costs only its own copy. A relay that failed without refusing is tried again once there
is no untried one. `publish` returns at the first `confirmations` OKs; the other copies continue.
"""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

import math
from collections.abc import Sequence

from strata.protocol.errors import (
    ConnectionFailed,
    InvalidInput,
    MissingCapability,
    RequestRefused,
    Retry,
    StrataError,
)
from strata.relays.connection.values import Published
from strata.relays.pool.values import Copy, PoolPublished

__all__ = ["PublishPlan"]


class PublishPlan:
    """The copies of one packet. `start`, `failed` and `handle_timer` return the relays to send it to now."""

    def __init__(
        self,
        packet_id: str,
        *,
        copies: int,
        confirmations: int,
        retry_interval: float,
        retry_cap: float,
        deadline: float,
    ) -> None:
        self.deadline = deadline
        self.copies: dict[str, Copy] = {}
        """Every relay the packet was sent to, and the state of the copy there."""
        self._packet_id = packet_id
        self._wanted = copies
        self._confirmations = confirmations
        self._interval = retry_interval
        self._cap = retry_cap
        self._retry_at = math.inf
        self._answers: list[Published] = []
        self._retries_allowed: set[str] = set()
        self._last_error: StrataError | None = None

    def start(self, targets: Sequence[str], now: float) -> list[str]:
        """Start the publish; the first relays are those of `targets`, in their order."""
        self._retry_at = now + self._interval
        return self._recruit(targets, self._wanted)

    def stored(self, url: str, answer: Published) -> None:
        """Note that a relay said OK."""
        self.copies[url] = Copy.STORED
        self._answers.append(answer)

    def failed(self, url: str, error: StrataError, targets: Sequence[str]) -> list[str]:
        """Note that a copy failed: another relay takes its place."""
        final = _is_final(error)
        self.copies[url] = Copy.REFUSED if final else Copy.FAILED
        if not final:
            self._retries_allowed.add(url)
        # A refusal is more informative than a relay that could not be reached.
        if final or self._last_error is None or not _is_final(self._last_error):
            self._last_error = error
        return self._recruit([t for t in targets if t not in self.copies], self._missing())

    def handle_timer(self, targets: Sequence[str], now: float) -> list[str]:
        """If copies are missing when the timer is due, try one more relay, or one that failed before."""
        if now < self._retry_at:
            return []
        self._interval = min(self._interval * 2, self._cap)
        self._retry_at = now + self._interval
        if self._stored() >= self._wanted:
            self._retry_at = math.inf
            return []
        fresh = [t for t in targets if t not in self.copies]
        again = [t for t in targets if t in self._retries_allowed]
        return self._recruit([*fresh, *again], max(1, self._missing()))

    def get_timer(self) -> float:
        """When to call `handle_timer`; infinity once every copy is stored."""
        return math.inf if self._stored() >= self._wanted else self._retry_at

    @property
    def is_confirmed(self) -> bool:
        """Whether enough relays have said OK."""
        return len(self._answers) >= self._confirmations

    @property
    def refusal(self) -> StrataError | None:
        """The refusal to raise, once every relay tried has refused permanently; None before."""
        hopeless = bool(self.copies) and all(copy is Copy.REFUSED for copy in self.copies.values())
        return self._last_error if hopeless else None

    @property
    def last_error(self) -> StrataError:
        """The most informative failure so far."""
        return self._last_error or ConnectionFailed("no relay of the pool is connected")

    def result(self) -> PoolPublished:
        """The value that `publish` returns."""
        times = [answer.received_at for answer in self._answers if answer.received_at is not None]
        return PoolPublished(
            self._packet_id,
            min(times, default=None),
            dict(self.copies),
            duplicate=all(answer.duplicate for answer in self._answers),
            queued=all(answer.queued for answer in self._answers),
        )

    def _stored(self) -> int:
        return sum(copy is Copy.STORED for copy in self.copies.values())

    def _missing(self) -> int:
        alive = sum(copy in (Copy.STORED, Copy.PENDING) for copy in self.copies.values())
        return self._wanted - alive

    def _recruit(self, candidates: Sequence[str], count: int) -> list[str]:
        chosen = list(candidates[: max(count, 0)])
        for url in chosen:
            self.copies[url] = Copy.PENDING
            self._retries_allowed.discard(url)
        return chosen


def _is_final(error: StrataError) -> bool:
    """Whether this relay will never accept this packet: it refused, or our own checks for this relay did."""
    if isinstance(error, RequestRefused):
        return error.retry in (Retry.NEVER, Retry.AUTHENTICATE)
    return isinstance(error, InvalidInput | MissingCapability)
