"""Typed packets against a real relay: what §14 requires of each, what stays queryable, what is left alone."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from tests.support.bare_client import BareClient
from tests.support.made_packets import ids_of, make, new_identity
from tests.support.relay_process import RelayProcess

OTHER = "0x" + "ab" * 32


@pytest.mark.req("R-246", "R-249")
async def test_a_retracted_packet_is_still_there(relay: RelayProcess, client: BareClient):
    who = new_identity()
    original = make(who, "wrong")
    await client.publish(original)
    retract = make(who, type="CORRECTION", action="retract", target_packet=original.packet_id)
    assert (await client.publish(retract))["type"] == "OK"
    status, _, body = relay.get(f"/packets/{original.packet_id}")
    assert status == 200 and original.canonical in body
    events, _ = await client.subscribe("s", {"packet_ids": [original.packet_id]})
    assert ids_of(events) == [original.packet_id]


@pytest.mark.req("R-247")
async def test_a_correction_by_another_is_an_ordinary_packet(client: BareClient):
    who, other = new_identity(), new_identity()
    original = make(who)
    await client.publish(original)
    foreign = make(other, type="CORRECTION", action="replace", target_packet=original.packet_id)
    assert (await client.publish(foreign))["status"] == "ACCEPTED"
    events, _ = await client.subscribe("s", {"authors": [other.did]})
    assert ids_of(events) == [foreign.packet_id]


@pytest.mark.req("R-238", "R-239", "R-246", "R-250", "R-251", "R-252", "R-260", "R-261", "R-262")
@pytest.mark.parametrize(
    "content",
    [
        {"type": "TRUST_EDGE", "from": "did:strata:other", "to": "did:strata:x", "strength": 0.5},
        {"type": "TRUST_EDGE", "to": "did:strata:x", "strength": 1.5},
        {"type": "CORRECTION", "action": "burn", "target_packet": OTHER},
        {"type": "CORRECTION", "action": "retract", "target_packet": "this one"},
        {"type": "ATTESTATION", "target_packet": OTHER, "attestation": {}},
        {"type": "CONSENSUS_METRIC", "source_id": "did:strata:other", "target_packet": OTHER, "metrics": {}},
        {"type": "CONFIG", "config_type": "REPLICATION_POLICY_V1", "relay_id": "did:strata:other"},
        {"type": "CONFIG", "scope": "SERVICE_CONFIG", "provider_id": "did:strata:other"},
    ],
    ids=lambda content: f"{content['type']}-{len(json.dumps(content))}",
)
async def test_a_typed_packet_of_wrong_shape_is_refused_and_not_stored(client: BareClient, content: dict):
    who = new_identity()
    content = {"from": who.did, "created_at": int(time.time()), **content}
    packet = make(who, **content)
    answer = await client.publish(packet)
    assert (answer["type"], answer["code"]) == ("ERROR", "invalid_schema")
    events, _ = await client.subscribe("s", {"authors": [who.did]})
    assert events == []


@pytest.mark.req("R-264", "R-265", "R-332")
@pytest.mark.parametrize("type", ["MESSAGE", "PROFILE", "FOLLOW", "strata.identity.verification", "/a/b"])
async def test_what_the_relay_has_no_rule_for_is_opaque(client: BareClient, type: str):
    who = new_identity()
    packet = make(who, type=type, encryption={"scheme": "no such scheme", "recipients": "garbage"}, from_=7)
    assert (await client.publish(packet))["status"] == "ACCEPTED"
    events, _ = await client.subscribe("s", {"authors": [who.did]})
    assert [event["packet"] for event in events] == [json.loads(packet.canonical)]


@pytest.mark.req("R-241", "R-242", "R-314", "R-315", "R-320")
async def test_the_twenty_first_strong_edge_of_a_day_waits(client: BareClient):
    who = new_identity()
    member: dict[str, Any] = {"from": who.did}
    edges = [
        make(
            who,
            type="TRUST_EDGE",
            to=new_identity().did,
            strength=0.9,
            context="friends",
            created_at=int(time.time()),
            **member,
        )
        for _ in range(21)
    ]
    answers = await client.publish_all(edges)
    assert [answer["type"] for answer in answers].count("OK") == 20
    (refused,) = [answer for answer in answers if answer["type"] == "ERROR"]
    assert refused["code"] == "rate_limited" and refused["detail"] == "trust_budget"
    assert 86_000 < refused["retry_after"] <= 86_400
    assert (refused["limit"], refused["remaining"], refused["window_seconds"]) == (20, 0, 86_400)
    assert (await client.publish(make(who)))["status"] == "ACCEPTED"
