"""The checks by content type: each row of relay.md §14 broken once, and nothing beyond these rows."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strata.protocol import canonical, packets
from strata.protocol.errors import ErrorCode, InvalidPacket
from strata.protocol.ids import Identity
from strata.protocol.packets import Packet
from strata.protocol.typed import (
    attestation_signature_holds,
    check_content,
    has_checks,
    is_websocket_url,
    trust_strength,
)

NOW = 1_760_000_000
AUTHOR = Identity(bytes(range(32)))
OTHER = Identity(b"\x07" * 32)
KEYS = (AUTHOR.public_key,)
TARGET = "0x172ad7325b52ee3dfa53990dcb331fd0b290d05fee5597864ee313110aafd1a1"

Json = dict[str, Any]


def signed(attestation: Json, signer: Identity = AUTHOR) -> Json:
    body = {name: value for name, value in attestation.items() if name != "signature"}
    return body | {"signature": f"0x{signer.sign(canonical.encode(body)).hex()}"}


V6 = {
    "attestation_id": "0x01",
    "attestor_id": AUTHOR.did,
    "attestor_type": "LAB",
    "target_packet": TARGET,
    "domain": "CONTENT",
    "subject": "SPAM",
    "confidence": 0.95,
    "method": "manual",
    "issued_at": 1760000100,
    "metadata": {},
}
V6_SIGNATURE = (
    "0x0eebb08ad3aa2492680824c2ac800658dfb226b2ad6dcb41ef041885d5e7a8ec"
    "5536e017b5e30077466e9df1cf08bd2bbb38eaadcb7ce7848813447cbc39f00b"
)

SOUND: dict[str, Json] = {
    "TRUST_EDGE": {"from": AUTHOR.did, "to": OTHER.did, "strength": 0.5, "context": "x", "created_at": NOW},
    "TRUST_REVOCATION": {"from": AUTHOR.did, "to": OTHER.did, "created_at": NOW},
    "CORRECTION": {"target_packet": TARGET, "action": "replace", "text": "better"},
    "ATTESTATION": {"target_packet": TARGET, "attestation": V6 | {"signature": V6_SIGNATURE}},
    "CONSENSUS_METRIC": {
        "target_packet": TARGET,
        "metrics": {"human_votes": 3},
        "source_id": AUTHOR.did,
        "observed_at": NOW,
    },
    "CONFIG": {"scope": "SERVICE_CONFIG", "provider_id": AUTHOR.did},
    "RELAY_DESCRIPTOR": {
        "relay_id": AUTHOR.did,
        "descriptor_version": 1,
        "ws_endpoint": "wss://relay.example.net/strata",
    },
    "CLIENT_MANIFEST": {
        "client_id": AUTHOR.did,
        "name": "camera",
        "public_keys": [{"key_id": "k", "public_key": "0x" + "11" * 32, "valid_from": NOW, "valid_until": 0}],
    },
}
DROP = object()


def packet(kind: str, content: Json, author: Identity = AUTHOR) -> Packet:
    members = {name: value for name, value in content.items() if value is not DROP}
    return packets.build(author, {"type": kind, **members}, timestamp=NOW)


def refusal(kind: str, keys: Any = KEYS, base: Json | None = None, **changes: Any) -> tuple[Any, Any] | None:
    """The code and detail for a type's valid content with these changes; None if it passes."""
    try:
        check_content(packet(kind, (SOUND[kind] if base is None else base) | changes), keys)
    except InvalidPacket as error:
        return error.code, error.detail
    return None


def schema(detail: str) -> tuple[ErrorCode, str]:
    return ErrorCode.INVALID_SCHEMA, detail


@pytest.mark.req("R-239", "R-246", "R-250", "R-253", "R-260", "R-262", "R-384", "R-386")
@pytest.mark.parametrize("kind", SOUND)
def test_sound_packets_pass_with_whatever_else_they_carry(kind: str) -> None:
    assert refusal(kind) is None
    assert refusal(kind, x_new={"more": [1]}) is None
    assert refusal(kind, keys=()) is None
    assert has_checks(packet(kind, SOUND[kind]))


