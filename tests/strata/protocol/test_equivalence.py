"""Which packets are repeats of another: only the keys; the log that uses them is tested with the store."""

import sys
from types import FrameType

import pytest
from blake3 import blake3
from strata.protocol import canonical, packets
from strata.protocol.equivalence import document_key, equivalence_key
from strata.protocol.ids import Identity

A, B = Identity.from_seed(bytes(32)), Identity.from_seed(bytes([1]) * 32)
TARGET, OTHER = "0x" + "a" * 64, "0x" + "b" * 64


def attestation(author=A, attestation_id="0x01", target=TARGET, **more):
    inner = {"attestation_id": attestation_id, "target_packet": target, **more}
    content = {"type": "ATTESTATION", "target_packet": target, "attestation": inner}
    return packets.build(author, content, timestamp=1000)


def metric(author=A, target=TARGET, observed_at=5, **metrics):
    content = {"type": "CONSENSUS_METRIC", "target_packet": target, "observed_at": observed_at}
    return packets.build(author, {**content, "metrics": metrics}, timestamp=1000)


@pytest.mark.req("R-113")
def test_an_attestation_repeats_one_with_the_same_author_id_and_target():
    key = equivalence_key(attestation())
    assert key == equivalence_key(attestation(confidence=0.5))
    assert key != equivalence_key(attestation(attestation_id="0x02"))
    assert key != equivalence_key(attestation(target=OTHER))


@pytest.mark.req("R-115")
def test_another_author_is_never_blocked():
    assert equivalence_key(attestation(A)) != equivalence_key(attestation(B))


@pytest.mark.req("R-114")
def test_a_metric_repeats_one_of_the_same_moment_only():
    key = equivalence_key(metric(human_votes=1))
    assert key == equivalence_key(metric(human_votes=2))
    assert key != equivalence_key(metric(observed_at=6))
    assert key != equivalence_key(metric(target=OTHER))
    assert key != equivalence_key(metric(B))
    assert key != equivalence_key(attestation())


@pytest.mark.parametrize(
    "content",
    [
        {"type": "POST", "target_packet": TARGET, "observed_at": 5},
        {"type": "ATTESTATION", "target_packet": TARGET},
        {"type": "ATTESTATION", "target_packet": TARGET, "attestation": []},
        {"type": "ATTESTATION", "attestation": {"attestation_id": "0x01"}},
        {"type": "CONSENSUS_METRIC", "target_packet": TARGET},
        {"type": "CONSENSUS_METRIC", "target_packet": TARGET, "observed_at": [5]},
        {"type": "ATTESTATION", "target_packet": TARGET, "attestation": {"attestation_id": {"a": 1}}},
    ],
)
def test_what_the_rule_does_not_speak_of_has_no_key(content):
    assert equivalence_key(packets.build(A, content, timestamp=1000)) is None


def test_a_document_is_known_by_its_canonical_form():
    document = {"b": [1e-6, "\u20ac", {"y": None, "x": -0.0}], "a": 2.0}
    packet = packets.build(A, {"type": "DID_DOCUMENT", "document": document}, timestamp=1000)
    assert equivalence_key(packet) == document_key(blake3(canonical.encode(document)).digest())


@pytest.mark.parametrize(
    "content",
    [
        {"type": "CONSENSUS_METRIC", "target_packet": TARGET, "observed_at": [2e-6] * 2000},
        {"type": "DID_DOCUMENT", "document": {"x": [2e-6] * 2000}},
    ],
)
def test_a_key_is_made_without_a_step_for_each_value(content):
    """The event loop computes keys, also of packets with tens of thousands of values."""
    packet = packets.build(A, content, timestamp=1000)
    calls = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        equivalence_key(packet)
    finally:
        sys.setprofile(None)
    assert calls < 50
