"""Text as Windows writes it, and JSON of names that are not UTF-8."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from strata.protocol.text_files import json_of, utf8_of


def test_a_byte_order_mark_is_dropped_and_nothing_else():
    assert utf8_of(b"\xef\xbb\xbfa\xef\xbb\xbf") == b"a\xef\xbb\xbf"
    for text in (b"", b"a", b"\xef\xbb", b"ab\0", b"\xff"):
        assert utf8_of(text) == text


@pytest.mark.parametrize("coding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-be"])
def test_utf_16_is_said_to_be_that(coding):
    with pytest.raises(ValueError, match="the text is UTF-16; save it as UTF-8"):
        utf8_of('{"a": 1}'.encode(coding))


def test_json_has_names_that_are_not_utf_8():
    assert json_of({"path": "/läke", "n": 1}) == '{"path":"/läke","n":1}'.encode()
    latin = Path(os.fsdecode(b"/l\xe4ke"))
    assert json.loads(json_of({"path": str(latin), "n": [1, None]})) == {"path": "/l?ke", "n": [1, None]}