@pytest.mark.req("R-238", "R-235", "R-260", "R-262", "R-263", "R-384")
@pytest.mark.parametrize(
    ("kind", "member"),
    [
        ("TRUST_EDGE", "from"),
        ("TRUST_REVOCATION", "from"),
        ("CONSENSUS_METRIC", "source_id"),
        ("CONFIG", "provider_id"),
        ("RELAY_DESCRIPTOR", "relay_id"),
        ("CLIENT_MANIFEST", "client_id"),
    ],
)
@pytest.mark.parametrize("value", [OTHER.did, DROP, None, 5, [AUTHOR.did]])
def test_nobody_speaks_for_another(kind: str, member: str, value: Any) -> None:
    code, _ = refusal(kind, **{member: value}) or (None, None)
    assert code == ErrorCode.INVALID_SCHEMA


# --- Trust ----------------------------------------------------------------------------------------------


@pytest.mark.req("R-239")
@pytest.mark.parametrize("strength", [1.5, -0.1, 2, "0.5", None, DROP, True, [0.5], 1e21])
def test_a_strength_is_a_number_from_0_to_1(strength: Any) -> None:
    assert refusal("TRUST_EDGE", strength=strength) == schema("strength")


@pytest.mark.req("R-239")
@pytest.mark.parametrize("strength", [0, 1, 0.0, 1.0, 1e-7])
def test_its_bounds_belong_to_it(strength: Any) -> None:
    assert refusal("TRUST_EDGE", strength=strength) is None


@pytest.mark.req("R-239")
@pytest.mark.parametrize("to", ["nobody", "", None, 5, DROP, "did:strata:"])
def test_an_edge_leads_to_a_did(to: Any) -> None:
    assert refusal("TRUST_EDGE", to=to) == schema("to")


@pytest.mark.req("R-240")
def test_an_edge_signature_covers_the_packet_without_itself() -> None:
    content = {"type": "TRUST_EDGE", **SOUND["TRUST_EDGE"]}
    body = {"version": 1, "timestamp": NOW, "author_id": AUTHOR.did, "content": content}
    right = f"0x{AUTHOR.sign(canonical.encode(body)).hex()}"
    wrong = f"0x{OTHER.sign(canonical.encode(body)).hex()}"
    assert refusal("TRUST_EDGE", edge_signature=right) is None
    assert refusal("TRUST_EDGE", edge_signature=None) is None
    assert refusal("TRUST_EDGE", edge_signature=right, strength=0.4) == schema("edge_signature")
    no_signatures: tuple[object, ...] = (wrong, "0x", "", 5, {})
    for broken in no_signatures:
        assert refusal("TRUST_EDGE", edge_signature=broken) == schema("edge_signature")
    # Any live key of the author is enough; without one, only the form can be checked.
    assert refusal("TRUST_EDGE", keys=(OTHER.public_key, *KEYS), edge_signature=right) is None
    assert refusal("TRUST_EDGE", keys=(), edge_signature=wrong) is None


@pytest.mark.req("R-242")
def test_edges_alone_draw_on_a_budget() -> None:
    assert trust_strength(packet("TRUST_EDGE", SOUND["TRUST_EDGE"])) == 0.5
    assert trust_strength(packet("TRUST_EDGE", {"strength": 1})) == 1
    assert trust_strength(packet("TRUST_EDGE", {"strength": "much"})) is None
    for kind in ("TRUST_REVOCATION", "POST", "CONFIG"):
        assert trust_strength(packet(kind, {"strength": 0.9})) is None


# --- Corrections and metrics ----------------------------------------------------------------------------

NOT_IDS = [None, DROP, 5, "", "0x12", TARGET[2:], TARGET.upper(), TARGET + "00", [TARGET]]


