"""A client's scores of relays, from its own observations (R-340…R-344): no I/O, no clock.

Everything counted is an `Observation`. What they come to for one relay is told in `strata.relays.conduct`.
The pool adds one thing, for it has others to turn to: a relay is *gone* when it could not be reached in 24
different hours of the window in which another relay could, and was reached in none.
"""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from strata.relays.conduct import Aspect, Conduct, Saved, Score, Standing

__all__ = ["Observation", "Reputation"]


@dataclass(frozen=True, slots=True)
class Observation:
    """Something seen of one relay; several alike may be one observation."""

    url: str
    at: float
    """Unix seconds."""
    kind: Aspect
    good: int = 0
    bad: int = 0
    value: float | None = None
    """The mean of the measurements, over the `good` ones."""


class Reputation:
    """The scores of all relays that one client knows; no other client sees them (R-340)."""

    def __init__(self) -> None:
        self._relays: dict[str, Conduct] = {}

    def record(self, observation: Observation) -> None:
        """Take note; `judge` draws the conclusions."""
        seen = observation
        self._of(seen.url).record(seen.at, seen.kind, seen.good, seen.bad, seen.value)

    def restore(self, url: str, saved: Saved, observations: Iterable[Observation] = ()) -> None:
        """Go on from what an earlier process kept, and from what it observed of this relay.

        The log of observations is never changed, so it still has those that a sentence served has wiped out.
        """
        conduct = self._of(url)
        conduct.restore(saved)
        for seen in observations:
            if not conduct.has_forgiven(seen.at, seen.kind):
                self.record(seen)

    def saved(self, url: str) -> Saved:
        """What to keep of a relay."""
        return self._relays.get(url, Conduct()).saved

    def forget(self, url: str) -> None:
        """Drop everything known about a relay."""
        self._relays.pop(url, None)

    def standing(self, url: str) -> Standing:
        """What was last judged."""
        return self._relays.get(url, Conduct()).standing

    def score(self, url: str, now: float) -> Score:
        """The score of a relay."""
        return self._relays.get(url, Conduct()).score(now)

    def judge(self, url: str, now: float) -> Standing | None:
        """Move the relay to the standing it has earned; returns it if that is another than before."""
        conduct = self._of(url)

        def reached_elsewhere() -> set[int]:
            others = (other for other in self._relays.values() if other is not conduct)
            return {hour for other in others for hour in other.hours_reached()}

        return conduct.judge(now, lambda: conduct.is_gone(reached_elsewhere))

    def _of(self, url: str) -> Conduct:
        return self._relays.setdefault(url, Conduct())
