"""Rows of a log that are not valid, and those that are."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strata.protocol import canonical, packets
from strata.protocol.packets import Packet
from strata_pipeline.bodies import read_body, signed_bytes
from strata_pipeline.lake.kinds import KINDS, kind_of
from strata_pipeline.transforms.checking import CHECKED, check_batch, fault_of

from tests.support import relay_logs

PACKET = relay_logs.make(1, at=1_760_000_000)


def fault(packet: Packet, **changes: object) -> tuple[str, str] | None:
    row: dict[str, Any] = {
        "body": packet.canonical,
        "packet_id": packet.digest,
        "author_id": packet.author_id,
        "content_type": packet.content_type,
        "timestamp": packet.timestamp,
        "expires_at": packet.expires_at,
    }
    return fault_of(**(row | changes))


def test_packets_of_every_shape_pass():
    shapes: list[dict[str, Any]] = [
        {"content": {"type": "POST", "text": 'quotes " \\ and \u0000 and "packet_id":"0x00"'}},
        {"content": {"type": "X", "inner": {"packet_id": "0x" + "00" * 32, "signature": "0x" + "11" * 64}}},
        {"content": {"type": "POST", "a": 1.5}, "extra": {"q_between": 1, "zz_last": [1], "a_first": {}}},
        {"content": {"type": "POST"}, "expires_at": 1_790_000_000},
        {"content": {"type": ""}},
    ]
    for shape in shapes:
        content = shape.pop("content")
        assert fault(packets.build(relay_logs.author(1), content, timestamp=1_760_000_000, **shape)) is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"author_id": relay_logs.author(2).did}, "columns_differ"),
        ({"content_type": "NOTE"}, "columns_differ"),
        ({"timestamp": 1}, "columns_differ"),
        ({"expires_at": 1}, "columns_differ"),
        ({"packet_id": bytes(32)}, "packet_id_mismatch"),
        ({"packet_id": b"short"}, "packet_id_mismatch"),
        ({"body": None}, "null"),
        ({"packet_id": None}, "null"),
        ({"body": b""}, None),
        ({"body": PACKET.canonical[:-20]}, None),
        ({"body": b"{}"}, None),
        ({"body": b"\xff\x00"}, None),
        ({"body": b"[" * 5000}, None),
        ({"body": json.dumps(PACKET.value).encode()}, "not_canonical"),
        ({"body": canonical.encode({**PACKET.value, "nonce": "other"})}, "packet_id_mismatch"),
    ],
)
def test_what_is_wrong_is_told(changes: dict[str, object], reason: str | None):
    found = fault(PACKET, **changes)
    assert found is not None and found[0] and found[1]
    assert reason is None or found[0] == reason


def test_members_moved_to_where_canonical_form_has_them_not_are_seen():
    text = PACKET.canonical
    for member in (f'"packet_id":"{PACKET.packet_id}",', f'"signature":"{PACKET.signature}",'):
        moved = b"{" + member.encode() + text.replace(member.encode(), b"")[1:]
        found = fault(PACKET, body=moved)
        assert found is not None and found[0] == "not_canonical"


@given(st.integers(0, len(PACKET.canonical) - 1), st.integers(1, 255))
def test_no_flipped_byte_outside_the_signature_passes(place: int, flip: int):
    body = bytearray(PACKET.canonical)
    body[place] ^= flip
    start = PACKET.canonical.index(PACKET.signature.encode())
    if not start <= place < start + len(PACKET.signature):  # signatures are checked by audits
        assert fault(PACKET, body=bytes(body)) is not None


def test_what_is_cut_out_is_what_the_author_signed():
    told = read_body(PACKET.canonical)
    assert told is not None
    assert signed_bytes(PACKET.canonical, PACKET.digest, told) == PACKET.signed_bytes


def test_a_batch_keeps_every_row_and_says_what_is_wrong_with_it():
    made = [relay_logs.make(n, at=1_760_000_000) for n in range(3)]
    rows = {
        "sequence": pa.array([1, 2, 3], pa.int64()),
        "received_at": pa.array([1, 1, 1], pa.int64()),
        "timestamp": pa.array([packet.timestamp for packet in made], pa.int64()),
        "expires_at": pa.array([None] * 3, pa.int64()),
        "packet_id": pa.array([packet.digest for packet in made], pa.binary()),
        "author_id": pa.array([packet.author_id for packet in made]),
        "content_type": pa.array(["POST", "NOTE", "POST"]),
        "body": pa.array([packet.canonical for packet in made], pa.binary()),
        "annotation": pa.array([None, None, b"{}"], pa.binary()),
    }
    checked = check_batch(pa.RecordBatch.from_pydict(rows))
    assert checked.schema == CHECKED
    assert checked["reason"].to_pylist() == [None, "columns_differ", None]
    assert checked["size"].to_pylist() == [len(packet.canonical) for packet in made]
    assert checked["annotation"].to_pylist() == [None, None, b"{}"]


@given(st.text(max_size=80))
def test_no_type_makes_a_folder_of_its_own(content_type: str):
    assert kind_of(content_type) in {*KINDS, "channel", "other"}


def test_content_topics_share_a_folder():
    assert kind_of("/chat/1/room/proto") == "channel"
    assert {kind_of(t) for t in ("/a/b/c", "/a/b/c/d/e", "a/b/c/d", "//1/x/y", "../../x")} == {"other"}
    assert kind_of("POST") == "POST" and kind_of("post") == "other"
