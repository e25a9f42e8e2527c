"""A log that has lost its end: an older copy of the database is put back (R-154, R-155, R-157)."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
from pathlib import Path

import pytest

from tests.support.backups import Copied
from tests.support.bare_client import BareClient, open_client
from tests.support.made_packets import ids_of, make, new_identity
from tests.support.relay_process import RelayProcess, running


async def read_all(client: BareClient, cursor: str | None = None) -> tuple[list[str], dict]:
    """The ids of all packets after a cursor, and the last answer."""
    ids: list[str] = []
    while True:
        events, end = await client.subscribe("all", {"limit": 500, "cursor": cursor})
        ids += ids_of(events)
        await client.send({"type": "UNSUBSCRIBE", "subscription_id": "all"})
        if end["type"] == "ERROR" or end["complete"]:
            return ids, end
        cursor = end["cursor"]


async def serving(relay: RelayProcess) -> None:
    """Wait until the relay serves: it listens anew after it has found its log replaced."""
    async with asyncio.timeout(60):
        while True:
            with contextlib.suppress(OSError, http.client.HTTPException):
                if (await asyncio.to_thread(relay.get, "/readyz"))[0] == 200:
                    return
            await asyncio.sleep(0.05)


@pytest.fixture
async def database(shared_database: str) -> Copied:
    return await Copied(shared_database).make()


@pytest.mark.req("R-154", "R-157")
@pytest.mark.parametrize("guarded", [True, False])
async def test_a_cursor_behind_the_end_of_a_restored_backup_is_invalid_and_says_where_to_go_on(
    tmp_path: Path, database: Copied, guarded: bool
):
    identity = new_identity()
    kept, lost, new = ([make(identity, n=n) for n in range(start, start + 20)] for start in (0, 100, 200))
    relay = RelayProcess(tmp_path, database_url=database.url)
    with running(relay):
        async with open_client(relay.ws) as client:
            await client.publish_all(kept)
            _, end_of_kept = await read_all(client)
            await database.copy()
            await client.publish_all(lost)
            ids, end_of_lost = await read_all(client)
            assert ids == [packet.packet_id for packet in kept + lost]
        assert relay.stop() == 0
    await database.put_back()
    if not guarded:
        (tmp_path / ".relayd" / "log-guard").unlink()
    with running(relay):
        async with open_client(relay.ws) as client:
            await client.publish_all(new)
            _, refused = await read_all(client, end_of_lost["cursor"])
            assert (refused["type"], refused["code"], refused["detail"]) == (
                "ERROR",
                "invalid_cursor",
                "log_reset",
            )
            # The lost packets were of a term that the copy does not know: the guard does.
            assert ("cursor" in refused) is guarded
            # A place that both logs have stays good.
            ids, end = await read_all(client, refused.get("cursor", end_of_kept["cursor"]))
            assert ids == [packet.packet_id for packet in new]
            assert (await read_all(client, end_of_kept["cursor"]))[0] == ids
            assert (await read_all(client, end["cursor"]))[0] == []
        assert relay.metric("relayd_log_epoch") == 2
        assert relay.metric("relayd_lost_cursors_total") == 1
        assert len([line for line in relay.complaints() if "log_epoch_begins" in line]) == 1


@pytest.mark.req("R-154", "R-157")
async def test_relays_that_run_through_the_swap_begin_anew(tmp_path: Path, database: Copied):
    identity = new_identity()
    kept, lost, new = ([make(identity, n=n) for n in range(start, start + 20)] for start in (0, 100, 200))
    with (
        running(RelayProcess(tmp_path / "a", database_url=database.url)) as relay,
        running(RelayProcess(tmp_path / "b", database_url=database.url)) as other,
    ):
        async with open_client(relay.ws) as client:
            await client.publish_all(kept)
        await database.copy()
        async with open_client(relay.ws) as client, open_client(other.ws) as reader:
            await client.publish_all(lost)
            await reader.send({"type": "SUBSCRIBE", "subscription_id": "s", "gapless": True})
            events = await reader.events("s", 40)
            assert ids_of(events) == [packet.packet_id for packet in kept + lost]
            await database.put_back()
            for peer in (client, reader):
                await asyncio.wait_for(peer.socket.wait_closed(), 60)
        await asyncio.gather(serving(relay), serving(other))
        for one in (relay, other):
            async with open_client(one.ws) as client:
                _, refused = await read_all(client, events[-1]["cursor"])
                assert refused["detail"] == "log_reset"
                assert (await read_all(client, refused["cursor"]))[0] == []
        async with open_client(relay.ws) as client, open_client(other.ws) as reader:
            await client.publish_all(new)
            ids, _ = await read_all(reader, refused["cursor"])
            assert ids == [packet.packet_id for packet in new]
        assert relay.metric("relayd_log_epoch") == other.metric("relayd_log_epoch") == 2
        assert relay.get("/readyz")[0] == 200
