"""Filters and the interest index against the simplest reading of the rules."""

import gc
import sys
import tracemalloc

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strata.protocol.errors import InvalidMessage
from strata.protocol.wire import Filters

from relayd.feed.filters import CompiledFilter, compile_filter
from relayd.feed.interest import InterestIndex
from relayd.store.types import LogEntry, NewPacket

AUTHORS = ["did:strata:a", "did:strata:b", "did:strata:ab"]
TYPES = ["POST", "post", "/chat/1"]
IDS = [bytes([n]) * 32 for n in range(3)]

maybe_time = st.one_of(st.none(), st.integers(0, 5))
filters = st.builds(
    Filters,
    authors=st.one_of(st.none(), st.lists(st.sampled_from(AUTHORS), max_size=2)),
    types=st.one_of(st.none(), st.lists(st.sampled_from(TYPES), max_size=2)),
    packet_ids=st.one_of(st.none(), st.lists(st.sampled_from(["0x" + i.hex() for i in IDS]), max_size=2)),
    since=maybe_time,
    until=maybe_time,
    received_since=maybe_time,
    received_until=maybe_time,
)
entries = st.builds(
    LogEntry,
    sequence=st.integers(1, 9),
    received_at=st.integers(0, 5),
    packet=st.builds(
        NewPacket,
        packet_id=st.sampled_from(IDS),
        author_id=st.sampled_from(AUTHORS),
        content_type=st.sampled_from(TYPES),
        timestamp=st.integers(0, 5),
        expires_at=st.none(),
        body=st.just(b"{}"),
    ),
)


def wanted(f: Filters, e: LogEntry) -> bool:
    """RFC-0004 §3.1 as written, live."""
    if f.authors and e.packet.author_id not in f.authors:
        return False
    if f.types and e.packet.content_type not in f.types:
        return False
    if f.packet_ids and "0x" + e.packet.packet_id.hex() not in f.packet_ids:
        return False
    if f.since is not None and e.packet.timestamp < f.since:
        return False
    if f.received_since is not None and e.received_at < f.received_since:
        return False
    return not (f.received_until is not None and e.received_at > f.received_until)


@pytest.mark.req("R-142", "R-143", "R-144", "R-145", "R-146", "R-147", "R-148", "R-006")
@given(filters, entries)
def test_a_compiled_filter_means_what_the_filter_says(f, entry):
    assert compile_filter(f, max_values=10).matches(entry) == wanted(f, entry)


@given(st.lists(st.tuples(filters, st.booleans()), max_size=12), st.lists(entries, max_size=6))
def test_the_index_finds_exactly_the_subscriptions_whose_filter_matches(subscriptions, packets):
    index: InterestIndex[int] = InterestIndex()
    compiled = [compile_filter(f, max_values=10) for f, _ in subscriptions]
    for number, filter in enumerate(compiled):
        index.add(number, filter)
    for number, (_, stays) in enumerate(subscriptions):
        if not stays:
            index.discard(number, compiled[number])
    open_now = {number: f for number, (f, stays) in enumerate(subscriptions) if stays}
    assert len(index) == len(open_now)
    for entry in packets:
        found = [member for group in index.candidates(entry) for member in group.members]
        assert sorted(found) == [number for number, f in open_now.items() if wanted(f, entry)]


@pytest.mark.req("R-179")
@given(st.lists(filters, max_size=8))
def test_an_emptied_index_holds_nothing(some):
    index: InterestIndex[int] = InterestIndex()
    for number, f in enumerate(some):
        index.add(number, compile_filter(f, max_values=10))
    for number, f in enumerate(some):
        index.discard(number, compile_filter(f, max_values=10))
    assert not any((index._groups, index._by_author, index._by_type, index._by_packet_id, index._everything))


@pytest.mark.parametrize("bad", ["", "0x12", "0X" + "0" * 64, "0x" + "G" * 64, "z" * 66, "0x" + "A" * 64])
def test_a_malformed_packet_id_is_refused(bad):
    with pytest.raises(InvalidMessage):
        compile_filter(Filters(packet_ids=[bad]), max_values=10)


def test_too_many_values_are_refused():
    with pytest.raises(InvalidMessage) as caught:
        compile_filter(Filters(authors=["a"] * 6, types=["b"] * 5), max_values=10)
    assert caught.value.detail == "too_many_filter_values"


@pytest.mark.parametrize(
    ("filters", "detail"),
    [
        (Filters(authors=["did:strata:a", "did:strata:" + "a" * 1014]), "authors"),
        (Filters(types=["POST", "x" * 4097]), "types"),
        (Filters(types=["🦀" * 1025]), "types"),
    ],
)
def test_a_value_that_is_too_long_is_refused(filters, detail):
    with pytest.raises(InvalidMessage) as caught:
        compile_filter(filters, max_values=10)
    assert caught.value.detail == detail
    compile_filter(
        Filters(authors=["did:strata:" + "a" * 1013], types=["x" * 4096, "🦀" * 1024]), max_values=10
    )


@pytest.mark.parametrize(
    "values",
    [
        [f"t{n}" for n in range(1000)],
        [f"did:strata:z{n:050}" for n in range(1000)],
        [f"{n}" + "x" * 900 + "🦀" for n in range(100)],
    ],
    ids=["short", "dids", "emoji"],
)
def test_a_filter_says_about_what_it_takes_in_memory(values):
    index: InterestIndex[int] = InterestIndex()
    sent = msgspec.json.encode(Filters(types=values))
    gc.collect()
    tracemalloc.start()
    try:
        compiled = compile_filter(msgspec.json.decode(sent, type=Filters), max_values=1000)
        index.add(1, compiled)
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 0.5 * taken < compiled.kept_bytes < 2 * taken
    assert compiled.kept_bytes > len(sent)


@given(filters)
def test_what_a_filter_takes_counts_each_value_once_as_python_measures_it(f):
    compiled = compile_filter(f, max_values=10)
    values = (*compiled.authors, *compiled.types, *compiled.packet_ids)
    assert compiled.kept_bytes == 1024 + sum(map(sys.getsizeof, values)) + 400 * len(values)


def test_equal_filters_are_one_group():
    assert compile_filter(Filters(authors=["a", "b"]), max_values=9) == compile_filter(
        Filters(authors=["b", "a"], types=[], since=None), max_values=9
    )
    assert CompiledFilter() == compile_filter(Filters(), max_values=0)
