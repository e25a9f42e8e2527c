"""A file of places is read as a whole before anything is erased, and each fault is named by its line."""

from __future__ import annotations

from pathlib import Path

import pytest
from strata.protocol.places import MAX_PLACE_BYTES, PacketPlace, place_line

from relayd.cli.places import read_places, tell_places
from relayd.store.places import PlacesErased, RefusedPlace

DAY = 20_000


def place(ordinal: int, name: str = "ab") -> PacketPlace:
    return PacketPlace("0x" + name * 32, (DAY << 32) + ordinal, DAY * 86_400)


def test_lines_are_read_in_their_order(tmp_path: Path):
    path = tmp_path / "places.jsonl"
    lines = [place_line(place(9)), b"", place_line(place(2)) + b"\r", place_line(place(3))]
    path.write_bytes(b"\xef\xbb\xbf" + b"\n".join(lines))  # with a byte order mark
    assert read_places(str(path)) == [place(9), place(2), place(3)]


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        ([b""], "names no place: strata-pipeline find has found nothing"),
        ([place_line(place(1)), b"{"], "line 2: "),
        ([b'{"packet":{}}'], "line 1: it is not an object of .* as they are"),
        ([b"7" * 10_000_000], f"line 1: it is longer than {MAX_PLACE_BYTES} bytes"),
        ([place_line(place(1))] * 2, "line 2: line 1 names the same place"),
        ([place_line(place(1)), place_line(place(1, "cd"))], "line 2: line 1 names another packet for the"),
        ([place_line(place(n)) for n in range(1, 5)], "names more than 3 places: split it"),
    ],
)
def test_a_fault_is_named_by_its_line(tmp_path: Path, lines: list[bytes], problem: str):
    path = tmp_path / "places.jsonl"
    path.write_bytes(b"\n".join(lines))
    with pytest.raises(ValueError, match=problem):
        read_places(str(path), limit=3)


def test_what_was_done_is_told_with_each_refusal(capsys: pytest.CaptureFixture[str]):
    done = PlacesErased(1, 2, 3, 4, 6, [RefusedPlace("0xab", 7, "the log ends at 6")])
    tell_places(done, dry_run=False, json=False)
    assert capsys.readouterr().out.splitlines() == [
        "1 packets erased",
        "2 that retention has dropped got a tombstone",
        "3 were erased before",
        "4 stay: they carry keys, or revoke them",
        "6 were refused:",
        "  0xab at 7: the log ends at 6",
        "  and 5 more",
    ]
    tell_places(PlacesErased(1), dry_run=True, json=False)
    assert capsys.readouterr().out.startswith(
        "1 packets would be erased\n0 that retention has dropped would "
    )
    tell_places(done, dry_run=True, json=True)
    assert capsys.readouterr().out == (
        '{"erased":1,"dropped":2,"already":3,"spared":4,"refused":6,'
        '"refusals":[{"packet_id":"0xab","sequence":7,"reason":"the log ends at 6"}],"dry_run":true}\n'
    )
