"""Packets that a relay lacks though its cursors have passed them are found by comparing sets, and fetched."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from strata.protocol import canonical
from strata.protocol.negentropy import ItemSet, Reconciler

from relayd.config import Settings
from relayd.database import database_beside
from tests.support.bare_client import open_client
from tests.support.federations import (
    Federated,
    eventually,
    federated,
    holds,
    ids_at,
    noted,
    peer_comes_to,
    peers_command,
)
from tests.support.forks import RELAYD, run_fork
from tests.support.made_packets import ids_of, make, new_identity
from tests.support.relay_process import RelayProcess, environment, http_get

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federated]:
    """Relay a reads from b, and compares on request, a thousand packets at a time."""
    settings: dict[str, Any] = {"reconcile_interval": 0, "reconcile_max_items": 1000}
    with federated(tmp_path_factory.mktemp("pair"), "ab", [("a", "b")], **settings) as relays:
        yield relays


async def lose(relay: RelayProcess, packet_ids: list[str]) -> None:
    """Delete packets from a relay's database as no program of ours ever does."""
    settings = dataclasses.replace(Settings(), data_dir=Path(str(relay.settings["data_dir"])))
    ids = [bytes.fromhex(packet_id[2:]) for packet_id in packet_ids]
    async with database_beside(settings) as url:
        connection = await asyncpg.connect(url)
        for table in ("packets", "packet_ids"):
            done = await connection.execute(f"DELETE FROM {table} WHERE packet_id = ANY ($1::bytea[])", ids)
            assert done == f"DELETE {len(ids)}"
        await connection.close()


async def reconciled(relays: Federated, *arguments: str, exit_code: int = 0) -> dict[str, Any]:
    did = relays.identities["b"].did
    done = await asyncio.to_thread(peers_command, relays["a"], "reconcile", did[:-2], "--json", *arguments)
    assert done.returncode == exit_code, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def restart(relay: RelayProcess) -> None:
    """Start a fresh process, which does not remember what its database has lost."""
    relay.kill()
    relay.start()


@pytest.mark.req("R-367")
async def test_what_was_lost_although_cursors_have_passed_it_is_brought(pair: Federated):
    author, other = new_identity(), new_identity()
    packets = [make(author, age=300 + n) for n in range(30)]
    further = [make(other, age=300 + n) for n in range(3)]
    short = [make(author, age=300, expires_in=3)]
    async with open_client(pair["b"].ws) as client:
        for answer in await client.publish_all([*packets, *further, *short]):
            assert answer["type"] == "OK", answer
    everything = await holds(pair["a"], [author.did, other.did], lambda found: len(found) >= 33)
    await lose(pair["a"], [packet.packet_id for packet in packets[5:15]])
    restart(pair["a"])
    await peer_comes_to(pair["a"], lambda peer: peer["state"] == "connected")
    assert len(await ids_at(pair["a"], [author.did])) <= 21, "the cursor has passed them"
    found = await reconciled(pair)
    assert (found["need"], found["brought"], found["withheld"], found["refused"]) == (10, 10, 0, 0)
    did = pair.identities["b"].did  # it has sent what it named; and reading had already passed that
    await eventually(lambda: noted(pair["a"], did, "presence") == (1, 0))
    assert noted(pair["a"], did, "consistency") == (0, 1)
    after = await ids_at(pair["a"], [author.did, other.did])
    assert {packet.packet_id for packet in (*packets, *further)} <= set(ids_of(after))
    assert len(after) == len(set(ids_of(after)))
    # Each keeps the time at which the first relay received it.
    witnessed = {event["packet"]["packet_id"]: event["received_at"] for event in everything}
    for event in after:
        assert event["received_at"] == witnessed[event["packet"]["packet_id"]]
    found = await reconciled(pair, "--since", "1d")
    assert (found["need"], found["brought"], found["problem"]) == (0, 0, None)
    assert found["rounds"] == 2, "one for the keys of all times, and one for the rest"
    text = http_get(pair["a"].ready["metrics"])[2].decode()
    assert f'relayd_peer_differences_total{{kind="brought",peer="{did}"}} 10.0' in text
    assert f'relayd_peer_comparisons_total{{outcome="equal",peer="{did}"}} 1.0' in text


async def test_too_many_packets_for_one_comparison_are_compared_in_parts(pair: Federated):
    author = new_identity()
    packets = [make(author, age=3600 + n) for n in range(1500)]
    async with open_client(pair["b"].ws) as client:
        for start in range(0, 1500, 250):
            await client.publish_all(packets[start : start + 250])
    await holds(pair["a"], [author.did], lambda found: len(found) >= 1500)
    await lose(pair["a"], [packet.packet_id for packet in packets[::100]])
    restart(pair["a"])
    found = await reconciled(pair)
    assert (found["need"], found["brought"], found["problem"]) == (15, 15, None)
    assert found["parts"] > 3
    async with open_client(pair["b"].ws) as client:
        await client.authenticate(pair.identities["a"], capabilities=["subscribe", "replicate"])
        large = await client.ask({"type": "RECONCILE", "until": 2**40, "message": "61"})
        assert (large["code"], large["detail"]) == ("rate_limited", "reconcile_too_large")
        assert large["limit"] == 1000
    assert len(await ids_at(pair["a"], [author.did])) == 1500