@pytest.mark.req("R-246", "R-250", "R-260", "R-020")
@pytest.mark.parametrize("kind", ["CORRECTION", "ATTESTATION", "CONSENSUS_METRIC"])
@pytest.mark.parametrize("target", NOT_IDS)
def test_a_target_is_a_packet_id(kind: str, target: Any) -> None:
    assert refusal(kind, target_packet=target) == schema("target_packet")


@pytest.mark.req("R-253", "R-041")
@pytest.mark.parametrize("kind", ["CORRECTION", "CONSENSUS_METRIC"])
def test_the_target_need_not_be_known(kind: str) -> None:
    assert refusal(kind, target_packet="0x" + "0f" * 32) is None


@pytest.mark.req("R-246")
@pytest.mark.parametrize("action", [None, DROP, "delete", "REPLACE", "", 5, ["replace"], {}])
def test_a_correction_replaces_or_retracts(action: Any) -> None:
    assert refusal("CORRECTION", action=action) == schema("action")
    assert refusal("CORRECTION", action="retract") is None


@pytest.mark.req("R-247")
def test_a_correction_by_somebody_else_is_an_ordinary_packet() -> None:
    check_content(packet("CORRECTION", SOUND["CORRECTION"], OTHER), (OTHER.public_key,))


@pytest.mark.req("R-260")
@pytest.mark.parametrize("metrics", [None, DROP, [], "x", 5])
def test_metrics_are_an_object(metrics: Any) -> None:
    assert refusal("CONSENSUS_METRIC", metrics=metrics) == schema("metrics")


# --- Attestations ---------------------------------------------------------------------------------------


def attested(**changes: Any) -> tuple[Any, Any] | None:
    """The refusal of a correctly signed attestation with these changes; None if it passes."""
    members = {name: value for name, value in (V6 | changes).items() if value is not DROP}
    return refusal("ATTESTATION", attestation=signed(members))


@pytest.mark.req("R-254", "R-250")
def test_vector_v6() -> None:
    assert signed(V6)["signature"] == V6_SIGNATURE
    assert attestation_signature_holds(V6 | {"signature": V6_SIGNATURE}, KEYS)
    assert not attestation_signature_holds(V6 | {"signature": V6_SIGNATURE}, (OTHER.public_key,))
    assert not attestation_signature_holds(V6, KEYS)


@pytest.mark.req("R-240", "R-254")
def test_what_is_signed_inside_a_packet_is_a_part_of_its_text(monkeypatch: pytest.MonkeyPatch) -> None:
    edge = {"type": "TRUST_EDGE", **SOUND["TRUST_EDGE"], "junk": [1e300] * 9}
    body = {"version": 1, "timestamp": NOW, "author_id": AUTHOR.did, "content": edge}
    edge |= {"edge_signature": f"0x{AUTHOR.sign(canonical.encode(body)).hex()}"}
    attestation = signed(V6 | {"metadata": {"junk": [1e300] * 9, "signature": "another"}})
    contents = (edge, {"type": "ATTESTATION", **SOUND["ATTESTATION"], "attestation": attestation})
    sound = [packets.build(AUTHOR, content, timestamp=NOW) for content in contents]
    # Writing it again would take a relay 0.1 s for a large packet of numbers.
    monkeypatch.setattr(canonical, "encode", None)
    for packet in sound:
        check_content(packet, KEYS)
        with pytest.raises(InvalidPacket, match="signature"):
            check_content(packet, (OTHER.public_key,))


@pytest.mark.req("R-254")
def test_the_inner_signature_is_the_attestors() -> None:
    expected = (ErrorCode.INVALID_SIGNATURE, "attestation_signature")
    assert refusal("ATTESTATION", attestation=signed(V6, OTHER)) == expected
    assert refusal("ATTESTATION", attestation=V6 | {"signature": V6_SIGNATURE, "confidence": 0.9}) == expected
    assert refusal("ATTESTATION", attestation=signed(V6 | {"x_new": 1})) is None
    # Where the key does not resolve, clients verify it.
    assert refusal("ATTESTATION", keys=(), attestation=signed(V6, OTHER)) is None


