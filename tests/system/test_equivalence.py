"""Attestations and metrics that state the same thing twice, over the wire."""

import pytest
from strata.protocol import canonical

from tests.support.made_packets import make, new_identity

TARGET = "0x" + "a" * 64


def attestation(author, number, attestation_id="0x01"):
    inner = {
        "attestation_id": attestation_id,
        "attestor_id": author.did,
        "target_packet": TARGET,
        "subject": "SPAM",
        "confidence": 0.5,
        "issued_at": number,
    }
    inner["signature"] = f"0x{author.sign(canonical.encode(inner)).hex()}"
    return make(author, type="ATTESTATION", target_packet=TARGET, attestation=inner)


def metric(author, number, observed_at):
    return make(
        author,
        type="CONSENSUS_METRIC",
        target_packet=TARGET,
        source_id=author.did,
        observed_at=observed_at,
        metrics={"human_votes": number},
    )


@pytest.mark.req("R-113", "R-115")
async def test_an_attestation_is_stored_once_for_its_author_id_and_target(client):
    author, other = new_identity(), new_identity()
    first, again, foreign = attestation(author, 1), attestation(author, 2), attestation(other, 3)
    await client.subscribe("live", {"authors": [author.did, other.did], "limit": 0})
    assert "duplicate" not in await client.publish(first)
    answer = await client.publish(again)
    assert (answer["type"], answer["status"], answer["duplicate"]) == ("OK", "ACCEPTED", True)
    assert answer["packet_id"] == again.packet_id
    assert answer["duplicate_of"] == first.packet_id
    assert "duplicate" not in await client.publish(foreign)
    assert "duplicate" not in await client.publish(attestation(author, 4, attestation_id="0x02"))
    live = await client.events("live", 3)
    assert again.packet_id not in [event["packet"]["packet_id"] for event in live]
    stored, _ = await client.subscribe("stored", {"authors": [author.did]})
    assert len(stored) == 2


@pytest.mark.req("R-114")
async def test_a_metric_is_stored_once_for_its_moment(client):
    author = new_identity()
    first = metric(author, 1, observed_at=100)
    answers = await client.publish_all([first, metric(author, 2, 100), metric(author, 3, 101)])
    assert [answer.get("duplicate_of") for answer in answers] == [None, first.packet_id, None]
