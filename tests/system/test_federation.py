"""Relays of different owners replicate: real processes, each with a database and a DID of its own."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from functools import partial

import pytest
from strata.protocol.ids import Identity

from tests.support.bare_client import open_client
from tests.support.federations import (
    Federated,
    eventually,
    federated,
    holds,
    ids_at,
    peer_comes_to,
    peer_of,
    peers_command,
)
from tests.support.made_packets import ids_of, make, new_identity
from tests.support.relay_process import http_get

pytestmark = pytest.mark.timeout(400)  # three relays, each with a PostgreSQL of its own
RING = [("a", "b"), ("b", "a"), ("b", "c"), ("c", "b"), ("c", "a"), ("a", "c")]


@pytest.fixture(scope="module")
def ring(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federated]:
    """Three relays, each of which reads from both others."""
    with federated(tmp_path_factory.mktemp("ring"), "abc", RING, group="ring") as relays:
        yield relays


def arrived(relays: Federated, name: str) -> Counter[str]:
    """How many packets came to this relay from its peers, by what became of them."""
    text = http_get(relays[name].ready["metrics"])[2].decode()
    counted: Counter[str] = Counter()
    for line in text.splitlines():
        if line.startswith("relayd_peer_packets_total{"):
            counted[line.split('outcome="')[1].split('"')[0]] += int(float(line.rsplit(" ", 1)[1]))
    return counted


def is_linked(relays: Federated, name: str, peers: int) -> bool:
    text = http_get(relays[name].ready["metrics"])[2].decode()
    connected = [line for line in text.splitlines() if line.startswith("relayd_peer_connected{")]
    return sum(line.endswith(" 1.0") for line in connected) == peers


@pytest.mark.req("R-350", "R-351", "R-353", "R-360", "R-367", "R-371", "R-373", "R-374")
async def test_each_packet_goes_once_to_each_relay_of_a_ring(ring: Federated):
    for name in "abc":
        await eventually(partial(is_linked, ring, name, 2))
    authors = {name: new_identity() for name in "abc"}
    dids = [author.did for author in authors.values()]
    made = {name: [make(authors[name], n=n) for n in range(20)] for name in "abc"}
    before = {name: arrived(ring, name) for name in "abc"}
    for name in "abc":
        async with open_client(ring[name].ws) as client:
            await client.publish_all(made[name])
    wanted = {packet.packet_id: packet for some in made.values() for packet in some}
    seen = {name: await holds(ring[name], dids, lambda found: len(found) >= len(wanted)) for name in "abc"}
    for events in seen.values():
        assert Counter(ids_of(events)) == Counter(wanted.keys())
        for event in events:  # what comes out is what its author signed, to the byte
            assert event["packet"] == json.loads(wanted[event["packet"]["packet_id"]].canonical)
    witness = [{e["packet"]["packet_id"]: e["received_at"] for e in events} for events in seen.values()]
    assert witness[0] == witness[1] == witness[2]
    for name in "abc":
        came = arrived(ring, name) - before[name]
        assert came == Counter(stored=40), came


@pytest.mark.req("R-364", "R-372")
async def test_a_relay_killed_while_it_reads_lacks_nothing_afterwards(ring: Federated):
    author = new_identity()
    packets = [make(author, n=n) for n in range(600)]
    async with open_client(ring["a"].ws) as client:
        for start in range(0, 600, 100):
            await client.publish_all(packets[start : start + 100])
            if start in (100, 300):
                ring["b"].kill()
                ring["b"].start()
    for name in "bc":
        events = await holds(ring[name], [author.did], lambda found: len(found) >= 600)
        assert Counter(ids_of(events)) == Counter(packet.packet_id for packet in packets)


async def test_what_was_published_while_a_relay_was_away_comes_when_it_is_back(ring: Federated):
    author = new_identity()
    ring["c"].kill()
    packets = [make(author, n=n) for n in range(30)]
    async with open_client(ring["a"].ws) as a, open_client(ring["b"].ws) as b:
        await a.publish_all(packets[:15])
        await b.publish_all(packets[15:])
    ring["c"].start()
    events = await holds(ring["c"], [author.did], lambda found: len(found) >= 30)
    assert Counter(ids_of(events)) == Counter(packet.packet_id for packet in packets)


async def test_a_live_subscriber_sees_each_packet_once_wherever_it_listens(ring: Federated):
    author = new_identity()
    packets = [make(author, n=n) for n in range(10)]
    async with (
        open_client(ring["a"].ws) as a,
        open_client(ring["b"].ws) as b,
        open_client(ring["c"].ws) as c,
    ):
        for client in (a, b, c):
            await client.send(
                {
                    "type": "SUBSCRIBE",
                    "subscription_id": "live",
                    "gapless": True,
                    "filters": {"authors": [author.did]},
                }
            )
        await a.publish_all(packets)
        async with open_client(ring["b"].ws) as other:  # the same packets at another relay: duplicates
            await other.publish_all(packets)
        for client in (a, b, c):
            events = await client.events("live", 10, timeout=60)
            assert Counter(ids_of(events)) == Counter(packet.packet_id for packet in packets)
        await holds(ring["c"], [author.did], lambda found: len(found) >= 10)
        for client in (a, b, c):
            await client.barrier()
            assert not [message for message in client.inbox if message["type"] == "EVENT"]


@pytest.mark.req("R-349", "R-379")
async def test_an_author_blocked_here_is_not_replicated_in(tmp_path):
    blocked, fine = new_identity(), new_identity()
    with federated(
        tmp_path, "ab", [("a", "b")], per_relay={"a": {"blocked_authors": [blocked.did]}}
    ) as relays:
        async with open_client(relays["b"].ws) as client:
            await client.publish_all([make(blocked, n=n) for n in range(3)])
            await client.publish_all([make(fine, n=n) for n in range(3)])
        await holds(relays["a"], [fine.did], lambda found: len(found) == 3)
        assert await ids_at(relays["a"], [blocked.did]) == []
        peer = await peer_comes_to(relays["a"], lambda peer: peer["skipped"] == 3)
        assert (peer["state"], peer["offences"]) == ("connected", 0)
        (listed,) = _peers(relays)
        assert listed == peer
        await _paused(relays)


def _peers(relays: Federated) -> list[dict[str, object]]:
    done = peers_command(relays["a"], "list", "--json")
    assert done.returncode == 0, done.stderr
    found: list[dict[str, object]] = json.loads(done.stdout)["peers"]
    return found


async def _paused(relays: Federated) -> None:
    """`relayd peers pause` stops a link that is up, and `resume` brings what came meanwhile."""
    author, did = new_identity(), relays.identities["b"].did
    assert peers_command(relays["a"], "pause", did[:-3]).returncode == 0
    await eventually(lambda: is_linked(relays, "a", 0))
    async with open_client(relays["b"].ws) as client:
        await client.publish_all([make(author, n=n) for n in range(3)])
    assert (await peer_of(relays["a"]))["state"] == "paused"
    assert await ids_at(relays["a"], [author.did]) == []
    assert peers_command(relays["a"], "resume", did).returncode == 0
    await holds(relays["a"], [author.did], lambda found: len(found) == 3)
    assert peers_command(relays["a"], "reset-cursor", did).returncode == 0
    assert peers_command(relays["a"], "forgive", "did:strata:zNobody").returncode == 2
    await peer_comes_to(relays["a"], lambda peer: peer["state"] == "connected")


@pytest.mark.req("R-290", "R-356", "R-358")
async def test_a_relay_that_the_upstream_does_not_list_reads_nothing(tmp_path):
    author = new_identity()
    with federated(tmp_path, "ab", [("a", "b")], per_relay={"b": {"replication_peers": []}}) as relays:
        async with open_client(relays["b"].ws) as client:
            await client.publish_all([make(author, n=0)])
        await peer_comes_to(relays["a"], lambda peer: "replication_peers" in str(peer["problem"]))
        assert await ids_at(relays["a"], [author.did]) == []
        manifest = json.loads(http_get(f"{relays['b'].http}/.well-known/strata-relay.json")[2])
        assert manifest["replication"]["accepts_peer_subscriptions"] is False


@pytest.mark.req("R-355", "R-359", "R-361", "R-362")
async def test_what_a_session_that_may_replicate_is_served(ring: Federated):
    """R-355 from outside: a peer says which relay it is and that it wants to replicate."""
    peer: Identity = ring.identities["b"]
    async with open_client(ring["a"].ws) as client, open_client(ring["a"].ws) as stranger:
        answer = await client.authenticate(peer, capabilities=["subscribe", "replicate"])
        assert answer["capabilities"] == ["subscribe", "replicate"]
        author = new_identity()
        await stranger.publish_all([make(author, n=0), make(author, n=1, type="NOTE")])
        await holds(ring["b"], [author.did], lambda found: len(found) == 2)
        filters = {"authors": [author.did], "limit": 10}
        cases = [
            (client, "PUBLIC_SOCIAL", {}, 1),
            (client, "XYZ", {}, 2),
            (client, "FULL_ARCHIVE", {}, 2),
            (stranger, "PUBLIC_SOCIAL", {}, 2),  # the session decides, not the profile
            (client, None, {"not_via": [ring.identities["b"].did]}, 2),
        ]
        for n, (who, profile, more, count) in enumerate(cases):
            await who.send(
                {
                    "type": "SUBSCRIBE",
                    "subscription_id": f"s{n}",
                    "replication_profile": profile,
                    "history_marker": True,
                    "filters": filters | more,
                }
            )
            assert len(await who.events(f"s{n}", count)) == count
            assert (await who.receive())["type"] == "END_OF_HISTORY"
        await client.send(
            {"type": "SUBSCRIBE", "subscription_id": "t", "replication_profile": "HIGH_TRUST_ONLY"}
        )
        assert (await client.receive())["code"] == "unsupported_profile"
    async with open_client(ring["b"].ws) as client:
        # What b got from a is left out for one who reads a as well, and for nobody else.
        await client.authenticate(ring.identities["c"], capabilities=["subscribe", "replicate"])
        for n, (not_via, count) in enumerate([([ring.identities["a"].did], 0), ([], 2)]):
            await client.send(
                {
                    "type": "SUBSCRIBE",
                    "subscription_id": f"v{n}",
                    "history_marker": True,
                    "filters": filters | {"not_via": not_via},
                }
            )
            assert len(await client.events(f"v{n}", count)) == count if count else True
            assert (await client.receive())["type"] == "END_OF_HISTORY"


@pytest.mark.req("R-352", "R-389")
async def test_the_manifest_says_that_peers_are_served(ring: Federated):
    manifest = json.loads(http_get(f"{ring['a'].http}/.well-known/strata-relay.json")[2])
    assert manifest["relay_id"] == ring.identities["a"].did
    assert manifest["replication"] == {
        "accepts_peer_subscriptions": True,
        "supported_profiles": ["FULL_ARCHIVE", "PUBLIC_SOCIAL"],
        "requires_auth": True,
    }
