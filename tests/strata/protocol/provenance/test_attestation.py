"""Making client attestations: vector V5, the builder, the nonce for a platform."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
from strata.protocol import canonical, packets
from strata.protocol.packets import Packet
from strata.protocol.provenance import attest
from strata.protocol.provenance.attestation import platform_nonce, preimage

from tests.support.made_origins import AUTHOR, CLIENT, HELLO, MEDIA, NOW, header_of, model_header, verdict

V5_CONTENT = {
    "type": "POST",
    "text": "photo",
    "media": [{"media_hash": HELLO, "media_type": "image/jpeg", "size_bytes": 5}],
}


def build(content: Any = V5_CONTENT, **options: Any) -> Packet:
    defaults: dict[str, Any] = {
        "timestamp": NOW,
        "origin_type": "SOFTWARE",
        "genesis_media_hash": HELLO,
    }
    return attest(AUTHOR, CLIENT, "1.0.0", content, **defaults | options)


@pytest.mark.req("R-231", "R-230", "R-205")
def test_vector_v5() -> None:
    packet = build()
    header = header_of(packet)
    digest = hashlib.sha256(preimage(packet.value) + b"SOFTWARE" + HELLO.encode()).hexdigest()
    assert digest == "bb645b204c4d424b21c09d9d070a0787ba50483d623f0395ee45b4a9c27f1ee1"
    assert header == {
        "origin_type": "SOFTWARE",
        "genesis_media_hash": HELLO,
        "edit_history": [],
        "client_attestation": {
            "client_id": "did:strata:z6MkwVDfCg9LbbY6xjH3EZk8YSFQZujV5Y4y1ZWeER9tDiN3",
            "client_version": "1.0.0",
            "client_signature": (
                "0xe3eb73166a1957ad3437d068baa993a1d4f82700010eee9d9eb9501224553eee"
                "883625574f49edf555458b2b10ca86445aedbee8bb93c4fd0c5f46bd4745770d"
            ),
        },
    }
    assert packet.packet_id == "0x0f9e5fda36382ada2e70cfdf2c95e59a9003cfccd37af7a577e062a75159a2a9"
    assert packet.signature == (
        "0xadf57fc0647ff3bcbd899a9ef143dcb2ec2f22c1c3a2e910cf3c090f82ad5391"
        "039f3cfc1bc032b3e5306a4e0da60dd627e1010d5bccc8120e17b9fd6d193906"
    )
    assert verdict(packet) is None


@pytest.mark.req("R-231")
def test_what_a_client_attests_is_a_part_of_the_packet_s_text(monkeypatch: pytest.MonkeyPatch) -> None:
    packet = build({**V5_CONTENT, "junk": [1e300] * 9})
    # Writing it again would take a relay 0.1 s for a large packet of numbers.
    monkeypatch.setattr(canonical, "encode", None)
    assert verdict(packet) is None


@pytest.mark.req("R-231")
def test_a_null_genesis_is_the_empty_text() -> None:
    packet = build({"type": "POST", "text": "words"}, genesis_media_hash=None)
    signature = header_of(packet)["client_attestation"]["client_signature"]
    digest = hashlib.sha256(preimage(packet.value) + b"SOFTWARE").digest()
    assert signature == f"0x{CLIENT.sign(digest).hex()}"
    assert verdict(packet) is None


@pytest.mark.req("R-230")
def test_every_member_that_the_builder_takes_is_covered() -> None:
    packet = build(expires_at=NOW + 60, nonce="once", extra={"x_more": [1]}, header=model_header())
    assert packet.expires_at == NOW + 60
    assert packet.nonce == "once"
    assert packet.value["x_more"] == [1]
    assert header_of(packet)["issuer_chain"]
    # SOFTWARE, because the origin is taken from the argument, not from the header.
    assert verdict(packet) is None


def test_a_signed_claim_in_the_header_stays_as_it_was_signed() -> None:
    packet = build(header=model_header(), origin_type="AI_MODEL", genesis_media_hash=None)
    assert header_of(packet)["genesis_media_hash"] == HELLO
    assert verdict(packet) is None


@pytest.mark.parametrize("version", ["1", "1.0", "v1.0.0", "1.0.0 ", "", "01.0.0"])
def test_the_version_is_semantic(version: str) -> None:
    with pytest.raises(ValueError, match="version"):
        attest(AUTHOR, CLIENT, version, MEDIA, timestamp=NOW, origin_type="SOFTWARE")


def test_unknown_origin_is_not_attested() -> None:
    with pytest.raises(ValueError, match="unknown"):
        build(origin_type="UNKNOWN")


@pytest.mark.req("R-233")
def test_the_platform_vouches_for_packet_and_first_medium() -> None:
    asked: list[bytes] = []

    def platform(nonce: bytes) -> dict[str, str]:
        asked.append(nonce)
        return {"format": "apple-app-attest"}

    packet = build(platform_attestation=platform)
    attestation = header_of(packet)["client_attestation"]
    assert attestation["platform_attestation"] == {"format": "apple-app-attest"}
    expected = hashlib.sha256(preimage(packet.value) + HELLO.encode()).digest()
    assert asked == [expected]
    assert platform_nonce(packet.value) == expected
    assert verdict(packet) is None  # and its failure has no consequence at the relay


@pytest.mark.req("R-233")
@pytest.mark.parametrize("broken", [5, "x", {}, {"format": "play-integrity", "payload": "AAAA"}, None])
def test_a_platform_attestation_that_fails_never_downgrades(broken: Any) -> None:
    packet = build(platform_attestation=lambda _: {})
    header = {**header_of(packet)}
    header["client_attestation"] = {**header["client_attestation"], "platform_attestation": broken}
    assert verdict(packets.build(AUTHOR, V5_CONTENT, timestamp=NOW, provenance_header=header)) is None
