"""A line names one place, or says what is wrong with it."""

from __future__ import annotations

import pytest
from strata.protocol import canonical
from strata.protocol.errors import InvalidInput
from strata.protocol.places import MAX_PLACE_BYTES, PacketPlace, place_line, read_place

DAY = 20_000
PLACE = PacketPlace("0x" + "ab" * 32, (DAY << 32) + 7, DAY * 86_400 + 5)
MEMBERS = {"packet_id": PLACE.packet_id, "received_at": PLACE.received_at, "sequence": PLACE.sequence}


def test_what_was_written_is_read_again():
    assert read_place(place_line(PLACE)) == PLACE
    assert read_place(b" " + place_line(PLACE) + b"\n") == PLACE
    first = PacketPlace(PLACE.packet_id, 1, 0)
    assert read_place(place_line(first)) == first


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"packet_id": "0x" + "AB" * 32}, "64 hex digits in lower case"),
        ({"packet_id": "ab" * 32}, "64 hex digits"),
        ({"packet_id": None}, "64 hex digits"),
        ({"sequence": 0}, "not a place in a log"),
        ({"sequence": -1}, "not a place in a log"),
        ({"sequence": DAY << 32}, "not a place in a log"),
        ({"sequence": 2**53 - 1}, "received_at is not of that day"),
        ({"sequence": "7"}, "not a place in a log"),
        ({"sequence": True}, "not a place in a log"),
        ({"received_at": PLACE.received_at + 86_400}, "2024-10-04, and received_at is not of that day"),
        ({"received_at": PLACE.received_at + 0.5}, "not of that day"),
        ({"received_at": None}, "not of that day"),
        ({"received_at": -1}, "not of that day"),
        ({"author_id": "did:strata:a"}, "alone"),
    ],
)
def test_a_line_that_can_name_no_place_says_why(changed, problem):
    with pytest.raises(InvalidInput, match=problem):
        read_place(canonical.encode(MEMBERS | changed))


@pytest.mark.parametrize(
    "line", [b"", b"{", b"7", b"[]", b"{}", b'{"sequence":1,"sequence":1}', b" " * MAX_PLACE_BYTES + b"{}"]
)
def test_what_is_no_line_is_refused(line):
    with pytest.raises(InvalidInput):
        read_place(line)


def test_the_first_day_is_a_day():
    with pytest.raises(InvalidInput, match="not of that day"):
        read_place(canonical.encode(MEMBERS | {"sequence": 1}))
    with pytest.raises(InvalidInput, match="not of that day"):
        read_place(canonical.encode(MEMBERS | {"sequence": 1, "received_at": -1}))