@pytest.mark.req("R-373")
async def test_what_this_relay_has_erased_does_not_come_back(pair: Federated):
    author = new_identity()
    packets = [make(author, age=500 + n) for n in range(4)]
    async with open_client(pair["b"].ws) as client:
        await client.publish_all(packets)
    await holds(pair["a"], [author.did], lambda found: len(found) == 4)
    command = ["erase", "--reason", "asked for", packets[0].packet_id]
    code, _, err = await asyncio.to_thread(run_fork, RELAYD, command, env=environment(pair["a"].settings))
    assert code == 0, err.decode()
    for _ in range(2):  # nor does it count as missing
        found = await reconciled(pair)
        assert (found["need"], found["brought"], found["known"]) == (0, 0, 1)
    assert len(await ids_at(pair["a"], [author.did])) == 3


@pytest.mark.req("R-113", "R-373")
async def test_what_repeats_another_packet_here_is_not_requested_again_and_again(pair: Federated):
    author = new_identity()
    inner: dict[str, Any] = {
        "attestation_id": "0x01",
        "attestor_id": author.did,
        "target_packet": "0x" + "a" * 64,
        "subject": "SPAM",
        "confidence": 0.5,
        "issued_at": 1,
    }
    inner["signature"] = f"0x{author.sign(canonical.encode(inner)).hex()}"
    content: dict[str, Any] = {"target_packet": inner["target_packet"], "attestation": inner}
    for name, age in (("a", 500), ("b", 400)):  # the same attestation, in two packets
        async with open_client(pair[name].ws) as client:
            answer = await client.publish(make(author, type="ATTESTATION", age=age, **content))
            assert "duplicate" not in answer, answer
    found = await reconciled(pair)  # by its end, a second or two later, what was not taken is recorded
    found = await reconciled(pair)
    assert (found["need"], found["refused"], found["problem"]) == (0, 0, None)


@pytest.mark.req("R-353")
async def test_what_a_session_may_ask(pair: Federated):
    first = Reconciler(ItemSet([])).initiate().hex()
    whole = {"type": "RECONCILE", "until": 2**40, "message": first}
    async with open_client(pair["b"].ws) as stranger, open_client(pair["b"].ws) as client:
        refused = await stranger.ask(whole)
        assert (refused["code"], refused["detail"]) == ("unauthenticated", "missing_capability")
        granted = await client.authenticate(pair.identities["a"], capabilities=["subscribe", "replicate"])
        assert "replicate" in granted["capabilities"]
        assert "reconcile" in granted["extensions"]
        for message in (
            {"type": "RECONCILE", "message": first},  # nothing is open
            {**whole, "message": "no hex"},
            {**whole, "types": ["NOBODY_HAS_THIS"], "message": "6100"},
            {**whole, "until": -1},
            {**whole, "types": ["T"] * 3 + [f"T{n}" for n in range(70)]},
        ):
            answer = await client.ask(message)
            assert (answer["type"], answer["code"]) == ("ERROR", "invalid_schema"), message
        equal = await client.ask({**whole, "types": ["NOBODY_HAS_THIS"]})
        assert (equal["type"], equal["message"]) == ("RECONCILED", "6100000200"), "no ids here either"
        other_version = await client.ask({"type": "RECONCILE", "message": "62"})
        assert other_version["message"] == "61"


async def test_how_an_operator_looks_at_a_peer(pair: Federated):
    did = pair.identities["b"].did
    author = new_identity()
    async with open_client(pair["b"].ws) as client:
        await client.publish_all([make(author)])
    await holds(pair["a"], [author.did], lambda found: len(found) == 1)
    async with asyncio.timeout(30):
        while True:  # until it learns that nothing is missing
            checked = await asyncio.to_thread(peers_command, pair["a"], "check", "--json")
            (found,) = json.loads(checked.stdout)["peers"]
            if found["behind_seconds"] == 0:
                break
    assert checked.returncode == 0, checked.stderr
    assert (found["relay_id"], found["reached"], found["problem"]) == (did, True, None)
    assert found["grants"] == ["replicate", "subscribe"]
    assert "reconcile" in found["extensions"]
    assert abs(found["clock_ahead"]) < 60
    for command in ("check", "show", "reconcile"):
        done = await asyncio.to_thread(peers_command, pair["a"], command, did)
        assert done.returncode == 0, done.stderr
        assert done.stdout
    shown = await asyncio.to_thread(peers_command, pair["a"], "show", did, "--json")
    details = json.loads(shown.stdout)
    assert (details["relay_id"], details["state"]) == (did, "connected")
    assert details["equal_at"] >= details["compared"]["since"]
    for arguments in (("show", "did:nobody"), ("check", "did:nobody"), ("reconcile", did, "--since", "soon")):
        assert (await asyncio.to_thread(peers_command, pair["a"], *arguments)).returncode == 2
