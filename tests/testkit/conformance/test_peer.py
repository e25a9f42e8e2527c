"""What the tool itself must get right: packets with one fault, and what it finds in every message."""

from __future__ import annotations

import json

import pytest
from strata.protocol import canonical, packets
from strata.protocol.errors import InvalidPacket
from strata.protocol.ids import Identity
from strata.protocol.packets import Packet
from strata_testkit.conformance import forge
from strata_testkit.conformance.context import Subject
from strata_testkit.conformance.http import http_base
from strata_testkit.conformance.verdicts import shorten
from strata_testkit.conformance.witness import Witness

AUTHOR = Identity(bytes(range(32)))
PACKET = packets.build(AUTHOR, {"type": "POST", "text": "é"}, timestamp=1_760_000_000)


def test_a_sealed_packet_has_no_fault_but_the_one_given():
    sealed = forge.seal(AUTHOR, forge.members(PACKET, nonce=7))
    with pytest.raises(InvalidPacket, match="nonce"):
        Packet.parse(sealed)
    Packet.parse(forge.seal(AUTHOR, forge.members(PACKET, x=1))).verify()
    assert "nonce" not in forge.members(PACKET, nonce=...)
    assert forge.packet_id_of(forge.seal(AUTHOR, PACKET.value)) == PACKET.packet_id


def test_flipped_and_malleated_packets_differ_in_their_signature_alone():
    for raw in (forge.flipped(PACKET.canonical, "signature"), forge.malleated(PACKET)):
        broken = Packet.parse(raw)
        assert broken.packet_id == PACKET.packet_id
        with pytest.raises(InvalidPacket, match="signature"):
            broken.verify()


def test_respelled_packets_are_the_same():
    text = forge.respelled(PACKET)
    assert text.encode() != PACKET.canonical
    assert Packet.parse(text.encode()) == PACKET


@pytest.mark.parametrize("size_bytes", [500, 4096, 262_144])
def test_sized_packets_have_their_size(size_bytes: int):
    packet = forge.sized(AUTHOR, {"type": "POST"}, size_bytes, timestamp=1)
    assert packet.size_bytes == size_bytes
    packet.verify()


def see(message: dict[str, object]) -> dict[str, str]:
    witness = Witness()
    witness.see(message, json.dumps(message))
    return witness.breaches


def event(**changes: object) -> dict[str, object]:
    sound = {"type": "EVENT", "subscription_id": "s", "packet": PACKET.value, "received_at": 1}
    return {**sound, **changes}


def test_a_witness_has_nothing_against_sound_messages():
    header: dict[str, object] = {
        "origin_type": "SOFTWARE",
        "genesis_media_hash": None,
        "edit_history": [],
        "camelCase": 1,
    }
    claim = json.loads(forge.seal(AUTHOR, forge.members(PACKET, provenance_header=header)))
    served = {**claim, "provenance_header": {**header, "origin_type": "UNKNOWN"}}
    note = {"provenance": {"effective_origin_type": "UNKNOWN", "original_provenance_header": header}}
    sound: list[dict[str, object]] = [
        event(),
        event(packet=served, relay_annotations=note),
        {"type": "ERROR", "code": "invalid_schema", "reason": "no"},
        {"type": "OK", "packet_id": PACKET.packet_id, "status": "ACCEPTED"},
        {"type": "SOMETHING_NEW"},
    ]
    for message in sound:
        assert see(message) == {}


@pytest.mark.parametrize(
    ("message", "row"),
    [
        (event(received_at=None), "R-098"),
        (event(received_at=1.5), "R-098"),
        (event(subscription_id=None), "R-172"),
        (event(packet=None), "R-171"),
        (event(packet={**PACKET.value, "timestamp": 1}), "R-171"),
        (event(extraMember=1), "R-003"),
        ({"type": "ERROR", "code": "x"}, "R-195"),
        ({"type": "ERROR", "reason": "x"}, "R-195"),
        ({"type": "ERROR", "code": "x", "reason": "in /home/relay/db.py"}, "R-199"),
        ({"type": "ERROR", "code": "x", "reason": "INSERT INTO packets"}, "R-199"),
        ({"type": "OK", "packet_id": "zQm", "status": "ACCEPTED"}, "R-020"),
    ],
)
def test_a_witness_sees_each_breach(message, row):
    assert list(see(message)) == [row]


def test_limits_come_from_the_manifest_where_it_has_them():
    assert Subject("ws://x").max_packet_bytes == packets.DEFAULT_MAX_PACKET_BYTES
    odd = Subject("ws://x", {"limits": {"max_packet_bytes": "1", "max_limit": 7}, "policy": []})
    assert (odd.max_packet_bytes, odd.max_limit) == (packets.DEFAULT_MAX_PACKET_BYTES, 7)
    assert odd.max_packet_age_seconds == packets.DEFAULT_MAX_PACKET_AGE_SECONDS


def test_small_things():
    assert (
        http_base("wss://user:secret@relay.example.net:8443/strata?x=1") == "https://relay.example.net:8443"
    )
    assert shorten("x" * 1000).endswith("…") and shorten({"a": float("nan")})
    assert shorten({"a": {1, 2}})
    assert canonical.encode(PACKET.value) == PACKET.canonical
