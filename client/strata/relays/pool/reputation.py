"""A client's scores of relays, from its own observations (R-340…R-344): no I/O, no clock.

Everything that counts is an `Observation`. `strata.relays.conduct` describes how they make up the score of
one relay. The pool adds one rule, because it has other relays: a relay is *gone* if it was unreachable in 24
different hours of the window in which another relay was reached, and was itself reached in none.
"""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from strata.relays.conduct import Aspect, Conduct, Saved, Score, Standing

__all__ = ["Observation", "Reputation"]


@dataclass(frozen=True, slots=True)
class Observation:
    """Something observed of one relay; several events of one kind may be one observation."""

    url: str
    at: float
    """When, in Unix seconds."""
    kind: Aspect
    good: int = 0
    bad: int = 0
    value: float | None = None
    """The mean of what was measured, over the `good` ones."""


class Reputation:
    """The scores of all relays that one client knows; no other client sees them (R-340)."""

    def __init__(self) -> None:
        self._relays: dict[str, Conduct] = {}

    def record(self, observation: Observation) -> None:
        """Record an observation; `judge` acts on it."""
        seen = observation
        self._of(seen.url).record(seen.at, seen.kind, seen.good, seen.bad, seen.value)

    def restore(self, url: str, saved: Saved, observations: Iterable[Observation] = ()) -> None:
        """Restore what an earlier process kept and observed of this relay.

        The log of observations is never changed, so it still has those that a served sentence has cleared.
        """
        conduct = self._of(url)
        conduct.restore(saved)
        for seen in observations:
            if not conduct.has_forgiven(seen.at, seen.kind):
                self.record(seen)

    def saved(self, url: str) -> Saved:
        """What to keep about a relay."""
        return self._relays.get(url, Conduct()).saved

    def forget(self, url: str) -> None:
        """Drop everything known about a relay."""
        self._relays.pop(url, None)

    def standing(self, url: str) -> Standing:
        """The standing as last judged."""
        return self._relays.get(url, Conduct()).standing

    def score(self, url: str, now: float) -> Score:
        """The score of a relay."""
        return self._relays.get(url, Conduct()).score(now)

    def judge(self, url: str, now: float) -> Standing | None:
        """Update the relay's standing; return the new one if it has changed."""
        conduct = self._of(url)

        def reached_elsewhere() -> set[int]:
            others = (other for other in self._relays.values() if other is not conduct)
            return {hour for other in others for hour in other.hours_reached()}

        return conduct.judge(now, lambda: conduct.is_gone(reached_elsewhere))

    def _of(self, url: str) -> Conduct:
        return self._relays.setdefault(url, Conduct())
