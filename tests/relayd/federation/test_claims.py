"""A packet's statements about itself."""

from __future__ import annotations

import pytest

from relayd.federation.claims import claimed_id, claims_of

ID = "0x" + "0a" * 32


@pytest.mark.parametrize(
    ("raw", "name", "claims"),
    [
        (f'{{"packet_id":"{ID}","timestamp":7}}', ID, (b"\x0a" * 32, 7)),
        (f'{{"timestamp":0,"content":[],"packet_id":"{ID}"}}', ID, (b"\x0a" * 32, 0)),
        (f'{{"packet_id":"{ID}"}}', ID, None),
        (f'{{"packet_id":"{ID}","timestamp":"7"}}', ID, None),
        (f'{{"packet_id":"{ID}","timestamp":true}}', ID, None),
        (f'{{"packet_id":"{ID}","timestamp":-1}}', ID, None),
        (f'{{"packet_id":"{ID}","timestamp":{2**53}}}', ID, None),
        ('{"packet_id":"0x","timestamp":7}', "0x", None),
        ('{"packet_id":7}', "", None),
        ("[]", "", None),
        ("", "", None),
        ('{"packet_id":' + "[" * 9999, "", None),
    ],
)
def test_an_id_and_a_time_or_none(raw, name, claims):
    assert claimed_id(raw.encode()) == name
    assert claims_of(raw.encode()) == claims


def test_bytes_that_are_no_text():
    assert claimed_id(b'{"packet_id":"\xff"}') == ""
