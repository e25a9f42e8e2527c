"""AUTH and capabilities, as seen by a plain RFC-0004 client."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from strata.protocol import packets
from strata.protocol.ids import Identity
from strata.protocol.keys import revoke_content, rotate_content
from websockets.exceptions import ConnectionClosedError

from tests.support.bare_client import BareClient, Message, open_client, publish_text
from tests.support.made_packets import ids_of, make, new_identity
from tests.support.relay_process import RelayProcess, running

PEER = new_identity()
MEMBER = new_identity()


def fault(answer: Message) -> tuple[str, str | None]:
    assert answer["type"] == "ERROR", answer
    assert answer["reason"]
    return answer["code"], answer.get("detail")


@pytest.fixture(scope="module")
def closed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RelayProcess]:
    """A relay that requires AUTH for everything, and has members and a peer."""
    folder = tmp_path_factory.mktemp("closed")
    settings: dict[str, Any] = {
        "require_auth": ["publish", "subscribe"],
        "members": [MEMBER.did],
        "replication_peers": [PEER.did],
    }
    with running(RelayProcess(folder, **settings)) as process:
        yield process
        assert not process.complaints()


@pytest.mark.req("R-139", "R-266", "R-268", "R-269", "R-271", "R-354")
async def test_the_first_frame_is_a_challenge(relay: RelayProcess):
    seen = set()
    for _ in range(5):
        async with open_client(relay.ws) as client:
            challenge = await client.challenge()
            assert challenge.keys() == {"type", "challenge", "server_id", "expires_at", "extensions"}
            assert len(base64.b64decode(challenge["challenge"], validate=True)) >= 32
            assert 115 <= challenge["expires_at"] - time.time() <= 120
            assert "gapless" in challenge["extensions"]
            seen.add(challenge["challenge"])
    assert len(seen) == 5
    manifest = json.loads(relay.get("/.well-known/strata-relay.json")[2])
    assert challenge["server_id"] == relay.ready["relay_id"] == manifest["relay_id"]
    assert manifest["auth"]["required_for"] == []


@pytest.mark.req("R-267")
async def test_who_never_authenticates_can_do_everything_by_default(client: BareClient):
    packet = make(identity := new_identity())
    assert (await client.publish(packet))["type"] == "OK"
    events, _ = await client.subscribe("s", {"authors": [identity.did]})
    assert ids_of(events) == [packet.packet_id]


@pytest.mark.req("R-136", "R-275", "R-280", "R-285")
async def test_auth_is_answered_with_the_capabilities_of_the_session(client: BareClient):
    answer = await client.authenticate(identity := new_identity())
    assert answer["type"] == "AUTH_OK"
    assert answer["author_id"] == identity.did
    assert answer["capabilities"] == ["publish", "subscribe"]
    assert (await client.publish(make(identity)))["type"] == "OK"


@pytest.mark.req("R-135")
async def test_an_auth_without_a_client_msg_id_is_answered_without_one(client: BareClient):
    challenge, identity = await client.challenge(), new_identity()
    signed = (challenge["challenge"] + challenge["server_id"]).encode()
    await client.send(
        {
            "type": "AUTH",
            "author_id": identity.did,
            "challenge": challenge["challenge"],
            "signature": "0x" + identity.sign(signed).hex(),
        }
    )
    answer = await client.receive()
    assert answer["type"] == "AUTH_OK"
    assert "client_msg_id" not in answer


@pytest.mark.req("R-276")
async def test_a_signature_over_the_decoded_challenge_is_good_too(client: BareClient):
    identity, challenge = new_identity(), await client.challenge()
    signed = base64.b64decode(challenge["challenge"]) + challenge["server_id"].encode()
    answer = await client.authenticate(
        identity, challenge=challenge, signature="0x" + identity.sign(signed).hex()
    )
    assert answer["type"] == "AUTH_OK"


@pytest.mark.req("R-279")
async def test_an_identity_nobody_knows(client: BareClient):
    answer = await client.authenticate(new_identity(), author_id="did:strata:never-heard-of")
    assert fault(answer) == ("unauthenticated", "unresolved_key")


@pytest.mark.req("R-282")
async def test_after_a_failure_there_is_a_fresh_challenge_on_the_same_socket(client: BareClient):
    first = await client.challenge()
    answer = await client.authenticate(new_identity(), challenge=first, signature="0x" + "00" * 64)
    assert fault(answer) == ("invalid_signature", None)
    fresh = await client.challenge()
    assert fresh["challenge"] != first["challenge"]
    assert (await client.authenticate(new_identity(), challenge=fresh))["type"] == "AUTH_OK"


@pytest.mark.req("R-282")
async def test_the_fifth_failure_closes_with_1008(relay: RelayProcess):
    async with open_client(relay.ws) as client:
        for _ in range(5):
            answer = await client.authenticate(new_identity(), signature="0x" + "00" * 64)
            assert fault(answer) == ("invalid_signature", None)
        with pytest.raises(ConnectionClosedError) as closed:
            await client.barrier()
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1008


class Signer:
    """Signs with one key for the DID of another."""

    def __init__(self, key: Identity, did: str) -> None:
        self.did = did
        self.sign = key.sign


def key_event(key: Identity, author: Identity, content: dict[str, Any]) -> packets.Packet:
    return packets.build(Signer(key, author.did), content, timestamp=int(time.time()))


@pytest.mark.req("R-277", "R-281")
async def test_a_key_that_is_revoked_or_replaced_authenticates_nobody(
    client: BareClient, relay: RelayProcess
):
    first, second = new_identity(), new_identity()
    now, own = int(time.time()), f"{first.did}#{first.did.rpartition(':')[2]}"
    rotation = rotate_content(f"{first.did}#second", second.public_key, replaces=own, valid_from=now)
    assert (await client.publish(key_event(first, first, rotation)))["type"] == "OK"
    async with open_client(relay.ws) as other:
        challenge = await other.challenge()
        signed = (challenge["challenge"] + challenge["server_id"]).encode()
        answer = await other.authenticate(
            first, challenge=challenge, signature="0x" + second.sign(signed).hex()
        )
        assert answer["type"] == "AUTH_OK"
        revocation = revoke_content(own, revoked_at=now - 1)
        assert (await other.publish(key_event(second, first, revocation)))["type"] == "OK"
    code, detail = fault(await client.authenticate(first))
    assert (code, detail) == ("invalid_signature", "key_revoked")


@pytest.mark.req("R-191", "R-267")
async def test_a_session_may_publish_for_others(client: BareClient):
    await client.authenticate(new_identity())
    assert (await client.publish(make(new_identity())))["type"] == "OK"


@pytest.mark.req("R-283")
async def test_a_later_auth_replaces_the_identity_and_a_failed_one_does_not(closed: RelayProcess):
    async with open_client(closed.ws) as client:
        first = await client.challenge()
        assert (await client.authenticate(MEMBER, challenge=first, capabilities=["publish"]))[
            "type"
        ] == "AUTH_OK"
        # A used challenge is refused, and the refusal brings a fresh one.
        answer = await client.authenticate(PEER, challenge=first)
        assert fault(answer) == ("unauthenticated", "challenge_unknown")
        assert (await client.publish(make(MEMBER)))["type"] == "OK"
        answer = await client.authenticate(PEER, capabilities=["subscribe", "replicate"])
        assert (answer["author_id"], answer["capabilities"]) == (PEER.did, ["subscribe", "replicate"])
        assert fault(await client.publish(make(PEER))) == ("unauthenticated", "missing_capability")
        failed = await client.authenticate(MEMBER, challenge=first)
        assert failed["type"] == "ERROR"
        _, end = await client.subscribe("s")
        assert end["type"] == "END_OF_HISTORY"


@pytest.mark.req("R-284")
async def test_a_new_connection_is_anonymous(closed: RelayProcess):
    async with open_client(closed.ws) as client:
        await client.authenticate(MEMBER)
        assert (await client.publish(make(MEMBER)))["type"] == "OK"
    async with open_client(closed.ws) as client:
        assert fault(await client.publish(make(MEMBER))) == ("unauthenticated", "missing_capability")


@pytest.mark.req("R-286", "R-287", "R-290")
@pytest.mark.parametrize(
    ("identity", "requested", "effective"),
    [
        (MEMBER, None, ["publish", "subscribe"]),
        (MEMBER, [], []),
        (MEMBER, ["publish", "fly"], ["publish"]),
        (MEMBER, ["replicate"], []),
        (PEER, None, ["publish", "subscribe", "replicate"]),
        (PEER, ["replicate"], ["replicate"]),
        (new_identity(), ["publish", "subscribe", "replicate"], []),
    ],
)
async def test_effective_is_requested_and_granted(closed: RelayProcess, identity, requested, effective):
    async with open_client(closed.ws) as client:
        answer = await client.authenticate(identity, capabilities=requested)
        assert answer["capabilities"] == effective


@pytest.mark.req("R-288", "R-289", "R-292")
@pytest.mark.parametrize("capabilities", [[], ["publish"], ["subscribe"], ["publish", "subscribe"]])
async def test_each_capability_allows_its_action_alone(closed: RelayProcess, capabilities):
    async with open_client(closed.ws) as client:
        await client.authenticate(MEMBER, capabilities=capabilities)
        published = await client.publish(make(MEMBER))
        _, subscribed = await client.subscribe("s")
        for answer, capability in ((published, "publish"), (subscribed, "subscribe")):
            if capability in capabilities:
                assert answer["type"] in ("OK", "END_OF_HISTORY")
            else:
                assert fault(answer) == ("unauthenticated", "missing_capability")
        await client.barrier()  # nothing was closed


@pytest.mark.req("R-292")
async def test_auth_can_be_required_for_publishing_alone(tmp_path: Path):
    with running(RelayProcess(tmp_path, require_auth=["publish"])) as process:
        async with open_client(process.ws) as client:
            identity = new_identity()
            assert fault(await client.publish(make(identity)))[1] == "missing_capability"
            _, end = await client.subscribe("s")
            assert end["type"] == "END_OF_HISTORY"
            await client.authenticate(identity)
            packet = make(identity)
            assert (await client.publish(packet))["type"] == "OK"
            assert process.get(f"/packets/{packet.packet_id}")[0] == 200


@pytest.mark.req("R-133", "R-288")
async def test_auth_and_what_needs_it_may_travel_together(closed: RelayProcess):
    async with open_client(closed.ws) as client:
        challenge = await client.challenge()
        signed = (challenge["challenge"] + challenge["server_id"]).encode()
        auth = {
            "type": "AUTH",
            "author_id": MEMBER.did,
            "challenge": challenge["challenge"],
            "signature": "0x" + MEMBER.sign(signed).hex(),
            "client_msg_id": "auth",
        }
        sent = [make(MEMBER) for _ in range(20)]
        await client.send(auth)
        for number, packet in enumerate(sent):
            await client.send(publish_text(packet, str(number)))
        assert (await client.answer("auth"))["type"] == "AUTH_OK"
        for number in range(20):
            assert (await client.answer(str(number)))["type"] == "OK"
        events, _ = await client.subscribe("s", {"packet_ids": [packet.packet_id for packet in sent]})
        assert ids_of(events) == [packet.packet_id for packet in sent]


@pytest.mark.req("R-270")
def test_a_lifetime_below_a_minute_stops_the_relay_at_start(tmp_path: Path):
    process = RelayProcess(tmp_path, challenge_lifetime=30)
    process.spawn()
    assert process.wait() == 2
    assert "challenge_lifetime (30) is below 60" in process.last_words()
