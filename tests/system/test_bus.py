"""Relays that announce commits over a real NATS server, beside one that listens to PostgreSQL."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.bare_client import BareClient, open_client
from tests.support.made_packets import ids_of, make, new_identity
from tests.support.nats import NatsServer
from tests.support.relay_process import RelayProcess, running
from tests.support.waiting import until


@pytest.fixture
def bus() -> Iterator[NatsServer]:
    server = NatsServer().start()
    yield server
    server.kill()


@pytest.mark.req("R-159", "R-161", "R-311")
async def test_relays_go_on_through_the_death_of_the_bus(
    tmp_path: Path, shared_database: str, bus: NatsServer
):
    identity = new_identity()
    packets = [make(identity, n=n) for n in range(300)]
    ids = [packet.packet_id for packet in packets]
    with (
        running(RelayProcess(tmp_path / "1", database_url=shared_database, bus_url=bus.url)) as one,
        running(RelayProcess(tmp_path / "2", database_url=shared_database, bus_url=bus.url)) as two,
        # One that does not have the setting yet.
        running(RelayProcess(tmp_path / "3", database_url=shared_database)) as three,
    ):
        async with (
            open_client(one.ws) as writer,
            open_client(three.ws) as late_writer,
            open_client(two.ws) as reader,
            open_client(three.ws) as other_reader,
        ):
            readers = (reader, other_reader)
            for each in readers:
                await follow(each, identity.did)
            await writer.publish_all(packets[:100])
            for each in readers:
                assert ids_of(await each.events("s", 100, timeout=60)) == ids[:100]
            bus.kill()
            await writer.publish_all(packets[100:150])
            await late_writer.publish_all(packets[150:200])
            for each in readers:
                assert ids_of(await each.events("s", 100, timeout=60)) == ids[100:200]
            await asyncio.to_thread(bus.start)
            await late_writer.publish_all(packets[200:250])
            await writer.publish_all(packets[250:])
            for each in readers:
                assert ids_of(await each.events("s", 100, timeout=60)) == ids[200:]
                await each.barrier()
                assert not each.inbox
        assert one.logged("bus_lost") == 1 and not one.complaints()
        await until(lambda: one.metric("relayd_bus_connected", bus="127.0.0.1") == 1)
        assert one.metric("relayd_bus_failures_total") >= 1
        assert one.metric("relayd_bus_wakeups_total", outcome="sent") >= 2
        assert one.get("/readyz")[0] == 200


async def follow(client: BareClient, author: str) -> None:
    filters = {"authors": [author]}
    await client.send({"type": "SUBSCRIBE", "subscription_id": "s", "filters": filters, "gapless": True})


@pytest.mark.req("R-316")
async def test_an_identity_has_one_budget_on_all_machines(
    tmp_path: Path, shared_database: str, bus: NatsServer
):
    limit, identity = 200, new_identity()
    settings = {
        "database_url": shared_database,
        "bus_url": bus.url,
        "publish_limit": limit,
        "limit_window_seconds": 3600,
        "unlimited_addresses": ["192.0.2.0/24"],
    }
    with (
        running(RelayProcess(tmp_path / "1", **settings)) as one,  # type: ignore[arg-type]
        running(RelayProcess(tmp_path / "2", **settings)) as two,  # type: ignore[arg-type]
    ):
        for relay in (one, two):
            await until(lambda: relay.metric("relayd_bus_connected", bus="127.0.0.1") == 1)  # noqa: B023
        async with open_client(one.ws) as here, open_client(two.ws) as there:
            for client in (here, there):
                assert (await client.authenticate(identity))["type"] == "AUTH_OK"
            answers = await here.publish_all([make(identity, n=n) for n in range(limit + 1)])
            assert [answer.get("code") for answer in answers] == [None] * limit + ["rate_limited"]
            let_in = 0
            while (await there.publish(make(identity)))["type"] == "OK":
                let_in += 1
                await asyncio.sleep(0.1)
            assert let_in < limit * 3 // 4
            assert two.metric("relayd_rate_limited_total") >= 1
        assert not one.complaints() + two.complaints()
