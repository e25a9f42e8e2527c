"""The relay's verdict: which packets are refused, which are downgraded, and which claims stand."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strata.protocol import packets
from strata.protocol.errors import ErrorCode, InvalidPacket
from strata.protocol.ids import Identity
from strata.protocol.provenance import REASONS, Downgrade, ProvenanceTrust, needed_dids
from strata.protocol.provenance.judgement import claim_bytes
from strata.protocol.provenance.manifest import ClientKey, manifest_content

from tests.support.made_origins import (
    AUTHOR,
    CLIENT,
    DEVICE,
    HELLO,
    MAKER,
    MEDIA,
    MODEL,
    NOW,
    ROOT,
    TRUST,
    attested,
    chain_to_root,
    hardware_header,
    header_of,
    link,
    model_header,
    own_keys,
    post,
    signed_claim,
    software_header,
    verdict,
    without,
)

TEXT = {"type": "POST", "text": "no media"}
OTHER = Identity(b"\x21" * 32)


def refusal(packet: packets.Packet, trust: ProvenanceTrust = TRUST, **options: Any) -> tuple[ErrorCode, Any]:
    with pytest.raises(InvalidPacket) as caught:
        verdict(packet, trust, **options)
    return caught.value.code, caught.value.detail


def reason(packet: packets.Packet, **options: Any) -> str | None:
    downgrade = verdict(packet, **options)
    return downgrade.reason if downgrade else None


# --- What needs no proof ------------------------------------------------------------------------------------


@pytest.mark.req("R-203", "R-202")
@pytest.mark.parametrize(
    "header",
    [packets.MINIMAL_PROVENANCE_HEADER, {}, {"origin_type": None}, {"origin_type": "UNKNOWN", "x": 1}],
)
def test_unknown_origin_needs_no_proof(header: Any) -> None:
    assert verdict(post(header)) is None
    assert verdict(packets.build(AUTHOR, TEXT, timestamp=NOW)) is None


@pytest.mark.req("R-204", "R-007")
def test_an_origin_nobody_knows_is_downgraded() -> None:
    assert verdict(post({"origin_type": "SATELLITE"})) == Downgrade(
        "SATELLITE", "UNKNOWN", "unknown_origin_type", drops_client_attestation=False
    )
    assert verdict(post({"origin_type": "software"})) is not None


def test_an_origin_that_is_no_string_is_no_schema() -> None:
    assert refusal(post({"origin_type": 7})) == (ErrorCode.INVALID_SCHEMA, "origin_type")


# --- SOFTWARE and client attestation ------------------------------------------------------------------------


@pytest.mark.req("R-205", "R-202")
def test_attested_software_stands() -> None:
    assert verdict(attested(software_header())) is None


@pytest.mark.req("R-206", "R-207", "R-229")
@pytest.mark.parametrize("content", [MEDIA, TEXT], ids=["media", "text"])
def test_unattested_software_is_downgraded_and_not_refused(content: Any) -> None:
    expected = Downgrade("SOFTWARE", "UNKNOWN", "client_attestation_missing", drops_client_attestation=False)
    assert verdict(post(software_header(), content)) == expected


def attestation(**changes: Any) -> dict[str, Any]:
    sound = header_of(attested(software_header()))["client_attestation"]
    return {**sound, **changes}


@pytest.mark.req("R-206", "R-207", "R-205")
@pytest.mark.parametrize(
    ("broken", "expected"),
    [
        ("a string", "client_attestation_malformed"),
        ([], "client_attestation_malformed"),
        ({}, "client_attestation_malformed"),
        (attestation(client_id="nobody"), "client_attestation_malformed"),
        (attestation(client_id=None), "client_attestation_malformed"),
        (attestation(client_version=3), "client_attestation_malformed"),
        (attestation(client_signature="0x00"), "client_attestation_malformed"),
        (attestation(client_id="did:strata:some_app"), "client_key_unresolved"),
        (attestation(client_id=OTHER.did), "client_signature_invalid"),
        (attestation(client_signature="0x" + "00" * 64), "client_signature_invalid"),
    ],
)
def test_an_attestation_that_fails_costs_the_claim(broken: Any, expected: str) -> None:
    downgrade = verdict(post(software_header(client_attestation=broken)))
    assert downgrade == Downgrade("SOFTWARE", "UNKNOWN", expected, drops_client_attestation=True)
    assert expected in REASONS


@pytest.mark.req("R-231")
@pytest.mark.parametrize(
    "change",
    [
        {"content": {**MEDIA, "text": "another"}},
        {"timestamp": NOW + 1},
        {"provenance_header": {"origin_type": "SOFTWARE", "genesis_media_hash": None}},
        {"provenance_header": {"origin_type": "SOFTWARE", "genesis_media_hash": HELLO, "edit_history": [{}]}},
        {"nonce": "another"},
    ],
)
def test_the_attestation_covers_the_whole_packet(change: dict[str, Any]) -> None:
    sound = attested(software_header())
    members = {**sound.value, **change}
    members["provenance_header"] = {
        **members["provenance_header"],
        "client_attestation": header_of(sound)["client_attestation"],
    }
    tampered = packets.build(
        AUTHOR,
        members["content"],
        timestamp=members["timestamp"],
        nonce=members.get("nonce"),
        provenance_header=members["provenance_header"],
    )
    assert reason(tampered) == "client_signature_invalid"


@pytest.mark.req("R-237")
def test_an_operator_may_refuse_a_client() -> None:
    trust = dataclasses.replace(TRUST, refused_clients=frozenset({CLIENT.did}))
    assert verdict(attested(software_header()), trust) == Downgrade(
        "SOFTWARE", "UNKNOWN", "client_refused", drops_client_attestation=True
    )


@pytest.mark.req("R-232")
def test_a_manifest_replaces_the_key_in_the_client_id() -> None:
    old, new = Identity(b"\x31" * 32), Identity(b"\x32" * 32)
    manifest = packets.build(
        CLIENT,
        manifest_content(
            CLIENT.did,
            "camera",
            [
                ClientKey("old", old.public_key, NOW - 1000, NOW - 301),
                ClientKey("now", new.public_key, NOW - 500, 0),
            ],
        ),
        timestamp=NOW,
    )

    class Signing:
        """Signs as the client with one of its software keys."""

        did = CLIENT.did

        def __init__(self, key: Identity) -> None:
            self.sign = key.sign

    by_new, by_old = (attested(software_header(), client=Signing(key)) for key in (new, old))
    assert reason(by_new, manifest=manifest) is None
    assert reason(by_old, manifest=manifest) == "client_signature_invalid"
    assert reason(by_old, manifest=manifest, now=NOW - 1) is None  # within the skew of 300 s after its end
    assert (
        reason(by_new, manifest=manifest, now=NOW - 801) == "client_signature_invalid"
    )  # and before its start
    assert reason(attested(software_header()), manifest=manifest) == "client_signature_invalid"
    assert reason(by_new) == "client_signature_invalid"  # without a manifest, the DID's own key counts


@pytest.mark.req("R-232")
def test_a_manifest_without_a_live_key_resolves_nothing() -> None:
    content = manifest_content(CLIENT.did, "x", [ClientKey("k", CLIENT.public_key, 0, NOW - 10_000)])
    manifest = packets.build(CLIENT, content, timestamp=NOW)
    assert reason(attested(software_header()), manifest=manifest) == "client_key_unresolved"


# --- AI_MODEL -----------------------------------------------------------------------------------------------


@pytest.mark.req("R-214", "R-218", "R-220")
def test_a_model_with_its_chain_stands() -> None:
    assert verdict(attested(model_header())) is None
    # The signature may be in the last link, and an issuer above the model may have made it.
    header = without(model_header(), "issuer_signature")
    chain = chain_to_root(MODEL)
    for signer in (MODEL, MAKER, ROOT):
        last = signed_claim(signer, "signature", header)["signature"]
        signed = header | {"issuer_chain": [chain[0], chain[1] | {"signature": last}]}
        assert verdict(attested(signed)) is None


@pytest.mark.req("R-214", "R-216", "R-217")
@pytest.mark.parametrize(
    ("changes", "code", "detail"),
    [
        ({"issuer_chain": None}, "missing_proof", "issuer_chain"),
        ({"issuer_chain": []}, "missing_proof", "issuer_chain"),
        ({"issuer_signature": None}, "missing_proof", "issuer_signature"),
        ({"issuer_chain": chain_to_root(MODEL)[:1]}, "invalid_issuer_chain", "unrooted"),
        ({"issuer_chain": [link(OTHER, MODEL)]}, "invalid_issuer_chain", "unrooted"),
        ({"issuer_signature": "0x" + "00" * 64}, "invalid_provenance", "issuer_signature"),
        ({"issuer_signature": "signed"}, "invalid_provenance", "issuer_signature"),
        ({"genesis_media_hash": "0x" + "11" * 32}, "invalid_provenance", "issuer_signature"),
    ],
)
def test_a_model_without_its_proof_is_refused(changes: Any, code: str, detail: str) -> None:
    """With or without a client attestation: the proof of the claim comes first (A-081)."""
    header = model_header(**changes)
    assert refusal(attested(header)) == (code, detail)
    assert refusal(post(header)) == (code, detail)


@pytest.mark.req("R-218")
def test_evidence_elsewhere_is_no_evidence() -> None:
    header = model_header()
    proof = {name: header.pop(name) for name in ("issuer_chain", "issuer_signature")}
    assert refusal(post(header, MEDIA | proof))[0] == ErrorCode.MISSING_PROOF


@pytest.mark.req("R-219")
@pytest.mark.parametrize("header", [model_header(), hardware_header()])
def test_without_roots_every_chain_is_unrooted(header: Any) -> None:
    assert refusal(attested(header), ProvenanceTrust()) == (ErrorCode.INVALID_ISSUER_CHAIN, "unrooted")


@pytest.mark.req("R-219")
def test_roots_of_one_kind_do_not_serve_the_other() -> None:
    models_only = dataclasses.replace(TRUST, hardware_roots=())
    assert verdict(attested(model_header()), models_only) is None
    assert refusal(attested(hardware_header()), models_only)[0] == ErrorCode.INVALID_ISSUER_CHAIN


# --- HARDWARE_SECURE_ENCLAVE --------------------------------------------------------------------------------


@pytest.mark.req("R-215", "R-218")
def test_a_device_with_its_chain_stands() -> None:
    assert verdict(attested(hardware_header())) is None


@pytest.mark.req("R-215", "R-216", "R-217")
@pytest.mark.parametrize(
    ("changes", "code", "detail"),
    [
        ({"device_id": None}, "missing_proof", "device_id"),
        ({"device_signature": None}, "missing_proof", "device_signature"),
        ({"issuer_chain": None}, "missing_proof", "issuer_chain"),
        ({"device_signature": "0x" + "00" * 64}, "invalid_provenance", "device_signature"),
        ({"device_signature": 5}, "invalid_provenance", "device_signature"),
        ({"edit_history": [{"action": "CROP"}]}, "invalid_provenance", "device_signature"),
        ({"issuer_chain": chain_to_root(OTHER)}, "invalid_issuer_chain", "device_mismatch"),
        ({"device_id": OTHER.did}, "invalid_issuer_chain", "device_mismatch"),
        ({"issuer_chain": [link(OTHER, DEVICE)]}, "invalid_issuer_chain", "unrooted"),
        ({"attestation_evidence": {}}, "invalid_attestation", "unsupported_format"),
        ({"attestation_evidence": "x"}, "invalid_attestation", "unsupported_format"),
    ],
)
def test_a_device_without_its_proof_is_refused(changes: Any, code: str, detail: str) -> None:
    header = hardware_header(**changes)
    assert refusal(attested(header)) == (code, detail)
    assert refusal(post(header)) == (code, detail)


@pytest.mark.req("R-216")
@pytest.mark.parametrize("header", [model_header(), hardware_header()])
def test_a_proved_claim_without_a_client_attestation_is_downgraded(header: Any) -> None:
    assert verdict(post(header)) == Downgrade(
        header["origin_type"], "UNKNOWN", "client_attestation_missing", drops_client_attestation=False
    )


@pytest.mark.req("R-221")
def test_the_signed_claim_is_these_bytes() -> None:
    header = {
        "origin_type": "HARDWARE_SECURE_ENCLAVE",
        "genesis_media_hash": HELLO,
        "device_id": "did:device:camera-1",
        "edit_history": [],
        "issuer_chain": "left out",
    }
    text = (
        '{"device_id":"did:device:camera-1","edit_history":[],'
        '"genesis_media_hash":"0xea8f163db38682925e4491c5e58d4bb3506ef8c14eb78a86e908c5624a67200f",'
        '"origin_type":"HARDWARE_SECURE_ENCLAVE"}'
    )
    assert claim_bytes(header) == text.encode()
    assert (
        claim_bytes(without(header, "device_id"))
        == text.replace('"device_id":"did:device:camera-1",', "").encode()
    )
    # Null and an absent member are signed differently.
    no_hash = text.replace('"0xea8f163db38682925e4491c5e58d4bb3506ef8c14eb78a86e908c5624a67200f"', "null")
    assert claim_bytes(header | {"genesis_media_hash": None}) == no_hash.encode()
    assert AUTHOR.sign(claim_bytes(header)).hex() == (
        "ebf81484ec379b08ff33cb07c41fb5cfa3c02a914409c3d1a0d01d9c196e891c"
        "3f39f211b4ed10f80c94ef71ecfe6df3d5322314fe8c301c6ef305379288a602"
    )


# --- Platform evidence --------------------------------------------------------------------------------------


class Expecting:
    """A verifier that accepts one payload and records its arguments."""

    format = "test-evidence"

    def __init__(self) -> None:
        self.told: list[Any] = []

    def verify(self, payload: bytes, *, nonce: Any, claim: Any, now: int) -> None:
        self.told.append((nonce, claim.genesis_media_hash, now))
        if payload != b"sound":
            raise InvalidPacket(ErrorCode.INVALID_ATTESTATION, "unsound", detail="unsound")


def evidence(payload: object = "c291bmQ", **members: Any) -> dict[str, Any]:
    return {"format": "test-evidence", "payload": payload, "nonce": None, **members}


@pytest.mark.req("R-222", "R-215", "R-217")
def test_evidence_is_checked_by_the_verifier_of_its_format() -> None:
    verifier = Expecting()
    trust = dataclasses.replace(TRUST, evidence={"test-evidence": verifier})
    assert verdict(attested(hardware_header(attestation_evidence=evidence())), trust) is None
    assert verifier.told == [(None, HELLO, NOW)]
    unsound = hardware_header(attestation_evidence=evidence("dW5zb3VuZA"))
    assert refusal(attested(unsound), trust) == (ErrorCode.INVALID_ATTESTATION, "unsound")
    for broken in (evidence("!"), evidence(payload=None), evidence(payload=4)):
        header = hardware_header(attestation_evidence=broken)
        assert refusal(attested(header), trust) == (ErrorCode.INVALID_ATTESTATION, "malformed_evidence")


@pytest.mark.req("R-222")
@pytest.mark.parametrize("kind", ["android-key-attestation", "apple-device-attestation", "c2pa", None, 3, []])
def test_evidence_nobody_can_check_has_failed_on_a_hardware_claim_alone(kind: Any) -> None:
    header = hardware_header(attestation_evidence=evidence(format=kind))
    assert refusal(attested(header)) == (ErrorCode.INVALID_ATTESTATION, "unsupported_format")
    assert verdict(attested(model_header(attestation_evidence=evidence(format=kind)))) is None
    assert verdict(attested(software_header(attestation_evidence=evidence(format=kind)))) is None


@pytest.mark.req("R-222")
def test_a_stated_nonce_is_the_one_of_the_claim() -> None:
    verifier = Expecting()
    trust = dataclasses.replace(TRUST, evidence={"test-evidence": verifier})
    # base64url(SHA-256("0x" + 22… ‖ V4 hello))
    genesis_id = "0x" + "22" * 32
    right = "r0h5P38wd8658lnh0h5b2Gg45BPeXlriT4oAKPznVw0"
    header = hardware_header(genesis_id=genesis_id, attestation_evidence=evidence(nonce=right))
    assert verdict(attested(header), trust) is None
    assert verifier.told[0][0] is not None
    for nonce in ("", "AAAA", right[:-2], 7):
        header = hardware_header(genesis_id=genesis_id, attestation_evidence=evidence(nonce=nonce))
        assert refusal(attested(header), trust) == (ErrorCode.INVALID_ATTESTATION, "nonce_mismatch")


# --- What the relay must know in advance --------------------------------------------------------------------


def test_the_dids_that_are_asked_for_are_announced() -> None:
    asked: list[str] = []

    def keys_of(did: str, at: int) -> tuple[bytes, ...]:
        asked.append(did)
        return own_keys(did, at)

    for header in (software_header(), model_header(), hardware_header()):
        packet = attested(header)
        asked.clear()
        verdict(packet, keys_of=keys_of)
        assert asked
        assert set(asked) <= set(needed_dids(packet))
    assert needed_dids(attested(hardware_header())) == (CLIENT.did, DEVICE.did)
    for plain in (packets.build(AUTHOR, TEXT, timestamp=NOW), post({"origin_type": "SATELLITE"})):
        assert needed_dids(plain) == ()


# --- Arbitrary input from a peer ----------------------------------------------------------------------------

json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53) + 1, 2**53 - 1) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
members = st.sampled_from(
    [*hardware_header(), "issuer_signature", "attestation_evidence", "client_attestation", "genesis_id"]
)


@given(
    st.sampled_from([software_header(), model_header(), hardware_header()]),
    st.dictionaries(members, json_values, max_size=3),
    st.booleans(),
)
def test_a_hostile_header_is_refused_in_the_proper_way_or_downgraded(
    header: dict[str, Any], changes: dict[str, Any], attest: bool
) -> None:
    genuine = header_of(attested(header))
    header = {**(genuine if attest else header), **changes}
    try:
        packet = post(header)
    except InvalidPacket:
        return  # refused by the schema that applies to every packet
    needed_dids(packet)
    try:
        found = verdict(packet)
    except InvalidPacket as error:
        assert error.detail
        return
    assert found is None or found.reason in REASONS


@pytest.mark.parametrize(
    "member", ["issuer_chain", "edit_history", "client_attestation", "attestation_evidence"]
)
def test_deep_and_wide_members_change_nothing(member: str) -> None:
    deep: Any = "end"
    for _ in range(58):
        deep = [deep]
    hostile_values: tuple[object, ...] = (deep, [{}] * 5000, {"x" * 50_000: 1})
    for hostile in hostile_values:
        try:
            verdict(post(hardware_header(**{member: hostile})))
        except InvalidPacket as error:
            assert error.detail


@pytest.mark.parametrize("origin", [None, "UNKNOWN", "SATELLITE", 5, ["SOFTWARE"], {}])
def test_no_keys_are_looked_for_where_nothing_is_claimed(origin: Any) -> None:
    header = software_header() | {"origin_type": origin, "device_id": DEVICE.did}
    assert needed_dids(post(header)) == ()


@pytest.mark.parametrize("device", [None, 5, "camera-1", [DEVICE.did]])
def test_keys_are_looked_for_under_dids_alone_and_those_of_a_device_for_hardware_alone(device: Any) -> None:
    assert needed_dids(attested(hardware_header() | {"device_id": device})) == (CLIENT.did,)
    assert needed_dids(attested(software_header() | {"device_id": DEVICE.did})) == (CLIENT.did,)
    assert needed_dids(post(hardware_header())) == (DEVICE.did,)


@pytest.mark.req("R-219", "R-220")
def test_chains_are_judged_with_the_skew_of_the_settings() -> None:
    chain = [link(ROOT, MODEL, valid_until=NOW - 100)]
    header = signed_claim(MODEL, "issuer_signature", model_header(issuer_chain=chain))
    for skew, expected in ((99, True), (100, False)):
        trust = dataclasses.replace(TRUST, clock_skew_seconds=skew)
        try:
            verdict(attested(header), trust)
            is_refused = False
        except InvalidPacket as error:
            is_refused = error.detail == "outside_validity"
        assert is_refused is expected
