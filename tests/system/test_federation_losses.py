"""Relays of which one loses something nobody has noticed yet: no peer is wronged, and nothing is missing."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from strata.protocol import canonical
from strata.protocol.ids import Identity
from strata.protocol.packets import Packet

from tests.support.bare_client import open_client
from tests.support.federations import Federated, eventually, federated, holds, peer_comes_to, peers_command
from tests.support.made_packets import ids_of, make, new_identity
from tests.support.relay_process import RelayProcess
from tests.support.tx_rx_proxy import TxRxProxy

pytestmark = pytest.mark.timeout(400)
RING = [("a", "b"), ("b", "a"), ("b", "c"), ("c", "b"), ("c", "a"), ("a", "c")]


async def publish(relay: RelayProcess, *packets: Packet) -> None:
    async with open_client(relay.ws) as client:
        for answer in await client.publish_all(list(packets)):
            assert answer["type"] == "OK", answer


def attestation(author: Identity, age: int) -> Packet:
    """The same statement, whatever the age of the packet that carries it."""
    inner: dict[str, Any] = {
        "attestation_id": "0x01",
        "attestor_id": author.did,
        "target_packet": "0x" + "a" * 64,
        "subject": "SPAM",
        "confidence": 0.5,
        "issued_at": 1,
    }
    inner["signature"] = f"0x{author.sign(canonical.encode(inner)).hex()}"
    return make(author, type="ATTESTATION", age=age, target_packet=inner["target_packet"], attestation=inner)


async def compared(relays: Federated, reader: str, upstream: str) -> dict[str, Any]:
    """Compare once; the result, and the offences that the reader holds against its peer."""
    did = relays.identities[upstream].did
    await peer_comes_to(relays[reader], lambda peer: peer["state"] == "connected")
    done = await asyncio.to_thread(peers_command, relays[reader], "reconcile", did, "--json")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    shown = await asyncio.to_thread(peers_command, relays[reader], "show", did, "--json")
    return found | {"offences": json.loads(shown.stdout)["offences"]}


@pytest.mark.req("R-374", "R-379", "R-381")
async def test_a_relay_restored_from_a_backup_does_not_accuse_a_peer_of_what_that_refused(tmp_path: Path):
    blocked, author = new_identity(), new_identity()
    strict = {"blocked_types": ["SPAM"], "blocked_authors": [blocked.did], "max_packet_bytes": 4096}
    links = [("a", "b"), ("b", "a")]
    with federated(tmp_path, "ab", links, per_relay={"b": strict}, reconcile_interval=0) as relays:
        a, b = relays["a"], relays["b"]
        await publish(b, attestation(author, 400))
        await holds(a, [author.did], lambda found: len(found) == 1)
        a.stop()
        data, backup = Path(str(a.settings["data_dir"])), tmp_path / "backup"
        copying = await asyncio.create_subprocess_exec("cp", "-a", data, backup)  # with PostgreSQL's user
        assert await copying.wait() == 0
        a.start()
        declined = [
            *(make(author, type="SPAM", age=300 + n) for n in range(30)),
            make(blocked, age=300),
            make(author, age=300, text="x" * 5000),
        ]
        passed = make(author, age=200)
        await publish(a, *declined, passed)
        await holds(b, [author.did], lambda found: passed.packet_id in ids_of(found))
        await peer_comes_to(b, lambda peer: peer["skipped"] == len(declined))
        a.stop()
        shutil.rmtree(data)
        backup.rename(data)
        (data / "log-guard").unlink()
        a.start()
        first = await compared(relays, "a", "b")
        assert (first["need"], first["brought"]) == (1, 1), "what it has lost, and the peer has"
        for reader, upstream in [*links, *links]:
            found = await compared(relays, reader, upstream)
            assert (found["need"], found["withheld"], found["problem"], found["offences"]) == (0, 0, None, 0)


def read_through(relays: Federated, reader: str, upstream: str, proxy: TxRxProxy) -> None:
    """Have one relay reach another through a proxy from now on."""
    file = Path(str(relays[reader].settings["peers_file"]))
    file.write_text(
        file.read_text().replace(f":{relays[upstream].port}/", f":{proxy.address.rsplit(':')[-1]}/")
    )
    relays[reader].kill()
    relays[reader].start()


@pytest.mark.req("R-364")
@pytest.mark.parametrize("hit", ["relay", "database"])
async def test_what_a_member_published_that_died_unnoticed_comes_though_the_reader_is_hit_too(
    tmp_path: Path, hit: str
):
    """Its peer has withheld it, and its cursor has passed it, before the reader knows of the death."""
    author = new_identity()
    with federated(tmp_path, "abc", RING, group="ring", reconcile_interval=0) as relays:
        a, b, c = relays["a"], relays["b"], relays["c"]
        async with TxRxProxy(f"tcp:127.0.0.1:{c.port}") as proxy:
            read_through(relays, "a", "c", proxy)
            await publish(c, make(author))
            await holds(a, [author.did], lambda found: len(found) == 1)
            await eventually(lambda: a.metric("relayd_peer_connected") == 2)
            proxy.stall()
            await publish(c, *(make(author) for _ in range(20)))
            await holds(b, [author.did], lambda found: len(found) == 21)
            await publish(b, *(make(author) for _ in range(20)))
            await holds(a, [author.did], lambda found: len(found) == 21)
            if hit == "relay":
                a.kill()
                c.kill()
                a.start()
            else:
                before = a.logged("reads_from_peers")
                a.postgres().kill()
                c.kill()
                await eventually(lambda: a.logged("reads_from_peers") > before)
            await holds(a, [author.did], lambda found: len(found) == 41)
