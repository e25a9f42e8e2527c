"""Rate limits and connection caps of a running relay, seen from addresses without exemptions."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from websockets.exceptions import InvalidStatus

from tests.support.bare_client import BareClient, Message, open_client
from tests.support.made_packets import ids_of, make, new_identity
from tests.support.relay_process import RelayProcess, http_get, running

NOWHERE = "192.0.2.0/24"
"""Nobody connects from there: with this as `unlimited_addresses` the limits apply to this machine too."""
HOUR = 3600
LIMITS: dict[str, Any] = {
    "limit_window_seconds": HOUR,
    "anonymous_publish_limit": 5,
    "publish_limit": 8,
    "anonymous_subscribe_limit": 4,
    "subscribe_limit": 6,
    "auth_limit": 60,
}


@pytest.fixture(scope="module")
def proxied(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RelayProcess]:
    """A relay behind a proxy on this machine: a test connects as any address with X-Forwarded-For."""
    folder = tmp_path_factory.mktemp("proxied")
    with running(RelayProcess(folder, trusted_proxies=["127.0.0.1"], **LIMITS)) as process:
        yield process
        assert not process.complaints()


_addresses = (f"198.51.100.{number}" for number in range(1, 255))


@pytest.fixture
def address() -> str:
    """An address that no other test has."""
    return next(_addresses)


def come_from(relay: RelayProcess, address: str) -> Any:
    return open_client(relay.ws, additional_headers={"X-Forwarded-For": f"203.0.113.1, {address}"})


def assert_limited(answer: Message, limit: int, detail: str) -> None:
    assert (answer["type"], answer["code"], answer["detail"]) == ("ERROR", "rate_limited", detail)
    assert isinstance(answer["retry_after"], int)
    assert 1 <= answer["retry_after"] <= HOUR
    assert (answer["limit"], answer["remaining"], answer["window_seconds"]) == (limit, 0, HOUR)


async def publish(client: BareClient, count: int) -> list[Message]:
    identity = new_identity()
    return await client.publish_all([make(identity) for _ in range(count)])


@pytest.mark.req("R-314", "R-315")
async def test_the_sixth_publish_is_refused_and_the_connection_lives(proxied: RelayProcess, address: str):
    async with come_from(proxied, address) as client:
        answers = await publish(client, 6)
        assert [answer["type"] for answer in answers] == ["OK"] * 5 + ["ERROR"]
        assert_limited(answers[5], 5, "publish_limit")
        await client.barrier()


@pytest.mark.req("R-316")
async def test_limits_go_by_address_until_a_session_authenticates(proxied: RelayProcess, address: str):
    identity = new_identity()
    async with come_from(proxied, address) as one, come_from(proxied, address) as other:
        await publish(one, 4)
        assert [answer["type"] for answer in await publish(other, 2)] == ["OK", "ERROR"]
        await one.authenticate(identity)
        await other.authenticate(identity)
        answers = await publish(one, 5) + await publish(other, 5)
        assert [answer["type"] for answer in answers] == ["OK"] * 8 + ["ERROR"] * 2
        assert_limited(answers[-1], 8, "publish_limit")
    async with come_from(proxied, next(_addresses)) as elsewhere:
        await elsewhere.authenticate(identity)
        assert_limited((await publish(elsewhere, 1))[0], 8, "publish_limit")


@pytest.mark.req("R-317")
async def test_subscribes_are_counted_apart_and_together_with_packets_by_id(
    proxied: RelayProcess, address: str
):
    async with come_from(proxied, address) as client:
        packet = make(new_identity())
        await client.publish(packet)
        for number in range(3):
            assert (await client.subscribe(f"s{number}"))[1]["type"] == "END_OF_HISTORY"
        path = f"{proxied.http}/packets/{packet.packet_id}"
        assert http_get(path, headers={"X-Forwarded-For": address})[0] == 200
        assert_limited((await client.subscribe("s3"))[1], 4, "subscribe_limit")
        status, headers, body = http_get(path, headers={"X-Forwarded-For": address})
        assert status == 429
        assert int(headers["retry-after"]) >= 1
        assert json.loads(body)["error"] == "rate_limited"
        assert (await client.publish(make(new_identity())))["type"] == "OK"


@pytest.mark.req("R-317", "R-325")
async def test_the_manifest_says_what_is_enforced(proxied: RelayProcess):
    rates = json.loads(proxied.get("/.well-known/strata-relay.json")[2])["limits"]["rates"]
    assert (rates["window_seconds"], rates["enforced_by"], rates["processes"]) == (HOUR, "process", 1)
    assert (rates["anonymous_address"]["publishes"], rates["identity"]["publishes"]) == (5, 8)
    assert (rates["anonymous_address"]["subscribes"], rates["identity"]["subscribes"]) == (4, 6)
    assert rates["address"]["auths"] == 60


@pytest.mark.req("R-317")
async def test_auths_and_connections_have_limits_of_their_own(tmp_path: Path):
    settings: dict[str, Any] = {"auth_limit": 2, "connection_limit": 3, "limit_window_seconds": HOUR}
    with running(RelayProcess(tmp_path, unlimited_addresses=[NOWHERE], **settings)) as process:
        async with AsyncExitStack() as stack:
            clients = [await stack.enter_async_context(open_client(process.ws)) for _ in range(3)]
            for client in clients[:2]:
                assert (await client.authenticate(new_identity()))["type"] == "AUTH_OK"
            assert_limited(await clients[2].authenticate(new_identity()), 2, "auth_limit")
            with pytest.raises(InvalidStatus) as refused:
                await stack.enter_async_context(open_client(process.ws))
            assert refused.value.response.status_code == 429
            assert int(refused.value.response.headers["Retry-After"]) >= 1


@pytest.mark.req("R-321")
async def test_one_address_holds_only_so_many_connections(tmp_path: Path):
    settings: dict[str, Any] = {"max_connections_per_address": 2, "max_connections": 5}
    with running(RelayProcess(tmp_path, trusted_proxies=["127.0.0.1"], **settings)) as process:
        async with AsyncExitStack() as stack:
            for number in (1, 1, 2, 2):
                await stack.enter_async_context(come_from(process, f"198.51.100.{number}"))
            for number, status in ((1, 429), (3, None), (4, 503)):
                if status is None:
                    await stack.enter_async_context(come_from(process, f"198.51.100.{number}"))
                    continue
                with pytest.raises(InvalidStatus) as refused:
                    await stack.enter_async_context(come_from(process, f"198.51.100.{number}"))
                assert refused.value.response.status_code == status


@pytest.mark.req("R-357", "R-376", "R-377")
async def test_a_peer_over_its_limit_is_told_when_to_come_back(tmp_path: Path):
    """Each peer has its own limit; an unlisted session that requests to replicate has the ordinary one."""
    peer, other, unlisted = new_identity(), new_identity(), new_identity()
    settings: dict[str, Any] = {"subscribe_limit": 1, "limit_window_seconds": HOUR}
    settings |= {"unlimited_addresses": [NOWHERE], "replication_peers": [peer.did, other.did]}
    with running(RelayProcess(tmp_path, **settings)) as process:
        for who in (peer, other, unlisted):
            async with open_client(process.ws) as client:
                answer = await client.authenticate(who, capabilities=["subscribe", "replicate"])
                assert ("replicate" in answer["capabilities"]) is (who is not unlisted)
                more: dict[str, Any] = {"replication_profile": "FULL_ARCHIVE"}
                assert (await client.subscribe("s", **more))[1]["type"] == "END_OF_HISTORY"
                assert_limited((await client.subscribe("t", **more))[1], 1, "subscribe_limit")


@pytest.mark.req("R-317", "R-380")
async def test_history_over_the_byte_budget_comes_later_and_whole(tmp_path: Path):
    """An open stream is slowed down and loses nothing; a new one is refused meanwhile."""
    settings: dict[str, Any] = {"anonymous_backfill_limit_bytes": 40_000, "limit_window_seconds": 1}
    with running(RelayProcess(tmp_path, unlimited_addresses=[NOWHERE], **settings)) as process:
        identity = new_identity()
        packets = [make(identity, "x" * 300) for _ in range(200)]
        async with open_client(process.ws) as client:
            assert {answer["type"] for answer in await client.publish_all(packets)} == {"OK"}
            await client.send({"type": "SUBSCRIBE", "subscription_id": "s", "gapless": True, "filters": {}})
            assert ids_of(await client.events("s", 200)) == [packet.packet_id for packet in packets]
            refused = await client.ask({"type": "SUBSCRIBE", "subscription_id": "t"})
            assert refused["detail"] == "backfill_limit"
            await asyncio.sleep(refused["retry_after"])  # as a client is told to do
            assert (await client.subscribe("t"))[1]["type"] == "END_OF_HISTORY"


@pytest.mark.req("R-318", "R-321")
async def test_this_machine_is_free_of_limits_unless_told_otherwise(tmp_path: Path):
    with running(RelayProcess(tmp_path, anonymous_publish_limit=1)) as process:
        assert "anonymous_publish_limit" in process.last_words()  # a warning: it affects nobody here
        async with open_client(process.ws) as client:
            assert {answer["type"] for answer in await publish(client, 20)} == {"OK"}
        # A client that comes through a proxy is not from this machine.
        async with come_from(process, "198.51.100.1") as client:
            assert [answer["type"] for answer in await publish(client, 2)] == ["OK", "ERROR"]


@pytest.mark.req("R-316", "R-321")
async def test_workers_of_a_machine_have_one_limit(tmp_path: Path):
    """Whichever worker the kernel assigns a connection to, and whatever the other worker has admitted."""
    here: dict[str, Any] = {**LIMITS, "unlimited_addresses": NOWHERE, "connection_limit": 0}
    relay = RelayProcess(tmp_path, workers=2, max_connections_per_address=6, **here)
    author = new_identity()
    with running(relay):
        async with AsyncExitStack() as stack:
            clients: list[BareClient] = []
            refused = 0
            async with asyncio.timeout(60):
                # Six are admitted, and no more, once each worker knows of all of them.
                while refused < 16 or len(clients) < 6:
                    try:
                        client = await stack.enter_async_context(open_client(relay.ws))
                    except InvalidStatus as error:
                        assert error.response.status_code == 429
                        refused += 1
                        continue
                    refused = 0
                    if len(clients) < 6:
                        clients.append(client)
                    else:
                        await client.socket.close()
            answers = await clients[0].publish_all([make(author, n=n) for n in range(5)])
            assert {answer["type"] for answer in answers} == {"OK"}
            too_many = 0
            for client in clients:
                # The other worker learns of it a moment later. Five more would mean a separate limit.
                while (answer := await client.publish(make(author)))["type"] == "OK" and too_many < 4:
                    too_many += 1
                    await asyncio.sleep(1)
                assert_limited(answer, 5, "publish_limit")
        assert not relay.complaints()
