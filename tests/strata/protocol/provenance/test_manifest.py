"""CLIENT_MANIFEST: its shape, its keys within their windows, the newest manifest."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from strata.protocol import packets
from strata.protocol.errors import ErrorCode, InvalidPacket
from strata.protocol.ids import Identity
from strata.protocol.packets import Packet
from strata.protocol.provenance.manifest import (
    MAX_CLIENT_KEYS,
    ClientKey,
    client_keys,
    manifest_content,
    newest,
)
from strata.protocol.typed import check_content

from tests.support.made_origins import CLIENT, NOW

KEY = ClientKey("main", CLIENT.public_key, NOW - 100, NOW + 100)
SOUND = manifest_content(CLIENT.did, "camera", [KEY], extra={"bundle_ids": {"ios": "net.example.camera"}})


def manifest(content: Any = SOUND, author: Identity = CLIENT) -> Packet:
    return packets.build(author, content, timestamp=NOW)


@pytest.mark.req("R-234")
def test_a_whole_manifest_passes_with_its_optional_members() -> None:
    check_content(manifest())
    optional = {"description": "x", "homepage": "https://h.example", "platforms": ["ios"]}
    check_content(manifest({**SOUND, **optional, "attestation_support": {"ios": True}, "x_new": 1}))


@pytest.mark.req("R-234")
@pytest.mark.parametrize("member", ["client_id", "name", "public_keys"])
@pytest.mark.parametrize("value", [None, 5, {}, [], "drop"])
def test_a_manifest_has_its_required_members(member: str, value: Any) -> None:
    content = {**SOUND, member: value}
    if value == "drop":
        del content[member]
    with pytest.raises(InvalidPacket) as caught:
        check_content(manifest(content))
    assert caught.value.code == ErrorCode.INVALID_SCHEMA


@pytest.mark.req("R-234")
@pytest.mark.parametrize(
    "change",
    [
        {"key_id": 1},
        {"public_key": CLIENT.public_key.hex()},
        {"public_key": "0x00"},
        {"public_key": "0x" + "zz" * 32},
        {"valid_from": "now"},
        {"valid_until": 1.5},
        {"valid_from": None},
    ],
)
def test_every_key_is_whole(change: Any) -> None:
    keys = SOUND["public_keys"]
    assert isinstance(keys, list)
    entries = [keys[0], {**keys[0], **change}]
    for broken in (entries, ["text"], [None]):
        with pytest.raises(InvalidPacket):
            check_content(manifest({**SOUND, "public_keys": broken}))


@pytest.mark.req("R-235")
def test_nobody_speaks_for_another_client() -> None:
    with pytest.raises(InvalidPacket) as caught:
        check_content(manifest(author=Identity(b"\x55" * 32)))
    assert (caught.value.code, caught.value.detail) == (ErrorCode.INVALID_SCHEMA, "author_mismatch")


@pytest.mark.req("R-232")
def test_keys_count_in_their_windows_and_the_latest_first() -> None:
    keys = [ClientKey(f"k{n}", bytes([n]) * 32, NOW + n, 0 if n % 2 else NOW + 10) for n in range(4)]
    packet = manifest(manifest_content(CLIENT.did, "x", keys))
    assert [key[0] for key in client_keys(packet, NOW + 3, 0)] == [3, 2, 1, 0]
    assert [key[0] for key in client_keys(packet, NOW + 1, 0)] == [1, 0]
    assert [key[0] for key in client_keys(packet, NOW + 1, 2)] == [3, 2, 1, 0]
    assert [key[0] for key in client_keys(packet, NOW + 11, 0)] == [3, 1]
    assert [key[0] for key in client_keys(packet, NOW + 11, 1)] == [3, 2, 1, 0]


def test_a_manifest_of_many_keys_costs_a_bounded_number_of_checks() -> None:
    keys = [ClientKey(f"k{n}", bytes([n]) * 32, n, 0) for n in range(100)]
    packet = manifest(manifest_content(CLIENT.did, "x", keys))
    assert [key[0] for key in client_keys(packet, NOW, 0)] == list(range(99, 99 - MAX_CLIENT_KEYS, -1))


@pytest.mark.req("R-236")
def test_the_newest_manifest_counts_whatever_the_order() -> None:
    first, second, third = (manifest({**SOUND, "name": name}) for name in "abc")
    latest = min(second, third, key=lambda packet: packet.packet_id)
    received = [(first, NOW), (second, NOW + 5), (third, NOW + 5)]
    for order in itertools.permutations(received):
        assert newest(order) is latest
    assert newest([]) is None
