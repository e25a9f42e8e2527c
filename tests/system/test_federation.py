"""Relays of different owners replicate: real processes, each with its own database and DID."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from strata.protocol.documents import method_id
from strata.protocol.ids import Identity
from strata.protocol.keys import rotate_content
from strata.protocol.packets import Packet, build

from relayd.postgres.running import running_server
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
from tests.support.relay_process import RelayProcess, http_get, running
from tests.support.strata_command import strata_command

pytestmark = pytest.mark.timeout(400)  # three relays, each with its own PostgreSQL
RING = [("a", "b"), ("b", "a"), ("b", "c"), ("c", "b"), ("c", "a"), ("a", "c")]


@pytest.fixture(scope="module")
def ring(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federated]:
    """Three relays, each of which reads from both others."""
    with federated(tmp_path_factory.mktemp("ring"), "abc", RING, group="ring") as relays:
        yield relays


def arrived(relays: Federated, name: str) -> Counter[str]:
    """The number of packets that came to this relay from its peers, by outcome."""
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
        for event in events:  # it serves what the author signed, to the byte
            assert event["packet"] == json.loads(wanted[event["packet"]["packet_id"]].canonical)
    witness = [{e["packet"]["packet_id"]: e["received_at"] for e in events} for events in seen.values()]
    assert witness[0] == witness[1] == witness[2]
    for name in "abc":
        came = arrived(ring, name) - before[name]
        assert came == Counter(stored=40), came


@pytest.mark.req("R-363", "R-364", "R-372")
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
    await _in_pages(ring, author, [packet.packet_id for packet in packets])


async def _in_pages(relays: Federated, author: Identity, expected: list[str]) -> None:
    """R-363: the first page from the beginning, in order of receipt, each with its cursor; then the rest."""
    async with open_client(relays["a"].ws) as client:
        await client.authenticate(relays.identities["c"], capabilities=["subscribe", "replicate"])
        cursor, pages = None, []
        for n in range(2):
            filters = {"authors": [author.did], "types": [], "since": 0, "limit": 500, "order": "asc"}
            page, end = await client.subscribe(
                f"p{n}", filters | {"cursor": cursor}, replication_profile="FULL_ARCHIVE"
            )
            assert (end["type"], end["complete"]) == ("END_OF_HISTORY", n == 1)
            assert all(isinstance(event["cursor"], str) for event in page)
            await client.send({"type": "UNSUBSCRIBE", "subscription_id": f"p{n}"})
            cursor = page[-1]["cursor"]
            pages.append(page)
    assert [len(page) for page in pages] == [500, 100]
    events = [event for page in pages for event in page]
    received = [event["received_at"] for event in events]
    assert received == sorted(received)
    assert sorted(ids_of(events)) == sorted(expected)


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


async def test_keys_that_change_at_one_relay_are_the_same_at_all(ring: Federated):
    """Each relay has the same chain of an author, wherever the keys and what they sign were published."""
    first = new_identity()
    second = new_identity().speaking_for(first.did)
    now = int(time.time())
    rotation = build(
        first,
        rotate_content(
            method_id(first.did, "keys-2"),
            second.public_key,
            replaces=method_id(first.did, "keys-1"),
            valid_from=now - 60,
        ),
        timestamp=now,
    )
    async with open_client(ring["a"].ws) as client:
        assert (await client.publish(rotation))["type"] == "OK"
    chains = [
        await holds(ring[name], [first.did], lambda found: rotation.packet_id in ids_of(found))
        for name in "abc"
    ]
    assert [[(e["packet"], e["received_at"]) for e in chain] for chain in chains] == [
        [(json.loads(rotation.canonical), chains[0][0]["received_at"])]
    ] * 3
    kept = [make(second), make(second)]
    for name, packet in zip("bc", kept, strict=True):
        async with open_client(ring[name].ws) as client:
            assert (await client.publish(packet))["type"] == "OK"
    everything = {rotation.packet_id, *(packet.packet_id for packet in kept)}
    for name in "abc":
        events = await holds(ring[name], [first.did], lambda found: len(found) >= 3)
        assert set(ids_of(events)) == everything


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


async def test_a_relay_is_not_behind_a_peer_by_packets_that_do_not_come_from_it(ring: Federated):
    """The newest of all packets came to a itself, and to b and c from there."""
    author = new_identity()
    async with open_client(ring["b"].ws) as client:
        before = (await client.publish(make(author)))["received_at"]
    await holds(ring["a"], [author.did], lambda found: len(found) == 1)
    await eventually(lambda: time.time() > before + 3)
    async with open_client(ring["a"].ws) as client:
        await client.publish(make(author))
    for name in ("b", "c"):
        await holds(ring[name], [author.did], lambda found: len(found) == 2)

    def behind() -> list[int]:
        checked = json.loads(peers_command(ring["a"], "check", "--json").stdout)["peers"]
        return [each["behind_seconds"] for each in checked if each["read_up_to"] is not None]

    await eventually(lambda: set(behind()) == {0})


BLOCKED = new_identity()


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federated]:
    """Relay a reads from b and blocks an author; b tries to read from a, which does not list it."""
    special: dict[str, Any] = {"blocked_authors": [BLOCKED.did], "replication_peers": []}
    announcing = {"announce_seconds": 3600, "public_url": "wss://b.example/strata"}
    with federated(
        tmp_path_factory.mktemp("pair"),
        "ab",
        [("a", "b"), ("b", "a")],
        per_relay={"a": special, "b": announcing},
    ) as relays:
        yield relays


@pytest.mark.req("R-349", "R-379")
async def test_an_author_blocked_here_is_not_replicated_in(pair: Federated):
    fine = new_identity()
    async with open_client(pair["b"].ws) as client:
        await client.publish_all([make(BLOCKED, n=n) for n in range(3)])
        await client.publish_all([make(fine, n=n) for n in range(3)])
    await holds(pair["a"], [fine.did], lambda found: len(found) == 3)
    assert await ids_at(pair["a"], [BLOCKED.did]) == []
    peer = await peer_comes_to(pair["a"], lambda peer: peer["skipped"] == 3)
    assert (peer["state"], peer["offences"]) == ("connected", 0)
    (listed,) = _peers(pair)
    assert listed == peer
    await _paused(pair)


def _peers(relays: Federated) -> list[dict[str, object]]:
    done = peers_command(relays["a"], "list", "--json")
    assert done.returncode == 0, done.stderr
    found: list[dict[str, object]] = json.loads(done.stdout)["peers"]
    return found


async def _paused(relays: Federated) -> None:
    """`relayd peers pause` stops an active link, and `resume` brings the packets published meanwhile."""
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


async def test_a_machine_beside_the_one_that_reads_says_the_same_of_peers(pair: Federated, tmp_path: Path):
    a, did = pair["a"], pair.identities["b"].did
    await peer_comes_to(a, lambda peer: peer["state"] == "connected")

    def said(relay: RelayProcess, name: str) -> float:
        try:
            return relay.metric(f"relayd_peer_{name}", peer=did)
        except KeyError:  # it has not checked yet
            return -1

    with running_server(Path(str(a.settings["data_dir"]))) as url:
        settings = {**a.settings, "database_url": url, "data_dir": tmp_path / "data"}
        with running(RelayProcess(tmp_path / "beside", **settings)) as beside:  # type: ignore[arg-type]
            await eventually(lambda: said(beside, "connected") == said(a, "connected") == 1)
            assert peers_command(a, "pause", did).returncode == 0
            await eventually(lambda: (said(beside, "connected"), said(beside, "paused")) == (0, 1))
            assert peers_command(a, "resume", did).returncode == 0
            await eventually(lambda: (said(beside, "connected"), said(beside, "paused")) == (1, 0))


async def test_a_peer_that_goes_away_is_not_said_to_be_there(pair: Federated):
    await peer_comes_to(pair["a"], lambda peer: peer["state"] == "connected")
    pair["b"].kill()
    try:
        away = await peer_comes_to(
            pair["a"], lambda peer: peer["state"] == "disconnected" and peer["problem"]
        )
        assert away["problem"]
    finally:
        pair["b"].start()
    back = await peer_comes_to(pair["a"], lambda peer: peer["state"] == "connected")
    assert back["problem"] is None
    pair["a"].stop()
    try:
        (listed,) = _peers(pair)
        assert listed["state"] == "disconnected", "nobody is there who would read from it"
    finally:
        pair["a"].start()


@pytest.mark.req("R-382", "R-383")
async def test_a_relay_says_in_packets_where_it_is_and_what_peers_get(pair: Federated):
    did = pair.identities["b"].did
    for name in "ab":  # and the relay that reads from it learns of it
        events = await holds(pair[name], [did], lambda found: len(found) >= 2)
        said = {event["packet"]["content"]["type"]: event["packet"] for event in events}
        assert set(said) == {"RELAY_DESCRIPTOR", "CONFIG"}
        descriptor, config = said["RELAY_DESCRIPTOR"]["content"], said["CONFIG"]["content"]
        assert (descriptor["relay_id"], descriptor["ws_endpoint"]) == (did, "wss://b.example/strata")
        assert (config["config_type"], config["relay_id"]) == ("REPLICATION_POLICY_V1", did)
        assert [profile["name"] for profile in config["profiles"]] == ["FULL_ARCHIVE", "PUBLIC_SOCIAL"]


@pytest.mark.req("R-290", "R-356", "R-358")
async def test_a_relay_that_the_upstream_does_not_list_reads_nothing(pair: Federated):
    author = new_identity()
    async with open_client(pair["a"].ws) as client:
        await client.publish_all([make(author, n=0)])
    await peer_comes_to(pair["b"], lambda peer: "replication_peers" in str(peer["problem"]))
    assert await ids_at(pair["b"], [author.did]) == []
    manifest = json.loads(http_get(f"{pair['a'].http}/.well-known/strata-relay.json")[2])
    assert manifest["replication"]["accepts_peer_subscriptions"] is False


@pytest.mark.req("R-355", "R-359", "R-361", "R-362")
async def test_what_a_session_that_may_replicate_is_served(ring: Federated):
    """R-355 from outside: a peer states which relay it is and that it wants to replicate."""
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
            (client, "PUBLIC_SOCIAL", {"types": ["NOTE"]}, 0),
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
            assert len(await who.events(f"s{n}", count)) == count if count else True
            assert (await who.receive())["type"] == "END_OF_HISTORY"
        await client.send(
            {"type": "SUBSCRIBE", "subscription_id": "t", "replication_profile": "HIGH_TRUST_ONLY"}
        )
        assert (await client.receive())["code"] == "unsupported_profile"
    async with open_client(ring["b"].ws) as client:
        # Packets that b got from a are left out for a reader that also reads a, and for no other.
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


@pytest.mark.req("R-357", "R-359")
async def test_without_the_capability_a_session_that_asks_to_replicate_is_an_ordinary_reader(ring: Federated):
    """It gets the served form, and the profile has no effect."""
    author = new_identity()
    header = {"origin_type": "SOFTWARE", "genesis_media_hash": "0x" + "d1" * 32, "edit_history": []}
    content = {"type": "NOTE", "media": [{"media_hash": "0x" + "d1" * 32}]}
    packet = build(
        author, content, timestamp=int(time.time()), provenance_header=header, allow_unattested=True
    )
    forms = {}
    async with open_client(ring["a"].ws) as peer, open_client(ring["a"].ws) as other:
        granted = await peer.authenticate(ring.identities["b"], capabilities=["subscribe", "replicate"])
        refused = await other.authenticate(new_identity(), capabilities=["subscribe", "replicate"])
        assert (granted["capabilities"], refused["capabilities"]) == (
            ["subscribe", "replicate"],
            ["subscribe"],
        )
        await open_and_publish(ring["a"].ws, packet)
        for name, client in (("peer", peer), ("other", other)):
            profile = "PUBLIC_SOCIAL" if client is other else "FULL_ARCHIVE"
            (event,), _ = await client.subscribe("s", {"authors": [author.did]}, replication_profile=profile)
            forms[name] = event["packet"]["provenance_header"]["origin_type"]
    assert forms == {"peer": "SOFTWARE", "other": "UNKNOWN"}


async def open_and_publish(url: str, packet: Packet) -> None:
    async with open_client(url) as client:
        answer = await client.publish(packet)
        assert answer["type"] == "OK", answer


@pytest.mark.req("R-348")
def test_a_relay_that_reads_from_peers_and_serves_them_is_a_whole_relay(ring: Federated):
    """RFC-0004 and the rules for packets, checked from outside while the relay replicates both ways."""
    code, out, err = strata_command("conformance", "--json", ring["a"].ws, timeout=200)
    *results, summary = [json.loads(line) for line in out.splitlines()]
    assert not [each for each in results if each["result"] != "passed"]
    assert (code, summary["conforms"]) == (0, True), err
    assert summary["summary"]["MUST"]["passed"] > 100
    assert all(is_linked(ring, name, 2) for name in "abc")


@pytest.mark.req("R-352", "R-389")
async def test_the_manifest_says_that_peers_are_served(ring: Federated):
    manifest = json.loads(http_get(f"{ring['a'].http}/.well-known/strata-relay.json")[2])
    assert manifest["relay_id"] == ring.identities["a"].did
    assert manifest["replication"] == {
        "accepts_peer_subscriptions": True,
        "supported_profiles": ["FULL_ARCHIVE", "PUBLIC_SOCIAL"],
        "requires_auth": True,
    }
