"""Which packets are traced, and under which ids: the same in every process, and no client can choose."""

from __future__ import annotations

import hashlib

import pytest

from relayd.tracing.spans import Sample

IDS = [hashlib.sha256(b"%d" % number).digest() for number in range(4000)]


def test_processes_of_one_log_trace_the_same_packets_under_the_same_ids():
    one, other = Sample(0.1, b"key"), Sample(0.1, b"key")
    assert [one.trace(each) for each in IDS] == [other.trace(each) for each in IDS]
    assert one.trace(IDS[0]) is None or Sample(1, b"other").trace(IDS[0]) != one.trace(IDS[0])


@pytest.mark.parametrize(("ratio", "least", "most"), [(0, 0, 0), (0.1, 300, 500), (1, 4000, 4000)])
def test_so_many_are_traced_as_the_ratio_says(ratio, least, most):
    traced = [trace for each in IDS if (trace := Sample(ratio, b"key").trace(each)) is not None]
    assert least <= len(traced) <= most
    assert len({trace.append_id for trace in traced}) == len(traced)


def test_what_is_traced_at_a_small_ratio_is_traced_at_a_larger_one():
    few, more = Sample(0.05, b"key"), Sample(0.2, b"key")
    assert all(more.trace(each) == few.trace(each) for each in IDS if few.trace(each))


def test_a_trace_is_found_by_its_packets_id_and_drawn_by_a_secret():
    trace = Sample(1, b"key").trace(IDS[7])
    assert trace is not None and f"{trace.trace_id:032x}" == IDS[7].hex()[:32]
    other = Sample(1, b"another log").trace(IDS[7])
    assert other is not None and (other.trace_id, other.append_id != trace.append_id) == (
        trace.trace_id,
        True,
    )