@pytest.mark.req("R-250")
@pytest.mark.parametrize(
    ("member", "values"),
    [
        ("attestation_id", [DROP, None, 5, ["0x01"]]),
        ("subject", [DROP, None, 5]),
        ("confidence", [DROP, None, -0.1, 1.1, "1", True]),
        ("issued_at", [DROP, None, "now", 1.5]),
    ],
)
def test_an_attestation_has_its_members(member: str, values: list[Any]) -> None:
    for value in values:
        assert attested(**{member: value}) == schema(member)


@pytest.mark.req("R-250")
def test_an_attestation_is_a_signed_object() -> None:
    for broken in (None, DROP, "x", [], [V6]):
        assert refusal("ATTESTATION", attestation=broken) == schema("attestation")
    for signature in (None, "0x", 5, V6_SIGNATURE[:-2]):
        assert refusal("ATTESTATION", attestation=V6 | {"signature": signature}) == schema("signature")
    assert attested(confidence=0) is None
    assert attested(confidence=1) is None
    assert attested(issued_at=1760000100.0) is None


@pytest.mark.req("R-251")
@pytest.mark.parametrize("attestor", [OTHER.did, DROP, None, 5])
def test_the_attestor_is_the_author(attestor: Any) -> None:
    assert attested(attestor_id=attestor) == schema("attestor_id")


@pytest.mark.req("R-252")
@pytest.mark.parametrize("target", [*NOT_IDS, "0x" + "0f" * 32])
def test_both_targets_are_there_and_agree(target: Any) -> None:
    assert attested(target_packet=target) == schema("target_packet")


@pytest.mark.req("R-253", "R-256", "R-007")
def test_what_an_attestation_says_is_not_judged() -> None:
    assert attested(domain="INFRASTRUCTURE") is None
    assert (
        attested(domain="UNHEARD", attestor_type="X", attestation_tier="Y", method=5, metadata=None) is None
    )
    elsewhere = "0x" + "0f" * 32
    assert (
        refusal("ATTESTATION", target_packet=elsewhere, attestation=signed(V6 | {"target_packet": elsewhere}))
        is None
    )


@pytest.mark.req("R-257")
def test_nothing_is_read_from_other_places() -> None:
    assert refusal("POST", base={"text": "x", "attestations": [{"attestor_id": 5}], "attestation": 3}) is None


# --- CONFIG ---------------------------------------------------------------------------------------------

SNAPSHOT = {"scope": "BOOTSTRAP_SNAPSHOT", "source_id": AUTHOR.did, "issued_at": NOW, "expires_at": NOW + 1}


@pytest.mark.req("R-261")
def test_a_replication_policy_is_the_relays_own() -> None:
    base = {"config_type": "REPLICATION_POLICY_V1", "relay_id": AUTHOR.did}
    assert refusal("CONFIG", base=base) is None
    assert refusal("CONFIG", base=base | {"relay_id": OTHER.did}) == schema("relay_id")
    assert refusal("CONFIG", base={"config_type": "REPLICATION_POLICY_V1"}) == schema("relay_id")


@pytest.mark.req("R-262")
def test_a_snapshot_is_its_sources_and_ends_after_it_began() -> None:
    assert refusal("CONFIG", base=SNAPSHOT) is None
    assert refusal("CONFIG", base=SNAPSHOT | {"source_id": OTHER.did}) == schema("source_id")
    assert refusal("CONFIG", base=SNAPSHOT | {"expires_at": NOW}) == schema("expires_at")
    for member in ("issued_at", "expires_at"):
        for value in (None, "soon", 1.5, DROP):
            assert refusal("CONFIG", base=SNAPSHOT | {member: value}) == schema(member)


@pytest.mark.req("R-262", "R-007")
@pytest.mark.parametrize("scope", ["OTHER", None, 5, ["SERVICE_CONFIG"], DROP])
def test_other_scopes_are_opaque(scope: Any) -> None:
    assert refusal("CONFIG", base={"scope": scope, "source_id": OTHER.did, "expires_at": "x"}) is None


