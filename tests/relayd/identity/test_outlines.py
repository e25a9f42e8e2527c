"""What is kept of identity packets and manifests agrees with them."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from strata.protocol import packets
from strata.protocol.documents import RecoveryPolicy, VerificationMethod, build_document, method_id
from strata.protocol.errors import InvalidPacket
from strata.protocol.ids import Identity
from strata.protocol.keys import (
    add_content,
    approval_content,
    document_content,
    read_statement,
    revoke_content,
    rotate_content,
)
from strata.protocol.packets import Packet
from strata.protocol.provenance.manifest import ClientKey, check_manifest, client_keys, manifest_content

from relayd.identity.outlines import outlined, weight_of

NOW = 1_760_000_000
ALICE, OTHER = Identity(bytes(range(32))), Identity(bytes([7]) * 32)
FIRST_KEY = method_id(ALICE.did)
NEXT_KEY = method_id(OTHER.did).replace(OTHER.did, ALICE.did)
RECOVERY_KEY = method_id(ALICE.did, "recovery")
MANIFEST = manifest_content(
    ALICE.did,
    "app",
    [ClientKey("k", OTHER.public_key, 1, 9)],
    extra={"bundle_ids": ["a.b"], "description": "d"},
)
DOCUMENT = document_content(
    build_document(
        ALICE.did,
        [
            VerificationMethod(FIRST_KEY, ALICE.public_key, 1, 9, custody="hardware"),
            VerificationMethod(RECOVERY_KEY, OTHER.public_key, 1, revoked_at=3, recovery=True),
        ],
        created_at=4,
        authentication=[FIRST_KEY],
        recovery_policy=RecoveryPolicy(1, (RECOVERY_KEY,)),
    )
)
CONTENTS = [
    DOCUMENT,
    add_content(NEXT_KEY, OTHER.public_key, valid_from=1, valid_until=5, reason="new"),
    rotate_content(NEXT_KEY, OTHER.public_key, replaces=FIRST_KEY, valid_from=1),
    revoke_content(FIRST_KEY, revoked_at=3, reason="lost"),
    approval_content("0x" + "ab" * 32, approved_at=4, note="yes"),
    MANIFEST,
]
json = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


def said(read: Callable[[Packet], object], packet: Packet) -> object:
    try:
        return read(packet)
    except InvalidPacket as error:
        return error.code, error.detail, str(error)


def read_manifest(packet: Packet) -> object:
    check_manifest(packet)
    return list(client_keys(packet, 5, 0)), packet.content.get("bundle_ids")


def spoil(value: Any, data: st.DataObject) -> Any:
    """The value with another one somewhere in it."""
    if value and type(value) in (dict, list) and data.draw(st.booleans()):
        places = [*value, "another"] if type(value) is dict else list(range(len(value)))
        place = data.draw(st.sampled_from(places).filter(lambda name: name != "type"))
        spoilt = copy(value)
        spoilt[place] = spoil(value[place] if place != "another" else None, data)
        return spoilt
    return data.draw(json)


@given(st.sampled_from(CONTENTS), st.data())
def test_an_outline_says_what_the_packet_says(content, data):
    members = dict(content)
    if data.draw(st.booleans()):
        name = data.draw(st.sampled_from([*content, "another"]).filter(lambda name: name != "type"))
        members[name] = spoil(content.get(name), data)
    packet = packets.build(ALICE, members, timestamp=NOW, extra={"beside": data.draw(json)})
    read = read_manifest if content is MANIFEST else read_statement
    kept = outlined(packet)
    assert said(read, kept) == said(read, packet)
    assert (kept, kept.canonical, kept.signed_bytes, kept.content_type) == (
        packet, packet.canonical, packet.signed_bytes, packet.content_type,
    )  # fmt: skip


def test_what_is_beside_it_is_not_kept_and_weighs_its_bytes_alone():
    beside = {"x": [{}] * 5000, "y": {str(n): n for n in range(2000)}}
    document: Any = DOCUMENT["document"]
    method, *others = document["verification_method"]
    larger = [{**content, **beside} for content in CONTENTS]
    larger += [
        DOCUMENT | {"document": document | beside},
        DOCUMENT | {"document": document | {"verification_method": [method | beside, *others]}},
    ]
    for content, more in zip([*CONTENTS, DOCUMENT, DOCUMENT], larger, strict=True):
        small = packets.build(ALICE, content, timestamp=NOW)
        packet = packets.build(ALICE, more, timestamp=NOW, extra={"z": [[]] * 3000})
        kept = outlined(packet)
        assert kept.value == outlined(small).value
        texts = 3 if content is DOCUMENT else 2
        assert weight_of(kept) - weight_of(outlined(small)) == texts * (packet.size_bytes - small.size_bytes)
        assert weight_of(packet) > 6 * weight_of(kept)
