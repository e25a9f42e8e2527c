"""Which log a place belongs to: the terms of the log, and what follows from them.

A sequence alone does not name a packet: after an older backup is restored, the sequences after its end are
given out a second time. So the log is divided into **terms**. A process that begins to write opens a term,
with a random tag, and every packet belongs to the term in which it was appended. A place is a sequence and
the tag of its term. Two logs that have a place in common are the same log up to there: a tag is drawn once,
and a process that continues a log that may have lost its end does so under a new tag. (Raft calls this log
matching.)

Terms are many and say nothing about losses: each start of a relay opens one. **Epochs** are few. The epoch
rises by one when the log is known to have lost its end, or may have lost it.

    path    (begins_after, tag)   the terms of this log, in order; each ends where the next begins
    lost    (good_to, tag)        terms of a log whose end was lost, as far as claims have reported them
"""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

import msgspec

__all__ = ["NOWHERE", "SKEW_SECONDS", "Claim", "KnownLog", "Lineage", "Mark", "Term"]

SKEW_SECONDS: Final = 300
"""The furthest that the times of the log run ahead of the clock, after the clock was set back (R-099)."""
_TERMS_CLAIMED = 256
"""The number of latest terms that a claim names."""


class Term(NamedTuple):
    """One term of the log: a row of `log_terms`."""

    number: int
    tag: bytes
    begins_after: int
    epoch: int
    good_to: int | None = None
    """For a lost term, the sequence up to which its log agreed with this one. None for a term of this log."""


class Mark(NamedTuple):
    """A place in some log, as a cursor holds it."""

    sequence: int
    tag: bytes
    epoch: int


NOWHERE = Mark(0, b"", 0)
"""The place before the first packet, which all logs share."""


class Claim(msgspec.Struct, frozen=True):
    """A place that is known to have been committed, and the terms that led there."""

    mark: Mark
    terms: tuple[tuple[bytes, int], ...] = ()
    """Tag and beginning of each term, in order; the last `_TERMS_CLAIMED`."""
    is_exact: bool = False
    """Whether the place is the last one ever acknowledged, and not one from some seconds earlier."""


class Lineage:
    """The terms of one log at one moment. Immutable."""

    def __init__(self, terms: Iterable[Term] = ()) -> None:
        ordered = sorted(terms)
        self.path = tuple(term for term in ordered if term.good_to is None)
        self._begins = [term.begins_after for term in self.path]
        self._places = {term.tag: index for index, term in enumerate(self.path)}
        self._lost = {term.tag: term.good_to for term in ordered if term.good_to is not None}

    @property
    def current(self) -> Term:
        """The term under which packets are appended now."""
        return self.path[-1]

    def term_of(self, sequence: int) -> Term:
        """The term in which the packet at this sequence was appended."""
        return self.path[max(bisect_left(self._begins, sequence) - 1, 0)]

    def mark(self, sequence: int) -> Mark:
        """The place at this sequence."""
        term = self.term_of(sequence)
        return Mark(sequence, term.tag, term.epoch)

    def holds(self, mark: Mark, head: int) -> bool:
        """Whether this log, which ends at `head`, has this place, so that reading may continue after it."""
        good_to = self.good_to(mark, head)
        return good_to is not None and mark.sequence <= good_to

    def lacks(self, mark: Mark, head: int) -> bool:
        """Whether this place proves that the log has lost its end, and no epoch says so yet."""
        return mark.epoch >= self.current.epoch and not self.holds(mark, head)

    def good_to(self, mark: Mark, head: int) -> int | None:
        """The sequence up to which the log of a place agrees with this one, which ends at `head`.

        None if that is unknown.
        """
        if mark.sequence == 0:
            return 0
        index = self._places.get(mark.tag)
        if index is None:
            return self._lost.get(mark.tag)
        return self._end(index, head)

    def _end(self, index: int, head: int) -> int:
        return self._begins[index + 1] if index + 1 < len(self._begins) else head

    def continues(self, other: Lineage) -> bool:
        """Whether this log has the other's current term, and terms after it."""
        index = self._places.get(other.current.tag)
        return index is not None and index + 1 < len(self.path)

    def lost_terms(self, claim: Claim, head: int) -> tuple[list[bytes], int]:
        """The tags of a claim that this log lacks, and the sequence up to which the two logs agreed.

        No tags if the two logs have no term in common: then nothing says where they parted.
        """
        shared = [index for index, (tag, _) in enumerate(claim.terms) if tag in self._places]
        if not shared:
            return [], 0
        last = shared[-1]
        theirs = claim.terms[last + 1][1] if last + 1 < len(claim.terms) else claim.mark.sequence
        good_to = min(theirs, self._end(self._places[claim.terms[last][0]], head))
        return [tag for tag, _ in claim.terms[last + 1 :] if tag not in self._lost], good_to

    def claim(self, sequence: int, *, is_exact: bool) -> Claim:
        """This log up to a sequence, as a claim."""
        terms = tuple((term.tag, term.begins_after) for term in self.path if term.begins_after <= sequence)
        return Claim(self.mark(sequence), terms[-_TERMS_CLAIMED:], is_exact)


class KnownLog:
    """What a process knows about its log: its terms, and a place that is certainly committed.

    `on_lost` is called once, if the database turns out not to have that place.
    """

    def __init__(self, lineage: Lineage | None = None, *, on_lost: Callable[[], None] = lambda: None) -> None:
        self.lineage = lineage or Lineage([Term(1, bytes(4), 0, 1)])
        self.seen = 0
        """The highest sequence that is known to be committed."""
        self.is_followed = False
        """Whether this process has written to the log; until then it knows only what the database reports."""
        self.is_lost = False
        """Whether the database was found to have lost what this process knows."""
        self.told_at = 0
        """The time that the log gave last, as far as this process knows."""
        self._on_lost = on_lost

    def time_at(self, now: int) -> int:
        """The time that the log gives to a packet when the clock says `now`; packets are judged as of it.

        It is held when the clock steps back, but never further ahead than the tolerated skew (R-099).
        """
        return min(max(now, self.told_at), now + SKEW_SECONDS)

    def saw(self, sequence: int) -> None:
        """The log has reached this sequence, within the terms known here."""
        if sequence > self.seen:
            self.seen = sequence

    @property
    def mark(self) -> Mark:
        """The place that is certainly committed."""
        return self.lineage.mark(self.seen) if self.seen else NOWHERE

    @property
    def claim(self) -> Claim:
        """The same place as a claim, for the process that comes after this one."""
        return self.lineage.claim(self.seen, is_exact=True)

    def adopt(self, lineage: Lineage, head: int, certain: Mark) -> bool:
        """Adopt what the database reports. If it lacks a certain place, mark the log lost and return False.

        `certain` is `mark` as it was before the database was queried.
        """
        if not lineage.holds(certain, head):
            if not self.is_lost:
                self.is_lost = True
                self._on_lost()
            return False
        if not self.lineage.continues(lineage):  # else the answer is older than what is known here
            self.lineage = lineage
        self.saw(head)
        return True
