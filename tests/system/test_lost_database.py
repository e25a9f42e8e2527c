"""A database that vanishes and returns while publishers and readers wait (R-189, R-192, R-200)."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import asyncpg
import pytest

from tests.support.bare_client import BareClient, open_client, publish_text
from tests.support.made_packets import ids_of, make, new_identity
from tests.support.relay_process import RelayProcess, frozen, running
from tests.support.waiting import wait_until


def url_of(relay: RelayProcess) -> str:
    """The URL of a relay's embedded database, for a superuser of this machine."""
    folder = next(Path(str(relay.settings["data_dir"])).glob("postgres-*"))
    return f"postgresql://relayd@/relayd?host={folder}&port=5432"


async def readiness(relay: RelayProcess, status: int, timeout: float = 60.0) -> None:
    async with asyncio.timeout(timeout):
        while (await asyncio.to_thread(relay.get, "/readyz"))[0] != status:  # noqa: ASYNC110 - another process
            await asyncio.sleep(0.05)


async def complete(client: BareClient, author: str, packets: list) -> None:
    events, _ = await client.subscribe("all", {"authors": [author], "limit": 500})
    assert ids_of(events) == [packet.packet_id for packet in packets]


async def test_a_relay_whose_database_takes_no_writes_is_not_ready_though_nobody_publishes(tmp_path: Path):
    identity = new_identity()
    with running(RelayProcess(tmp_path, workers=2)) as relay:
        before, after = make(identity), make(identity)
        async with open_client(relay.ws) as client:
            await client.publish(before)
        connection = await asyncpg.connect(
            url_of(relay), server_settings={"default_transaction_read_only": "off"}
        )
        for state, status in (("on", 503), ("off", 200)):
            await connection.execute(f"ALTER SYSTEM SET default_transaction_read_only = {state}")
            await connection.execute("SELECT pg_reload_conf()")
            for _ in range(8):  # either worker may answer
                await readiness(relay, status)
            assert await connection.fetchval("SELECT count(*) FROM packets") == 1
            assert relay.get(f"/packets/{before.packet_id}")[0] == 200
        await connection.close()
        async with open_client(relay.ws) as client:
            assert (await client.publish(after))["type"] == "OK"
        wait_until(lambda: relay.logged("database_back") >= 2, "the lines of both workers")
        assert relay.logged("database_lost") == 2 == relay.logged("database_back")


_FULL = (
    "CREATE FUNCTION full_disk() RETURNS trigger LANGUAGE plpgsql AS"
    " $$BEGIN RAISE EXCEPTION 'no room' USING ERRCODE = '{}'; END$$;"
    " CREATE TRIGGER full_disk BEFORE INSERT ON packets FOR EACH ROW EXECUTE FUNCTION full_disk()"
)
_EMPTIED = "DROP TRIGGER full_disk ON packets"


@pytest.mark.parametrize(
    ("fails", "mended"),
    [
        (_FULL.format("53100"), _EMPTIED),
        (_FULL.format("P0001"), _EMPTIED),
        (
            "ALTER SYSTEM SET synchronous_standby_names = 'away'",
            "ALTER SYSTEM RESET synchronous_standby_names",
        ),
    ],
    ids=["the disk is full", "any error", "no standby confirms commits"],
)
async def test_a_relay_whose_database_stores_nothing_is_not_ready_until_it_does(
    tmp_path: Path, fails: str, mended: str
):
    with running(RelayProcess(tmp_path, publish_timeout=1)) as relay:
        connection = await asyncpg.connect(url_of(relay), server_settings={"synchronous_commit": "local"})
        async with open_client(relay.ws) as client:
            await connection.execute(fails)
            await connection.execute("SELECT pg_reload_conf()")
            while (await client.publish(make(new_identity())))["type"] == "OK":
                pass  # the settings are not in force yet
            await readiness(relay, 503)
            await connection.execute(mended)
            await connection.execute("SELECT pg_reload_conf()")
            await readiness(relay, 200)
            assert (await client.publish(make(new_identity())))["type"] == "OK"
        await connection.close()


