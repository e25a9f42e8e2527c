"""Clients that change their keys: packets that follow the answer are judged by the new ones."""

from __future__ import annotations

import dataclasses

import pytest
from strata.protocol.documents import method_id
from strata.protocol.errors import ErrorCode, InvalidPacket
from strata.protocol.ids import Identity
from strata.protocol.keys import add_content, revoke_content
from strata.protocol.packets import Packet
from strata.protocol.provenance.manifest import ClientKey, manifest_content

from relayd.store.types import LogEntry
from tests.relayd.admission.admission_rig import NOW, Peer, Rig, made, signed
from tests.support.made_origins import AUTHOR, CLIENT, attested, software_header

FIRST, SECOND = Identity(bytes([20]) * 32), Identity(bytes([21]) * 32)


@dataclasses.dataclass(frozen=True)
class ClientKeyHolder:
    """A key that speaks for the client."""

    key: Identity
    did: str = CLIENT.did

    def sign(self, message: bytes) -> bytes:
        return self.key.sign(message)


def manifest(key: Identity, *, timestamp: int = NOW) -> Packet:
    return signed(
        CLIENT,
        manifest_content(CLIENT.did, "app", [ClientKey("k", key.public_key, 0, 0)]),
        timestamp=timestamp,
    )


def claim(key: Identity, text: str = "photo") -> Packet:
    """A post whose origin the client attests with this key."""
    return attested(software_header(), {"type": "POST", "text": text}, ClientKeyHolder(key))


def commit_unseen(rig: Rig) -> list[LogEntry]:
    """Commit and answer what is queued; the feed brings it later."""
    queue, rig.log.queue = rig.log.queue, []
    entries: list[LogEntry] = []
    for packet, request in queue:
        entry = rig.log.append(packet, rig.now)
        assert entry is not None
        entries.append(entry)
        rig.admission.committed(request, rig.now, duplicate=False)
    return entries


async def known(rig: Rig, key: Identity) -> None:
    """Store a manifest with this key in the log."""
    peer = Peer()
    rig.publish(peer, manifest(key), "manifest")
    assert await rig.answers(peer, 1) == [("manifest", "ok")]
    rig.now += 2


@pytest.mark.req("R-236")
async def test_what_comes_behind_the_answer_to_a_manifest_is_judged_by_it(rig):
    await known(rig, FIRST)
    client, one, two = Peer(), Peer(), Peer()
    rig.publish(client, manifest(SECOND, timestamp=rig.now), "manifest")
    await rig.queued(1)
    entries = commit_unseen(rig)
    assert client.answers == [("manifest", "ok")]
    rig.publish(one, claim(SECOND, "one"), "new key")
    rig.publish(two, claim(FIRST, "two"), "old key")
    rig.publish(one, made(1), "behind it")
    rig.publish(two, made(2), "behind it")
    await rig.settled()
    assert not rig.log.queue, "they wait for the feed"
    rig.observe(entries)
    await rig.queued(4)
    found = {request.client_msg_id: packet.annotation for packet, request in rig.log.queue}
    assert found["new key"] is None
    assert found["old key"] is not None
    assert len(await rig.answers(one, 2)) == len(await rig.answers(two, 2)) == 2


@pytest.mark.req("R-236")
async def test_what_was_judged_by_the_manifest_before_is_judged_again(rig):
    """Both arrive together: the claim is checked while the manifest is on its way."""
    await known(rig, FIRST)
    client, one = Peer(), Peer()
    rig.publish(client, manifest(SECOND, timestamp=rig.now), "manifest")
    rig.publish(one, claim(SECOND), "new key")
    await rig.queued(1)
    await rig.settled()
    assert [request.client_msg_id for _, request in rig.log.queue] == ["manifest"]
    rig.observe(commit_unseen(rig))
    await rig.queued(1)
    assert [packet.annotation for packet, _ in rig.log.queue] == [None]
    assert await rig.answers(one, 1) == [("new key", "ok")]


@pytest.mark.req("R-074")
async def test_a_client_s_own_key_that_is_revoked_attests_nothing_behind_the_answer(rig):
    client, one = Peer(), Peer()
    rig.publish(client, signed(CLIENT, revoke_content(method_id(CLIENT.did), revoked_at=NOW - 1)), "revoke")
    await rig.queued(1)
    entries = commit_unseen(rig)
    rig.publish(one, attested(software_header()), "old key")
    await rig.settled()
    assert not rig.log.queue
    rig.observe(entries)
    await rig.queued(1)
    assert [packet.annotation is None for packet, _ in rig.log.queue] == [False]
    await rig.answers(one, 1)


