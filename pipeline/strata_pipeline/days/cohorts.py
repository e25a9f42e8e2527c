"""Who comes, stays and leaves, week by week, from samples of each day's authors. No I/O.

Of each day the `SAMPLED` authors with the least hashes are known. An author's hash is always the same, so
below the lowest bound of all days every author of every day is known: a fair sample, in which sets can be
compared. Where no day has more authors than a sample holds, these are all authors, and the numbers exact.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import takewhile

__all__ = ["GAP", "HASHES", "SAMPLED", "Cohort", "Cohorts", "Week", "cohorts_of"]

SAMPLED = 4096
"""Some 32 KB a day; a number that stands for a thousandth of all authors is known to about half of it."""
GAP = "…"
"""The name of what stands for many weeks in which nobody was active begins so."""
HASHES = 2**63
"""Hashes are below this number."""


@dataclass(frozen=True, slots=True)
class Week:
    """What authors did in a week, in numbers of authors that are scaled up from the sample."""

    name: str
    active: int
    new: int
    """Not seen before, as far as the days reach."""
    returned: int
    """Seen before, but not in the week before."""
    lost: int | None
    """Of the week before, and not in this one; None while this week goes on, and for the first."""

    @property
    def stayed(self) -> int:
        """Seen in the week before as well."""
        return self.active - self.new - self.returned


@dataclass(frozen=True, slots=True)
class Cohort:
    """The authors that were first seen in one week."""

    week: str
    authors: int
    known: int
    """So many of them are in the sample."""
    shares: list[float]
    """Which part of them was there in that week, which is 1, in the one after, and so on; before a `GAP`."""


@dataclass(frozen=True, slots=True)
class Cohorts:
    """All weeks, in order."""

    weeks: list[Week]
    cohorts: list[Cohort]
    share: float
    """The part of all authors that is in the sample; 1 where the numbers are exact."""


def cohorts_of(days: Iterable[tuple[str, bytes]], is_over: bool) -> Cohorts:
    """Weeks and cohorts of (week, sample) of days in order. `is_over` is whether the last week has ended.

    A week without packets counts as one in which nobody was active only if a day of it is given. One place
    may stand for very many of them (`GAP`): what was there after it was not so many weeks later.
    """
    samples = [(week, struct.unpack(f">{len(sample) // 8}q", sample)) for week, sample in days]
    # A full sample says nothing about hashes above its greatest.
    bound = min([max(hashes) + 1 for _, hashes in samples if len(hashes) >= SAMPLED], default=HASHES)
    active: dict[str, set[int]] = {}
    for week, hashes in samples:
        active.setdefault(week, set()).update(one for one in hashes if one < bound)
    share = bound / HASHES
    weeks, firsts = _weeks(active, share, is_over)
    names = list(active)
    cohorts = [
        Cohort(
            week,
            round(len(firsts[week]) / share),
            len(firsts[week]),
            [
                len(firsts[week] & active[later]) / len(firsts[week])
                for later in takewhile(lambda name: not name.startswith(GAP), names[place:])
            ],
        )
        for place, week in enumerate(names)
        if firsts[week]
    ]
    return Cohorts(weeks, cohorts, share)


def _weeks(
    active: Mapping[str, set[int]], share: float, is_over: bool
) -> tuple[list[Week], dict[str, set[int]]]:
    weeks: list[Week] = []
    firsts: dict[str, set[int]] = {}
    seen: set[int] = set()
    before: set[int] = set()
    for place, (name, now) in enumerate(active.items()):
        firsts[name] = now - seen
        lost = before - now if place and (is_over or place < len(active) - 1) else None
        parts = (firsts[name], (now & seen) - before, now & before)
        # Scaled up one by one, for rounding may not make somebody of nobody; together they are who was there.
        new, returned, stayed = (round(len(part) / share) for part in parts)
        total = new + returned + stayed
        weeks.append(Week(name, total, new, returned, None if lost is None else round(len(lost) / share)))
        seen |= now
        before = now
    return weeks, firsts
