"""Single members of decoded JSON: which values are accepted as what."""

from __future__ import annotations

import base64
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strata.protocol import fields


@pytest.mark.req("R-013")
@pytest.mark.parametrize(
    ("value", "expected"),
    [(3, 3), (-1, -1), (3.0, 3), (3.5, None), (True, None), ("3", None), (None, None), ([3], None)],
)
def test_whole_numbers(value: Any, expected: Any) -> None:
    assert fields.integer(value) == expected
    assert type(fields.integer(value)) is type(expected)


@pytest.mark.parametrize(
    ("value", "expected"), [(3, 3.0), (0.5, 0.5), (False, None), ("1", None), (None, None), ({}, None)]
)
def test_numbers(value: Any, expected: Any) -> None:
    assert fields.number(value) == expected


@pytest.mark.req("R-024")
def test_hex_of_a_known_size_in_either_case() -> None:
    assert fields.hex_bytes("0xaBcD", 2) == b"\xab\xcd"
    for value in (
        "abcd",
        "0xabc",
        "0xabcdef",
        "0X" + "abcd",
        "0xab d",
        "0xab\u0660d",
        "",
        None,
        5,
        ["0xabcd"],
    ):
        assert fields.hex_bytes(value, 2) is None
    for count in (4, 6):
        assert fields.hex_bytes("0x" + "ab " * count, 6) is None  # blanks are not digits


@pytest.mark.req("R-020")
def test_content_ids() -> None:
    assert fields.is_content_id("0x" + "0f" * 32)
    for value in ("0x" + "0F" * 32, "0f" * 32, "0x" + "0f" * 31, "0x" + "0f" * 33, "0x" + "0f" * 32 + "\n"):
        assert not fields.is_content_id(value)


@given(st.binary(max_size=40), st.booleans())
def test_base64url_with_padding_and_without(data: bytes, padded: bool) -> None:
    text = fields.unpadded_base64url(data)
    assert text == base64.urlsafe_b64encode(data).decode().rstrip("=")
    assert fields.base64url(text + "=" * (-len(text) % 4) * padded, 40) == data
    assert fields.base64url(text, len(data)) == data and fields.base64url(text, len(data) - 1) is None


@pytest.mark.parametrize(
    "value", ["A", "AAAAA", "A+A=", "A/AA", "AA=A", "AA===", "AA A", "AAAA\n", "é", None, 5, b"AA"]
)
def test_what_is_not_base64url(value: Any) -> None:
    assert fields.base64url(value, 99) is None


@given(st.text(max_size=12))
def test_any_text_is_read_or_not(text: str) -> None:
    for read in (lambda: fields.base64url(text, 9), lambda: fields.hex_bytes(text, 2)):
        assert read() is None or isinstance(read(), bytes)
