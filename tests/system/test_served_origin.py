"""A packet of unproven origin as served: rewritten, annotated or as signed, depending on the reader."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import asyncpg
import msgspec
import pytest
from strata.protocol import packets
from strata.protocol.auth import answer_challenge
from strata.protocol.ids import Identity
from strata.protocol.keys import add_content, revoke_content
from strata.protocol.packets import Packet
from strata.protocol.provenance import attest, restore
from strata.protocol.wire import AuthChallenge, encode

from tests.support.bare_client import BareClient, Message, open_client
from tests.support.made_origins import header_of
from tests.support.made_packets import new_identity
from tests.support.relay_process import RelayProcess, running
from tests.support.waiting import until

CLIENT, PEER = new_identity(), new_identity()
HASH = "0x" + "d1" * 32
MEDIA = [{"media_hash": HASH}]


@pytest.fixture(scope="module", params=["rewrite", "annotate"])
def serving(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, shared_database: str
) -> Iterator[RelayProcess]:
    """Relays of both kinds on one log: what is stored does not depend on how it is served."""
    relay = RelayProcess(
        tmp_path_factory.mktemp(request.param),
        database_url=shared_database,
        provenance_downgrade=request.param,
        replication_peers=[PEER.did],
    )
    with running(relay):
        yield relay
        assert not relay.complaints()


def attested(author: Identity) -> Packet:
    return attest(
        author,
        CLIENT,
        "1.2.3",
        {"type": "POST", "text": "a photo", "media": MEDIA},
        timestamp=int(time.time()),
        origin_type="SOFTWARE",
        genesis_media_hash=HASH,
    )


def badly_attested(author: Identity) -> Packet:
    """The same packet with an invalid client signature."""
    packet = attested(author)
    header = header_of(packet)
    fake = header["client_attestation"] | {"client_signature": "0x" + "11" * 64}
    return packets.build(
        author,
        packet.content,
        timestamp=packet.timestamp,
        provenance_header=header | {"client_attestation": fake},
    )


def unattested(author: Identity, origin: str = "SOFTWARE") -> Packet:
    header = {"origin_type": origin, "genesis_media_hash": HASH, "edit_history": []}
    return packets.build(
        author,
        {"type": "POST", "media": MEDIA},
        timestamp=int(time.time()),
        provenance_header=header,
        allow_unattested=True,
    )


CASES: dict[str, tuple[Any, str, bool]] = {
    "bad signature": (badly_attested, "client_signature_invalid", True),
    "no attestation": (unattested, "client_attestation_missing", False),
    "no such origin": (lambda author: unattested(author, "SATELLITE"), "unknown_origin_type", False),
}


def check_served(message: Message, signed: Packet, *, rewritten: bool, reason: str, drops: bool) -> None:
    """Check one EVENT, or answer to a GET, for a downgraded packet."""
    header = header_of(signed)
    expected = signed.value
    if rewritten:
        served = header | {"origin_type": "UNKNOWN"}
        if drops:
            del served["client_attestation"]
        expected = expected | {"provenance_header": served}
    assert message["packet"] == expected
    check_annotation(message["relay_annotations"], signed, reason)
    packet, origin = restore(json.dumps(message["packet"]).encode(), message["relay_annotations"])
    packet.verify()
    assert (packet, origin) == (signed, "UNKNOWN")


def check_annotation(annotations: dict[str, Any], signed: Packet, reason: str) -> None:
    header = header_of(signed)
    assert annotations["provenance"] == {
        "effective_origin_type": "UNKNOWN",
        "claimed_origin_type": header["origin_type"],
        "reason": reason,
        "original_provenance_header": header,
    }


async def authenticate(client: BareClient, identity: Identity) -> None:
    challenge = msgspec.convert(client.challenges[0], AuthChallenge)
    await client.send(encode(answer_challenge(challenge, identity)).decode())
    answer = await client.expect(lambda message: message["type"] == "AUTH_OK")
    assert "replicate" in answer["capabilities"]


@pytest.mark.req("R-202", "R-204", "R-206", "R-207", "R-208", "R-209", "R-210", "R-211")
@pytest.mark.parametrize("case", CASES)
async def test_a_claim_without_proof_is_stored_as_signed_and_served_for_less(
    serving: RelayProcess, shared_database: str, case: str
):
    make, reason, drops = CASES[case]
    author = new_identity()
    signed = make(author)
    expected: dict[str, Any] = {
        "rewritten": serving.settings["provenance_downgrade"] == "rewrite",
        "reason": reason,
        "drops": drops,
    }
    filters = {"authors": [author.did]}
    async with open_client(serving.ws) as reader, open_client(serving.ws) as peer:
        await authenticate(peer, PEER)
        for client in (reader, peer):
            await client.subscribe("live", filters)
        ok = await reader.publish(signed)
        assert ok["type"] == "OK", ok  # never refused for this
        check_annotation(ok["relay_annotations"], signed, reason)
        again = await reader.publish(signed)
        assert again["duplicate"] and again["relay_annotations"] == ok["relay_annotations"]
        events = await reader.events("live", 1)
        events += (await reader.subscribe("history", filters))[0]
        events += (await reader.subscribe("stream", filters, gapless=True))[0]
        assert len(events) == 3
        for event in events:
            check_served(event, signed, **expected)
        check_served(json.loads(serving.get(f"/packets/{signed.packet_id}")[2]), signed, **expected)
        events = await peer.events("live", 1)
        events += (await peer.subscribe("history", filters))[0]
        assert len(events) == 2
        for event in events:
            assert event["packet"] == signed.value and "relay_annotations" not in event
    connection = await asyncpg.connect(shared_database)
    try:
        row = await connection.fetchrow(
            "SELECT body, annotation FROM packets WHERE packet_id = $1", signed.digest
        )
    finally:
        await connection.close()
    assert row is not None
    assert row["body"] == signed.canonical
    assert json.loads(row["annotation"])["effective_origin_type"] == "UNKNOWN"


@pytest.mark.req("R-203", "R-205", "R-208")
async def test_what_is_proven_and_what_claims_nothing_are_served_as_signed(serving: RelayProcess):
    author = new_identity()
    proven = attested(author)
    humble = packets.build(author, {"type": "POST", "media": MEDIA}, timestamp=int(time.time()))
    async with open_client(serving.ws) as client:
        for packet in (proven, humble):
            ok = await client.publish(packet)
            assert ok["type"] == "OK" and "relay_annotations" not in ok
        events, _ = await client.subscribe("s", {"authors": [author.did], "order": "asc"})
        assert [event["packet"] for event in events] == [proven.value, humble.value]
        assert not any("relay_annotations" in event for event in events)


@pytest.mark.req("R-213")
async def test_a_downgrade_is_logged_by_id_and_reason_without_content(serving: RelayProcess):
    signed = unattested(new_identity())
    async with open_client(serving.ws) as client:
        await client.publish(signed)
    await until(lambda: signed.packet_id in serving.log.read_text(), "the line of the packet")
    lines = [line for line in serving.log.read_text().splitlines() if signed.packet_id in line]
    assert any("client_attestation_missing" in line for line in lines)
    assert not any(HASH in line for line in lines)


@pytest.mark.req("R-073", "R-077", "R-078", "R-208")
async def test_a_chain_and_what_it_has_revoked_stay_served(serving: RelayProcess):
    """A relay does not rewrite history when a key is revoked with effect from the past: readers decide."""
    author = new_identity()
    second = Identity.from_seed(author.public_key).speaking_for(author.did)
    now = int(time.time())
    made = [
        packets.build(by, content, timestamp=now)
        for by, content in (
            (author, add_content(f"{author.did}#second", second.public_key, valid_from=now - 60)),
            (second, {"type": "POST", "text": "by a key that is about to be stolen"}),
            (author, revoke_content(f"{author.did}#second", revoked_at=now - 50)),
        )
    ]
    refused = packets.build(second, {"type": "POST", "text": "by the thief"}, timestamp=now)
    async with open_client(serving.ws) as client:
        for packet in made:
            assert (await client.publish(packet))["type"] == "OK"
        answer = await client.publish(refused)
        assert answer["code"] == "key_revoked"
        events, _ = await client.subscribe("all", {"authors": [author.did], "order": "asc"})
        assert [event["packet"] for event in events] == [packet.value for packet in made]
        assert all(event["received_at"] >= now for event in events)
        events, _ = await client.subscribe("chain", {"authors": [author.did], "types": ["KEY_EVENT"]})
        assert len(events) == 2
        assert serving.get(f"/packets/{made[1].packet_id}")[0] == 200


async def test_both_kinds_of_relay_serve_the_same_log(tmp_path: Path, shared_database: str):
    signed = unattested(new_identity())
    relays = [
        RelayProcess(tmp_path / mode, database_url=shared_database, provenance_downgrade=mode)
        for mode in ("rewrite", "annotate")
    ]
    with running(relays[0]) as rewriting, running(relays[1]) as annotating:
        async with open_client(rewriting.ws) as one, open_client(annotating.ws) as other:
            for client in (one, other):
                await client.subscribe("live", {"authors": [signed.author_id]})
            await one.publish(signed)
            for client, rewritten in ((one, True), (other, False)):
                [event] = await client.events("live", 1)
                check_served(
                    event, signed, rewritten=rewritten, reason="client_attestation_missing", drops=False
                )
