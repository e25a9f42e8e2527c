"""What a line typed into a channel means."""

from __future__ import annotations

import re

import pytest
from strata.tools.cli.arguments import payload_of_line


def test_a_line_is_text_and_with_json_an_object_may_say_it():
    assert payload_of_line("é\r".encode(), as_json=False) == "é".encode()
    assert payload_of_line(b'{"a": 1}', as_json=False) == b'{"a": 1}'
    assert payload_of_line(b"plain", as_json=True) == b"plain"
    assert payload_of_line(b' {"text": "a\\nb"}', as_json=True) == b"a\nb"
    assert payload_of_line(b'{"base64": "AP8="}', as_json=True) == b"\x00\xff"
    assert payload_of_line(b"", as_json=True) == payload_of_line(b"\r", as_json=False) == b""


@pytest.mark.parametrize(
    "line", [b"{", b'{"txt":"x"}', b"{}", b'{"text":"x","base64":"eA=="}', b'{"base64":"?"}', b'{"text":1}']
)
def test_a_line_that_is_no_message_says_how_one_looks(line):
    with pytest.raises(ValueError, match=re.escape('must be {"text": "…"}')):
        payload_of_line(line, as_json=True)


def test_bytes_that_are_no_text_are_refused_with_the_way_to_send_them():
    with pytest.raises(ValueError, match="base64"):
        payload_of_line(b"\xff", as_json=False)
