"""Attestations and metrics that state the same thing twice, over the wire."""

import asyncio
import json
import time

import pytest
from strata.protocol import canonical
from strata.protocol.documents import VerificationMethod, build_document, method_id
from strata.protocol.keys import document_content
from strata.protocol.packets import Packet, build

from tests.support.forks import RELAYD, run_fork
from tests.support.made_packets import make, new_identity
from tests.support.relay_process import RelayProcess, environment
from tests.support.waiting import until

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


@pytest.mark.req("R-100", "R-102", "R-113")
@pytest.mark.parametrize("kind", ["document", "attestation"])
async def test_what_is_published_again_after_it_expired_is_served(relay: RelayProcess, client, kind):
    author = new_identity()
    method = VerificationMethod(method_id(author.did), author.public_key, 0)
    document = build_document(author.did, [method], created_at=1)
    content = document_content(document) if kind == "document" else attestation(author, 1).content

    def stating(expires_at: int | None) -> Packet:
        return build(author, content, timestamp=int(time.time()), expires_at=expires_at)

    first = stating(int(time.time()) + 1)
    assert "duplicate" not in await client.publish(first)
    await until(lambda: relay.get(f"/packets/{first.packet_id}")[0] == 410, "it has expired", timeout=60)
    renewed, again = stating(None), stating(int(time.time()) + 900)
    assert "duplicate" not in await client.publish(renewed)
    assert (await client.publish(again))["duplicate_of"] == renewed.packet_id
    assert relay.get(f"/packets/{renewed.packet_id}")[0] == 200
    if kind == "document":
        assert relay.get(f"/did-docs/{document.hash}")[2] == document.canonical
        assert json.loads(relay.get(f"/did/{author.did}")[2])["did_doc_hash"] == document.hash


@pytest.mark.req("R-113", "R-323")
async def test_what_states_the_same_as_a_removed_packet_is_refused_and_not_told_ok(
    relay: RelayProcess, client
):
    author = new_identity()
    first = attestation(author, 1)
    await client.publish(first)
    env = environment({"data_dir": relay.settings["data_dir"]})
    for command in ("remove", "restore", "erase"):
        done = await asyncio.to_thread(
            run_fork, RELAYD, [command, first.packet_id, "--reason", "asked for"], env=env
        )
        assert done[0] == 0, done
        status = 200 if command == "restore" else 410
        await until(lambda: relay.get(f"/packets/{first.packet_id}")[0] == status, command)  # noqa: B023
        answer = await client.publish(attestation(author, 2))
        if command == "restore":
            assert answer["duplicate_of"] == first.packet_id
        else:
            assert (answer["code"], answer["detail"]) == ("policy_rejected", "duplicate_of")


@pytest.mark.req("R-114")
async def test_a_metric_is_stored_once_for_its_moment(client):
    author = new_identity()
    first = metric(author, 1, observed_at=100)
    answers = await client.publish_all([first, metric(author, 2, 100), metric(author, 3, 101)])
    assert [answer.get("duplicate_of") for answer in answers] == [None, first.packet_id, None]