@pytest.mark.req("R-189", "R-192", "R-200")
@pytest.mark.parametrize("loss", ["killed", "terminated", "frozen"])
async def test_publishers_wait_for_the_database_and_nothing_is_lost_or_doubled(tmp_path: Path, loss):
    identity = new_identity()
    packets = [make(identity, n=n) for n in range(300)]
    with running(RelayProcess(tmp_path, publish_timeout=120)) as relay:
        async with open_client(relay.ws) as client, open_client(relay.ws) as reader:
            await reader.send(
                {
                    "type": "SUBSCRIBE",
                    "subscription_id": "s",
                    "filters": {"authors": [identity.did]},
                    "gapless": True,
                }
            )
            await reader.barrier()
            for packet in packets[:100]:
                await client.send(publish_text(packet, packet.packet_id))
            if loss == "killed":
                relay.postgres().kill()
            elif loss == "terminated":
                connection = await asyncpg.connect(url_of(relay))
                for _ in range(3):
                    await connection.execute(
                        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid()"
                        " AND backend_type = 'client backend'"
                    )
                await connection.close()
            with frozen(relay) if loss == "frozen" else contextlib.nullcontext():
                for packet in packets[100:200]:
                    await client.send(publish_text(packet, packet.packet_id))
                await client.barrier()  # the relay answers requests that need no database
                if loss == "frozen":
                    await readiness(relay, 503)
            for packet in packets[200:]:
                await client.send(publish_text(packet, packet.packet_id))
            answers = [await client.expect(lambda m: m["type"] in ("OK", "ERROR"), 120) for _ in packets]
            assert {answer["type"] for answer in answers} == {"OK"}
            assert sorted(a["packet_id"] for a in answers) == sorted(p.packet_id for p in packets)
            assert ids_of(await reader.events("s", 300, timeout=60)) == [p.packet_id for p in packets]
            await reader.barrier()
            assert not reader.inbox
            await readiness(relay, 200)
            await complete(client, identity.did, packets)


@pytest.mark.req("R-192", "R-199", "R-200")
async def test_what_cannot_be_stored_in_time_is_one_internal_error_and_safe_to_repeat(tmp_path: Path):
    identity = new_identity()
    packets = [make(identity, n=n) for n in range(20)]
    with running(RelayProcess(tmp_path, publish_timeout=0.5)) as relay:
        async with open_client(relay.ws) as client:
            with frozen(relay):
                answers = await asyncio.wait_for(client.publish_all(packets), 60)
                assert {(answer["type"], answer.get("code")) for answer in answers} == {
                    ("ERROR", "internal_error")
                }
                refused = await client.publish(make(identity, age=200_000))
                assert refused["code"] == "timestamp_too_old"
            async with asyncio.timeout(120):  # on a slow machine the first commits may be late again
                while {answer["type"] for answer in await client.publish_all(packets)} != {"OK"}:
                    pass
            events, _ = await client.subscribe("all", {"authors": [identity.did], "limit": 500})
            assert sorted(ids_of(events)) == sorted(packet.packet_id for packet in packets)
            assert relay.get(f"/packets/{packets[0].packet_id}")[0] == 200


@pytest.mark.req("R-200")
async def test_history_and_http_come_back_with_the_database(tmp_path: Path):
    identity = new_identity()
    packets = [make(identity, n=n) for n in range(50)]
    with running(RelayProcess(tmp_path, read_timeout=1)) as relay:
        async with open_client(relay.ws) as client:
            await client.publish_all(packets)
            with frozen(relay):
                name = client.name()
                await client.send(
                    {
                        "type": "SUBSCRIBE",
                        "subscription_id": "s",
                        "filters": {"authors": [identity.did]},
                        "history_marker": True,
                        "client_msg_id": name,
                    }
                )
                status, _, _ = await asyncio.to_thread(relay.get, f"/packets/{packets[0].packet_id}")
                assert status == 503
                assert (await asyncio.to_thread(relay.get, "/healthz"))[0] == 200
            await client.answer(name)
            assert ids_of(client.taken("s")) == [packet.packet_id for packet in packets]
