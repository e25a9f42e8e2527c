"""Which part of the log is read when: every packet in one part, and no part across a day."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st
from strata.protocol.sequences import Span, day_of, first_of_day
from strata_pipeline.log.spans import LogState, advance, next_batch, share_out


@st.composite
def states(draw: st.DrawFn) -> LogState:
    days = draw(st.dictionaries(st.integers(20_000, 20_006), st.integers(1, 40), min_size=1, max_size=5))
    ends = {day: first_of_day(day) + count for day, count in days.items()}
    removed_to = draw(st.sampled_from([0, *(first_of_day(day) for day in days)]))
    return LogState(max(ends.values()), removed_to, ends)


def every_sequence(state: LogState) -> list[int]:
    return [n for day, end in sorted(state.day_ends.items()) for n in range(first_of_day(day) + 1, end + 1)]


@given(states(), st.integers(1, 50))
def test_batches_hold_each_sequence_once_follow_each_other_and_keep_to_a_day(state: LogState, max_rows: int):
    reached, seen = 0, []
    while (span := next_batch(state, reached, max_rows)) is not None:
        assert span.after == reached
        held = [n for n in every_sequence(state) if span.after < n <= span.up_to]
        assert held and {day_of(n) for n in held} == {span.day}
        if span.up_to > state.removed_to:
            assert state.rows_expected(span) == len(held) <= max_rows
        else:  # only its last sequence is known to have a row
            assert held[-1] == state.day_ends[span.day]
        seen += held
        reached = span.up_to
    assert seen == every_sequence(state) and reached == state.head


@given(states(), st.integers(0, 50), st.integers(1, 9), st.data())
def test_shares_are_the_whole_and_nothing_twice(
    state: LogState, skip: int, partitions: int, data: st.DataObject
):
    after = data.draw(st.sampled_from([0, *every_sequence(state)]))
    spans = state.spans(after, state.head - skip)
    shares = share_out(spans, partitions)
    assert [n for s in shares for n in range(s.after + 1, s.up_to + 1)] == [
        n for n in every_sequence(state) if after < n <= state.head - skip
    ]
    assert all(day_of(share.after + 1) == day_of(share.up_to) for share in shares)
    assert len(shares) <= partitions + len(spans)


@given(states(), st.integers(1, 60), st.data())
def test_a_stream_moves_on_by_at_most_its_limit_and_reaches_the_head(
    state: LogState, limit: int, data: st.DataObject
):
    after = data.draw(st.sampled_from([0, *every_sequence(state)]))
    places = [after, *(n for n in every_sequence(state) if n > after)]
    reached = advance(state, after, limit)
    assert reached == places[min(limit, len(places) - 1)]
    assert advance(state, after, None) == places[-1]


def test_an_empty_log_has_nothing_to_read():
    empty = LogState(0, 0, {})
    assert next_batch(empty, 0, 10) is None and empty.spans(0) == [] and share_out([], 4) == []
    assert advance(empty, 0, 5) == 0


def test_spans_overlap_where_they_share_a_sequence():
    assert Span(0, 5).overlaps(Span(4, 9)) and not Span(0, 5).overlaps(Span(5, 9))
    pairs = itertools.combinations([Span(0, 3), Span(3, 6), Span(6, 7)], 2)
    assert not any(one.overlaps(other) or other.overlaps(one) for one, other in pairs)
