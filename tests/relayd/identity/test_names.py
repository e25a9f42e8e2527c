"""A set of names by their hashes: it knows all names added, and takes little memory for many."""

from __future__ import annotations

import sys

from hypothesis import given
from hypothesis import strategies as st

from relayd.identity.names import Names


@given(st.lists(st.text(max_size=8)), st.lists(st.text(max_size=8)))
def test_it_knows_what_was_added_and_nothing_else(added: list[str], asked: list[str]) -> None:
    names = Names(added[::2])
    names.update(added[1::2])
    for name in added:
        names.add(name)
    assert len(names) == len(set(added))
    assert all(name in names for name in added)
    assert [name in names for name in asked] == [name in set(added) for name in asked]


def test_a_name_takes_few_bytes_however_long_it_is() -> None:
    names = Names(f"did:strata:{number:0100}" for number in range(50_000))
    empty = Names()
    grown = sum(map(sys.getsizeof, names._parts)) - sum(map(sys.getsizeof, empty._parts))
    assert grown < 14 * 50_000
    assert "did:strata:" + "0" * 99 + "7" in names and "did:strata:7" not in names