async def test_a_manifest_that_is_not_stored_bars_nobody(rig):
    await known(rig, FIRST)
    client, one = Peer(), Peer()
    rig.publish(client, manifest(SECOND, timestamp=rig.now), "manifest")
    await rig.queued(1)
    rig.publish(one, claim(FIRST), "old key")
    await rig.settled()
    (_, request), *others = rig.log.queue
    assert not others
    rig.log.queue.clear()
    rig.admission.failed(request, InvalidPacket(ErrorCode.INTERNAL_ERROR, "lost"))
    await rig.queued(1)
    assert [packet.annotation for packet, _ in rig.log.queue] == [None]
    assert await rig.answers(one, 1) == [("old key", "ok")]


async def test_a_manifest_bars_no_packet_that_does_not_name_its_client(rig):
    client, one = Peer(), Peer()
    rig.publish(client, manifest(FIRST), "manifest")
    rig.publish(client, signed(CLIENT, {"type": "POST", "text": "by the client itself"}), "its post")
    rig.publish(one, made(1), "somebody's")
    await rig.queued(3)
    assert sorted(await rig.answers(client, 2)) == [("its post", "ok"), ("manifest", "ok")]


async def test_manifests_of_one_client_are_applied_one_after_the_other(rig):
    client = Peer()
    rig.publish(client, manifest(FIRST), "first")
    rig.publish(client, manifest(SECOND, timestamp=NOW + 1), "second")
    await rig.queued(1)
    await rig.settled()
    assert len(rig.log.queue) == 1
    assert await rig.answers(client, 2) == [("first", "ok"), ("second", "ok")]


def lives_on(who: Identity) -> Packet:
    """An event after which the DID alone no longer shows which keys count; the keys stay the same."""
    return signed(
        who, add_content(method_id(who.did, "more"), Identity(bytes([22]) * 32).public_key, valid_from=0)
    )


async def test_chains_that_have_no_room_beside_each_other_are_read_once_for_a_packet(rig):
    """An author's and a client's: of documents of the maximum size, one fills the memory."""
    rig.elsewhere(lives_on(AUTHOR), lives_on(CLIENT))
    rig.identities._chains._max_bytes = 1
    rig.elsewhere(lives_on(FIRST))
    assert rig.identities.missing([AUTHOR.did, CLIENT.did]) == [AUTHOR.did, CLIENT.did]
    peers = [Peer() for _ in range(3)]
    for n, peer in enumerate(peers):
        rig.publish(peer, attested(software_header(), {"type": "POST", "text": f"photo {n}"}), "claim")
    for peer in peers:
        assert await rig.answers(peer, 1) == [("claim", "ok")]
    assert len(rig.log.reads) <= 3
    assert len(rig.identities._chains) == 1, "nothing stays that has no room"


async def test_a_chain_that_has_gone_from_memory_has_not_changed(rig):
    """Meanwhile keys of others change, and those of a packet on its way are not read again."""
    rig.elsewhere(lives_on(AUTHOR))
    peer = Peer()
    rig.publish(peer, made(1), "post")
    await rig.queued(1)
    reads = len(rig.log.reads)
    rig.identities._chains._max_bytes = 1
    rig.elsewhere(lives_on(FIRST))
    assert rig.identities.chain(AUTHOR.did) is None
    assert await rig.answers(peer, 1) == [("post", "ok")]
    assert len(rig.log.reads) == reads


async def test_what_was_judged_by_a_manifest_that_is_erased_is_judged_again(rig):
    await known(rig, FIRST)
    one, two = Peer(), Peer()
    rig.publish(one, claim(FIRST, "one"), "claim")
    await rig.queued(1)
    rig.log.entries = [entry for entry in rig.log.entries if entry.packet.content_type != "CLIENT_MANIFEST"]
    rig.identities.forget_manifests()
    assert await rig.answers(one, 1) != [("claim", "ok")], "the keys it was judged by are gone"
    rig.publish(two, claim(FIRST, "two"), "claim")
    await rig.queued(1)
    assert rig.log.queue[0][0].annotation is not None
    assert await rig.answers(two, 1) == [("claim", "ok")]
