"""Several relays on one database (R-311): one log, one order, one delivery each."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from relayd.store import Store
from relayd.store.migrate import migrate
from tests.support.bare_client import Message, open_client
from tests.support.made_packets import ids_of, make, new_identity
from tests.support.relay_process import PostgresHost, RelayProcess, running
from tests.support.stored_packets import as_stored

DAY = 86_400


@pytest.fixture(scope="module")
def relays(
    shared_database: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[RelayProcess, RelayProcess, RelayProcess]]:
    folders = [tmp_path_factory.mktemp("relay") for _ in range(3)]
    one, two, three = (RelayProcess(folder, database_url=shared_database) for folder in folders)
    with running(one), running(two), running(three):
        yield one, two, three
        for relay in (one, two, three):
            assert not relay.complaints()
            assert relay.stop() == 0


def test_they_are_one_relay_by_name(relays):
    assert len({relay.ready["relay_id"] for relay in relays}) == 1


@pytest.mark.req("R-241", "R-242")
async def test_a_daily_budget_is_one_however_many_relays_an_identity_uses_at_once(relays):
    waves = 4
    identities = [new_identity() for _ in range(waves)]
    start = asyncio.Barrier(9)

    async def publish(relay: RelayProcess) -> list[str]:
        codes = []
        async with open_client(relay.ws) as client:
            for identity in identities:
                ends: dict[str, Any] = {"from": identity.did}
                edges = [
                    make(
                        identity,
                        type="TRUST_EDGE",
                        to=f"did:strata:{n}",
                        strength=0.9,
                        context=str(n),
                        created_at=int(time.time()),
                        **ends,
                    )
                    for n in range(10)
                ]
                await start.wait()
                codes += [answer.get("code", "ok") for answer in await client.publish_all(edges)]
        return codes

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(publish(relay)) for relay in relays for _ in range(3)]
    codes = Counter(code for task in tasks for code in task.result())
    assert codes == {"ok": 20 * waves, "rate_limited": 70 * waves}


@pytest.mark.req("R-111", "R-159", "R-161", "R-177", "R-311")
async def test_publishing_at_three_and_reading_at_three_is_one_log(relays):
    identity = new_identity()
    filters = {"authors": [identity.did]}
    packets = [make(identity, n=n) for n in range(600)]
    shared = packets[:60]  # every relay gets these
    # The rest comes once all have subscribed: of what is stored before, some readers get 500 at most.
    subscribed = asyncio.Barrier(9)

    async def publish(relay: RelayProcess, share: list) -> None:
        async with open_client(relay.ws) as client:
            answers = await client.publish_all(shared)
            await subscribed.wait()
            answers += await client.publish_all(share)
            assert {answer["type"] for answer in answers} == {"OK"}

    async def read(relay: RelayProcess, gapless: bool) -> list[str]:
        async with open_client(relay.ws) as client:
            message: Message = {"type": "SUBSCRIBE", "subscription_id": "s", "filters": dict(filters)}
            message |= {"gapless": True} if gapless else {}
            if not gapless:
                message["filters"]["limit"] = 500
            await client.send(message)
            await client.barrier()
            await subscribed.wait()
            got = ids_of(await client.events("s", 600, timeout=60))
            await client.barrier()
            assert not client.inbox
            return got

    async with asyncio.TaskGroup() as group:
        readers = [group.create_task(read(relay, gapless)) for relay in relays for gapless in (True, False)]
        for number, relay in enumerate(relays):
            group.create_task(publish(relay, packets[60 + number :: 3]))
    orders = [task.result() for task in readers]
    assert set(orders[0]) == {packet.packet_id for packet in packets}
    assert all(order == orders[0] for order in orders)


@pytest.mark.req("R-155", "R-311")
async def test_a_cursor_from_one_continues_at_another(relays):
    identity = new_identity()
    one, two, three = relays
    packets = [make(identity, n=n) for n in range(90)]
    async with open_client(one.ws) as a, open_client(two.ws) as b, open_client(three.ws) as c:
        await a.publish_all(packets)
        got: list[str] = []
        cursor = None
        for client in (a, b, c) * 3:
            events, end = await client.subscribe(
                "s", {"authors": [identity.did], "limit": 10, "cursor": cursor}
            )
            got += ids_of(events)
            cursor = end["cursor"]
            await client.send({"type": "UNSUBSCRIBE", "subscription_id": "s"})
    assert got == [packet.packet_id for packet in packets]


@pytest.mark.req("R-159", "R-311")
async def test_what_one_acknowledged_is_history_at_another_at_once(relays):
    one, two, _ = relays
    async with open_client(one.ws) as writer, open_client(two.ws) as reader:
        for _ in range(100):
            identity = new_identity()
            packet = make(identity)
            assert (await writer.publish(packet))["type"] == "OK"
            events, _ = await reader.subscribe("s", {"authors": [identity.did]})
            assert ids_of(events) == [packet.packet_id]


@pytest.mark.req("R-108", "R-309", "R-310")
async def test_retention_takes_whole_days_and_never_shortens_the_memory(tmp_path: Path):
    host = PostgresHost(tmp_path / "postgres")
    try:
        identity = new_identity()
        # Packets that arrived three days ago: only the store itself accepts a time other than now.
        old, exempt = make(identity, "old"), make(identity, type="KEY_EVENT")
        await migrate(host.url)
        store = await Store.open(host.url)
        await store.append([as_stored(old), as_stored(exempt)], int(time.time()) - 3 * DAY)
        await store.append([as_stored(make(identity, type="LATER"))], int(time.time()))
        await store.close()
        with running(RelayProcess(tmp_path, database_url=host.url, retention_days=1)) as relay:
            assert relay.get(f"/packets/{old.packet_id}")[0] == 410
            assert relay.get(f"/packets/{exempt.packet_id}")[0] == 200
            async with open_client(relay.ws) as client:
                events, _ = await client.subscribe("s", {"types": ["KEY_EVENT", "POST"]})
                assert ids_of(events) == [exempt.packet_id]
                assert (await client.publish(old)).get("duplicate") is True
                events, _ = await client.subscribe("s", {"types": ["KEY_EVENT", "POST"]})
                assert ids_of(events) == [exempt.packet_id]
    finally:
        host.close()
