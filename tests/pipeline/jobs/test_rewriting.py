"""A day is sorted in stretches of about the requested size, and each batch is in one of them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from strata_pipeline.jobs.rewriting import stretches
from strata_pipeline.lake_format import GENESIS, Manifest


def batch(number: int, body_bytes: int) -> Manifest:
    return Manifest(
        number=number, after=10 * number, up_to=10 * number + 10, packets=10, quarantined=0, rows="",
        contents="", body_bytes=body_bytes, kinds={}, last_packet_id="", last_received_at=0, written_at=0,
        previous=GENESIS,
    )  # fmt: skip


@given(st.lists(st.integers(0, 50), min_size=1, max_size=30), st.integers(1, 120))
def test_each_batch_is_in_one_stretch_and_none_is_much_larger_than_asked_for(sizes, most):
    day = [batch(number, size) for number, size in enumerate(sizes)]
    found = list(stretches(day, most))
    assert [one for stretch in found for one in stretch] == day
    taken = [sum(one.body_bytes for one in stretch) for stretch in found]
    assert all(0 < one for one in taken[:-1])
    assert max(taken) <= most + max(sizes)
    assert len(found) <= -(-sum(sizes) // most) + 1


def test_a_day_of_one_stretch_is_written_at_once_and_a_larger_one_evenly():
    day = [batch(number, 100) for number in range(12)]
    assert list(stretches(day, 1_200)) == [day]
    assert [len(stretch) for stretch in stretches(day, 500)] == [4, 4, 4]
