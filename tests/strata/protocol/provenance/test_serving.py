"""A downgraded packet on the wire, and how the signed packet is restored."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strata.protocol import canonical
from strata.protocol.errors import InvalidPacket
from strata.protocol.packets import Packet
from strata.protocol.provenance import ORIGIN_TYPES, REASONS, Downgrade, restore, served
from strata.protocol.provenance.origins import lower

from tests.support.made_origins import (
    HELLO,
    MEDIA,
    attested,
    hardware_header,
    model_header,
    post,
    software_header,
    verdict,
)

BAD = {"client_id": "did:strata:x", "client_version": "1", "client_signature": "0x"}


def judged(header: dict[str, Any]) -> tuple[Packet, Downgrade]:
    packet = post(header)
    downgrade = verdict(packet)
    assert downgrade is not None
    return packet, downgrade


CASES = [
    software_header(),
    software_header(client_attestation=BAD),
    model_header(),
    hardware_header(client_attestation=BAD),
    {"origin_type": "SATELLITE", "odd": [1e-7, 1e21, "é\u0000🦀"]},
    {"origin_type": "SATELLITE", "client_attestation": BAD},
]


@pytest.mark.req("R-206", "R-208", "R-040")
@pytest.mark.parametrize("header", CASES)
def test_the_served_copy_differs_in_the_origin_and_the_failed_attestation_alone(header: Any) -> None:
    packet, downgrade = judged(header)
    copy = json.loads(served(packet.canonical, downgrade).packet)
    signed = json.loads(packet.canonical)
    assert copy["provenance_header"].pop("origin_type") == "UNKNOWN"
    assert signed["provenance_header"].pop("origin_type") == header["origin_type"]
    if downgrade.drops_client_attestation:
        assert "client_attestation" not in copy["provenance_header"]
        signed["provenance_header"].pop("client_attestation")
    assert copy == signed
    assert ("client_attestation" in copy["provenance_header"]) == (header["origin_type"] == "SATELLITE") * (
        "client_attestation" in header
    )


@pytest.mark.req("R-209")
@pytest.mark.parametrize("mode", ["rewrite", "annotate"])
@pytest.mark.parametrize("header", CASES)
def test_the_annotation_says_what_was_claimed_and_why_not(header: Any, mode: Any) -> None:
    packet, downgrade = judged(header)
    annotations = json.loads(served(packet.canonical, downgrade, mode=mode).annotations)
    assert annotations == {
        "provenance": {
            "effective_origin_type": "UNKNOWN",
            "claimed_origin_type": header["origin_type"],
            "reason": downgrade.reason,
            "original_provenance_header": json.loads(packet.canonical)["provenance_header"],
        }
    }
    assert downgrade.reason in REASONS


@pytest.mark.req("R-209", "R-212", "R-342")
@pytest.mark.parametrize("mode", ["rewrite", "annotate"])
@pytest.mark.parametrize("header", CASES)
def test_a_client_gets_the_signed_packet_back(header: Any, mode: Any) -> None:
    packet, downgrade = judged(header)
    form = served(packet.canonical, downgrade, mode=mode)
    restored, origin = restore(form.packet, json.loads(form.annotations))
    assert restored == packet
    assert origin == "UNKNOWN"
    restored.verify()


@pytest.mark.req("R-210")
def test_annotating_leaves_the_packet_as_signed() -> None:
    packet, downgrade = judged(software_header())
    assert served(packet.canonical, downgrade, mode="annotate").packet == packet.canonical
    assert served(packet.canonical, downgrade).packet != packet.canonical


@pytest.mark.req("R-212")
@pytest.mark.parametrize("header", [software_header(), model_header(), hardware_header()])
def test_without_an_annotation_each_origin_is_tried(header: Any) -> None:
    packet, downgrade = judged(header)
    form = served(packet.canonical, downgrade)
    for none in (None, {}, {"provenance": None}, {"provenance": "x"}, {"other": 1}):
        assert restore(form.packet, none) == (packet, "UNKNOWN")


@pytest.mark.req("R-212")
@pytest.mark.parametrize("claimed", ORIGIN_TYPES)
@pytest.mark.parametrize("found", [*ORIGIN_TYPES, "NONSENSE", 5, None])
def test_the_lower_of_claim_and_annotation_counts(claimed: str, found: Any) -> None:
    packet = post({"origin_type": claimed, "genesis_media_hash": HELLO})
    _, origin = restore(packet.canonical, {"provenance": {"effective_origin_type": found}})
    known = found if found in ORIGIN_TYPES else "UNKNOWN"
    assert origin == (claimed if found is None else lower(claimed, known))


@pytest.mark.req("R-212", "R-036")
def test_nothing_is_credited_where_nothing_is_claimed() -> None:
    bare = Packet.parse(post({"origin_type": "UNKNOWN"}, {"type": "POST"}).canonical)
    assert restore(bare.canonical, None)[1] == "UNKNOWN"
    without_header = attested(software_header())
    value = {k: v for k, v in without_header.value.items() if k != "provenance_header"}
    with pytest.raises(InvalidPacket) as caught:
        restore(canonical.encode(value), None)
    assert caught.value.detail == "packet_id_mismatch"


@pytest.mark.req("R-212", "R-336")
def test_a_tampered_packet_stays_tampered() -> None:
    packet, downgrade = judged(software_header())
    form = served(packet.canonical, downgrade)
    annotations = json.loads(form.annotations)
    for change in (
        {"content": {**MEDIA, "text": "altered"}},
        {"timestamp": 1},
        {"provenance_header": {"origin_type": "UNKNOWN", "genesis_media_hash": "0x" + "11" * 32}},
    ):
        tampered = json.loads(form.packet) | change
        for given_annotations in (annotations, None):
            if "provenance_header" in change and given_annotations:
                continue  # the annotation restores the signed header, whatever was served
            with pytest.raises(InvalidPacket) as caught:
                restore(json.dumps(tampered).encode(), given_annotations)
            assert caught.value.detail == "packet_id_mismatch"


def test_a_served_claim_is_never_raised_by_rebuilding() -> None:
    """Serving SOFTWARE as HARDWARE, or annotating more than was signed, gains nothing."""
    packet = post(software_header())
    raised = json.loads(packet.canonical)
    raised["provenance_header"]["origin_type"] = "HARDWARE_SECURE_ENCLAVE"
    finding = {"provenance": {"effective_origin_type": "HARDWARE_SECURE_ENCLAVE"}}
    assert restore(json.dumps(raised).encode(), finding) == (packet, "SOFTWARE")


@pytest.mark.req("R-208")
@pytest.mark.parametrize("header", CASES)
def test_the_stored_finding_is_read_back(header: Any) -> None:
    _, downgrade = judged(header)
    assert Downgrade.decode(downgrade.encode()) == downgrade
    for garbage in (b"", b"{}", b"null", b"\xff"):
        with pytest.raises(msgspec.MsgspecError):
            Downgrade.decode(garbage)


def test_a_packet_as_deep_as_a_relay_may_admit_is_served() -> None:
    deep: Any = 1
    for _ in range(500):
        deep = [deep]
    value = post({"origin_type": "SOFTWARE"}).value | {"content": {"type": "POST", "deep": deep}}
    form = served(
        canonical.encode(value, max_depth=512), Downgrade("SOFTWARE", "UNKNOWN", "client_attestation_missing")
    )
    assert b"UNKNOWN" in form.packet


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
findings = st.dictionaries(
    st.sampled_from(["effective_origin_type", "original_provenance_header", "reason", "x"]), json_values
)


@given(
    st.sampled_from([software_header(), hardware_header(), {"origin_type": "SATELLITE"}]),
    st.dictionaries(st.sampled_from(["provenance", "x"]), findings | json_values),
    st.booleans(),
)
def test_a_lying_annotation_yields_the_signed_packet_or_a_refusal(
    header: dict[str, Any], annotations: dict[str, Any], rewritten: bool
) -> None:
    packet, downgrade = judged(header)
    raw = served(packet.canonical, downgrade).packet if rewritten else packet.canonical
    try:
        restored, origin = restore(raw, annotations)
    except InvalidPacket as error:
        assert rewritten
        assert error.detail == "packet_id_mismatch"
        return
    assert restored == packet
    assert origin is not None
    assert lower(origin, header["origin_type"]) == origin


awkward_names = st.sampled_from(
    ["provenance_header", "origin_type", "a", "é", '"', "\\", "\n", "\ue000", "😀", "z"]
)
awkward = st.recursive(
    st.none() | st.floats(-1e-5, 1e5) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(awkward_names, inner, max_size=3),
    max_leaves=6,
)


@pytest.mark.req("R-208", "R-209")
@given(
    st.dictionaries(awkward_names, awkward),
    st.dictionaries(awkward_names | st.just("client_attestation"), awkward),
    st.booleans(),
)
def test_bytes_are_spliced_as_the_values_would_be_changed(
    packet: dict[str, Any], header: dict[str, Any], drops: bool
) -> None:
    header["origin_type"] = 'SATELL"ITE'
    packet["provenance_header"] = header
    signed = canonical.encode(packet)
    found = Downgrade(header["origin_type"], "UNKNOWN", "because", drops)
    copy = {**header, "origin_type": "UNKNOWN"}
    if drops:
        copy.pop("client_attestation", None)
    expected = canonical.encode({**packet, "provenance_header": copy})
    finding = {
        "effective_origin_type": "UNKNOWN",
        "claimed_origin_type": header["origin_type"],
        "reason": "because",
        "original_provenance_header": header,
    }
    for downgrade in (found, Downgrade.decode(found.placed(signed).encode())):
        assert served(signed, downgrade) == (expected, canonical.encode({"provenance": finding}))
        assert served(signed, downgrade, mode="annotate").packet == signed


def test_a_placed_finding_is_served_without_reading_the_packet(monkeypatch: pytest.MonkeyPatch) -> None:
    header = {"origin_type": "SATELLITE", "client_attestation": BAD}
    packet, downgrade = judged(header)
    placed, expected = downgrade.placed(packet.canonical), served(packet.canonical, downgrade)

    def reads(*_: Any, **__: Any) -> None:
        raise AssertionError("serving has to cost a copy and no more")

    monkeypatch.setattr(canonical, "parse", reads)
    monkeypatch.setattr(canonical, "encode", reads)
    monkeypatch.setattr("strata.protocol.provenance.serving._members", reads)
    assert served(packet.canonical, placed) == expected
    assert Downgrade.decode(placed.encode()) == placed


def test_findings_of_older_versions_are_read() -> None:
    stored = b'{"claimed_origin_type":"X","effective_origin_type":"UNKNOWN","reason":"unknown_origin_type",'
    stored += b'"drops_client_attestation":false}'
    assert Downgrade.decode(stored) == Downgrade("X", "UNKNOWN", "unknown_origin_type")
    assert Downgrade("X", "UNKNOWN", "unknown_origin_type").encode() == stored
