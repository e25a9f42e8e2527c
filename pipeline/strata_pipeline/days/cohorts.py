"""Which authors come, stay and leave, week by week, from samples of each day's authors. No I/O.

For each day, the `SAMPLED` authors with the least hashes are known. An author's hash is always the same, so
below the lowest bound of all days every author of every day is known: a fair sample, in which sets can be
compared. If no day has more authors than a sample holds, the sample has all authors, and the numbers are
exact.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import takewhile

__all__ = ["GAP", "HASHES", "SAMPLED", "Cohort", "Cohorts", "Week", "cohorts_of"]

SAMPLED = 4096
"""This takes about 32 KB a day; a number that is a thousandth of all authors has an error of about half."""
GAP = "…"
"""The beginning of the name of an entry that stands for many weeks without active authors."""
HASHES = 2**63
"""Hashes are below this number."""


@dataclass(frozen=True, slots=True)
class Week:
    """The activity of authors in a week, in numbers of authors that are scaled up from the sample."""

    name: str
    active: int
    new: int
    """Authors not seen before, on the days that are given."""
    returned: int
    """Authors seen before, but not in the week before."""
    lost: int | None
    """Authors of the week before who are not in this one; None if this week is not over, and for the
    first."""

    @property
    def stayed(self) -> int:
        """Authors who were also seen in the week before."""
        return self.active - self.new - self.returned


@dataclass(frozen=True, slots=True)
class Cohort:
    """The authors who were first seen in one week."""

    week: str
    authors: int
    known: int
    """How many of them are in the sample."""
    shares: list[float]
    """The shares of them that were active in that week (always 1), in the next one, and so on, up to a
    `GAP`."""


@dataclass(frozen=True, slots=True)
class Cohorts:
    """All weeks, in order."""

    weeks: list[Week]
    cohorts: list[Cohort]
    share: float
    """The share of all authors that is in the sample; 1 if the numbers are exact."""


def cohorts_of(days: Iterable[tuple[str, bytes]], is_over: bool) -> Cohorts:
    """Weeks and cohorts from the (week, sample) of days in order. `is_over` is whether the last week has
    ended.

    A week without packets counts as one without active authors only if a day of it is given. One entry may
    stand for very many such weeks (`GAP`): positions after it do not give the number of weeks since.
    """
    samples = [(week, struct.unpack(f">{len(sample) // 8}q", sample)) for week, sample in days]
    # A full sample says nothing about hashes above its greatest one.
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
        # Scaled up one by one, so that rounding does not make a zero positive; the total is their sum.
        new, returned, stayed = (round(len(part) / share) for part in parts)
        total = new + returned + stayed
        weeks.append(Week(name, total, new, returned, None if lost is None else round(len(lost) / share)))
        seen |= now
        before = now
    return weeks, firsts
