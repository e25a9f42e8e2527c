"""Identities against real relays: chains, documents, recovery; across sessions, processes and restarts."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import strata
from strata.protocol import canonical
from strata.protocol.documents import (
    RecoveryPolicy,
    VerificationMethod,
    build_document,
    key_multibase,
    method_id,
)
from strata.protocol.ids import Identity
from strata.protocol.keys import (
    KeyChain,
    add_content,
    approval_content,
    document_content,
    revoke_content,
    rotate_content,
)
from strata.protocol.packets import Packet, build

from tests.support.bare_client import BareClient, open_client, publish_text
from tests.support.made_packets import ids_of, make, new_identity
from tests.support.relay_process import RelayProcess, running
from tests.support.waiting import until

_nonces = itertools.count(1)


@dataclass(frozen=True)
class Holder:
    """A key that speaks for another DID."""

    key: Identity
    did: str

    def sign(self, message: bytes) -> bytes:
        return self.key.sign(message)


def said(who, content: dict) -> Packet:
    return build(who, content, timestamp=int(time.time()), nonce=f"i{next(_nonces)}")


def revocation(who, key_id: str, *, ago: int = 1) -> Packet:
    return said(who, revoke_content(key_id, revoked_at=int(time.time()) - ago))


def rotation(who, did: str, new: Identity, *, name: str = "keys-2", replaces: str = "keys-1") -> Packet:
    content = rotate_content(
        method_id(did, name),
        new.public_key,
        replaces=method_id(did, replaces),
        valid_from=int(time.time()) - 1,
    )
    return said(who, content)


def code_of(answer: dict[str, Any]) -> tuple[Any, Any]:
    return answer.get("code", answer.get("status")), answer.get("detail")


@pytest.mark.req("R-069", "R-074", "R-076", "R-188")
async def test_a_revocation_and_what_follows_it_in_one_breath(relay: RelayProcess, client: BareClient):
    who = new_identity()
    before, behind = make(who, "before"), make(who, "behind")
    revoke = revocation(who, method_id(who.did))
    for name, packet in (("a", before), ("b", revoke), ("c", behind)):
        await client.send(publish_text(packet, name))
    answers = [code_of(await client.answer(name)) for name in "abc"]
    assert answers == [("ACCEPTED", None), ("ACCEPTED", None), ("key_revoked", None)]
    events, _ = await client.subscribe("s", {"authors": [who.did]})
    assert ids_of(events) == [before.packet_id, revoke.packet_id]


@pytest.mark.req("R-077", "R-078")
async def test_a_back_dated_revocation_stops_new_packets_and_hides_none(
    relay: RelayProcess, client: BareClient
):
    who = new_identity()
    old = make(who, "old")
    first = await client.publish(old)
    assert (
        code_of(await client.publish(revocation(who, method_id(who.did), ago=86_400 * 30)))[0] == "ACCEPTED"
    )
    assert code_of(await client.publish(make(who, "new")))[0] == "key_revoked"
    events, _ = await client.subscribe("s", {"authors": [who.did], "types": ["POST"]})
    assert ids_of(events) == [old.packet_id] and events[0]["received_at"] == first["received_at"]
    assert relay.get(f"/packets/{old.packet_id}")[0] == 200


@pytest.mark.req("R-066", "R-072", "R-073", "R-075")
async def test_a_rotated_identity_signs_with_its_new_key(relay: RelayProcess, client: BareClient):
    who, new = new_identity(), new_identity()
    holder = Holder(new, who.did)
    assert code_of(await client.publish(make(holder, "too soon")))[0] == "invalid_signature"
    rotate = rotation(who, who.did, new)
    assert code_of(await client.publish(rotate)) == ("ACCEPTED", None)
    for author in (holder, who):  # the old key's window ends with the clocks' skew
        assert code_of(await client.publish(make(author, "either")))[0] == "ACCEPTED"
    events, _ = await client.subscribe("s", {"authors": [who.did], "types": ["KEY_EVENT"]})
    assert ids_of(events) == [rotate.packet_id]


@pytest.mark.req("R-067", "R-068", "R-071")
async def test_who_may_say_what_about_keys(relay: RelayProcess, client: BareClient):
    who, stranger = new_identity(), new_identity()
    by_itself = said(
        Holder(stranger, who.did),
        add_content(method_id(who.did, "keys-2"), stranger.public_key, valid_from=int(time.time())),
    )
    assert code_of(await client.publish(by_itself))[0] == "invalid_signature"
    of_another = said(stranger, revoke_content(method_id(who.did), revoked_at=1))
    assert code_of(await client.publish(of_another))[0] == "invalid_schema"
    without_time = said(who, {"type": "KEY_EVENT", "event": "REVOKE", "key_id": method_id(who.did)})
    assert code_of(await client.publish(without_time))[0] == "invalid_schema"
    unknown = said(who, {"type": "KEY_EVENT", "event": "FREEZE", "key_id": method_id(who.did)})
    assert code_of(await client.publish(unknown))[0] == "ACCEPTED"
    assert code_of(await client.publish(make(who)))[0] == "ACCEPTED"


@pytest.mark.req("R-047", "R-279")
async def test_a_name_without_a_document_publishes_nothing(relay: RelayProcess, client: BareClient):
    named = Holder(new_identity(), f"did:strata:somebody_{next(_nonces)}")
    assert code_of(await client.publish(make(named))) == ("invalid_signature", "unresolved_key")


@pytest.mark.req("R-053", "R-054", "R-058", "R-061")
async def test_documents_are_published_served_and_fail_closed(relay: RelayProcess, client: BareClient):
    who = new_identity()
    now = int(time.time())
    own = VerificationMethod(method_id(who.did), who.public_key, now - 10)
    genesis = build_document(who.did, [own], created_at=now)
    first = await client.publish(said(who, document_content(genesis)))
    assert code_of(first)[0] == "ACCEPTED"
    again = await client.publish(said(who, document_content(genesis)))
    assert (again["status"], again.get("duplicate")) == ("ACCEPTED", True)
    assert relay.get(f"/did-docs/{genesis.hash}")[2] == genesis.canonical
    body = json.loads(relay.get(f"/did/{who.did}")[2])
    assert body["did_doc_hash"] == genesis.hash
    successors = [
        build_document(who.did, [own], created_at=now + n, previous=genesis, extra={"note": n})
        for n in (1, 2)
    ]
    unlinked = build_document(who.did, [own], created_at=now + 3)
    assert code_of(await client.publish(said(who, document_content(unlinked)))) == (
        "invalid_schema",
        "document_not_linked",
    )
    assert code_of(await client.publish(said(who, document_content(successors[0]))))[0] == "ACCEPTED"
    assert code_of(await client.publish(make(who)))[0] == "ACCEPTED"
    assert code_of(await client.publish(said(who, document_content(successors[1]))))[0] == "ACCEPTED"
    assert code_of(await client.publish(make(who))) == ("invalid_signature", "document_conflict")
    assert json.loads(relay.get(f"/did/{who.did}")[2])["conflict"]


@pytest.mark.req("R-079", "R-080", "R-081", "R-082", "R-083", "R-084", "R-088", "R-190")
async def test_recovery_by_two_of_three(tmp_path):
    who, new = new_identity(), new_identity()
    recovery = [Holder(new_identity(), who.did) for _ in range(3)]
    now = int(time.time())
    methods = [VerificationMethod(method_id(who.did), who.public_key, now - 10)]
    methods += [
        VerificationMethod(method_id(who.did, f"r{n}"), holder.key.public_key, now - 10, recovery=True)
        for n, holder in enumerate(recovery)
    ]
    document = build_document(who.did, methods, created_at=now, recovery_policy=RecoveryPolicy(threshold=2))
    with running(RelayProcess(tmp_path, recovery_delay_seconds=0)) as relay:
        async with open_client(relay.ws) as client:
            assert code_of(await client.publish(said(who, document_content(document))))[0] == "ACCEPTED"
            answer = await client.publish(make(recovery[0], "no post"))
            assert code_of(answer) == ("invalid_signature", "recovery_key_not_allowed")
            event = rotation(recovery[0], who.did, new)
            await client.send(
                {"type": "SUBSCRIBE", "subscription_id": "s", "filters": {"authors": [who.did]}}
            )
            assert code_of(await client.publish(event))[0] == "QUEUED"
            holder = Holder(new, who.did)
            assert code_of(await client.publish(make(holder)))[0] == "invalid_signature"
            again = approval_content(event.packet_id, approved_at=now)
            assert code_of(await client.publish(said(recovery[0], again)))[0] == "ACCEPTED"
            assert code_of(await client.publish(make(holder)))[0] == "invalid_signature"
            stranger = approval_content("0x" + "ab" * 32, approved_at=now)
            assert code_of(await client.publish(said(recovery[1], stranger)))[0] != "ACCEPTED"
            assert code_of(await client.publish(said(recovery[1], again)))[0] == "ACCEPTED"
            assert code_of(await client.publish(make(holder)))[0] == "ACCEPTED"
            repeated = await client.publish(event)
            assert (repeated["status"], repeated["duplicate"]) == ("ACCEPTED", True)
            assert event.packet_id in ids_of(await client.events("s", 2))  # forwarded while it was pending
        assert not relay.complaints()


@pytest.mark.req("R-047", "R-048", "R-056", "R-057", "R-064")
async def test_the_bootstrap_file_gives_names_their_keys(tmp_path):
    device, named = Holder(new_identity(), "did:device:cam-1"), Holder(new_identity(), "did:strata:news_desk")
    document = build_document(
        named.did, [VerificationMethod(method_id(named.did), named.key.public_key, 0)], created_at=0
    )
    path = tmp_path / "bootstrap.json"
    path.write_text(
        json.dumps(
            {
                "keys": {device.did: key_multibase(device.key.public_key)},
                "did_documents": [document.value],
                "clock_skew_seconds": 60,
            }
        )
    )
    with running(RelayProcess(tmp_path / "relay", bootstrap_file=path)) as relay:
        async with open_client(relay.ws) as client:
            for who in (device, named):
                assert code_of(await client.publish(make(who)))[0] == "ACCEPTED"
            # A name with a document may rotate like any other.
            new = new_identity()
            assert code_of(await client.publish(rotation(named, named.did, new)))[0] == "ACCEPTED"
            assert code_of(await client.publish(make(Holder(new, named.did))))[0] == "ACCEPTED"
        assert relay.get(f"/did-docs/{document.hash}")[2] == document.canonical
        manifest = json.loads(relay.get("/.well-known/strata-relay.json")[2])
        assert manifest["clock_skew_seconds"] == 60
        assert {"did": named.did, "did_doc_hash": document.hash} in manifest["did_docs"]


@pytest.mark.req("R-056", "R-074")
async def test_chains_survive_a_restart(tmp_path):
    people = [new_identity() for _ in range(20)]
    relay = RelayProcess(tmp_path)
    with running(relay):
        async with open_client(relay.ws) as client:
            for who in people:
                assert code_of(await client.publish(revocation(who, method_id(who.did))))[0] == "ACCEPTED"
        assert relay.stop() == 0
        relay.start()
        async with open_client(relay.ws) as client:
            answers = await client.publish_all([make(who) for who in people])
            assert {code_of(answer)[0] for answer in answers} == {"key_revoked"}
            assert code_of(await client.publish(make(new_identity())))[0] == "ACCEPTED"


@pytest.fixture(scope="module")
def pair(shared_database: str, tmp_path_factory) -> Iterator[tuple[RelayProcess, RelayProcess]]:
    one, two = (RelayProcess(tmp_path_factory.mktemp("r"), database_url=shared_database) for _ in range(2))
    with running(one), running(two):
        yield one, two
        assert not one.complaints() and not two.complaints()


@pytest.mark.req("R-074", "R-076", "R-311")
async def test_what_one_process_has_revoked_no_other_accepts(pair):
    """The revocation's OK is the boundary: everything sent after it, anywhere, is refused."""
    one, two = pair
    async with open_client(one.ws) as here, open_client(two.ws) as there:
        for _ in range(40):
            who = new_identity()
            assert code_of(await there.publish(make(who, "before")))[0] == "ACCEPTED"
            assert code_of(await here.publish(revocation(who, method_id(who.did))))[0] == "ACCEPTED"
            assert code_of(await there.publish(make(who, "behind")))[0] == "key_revoked"


