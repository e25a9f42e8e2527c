"""Sequences and the days in them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from strata.protocol.sequences import Span, day_of, day_text, first_of_day, parse_day


@given(st.integers(0, 60_000), st.integers(1, 2**32 - 1))
def test_sequences_and_days(day: int, ordinal: int):
    sequence = first_of_day(day) + ordinal
    assert day_of(sequence) == day == parse_day(day_text(day))
    assert Span(0, sequence).day == day and Span(0, sequence).ordinals == ordinal
