"""Terms and places: two logs that have a place in common are the same up to there.

The model keeps what no database can: every log that ever existed, packet by packet. Copies are taken and
restored, processes come and go with or without their knowledge, and whatever a reader's place is, the answer
must be true.
"""

from __future__ import annotations

import itertools

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from relayd.lineage import NOWHERE, Claim, KnownLog, Lineage, Mark, Term

FIRST = Term(1, b"\0\0\0\1", 0, 1)


class Logs(RuleBasedStateMachine):
    """One database, its copies, and processes that write under terms."""

    @initialize()
    def begin(self) -> None:
        self.tags = itertools.count(2)
        self.packets = itertools.count()
        self.terms: list[Term] = [FIRST]
        self.log: list[int] = []
        self.copies: list[tuple[list[Term], list[int]]] = []
        self.known: list[KnownLog] = []
        self.claims: list[tuple[Claim, list[int]]] = []
        # What readers received: a place, and the log up to there as it was then.
        self.given: list[tuple[Mark, list[int]]] = [(NOWHERE, [])]
        self.open_term([])

    @property
    def lineage(self) -> Lineage:
        return Lineage(self.terms)

    def open_term(self, claims: list[Claim]) -> None:
        """Open a term as `relayd.store.terms.open_term` does."""
        head, lineage = len(self.log), self.lineage
        for claim in claims:
            tags, good_to = lineage.lost_terms(claim, head)
            for tag in tags:
                if tag not in {term.tag for term in self.terms}:
                    number = max(term.number for term in self.terms) + 1
                    self.terms.append(Term(number, tag, good_to, claim.mark.epoch, good_to))
        lost = any(lineage.lacks(claim.mark, head) for claim in claims)
        number = max(term.number for term in self.terms) + 1
        epoch = max([lineage.current.epoch + lost, *(claim.mark.epoch + 1 for claim in claims if lost)])
        self.terms.append(Term(number, next(self.tags).to_bytes(4, "big"), head, epoch))

    @rule(count=st.integers(1, 4))
    def append(self, count: int) -> None:
        self.log = self.log + [next(self.packets) for _ in range(count)]
        for known in self.known:
            assert known.adopt(self.lineage, len(self.log), known.mark)

    @rule(data=st.data())
    def read(self, data: st.DataObject) -> None:
        place = data.draw(st.integers(0, len(self.log)))
        self.given.append((self.lineage.mark(place), self.log[:place]))

    @rule()
    def copy(self) -> None:
        self.copies.append((self.terms, self.log))
        self.terms = list(self.terms)

    @rule(data=st.data(), told=st.booleans())
    def put_back(self, data: st.DataObject, told: bool) -> None:
        """A copy replaces the database; then a process starts, with or without knowledge of the old state."""
        if not self.copies:
            return
        before = self.log
        claim = self.lineage.claim(len(before), is_exact=False)
        terms, log = data.draw(st.sampled_from(self.copies))
        self.terms, self.log = list(terms), log
        for known in list(self.known):
            held = known.adopt(self.lineage, len(log), known.mark)
            # A process notices exactly when something that it knows of is gone.
            assert held is (before[: known.seen] == log[: known.seen])
            assert held is not known.is_lost
            if not held:
                self.known.remove(known)
        self.open_term([claim] if told else [])
        for known in self.known:
            assert known.adopt(self.lineage, len(log), known.mark)

    @rule()
    def start(self) -> None:
        self.open_term([])
        process = KnownLog()
        assert process.adopt(self.lineage, len(self.log), process.mark)
        for known in [*self.known, process]:
            assert known.adopt(self.lineage, len(self.log), known.mark)
        self.known = [*self.known[-2:], process]

    @invariant()
    def no_answer_is_wrong(self) -> None:
        lineage, head = self.lineage, len(self.log)
        for mark, log in self.given:
            good_to = lineage.good_to(mark, head)
            if lineage.holds(mark, head):
                assert self.log[: mark.sequence] == log
            elif good_to is not None:
                assert self.log[:good_to] == log[:good_to], "the last good place is good"
                assert self.log[: mark.sequence] != log, "and what is refused is lost"

    @invariant()
    def a_place_of_this_log_is_good(self) -> None:
        for place in range(len(self.log) + 1):
            assert self.lineage.holds(self.lineage.mark(place), len(self.log))


TestLogs = pytest.mark.slow(Logs.TestCase)
TestLogs.settings = settings(max_examples=150, stateful_step_count=25, deadline=None)


def test_what_another_process_knew_places_the_terms_that_a_copy_never_had():
    lost = Lineage([FIRST, Term(2, b"b" * 4, 60, 1), Term(3, b"c" * 4, 90, 1)])
    copy = Lineage([FIRST])
    claim = lost.claim(120, is_exact=True)
    assert copy.good_to(claim.mark, 50) is None
    assert copy.lost_terms(claim, 50) == ([b"b" * 4, b"c" * 4], 50)
    # With a log that shares nothing, nobody can say.
    assert Lineage([Term(1, b"z" * 4, 0, 1)]).lost_terms(claim, 50) == ([], 0)


def test_a_place_behind_the_end_is_a_loss_unless_a_later_epoch_says_so():
    lineage = Lineage([FIRST])
    assert lineage.lacks(Mark(5, FIRST.tag, 1), head=4)
    assert not lineage.lacks(Mark(4, FIRST.tag, 1), head=4)
    later = Lineage([FIRST, Term(2, b"\0\0\0\2", 4, 2)])
    assert not later.lacks(Mark(5, FIRST.tag, 1), head=9)


def test_what_is_known_to_be_committed_never_shrinks():
    known = KnownLog(Lineage([FIRST]))
    known.saw(10)
    known.saw(5)
    assert known.mark == Mark(10, FIRST.tag, 1)
