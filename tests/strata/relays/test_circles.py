"""Places that lead in a circle are detected, wherever it begins; other places are not."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st
from strata.relays.circles import Circle


@given(st.integers(0, 40), st.integers(1, 40))
def test_a_circle_is_noticed_before_it_was_gone_round_often(before, length):
    circle, places = Circle(), itertools.chain(range(before), itertools.cycle(range(before, before + length)))
    passed = next(number for number, place in enumerate(places) if circle.closes(str(place)))
    assert before + length <= passed <= 2 * (before + length) + length


def test_places_that_lead_on_are_no_circle():
    circle = Circle()
    assert not any(circle.closes(str(place)) for place in range(1000))
