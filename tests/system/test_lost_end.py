"""A log that has lost its end: an older copy of the database is restored (R-154, R-155, R-157)."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import asyncpg
import pytest
import strata
from strata.txrx import TxRxSettings, dial, serve

from tests.support.backups import Copied
from tests.support.bare_client import BareClient, open_client
from tests.support.forks import RELAYD, STRATA, run_fork
from tests.support.made_packets import ids_of, make, new_identity
from tests.support.relay_process import PostgresHost, RelayProcess, environment, running
from tests.support.standbys import Standby
from tests.support.waiting import wait_until


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
    """Wait until the relay serves: it listens again after it has found its log replaced."""
    async with asyncio.timeout(60):
        while True:
            with contextlib.suppress(OSError, http.client.HTTPException):
                if (await asyncio.to_thread(relay.get, "/readyz"))[0] == 200:
                    return
            await asyncio.sleep(0.05)


@pytest.fixture
def open_server() -> Iterator[str]:
    """A PostgreSQL server in a folder that its user may enter, so that a standby can follow it."""
    with tempfile.TemporaryDirectory(prefix="relayd-primary-") as folder:
        Path(folder).chmod(0o755)
        host = PostgresHost(Path(folder))
        yield host.url
        host.close()


@pytest.fixture
async def database(shared_database: str) -> Copied:
    return await Copied(shared_database).make()


@pytest.mark.req("R-157")
async def test_a_reload_while_the_relay_begins_anew_is_not_lost(tmp_path: Path, database: Copied):
    file = tmp_path / "relayd.toml"
    file.write_text("")
    relay = RelayProcess(
        tmp_path,
        arguments=("--config", str(file)),
        database_url=database.url,
        failpoints="server.start=delay:3@2",
    )
    with running(relay):
        async with open_client(relay.ws) as client:
            await client.publish_all([make(new_identity())])
            await database.copy()
        await serving(relay)
        async with open_client(relay.ws) as client:
            await client.publish_all([make(new_identity())])
        await database.put_back()
        await asyncio.to_thread(wait_until, lambda: relay.logged("failpoint") == 1, "it to begin anew", 60)
        file.write_text("blocked_types = ['X']")
        os.kill(relay.pid, signal.SIGHUP)
        await asyncio.to_thread(wait_until, lambda: relay.logged("reloaded") == 1, "the reload", 60)
        await asyncio.to_thread(wait_until, lambda: relay.logged("serving") == 2, "it to serve", 60)
        _, _, manifest = await asyncio.to_thread(relay.get, "/.well-known/strata-relay.json")
        assert json.loads(manifest)["policy"]["declined_types"] == ["X"]


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
    if guarded:  # dies as soon as it notices
        relay.spawn()
        async with asyncio.timeout(60):
            while "log_epoch_begins" not in relay.log.read_text():  # noqa: ASYNC110 - another process
                await asyncio.sleep(0.01)
        relay.kill()
    else:
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
            # The lost packets were of a term that the copy does not know, but the guard does.
            assert ("cursor" in refused) is guarded
            # A place that both logs have stays valid.
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


@pytest.mark.req("R-157")
async def test_an_operators_new_epoch_and_what_the_command_line_says_of_it(tmp_path: Path, database: Copied):
    identity = new_identity()
    first, lost, new = ([make(identity, n=n) for n in range(start, start + 5)] for start in (0, 100, 200))
    position = tmp_path / "position"
    subscribe = ("subscribe", "--no-live", "--state", str(position), "--json")

    def strata_command(relay: RelayProcess) -> tuple[list[dict], str]:
        said, told = command(STRATA, *subscribe, "--relay", relay.ws)
        return [json.loads(line) for line in said.splitlines()], told

    relay = RelayProcess(tmp_path, database_url=database.url)
    with running(relay):
        relay.port = urlsplit(relay.ws).port or 0
        async with open_client(relay.ws) as client:
            await client.publish_all(first)
        relay.stop()
    await database.copy()
    with running(relay):
        async with open_client(relay.ws) as client:
            await client.publish_all(lost)
        records, said = await asyncio.to_thread(strata_command, relay)
        assert [record["packet"]["packet_id"] for record in records] == [
            packet.packet_id for packet in first + lost
        ]
        assert "log" not in said
        relay.stop()
    await database.put_back()
    told, _ = await asyncio.to_thread(command, RELAYD, "new-epoch", "--json", "--database-url", database.url)
    assert json.loads(told)["epoch"] == 2
    with running(relay):
        async with open_client(relay.ws) as client:
            await client.publish_all(new)
        assert json.loads(relay.get("/readyz")[2]) == {"status": "ready", "log_epoch": 2}
        (reset, *records), said = await asyncio.to_thread(strata_command, relay)
        assert set(reset) == {"log_reset"} and "may be missing" in said
        assert [record["packet"]["packet_id"] for record in records][-5:] == [
            packet.packet_id for packet in new
        ]
        checked, _ = await asyncio.to_thread(command, RELAYD, "doctor", "--database-url", database.url)
        assert "epoch 2" in checked


def command(program: str, *arguments: str) -> tuple[str, str]:
    """The output and the standard error of one of our commands, which must end successfully."""
    code, out, err = run_fork(program, arguments, env=environment({}), timeout=120)
    assert code == 0, err.decode()
    return out.decode(), err.decode()


async def take(deliveries: strata.Subscription, count: int, seen: list[object]) -> None:
    async with asyncio.timeout(90):
        while count:
            seen.append((await anext(deliveries)).packet.packet_id)
            count -= 1


@pytest.mark.req("R-154", "R-339")
async def test_a_subscription_is_told_of_the_reset_and_gets_every_new_packet_once(
    tmp_path: Path, database: Copied
):
    identity = new_identity()
    kept, lost, new = ([make(identity, n=n) for n in range(start, start + 50)] for start in (0, 100, 200))
    seen: list[object] = []
    told: list[strata.LogReset] = []

    def on_log_reset(reset: strata.LogReset) -> None:
        told.append(reset)
        seen.append(reset)

    with running(RelayProcess(tmp_path, database_url=database.url, workers=2)) as relay:
        async with (
            strata.connect(relay.ws) as publisher,
            strata.connect(relay.ws) as reader,
            reader.subscribe(on_log_reset=on_log_reset) as deliveries,
        ):
            for packet in kept:
                await publisher.publish(packet)
            await database.copy()
            for packet in lost:
                await publisher.publish(packet, timeout=60)
            await take(deliveries, 100, seen)
            await database.put_back()
            # Some lost ones too: their author publishes them again, and the reader already has them.
            for packet in lost[:5] + new:
                # A publish interrupted by the change of databases is repeated, and may find itself stored.
                await publisher.publish(packet, timeout=60)
            # So OK is not enough: the packets published again must be there.
            ids = [packet.packet_id for packet in lost[:5]]
            assert {found.packet.packet_id async for found in publisher.find(ids)} == set(ids)
            await take(deliveries, 50, seen)
            (reset,) = told
            # A worker that never learned the other's term cannot know how far the logs agree.
            assert reset.cursor is not None or reset.since is not None
            assert seen == [packet.packet_id for packet in kept + lost] + [reset] + [p.packet_id for p in new]
            assert reader.statistics.log_resets == 1


@pytest.mark.req("T-104", "R-154")
async def test_what_goes_from_a_tx_to_an_rx_through_the_loss_comes_once_and_in_order(
    tmp_path: Path, database: Copied
):
    patient = TxRxSettings(message_delivery_timeout=100.0)
    texts = [b"%d" % number for number in range(60)]
    with running(RelayProcess(tmp_path, database_url=database.url, workers=2)) as relay:
        address, rx = await serve(f"relay:{relay.ws}#/test/1/lost/proto", bytes, settings=patient)
        async with asyncio.timeout(100), rx, await dial(address, bytes, settings=patient) as tx:
            for number, text in enumerate(texts):
                if number == 20:
                    await database.copy()
                if number == 40:
                    await database.put_back()
                # Some are on their way when the log is replaced.
                await tx.send(text) if number % 20 < 15 else tx.post(text)
            await tx.drain()
            assert [await rx.recv() for _ in texts] == texts
            assert not rx.unread


@pytest.mark.req("R-154", "R-339")
async def test_a_pool_that_reads_a_relay_through_its_loss_misses_and_doubles_nothing(
    tmp_path: Path, database: Copied
):
    identity = new_identity()
    kept, lost, new = ([make(identity, n=n) for n in range(start, start + 20)] for start in (0, 100, 200))
    with (
        running(RelayProcess(tmp_path / "a", database_url=database.url)) as relay,
        running(RelayProcess(tmp_path / "b")) as other,
    ):
        options = strata.PoolOptions(sweep_interval=1, hold_back=0)
        async with (
            strata.connect(relay.ws) as here,
            strata.connect(other.ws) as there,
            strata.connect_pool([relay.ws, other.ws], options=options) as pool,
            pool.subscribe() as deliveries,
        ):
            for packet in kept:
                await here.publish(packet)
            await database.copy()
            for packet in lost:  # each relay has a part of the packets lost at the first one
                await here.publish(packet, timeout=60)
                await there.publish(packet)
            await database.put_back()
            for packet in new:
                await here.publish(packet, timeout=60)
            seen: list[str] = []
            async with asyncio.timeout(90):
                while len(seen) < 60:
                    seen.append((await anext(deliveries)).packet.packet_id)
            assert sorted(seen) == sorted(packet.packet_id for packet in kept + lost + new)


@pytest.mark.req("R-154", "R-157")
async def test_a_standby_that_lags_is_no_loss_and_one_that_is_promoted_without_the_end_is(
    tmp_path: Path, open_server: str
):
    database = await Copied(open_server).make()
    identity = new_identity()
    kept, lost, new = ([make(identity, n=n) for n in range(start, start + 20)] for start in (0, 100, 200))
    async with Standby(database.url) as standby:
        with running(
            RelayProcess(tmp_path, database_url=database.url, read_database_url=standby.url)
        ) as relay:
            async with open_client(relay.ws) as client:
                await client.publish_all(kept)
                await caught_up(standby, database)
                await standby.lose_contact()
                await client.publish_all(lost)
                ids, end = await read_all(client)
                assert ids == [packet.packet_id for packet in kept + lost]
                # The standby has not even received this place.
                ids, end = await read_all(client, end["cursor"])
                assert ids == [] and end["type"] == "END_OF_HISTORY"
            assert relay.metric("relayd_log_epoch") == 1
            assert not relay.complaints()
            relay.stop()
        await standby.promote()
        with running(RelayProcess(tmp_path, database_url=standby.url)) as relay:
            async with open_client(relay.ws) as client:
                await client.publish_all(new)
                _, refused = await read_all(client, end["cursor"])
                assert refused["detail"] == "log_reset"
                ids, _ = await read_all(client, refused["cursor"])
                assert ids == [packet.packet_id for packet in new]
            assert relay.metric("relayd_log_epoch") == 2
            relay.stop()
        # The old primary comes back as a replica, with an end that no other has: it is not queried.
        with running(
            RelayProcess(tmp_path, database_url=standby.url, read_database_url=database.url)
        ) as relay:
            async with open_client(relay.ws) as client:
                assert (await read_all(client))[0] == [packet.packet_id for packet in kept + new]


async def caught_up(standby: Standby, database: Copied) -> None:
    connection = await asyncpg.connect(database.url)
    try:
        head = await connection.fetchval("SELECT last_sequence FROM log_head")
    finally:
        await connection.close()
    async with asyncio.timeout(30):
        while await standby.execute("SELECT last_sequence FROM log_head") != head:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