@pytest.mark.req("R-074", "R-311")
async def test_racing_processes_leave_a_log_whose_order_forbids_nothing(pair):
    """Publishes and a revocation race through two processes: in the log, no publish follows it."""
    one, two = pair
    async with open_client(one.ws) as here, open_client(two.ws) as there:
        for round_ in range(15):
            who = new_identity()
            posts = [make(who, f"{round_} {n}") for n in range(30)]
            sent = asyncio.gather(here.publish_all(posts[:15]), there.publish_all(posts[15:]))
            await asyncio.sleep(random.random() * 0.004)
            revoke = revocation(who, method_id(who.did))
            async with open_client(random.choice(pair).ws) as third:
                assert code_of(await third.publish(revoke))[0] == "ACCEPTED"
            answers = [answer for part in await sent for answer in part]
            accepted = [
                packet.packet_id
                for packet, answer in zip(posts, answers, strict=True)
                if answer["type"] == "OK"
            ]
            assert {answer.get("code", "key_revoked") for answer in answers} == {"key_revoked"}
            events, _ = await here.subscribe(f"s{round_}", {"authors": [who.did]})
            order = ids_of(events)
            assert order[-1] == revoke.packet_id
            assert sorted(order[:-1]) == sorted(accepted)


@pytest.mark.req("R-342")
async def test_a_key_event_that_expires_makes_no_forger_of_the_relay(relay: RelayProcess, client: BareClient):
    """A reader cannot have the key any more, and a relay that served its packets is honest all the same."""
    who, new, now = new_identity(), new_identity(), int(time.time())
    content = add_content(method_id(who.did, "keys-2"), new.public_key, valid_from=now)
    await client.publish(build(who, content, timestamp=now, expires_at=now + 2))
    signed = [make(Holder(new, who.did)) for _ in range(3)]
    for packet in signed:
        assert code_of(await client.publish(packet))[0] == "ACCEPTED"
    await until(lambda: time.time() > now + 3, "the key event has expired")
    await client.publish(last := make(who))
    async with strata.connect(relay.ws) as reader:
        delivered = await anext(reader.subscribe(authors=[who.did], types=["POST"]))
        assert delivered.packet.packet_id == last.packet_id
        statistics = reader.statistics
    assert (statistics.events_tampered, statistics.events_forged) == (len(signed), 0)


@pytest.mark.req("R-073")
async def test_a_stranger_can_verify_an_author_from_what_the_relay_serves(
    relay: RelayProcess, client: BareClient
):
    who, new = new_identity(), new_identity()
    await client.publish(make(who, "by the first key"))
    await client.publish(rotation(who, who.did, new))
    await client.publish(make(Holder(new, who.did), "by the second key"))
    events, _ = await client.subscribe("s", {"authors": [who.did]})
    read = [(Packet.parse(canonical.encode(event["packet"])), event["received_at"]) for event in events]
    chain = KeyChain.replay(who.did, [item for item in read if item[0].content_type == "KEY_EVENT"])
    for packet, received_at in read:
        if packet.content_type == "POST":
            chain.verify(packet, received_at, ingest=False)
