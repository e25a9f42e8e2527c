"""The keys of strings in the columns of a log."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from strata.protocol.columns import HASHED, string_key, string_keys


def test_long_strings_are_hashes_that_no_string_is():
    for text in ("POST", "", "x" * 512, "\u00e9" * 256, "a\0b"):
        assert string_key(text) == text.encode()
    for text in ("x" * 513, "\u00e9" * 257):
        assert len(string_key(text)) == 33 and string_key(text).startswith(HASHED)


@given(st.lists(st.one_of(st.text(max_size=20), st.just("\u00e9" * 256), st.just("x" * 513))))
def test_many_strings_have_the_keys_that_each_has(values: list[str]):
    assert string_keys(values) == [string_key(value) for value in values]
