"""A tombstone is trusted because of its signature, and reveals nothing about the erased packet."""

from __future__ import annotations

import dataclasses

import pytest
from strata.protocol import canonical
from strata.protocol.errors import InvalidInput
from strata.protocol.ids import Identity
from strata.protocol.tombstones import Tombstone, read_tombstone, sign_tombstone, told_place

RELAY, OTHER = Identity(bytes(31) + b"r"), Identity(bytes(31) + b"o")
GONE = Tombstone("0x" + "ab" * 32, 85_899_345_921, 1_790_000_000, 1_790_000_100, RELAY.did)


def test_what_was_signed_is_read_again():
    raw = sign_tombstone(GONE, RELAY)
    assert raw == canonical.canonicalize(raw)
    assert read_tombstone(raw) == GONE
    with pytest.raises(ValueError, match="the relay that it names"):
        sign_tombstone(GONE, OTHER)


def test_whoever_changes_a_member_needs_the_relays_key():
    members, _ = canonical.parse(sign_tombstone(GONE, RELAY))
    assert isinstance(members, dict)
    for name in ("type", "packet_id", "sequence", "received_at", "erased_at", "relay_id"):
        other = {"packet_id": "0x" + "cd" * 32, "relay_id": OTHER.did}.get(name, 7)
        with pytest.raises(InvalidInput):
            read_tombstone(canonical.encode(members | {name: other}))
    with pytest.raises(InvalidInput, match="signature"):
        read_tombstone(canonical.encode(members), public_key=bytes(32))


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("type", "POST"),
        ("signature", None),
        ("signature", "0x00"),
        ("packet_id", None),
        ("packet_id", "0x" + "AB" * 32),
        ("relay_id", 7),
        ("sequence", "1"),
        ("received_at", True),
        ("erased_at", None),
    ],
)
def test_a_member_of_another_shape_is_told_apart_from_a_wrong_signature(name, wrong):
    members, _ = canonical.parse(sign_tombstone(GONE, RELAY))
    assert isinstance(members, dict)
    with pytest.raises(InvalidInput, match="not a tombstone"):
        read_tombstone(canonical.encode(members | {name: wrong}))


def test_times_before_1970_and_zero_are_read():
    early = dataclasses.replace(GONE, sequence=0, received_at=0, erased_at=-1)
    assert read_tombstone(sign_tombstone(early, RELAY)) == early


@pytest.mark.parametrize("raw", [b"", b"null", b"[]", b"{}", b'{"type":"TOMBSTONE"}', b"\xff"])
def test_anything_else_is_no_tombstone(raw: bytes):
    with pytest.raises(InvalidInput):
        read_tombstone(raw)


def test_a_relay_with_a_name_is_believed_by_a_key_that_is_given():
    named = Identity(bytes(31) + b"n", did="did:web:relay.example")
    raw = sign_tombstone(dataclasses.replace(GONE, relay_id=named.did), named)
    assert read_tombstone(raw, named.public_key).relay_id == named.did
    with pytest.raises(InvalidInput):
        read_tombstone(raw)


@pytest.mark.parametrize("at", [2**53, 2**63 - 1, -(2**63)])
@pytest.mark.parametrize("packet_id", [b"", bytes(31), bytes(33), bytes(32)])
def test_the_place_of_any_row_can_be_told(packet_id: bytes, at: int):
    name, told_at = told_place(packet_id, at)
    tombstone = dataclasses.replace(GONE, packet_id=name, received_at=told_at)
    assert read_tombstone(sign_tombstone(tombstone, RELAY)) == tombstone
    assert (told_at > 0) is (at > 0) and told_place(packet_id, 7)[0] == name


def test_the_place_of_a_sound_row_is_told_as_it_is():
    assert told_place(bytes.fromhex(GONE.packet_id[2:]), GONE.received_at) == (
        GONE.packet_id,
        GONE.received_at,
    )
