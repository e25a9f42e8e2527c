"""A reader's levels: edit histories, media bytes, apps that their platform attests."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strata.protocol import fields, packets
from strata.protocol.errors import ErrorCode, InvalidPacket
from strata.protocol.packets import Packet
from strata.protocol.provenance import AI_MODEL, HARDWARE, SOFTWARE, UNKNOWN, attest
from strata.protocol.provenance.attestation import platform_nonce
from strata.protocol.provenance.history import Level, edit_hash, history_holds, level_of, platform_attested
from strata.protocol.provenance.manifest import ClientKey, manifest_content

from tests.support.made_origins import AUTHOR, CLIENT, HELLO, MEDIA, NOW, attested, post

GENESIS = packets.byte_hash(b"as captured")
SIGNED = "0x" + "ab" * 64


def edits(*results: str, signed: bool = True, genesis: str = GENESIS) -> list[dict[str, Any]]:
    """A valid history that ends with the last result."""
    history: list[dict[str, Any]] = []
    for result in results:
        edit = {
            "action": "CROP",
            "timestamp": NOW,
            "prev_edit_hash": edit_hash(history[-1]) if history else genesis,
            "resulting_media_hash": result,
        }
        history.append(edit | ({"signature": SIGNED} if signed else {}))
    return history


def header(origin: str, history: Any, **changes: Any) -> dict[str, Any]:
    return {"origin_type": origin, "genesis_media_hash": GENESIS, "edit_history": history} | changes


def level(origin: str, history: Any, effective: str | None = None, **options: Any) -> Level:
    return level_of(post(header(origin, history)), effective or origin, **options)


MIDDLE = packets.byte_hash(b"half way")
SOUND = edits(MIDDLE, HELLO)


@pytest.mark.req("R-226")
def test_an_unbroken_history_keeps_the_level() -> None:
    assert level(HARDWARE, SOUND) == Level.HARDWARE
    assert level(AI_MODEL, SOUND) == Level.AI_MODEL
    unedited = post(header(HARDWARE, [], genesis_media_hash=HELLO))
    assert level_of(unedited, HARDWARE) == Level.HARDWARE


@pytest.mark.req("R-226")
@pytest.mark.parametrize("origin", [HARDWARE, AI_MODEL])
@pytest.mark.parametrize(
    "broken",
    [
        [],
        SOUND[:1],
        SOUND[1:],
        SOUND[::-1],
        [SOUND[0], SOUND[1] | {"prev_edit_hash": GENESIS}],
        [SOUND[0] | {"prev_edit_hash": MIDDLE}, SOUND[1]],
        [SOUND[0] | {"action": "GENERATE"}, SOUND[1]],
        [SOUND[0], {k: v for k, v in SOUND[1].items() if k != "resulting_media_hash"}],
        [SOUND[0], SOUND[1] | {"resulting_media_hash": MIDDLE}],
        [SOUND[0], "not an edit"],
        "not a history",
    ],
)
def test_a_broken_history_is_unknown_origin(origin: str, broken: Any) -> None:
    assert level(origin, broken) == Level.UNKNOWN


@pytest.mark.req("R-226")
def test_a_history_without_a_genesis_holds_nothing() -> None:
    orphan = post(header(HARDWARE, [], genesis_media_hash=None))
    assert level_of(orphan, HARDWARE) == Level.UNKNOWN
    assert not history_holds({"edit_history": SOUND}, HELLO)
    # An edit without a previous hash is not bound to a missing genesis hash.
    first = {"action": "CROP", "timestamp": NOW, "resulting_media_hash": HELLO}
    for beginning in ({}, {"genesis_media_hash": None}):
        for edit in (first, first | {"prev_edit_hash": None}):
            assert not history_holds(beginning | {"edit_history": [edit]}, HELLO)


@pytest.mark.req("R-226")
def test_without_a_medium_the_links_alone_must_hold_and_each_result_be_a_hash() -> None:
    assert history_holds(header(HARDWARE, []), None)
    assert history_holds(header(HARDWARE, SOUND), None)
    assert not history_holds(header(HARDWARE, SOUND[1:]), None)
    for result in ("half way", "", 5, None, MIDDLE.upper()):
        assert not history_holds(header(HARDWARE, edits(result)), None)  # type: ignore[arg-type]


@given(st.integers(0, 2), st.sampled_from(["action", "timestamp", "prev_edit_hash", "resulting_media_hash"]))
def test_whatever_changes_in_an_edit_breaks_the_chain(which: int, member: str) -> None:
    history = copy.deepcopy(edits(MIDDLE, packets.byte_hash(b"x"), HELLO))
    replaced = {"action": "ROTATE", "timestamp": NOW + 1}.get(member, packets.byte_hash(b"other"))
    history[which][member] = replaced
    last_and_inert = which == 2 and member in ("action", "timestamp")
    assert history_holds(header(HARDWARE, history), HELLO) == last_and_inert


@pytest.mark.req("R-227")
def test_an_unsigned_edit_withholds_the_hardware_level() -> None:
    assert level(HARDWARE, edits(MIDDLE, HELLO, signed=False)) == Level.UNKNOWN
    assert level(HARDWARE, [*SOUND[:1], SOUND[1] | {"signature": "0xshort"}]) == Level.UNKNOWN
    assert level(AI_MODEL, edits(MIDDLE, HELLO, signed=False)) == Level.AI_MODEL


@pytest.mark.req("R-228")
def test_an_attested_app_never_equals_hardware() -> None:
    assert level(SOFTWARE, []) == Level.SOFTWARE
    assert level(SOFTWARE, [], app_attested=True) == Level.ATTESTED_APP
    assert Level.SOFTWARE < Level.ATTESTED_APP < Level.HARDWARE
    for origin in (UNKNOWN, AI_MODEL):
        assert level(origin, SOUND, app_attested=True) == level(origin, SOUND)


@pytest.mark.req("R-036", "R-212")
def test_the_level_follows_the_effective_origin() -> None:
    assert level(HARDWARE, SOUND, UNKNOWN) == Level.UNKNOWN
    assert level(SOFTWARE, [], HARDWARE) == Level.SOFTWARE
    assert level_of(packets.build(AUTHOR, {"type": "POST"}, timestamp=NOW), None) == Level.UNKNOWN


@pytest.mark.req("R-028")
def test_bytes_that_are_not_the_medium_have_no_known_origin() -> None:
    assert level(HARDWARE, SOUND, media=b"hello") == Level.HARDWARE
    assert level(HARDWARE, SOUND, media=b"another") == Level.UNKNOWN
    assert level(SOFTWARE, [], media=b"another") == Level.UNKNOWN


@pytest.mark.req("R-226")
def test_each_medium_is_judged_for_itself() -> None:
    other = packets.byte_hash(b"second")
    content = {**MEDIA, "media": [{"media_hash": HELLO}, {"media_hash": other}]}
    packet = post(header(HARDWARE, SOUND), content)
    assert level_of(packet, HARDWARE, media_hash=HELLO) == Level.HARDWARE
    assert level_of(packet, HARDWARE, media_hash=other) == Level.UNKNOWN


# --- Platform attestation -------------------------------------------------------------------------------


class Platform:
    """A verifier that requires a nonce, and an app of the claim as the payload."""

    def __init__(self, kind: str) -> None:
        self.format = kind

    def verify(self, payload: bytes, *, nonce: bytes | None, claim: Any, now: int) -> None:
        if payload != b"net.example.camera" or payload.decode() not in claim.app_ids or not nonce:
            raise InvalidPacket(ErrorCode.INVALID_ATTESTATION, "no", detail="no")


MANIFEST = packets.build(
    CLIENT,
    manifest_content(
        CLIENT.did,
        "camera",
        [ClientKey("k", CLIENT.public_key, 0, 0)],
        extra={"bundle_ids": {"ios": "net.example.camera", "android": ["net.example.droid"]}},
    ),
    timestamp=NOW,
)


def with_platform(**changes: Any) -> Packet:
    def evidence(nonce: bytes) -> dict[str, Any]:
        return {
            "format": "apple-app-attest",
            "payload": fields.unpadded_base64url(b"net.example.camera"),
            "nonce": fields.unpadded_base64url(nonce),
        } | changes

    return attest(
        AUTHOR,
        CLIENT,
        "1.0.0",
        MEDIA,
        timestamp=NOW,
        origin_type=SOFTWARE,
        genesis_media_hash=HELLO,
        platform_attestation=evidence,
    )


VERIFIERS = {name: Platform(name) for name in ("apple-app-attest", "play-integrity", "c2pa")}


@pytest.mark.req("R-233", "R-228")
def test_a_platform_may_vouch_for_the_app() -> None:
    assert platform_attested(with_platform(), MANIFEST, VERIFIERS, now=NOW)
    assert platform_attested(with_platform(format="play-integrity"), MANIFEST, VERIFIERS, now=NOW)


@pytest.mark.req("R-233")
@pytest.mark.parametrize(
    "changes",
    [
        {"nonce": "AAAA"},
        {"nonce": None},
        {"payload": fields.unpadded_base64url(b"net.example.droid")},
        {"payload": fields.unpadded_base64url(b"net.example.other")},
        {"payload": None},
        {"format": "c2pa"},
        {"format": "android-key-attestation"},
        {"format": ["apple-app-attest"]},
    ],
)
def test_what_the_platform_does_not_vouch_for_is_plain_software(changes: Any) -> None:
    assert not platform_attested(with_platform(**changes), MANIFEST, VERIFIERS, now=NOW)


@pytest.mark.req("R-233")
def test_the_manifest_must_be_the_clients_own() -> None:
    other = packets.build(AUTHOR, {**MANIFEST.content, "client_id": AUTHOR.did}, timestamp=NOW)
    assert not platform_attested(with_platform(), other, VERIFIERS, now=NOW)
    unattested = attested({"origin_type": SOFTWARE, "genesis_media_hash": HELLO})
    assert not platform_attested(unattested, MANIFEST, VERIFIERS, now=NOW)
    assert not platform_attested(post({"origin_type": SOFTWARE}), MANIFEST, VERIFIERS, now=NOW)
    assert not platform_attested(with_platform(), MANIFEST, {}, now=NOW)


def test_the_nonce_needs_no_media() -> None:
    assert len(platform_nonce({"content": {"type": "POST"}, "packet_id": "x"})) == 32