# --- RELAY_DESCRIPTOR -----------------------------------------------------------------------------------


@pytest.mark.req("R-385", "R-263")
@pytest.mark.parametrize("version", [2, 0, "1", None, DROP, True, 1.5])
def test_the_descriptor_version_is_known(version: Any) -> None:
    assert refusal("RELAY_DESCRIPTOR", descriptor_version=version) == schema("descriptor_version")


@pytest.mark.req("R-385", "R-013")
def test_one_and_one_point_zero_are_one_number() -> None:
    assert refusal("RELAY_DESCRIPTOR", descriptor_version=1.0) is None


@pytest.mark.req("R-386", "R-263")
@pytest.mark.parametrize(
    "url",
    [
        "https://relay.example.net",
        "relay.example.net",
        "wss://",
        "wss:///path",
        "wss://host:port/",
        "wss://host:70000/",
        "ws://host:0/",
        "wss://ho st/",
        "wss://host/\n",
        "wss://host/#fragment",
        "wss://[::1/",
        "wss://hôst/",
        "",
        None,
        5,
        DROP,
    ],
)
def test_the_endpoint_is_a_websocket_url(url: Any) -> None:
    assert refusal("RELAY_DESCRIPTOR", ws_endpoint=url) == schema("ws_endpoint")


@pytest.mark.req("R-386")
@pytest.mark.parametrize(
    "url", ["ws://127.0.0.1:7447/strata", "wss://relay.example.net", "WSS://[::1]:443/x?y=z"]
)
def test_endpoints_of_every_sound_form(url: str) -> None:
    assert is_websocket_url(url)


@pytest.mark.req("R-387")
def test_the_other_members_of_a_descriptor_are_not_judged() -> None:
    assert refusal("RELAY_DESCRIPTOR", policy="odd", operator=5, services=None, http_base_url=[]) is None


# --- Nothing else ---------------------------------------------------------------------------------------


@pytest.mark.req("R-038", "R-039", "R-258", "R-259", "R-264", "R-265")
@pytest.mark.parametrize(
    "kind",
    [
        "POST",
        "MESSAGE",
        "ZZZ_TEST",
        "PROFILE",
        "SOCIAL_EDGE",
        "REACTION",
        "GROUP",
        "STAKE",
        "STAKE_SLASH",
        "ATTESTATION_RETRACTION",
        "ATTESTATION_DISPUTE",
        "trust_edge",
        "strata.identity.verification",
    ],
)
def test_types_without_rules_are_opaque(kind: str) -> None:
    odd = {"from": 5, "target_packet": "nowhere", "action": None, "source_id": [], "attestation_id": {}}
    assert refusal(kind, base=odd) is None
    assert not has_checks(packet(kind, odd))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53) + 1, 2**53 - 1) | st.floats(-1, 2) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@given(
    st.sampled_from(list(SOUND)), st.data(), st.dictionaries(st.text(max_size=12), json_values, max_size=2)
)
def test_hostile_content_is_refused_in_the_proper_way_or_passes(kind: str, data: Any, extra: Json) -> None:
    members = st.sampled_from([*SOUND[kind], "edge_signature", "scope", "config_type", "attestation"])
    changes = data.draw(st.dictionaries(members, json_values, max_size=3))
    found = refusal(kind, **(extra | changes))
    assert found is None or found[0] in (ErrorCode.INVALID_SCHEMA, ErrorCode.INVALID_SIGNATURE)


@given(st.dictionaries(st.sampled_from(list(V6)), json_values, max_size=3))
def test_hostile_attestations_too(changes: Json) -> None:
    found = refusal("ATTESTATION", attestation=V6 | {"signature": V6_SIGNATURE} | changes)
    assert found is None or found[0] in (ErrorCode.INVALID_SCHEMA, ErrorCode.INVALID_SIGNATURE)
