"""What an attacker tries: answers made for others, unauthorised reads, false addresses, crowds."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus

from tests.support.bare_client import BareClient, Message, open_client, publish_text
from tests.support.made_packets import ids_of, make, new_identity, seal
from tests.support.relay_process import RelayProcess, http_get, running

MEMBER = new_identity()
IDLE, HOSTILE = 200, 50


@pytest.fixture(scope="module")
def closed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RelayProcess]:
    """A relay that serves only members, with one packet in its log."""
    settings: dict[str, Any] = {"require_auth": ["publish", "subscribe"], "members": [MEMBER.did]}
    with running(RelayProcess(tmp_path_factory.mktemp("closed"), **settings)) as process:
        yield process
        assert process.is_running()
        assert not process.complaints()


@pytest.fixture
async def member(closed: RelayProcess) -> AsyncIterator[BareClient]:
    async with open_client(closed.ws) as client:
        assert (await client.authenticate(MEMBER))["type"] == "AUTH_OK"
        yield client


def is_error_of(subscription_id: str, message: Message) -> bool:
    return message.get("subscription_id") == subscription_id and message["type"] == "ERROR"


def fault(answer: Message) -> tuple[str, str | None]:
    assert answer["type"] == "ERROR", answer
    return answer["code"], answer.get("detail")


UNKNOWN = ("unauthenticated", "challenge_unknown")
MISSING = ("unauthenticated", "missing_capability")


# Challenges and answers.


@pytest.mark.req("R-268", "R-278")
async def test_an_answer_is_good_once(relay: RelayProcess):
    async with open_client(relay.ws) as client:
        challenge = await client.challenge()
        assert (await client.authenticate(identity := new_identity(), challenge=challenge))[
            "type"
        ] == "AUTH_OK"
        assert fault(await client.authenticate(identity, challenge=challenge)) == UNKNOWN


@pytest.mark.req("R-268", "R-278")
async def test_an_answer_is_good_on_its_own_socket_alone(relay: RelayProcess):
    async with open_client(relay.ws) as victim, open_client(relay.ws) as thief:
        challenge = await victim.challenge()
        assert fault(await thief.authenticate(new_identity(), challenge=challenge)) == UNKNOWN
        assert (await victim.authenticate(new_identity(), challenge=challenge))["type"] == "AUTH_OK"


@pytest.mark.req("R-268", "R-278")
async def test_an_answer_from_an_earlier_connection_is_good_no_more(relay: RelayProcess):
    async with open_client(relay.ws) as client:
        challenge = await client.challenge()
    async with open_client(relay.ws) as client:
        assert fault(await client.authenticate(new_identity(), challenge=challenge)) == UNKNOWN


@pytest.mark.req("R-275")
async def test_an_answer_for_one_relay_opens_no_other(relay: RelayProcess, closed: RelayProcess):
    """A relay passes off another's challenge as its own, and forwards the answer (A-071)."""
    async with open_client(closed.ws) as attacker:
        stolen = await attacker.challenge()
        shown = {**stolen, "server_id": relay.ready["relay_id"]}
        answer = await attacker.authenticate(MEMBER, challenge=shown)
        assert fault(answer) == ("invalid_signature", None)
        assert fault(await attacker.publish(make(MEMBER))) == MISSING


@pytest.mark.req("R-275")
async def test_the_border_between_challenge_and_relay_cannot_be_moved(closed: RelayProcess):
    async with open_client(closed.ws) as attacker:
        challenge = await attacker.challenge()
        moved = {**challenge, "challenge": challenge["challenge"] + challenge["server_id"], "server_id": ""}
        assert fault(await attacker.authenticate(MEMBER, challenge=moved)) == UNKNOWN


@pytest.mark.req("R-281")
async def test_a_packet_s_signature_authenticates_nobody(closed: RelayProcess):
    async with open_client(closed.ws) as attacker:
        packet = json.loads(make(MEMBER).canonical)
        answer = await attacker.authenticate(MEMBER, signature=packet["signature"])
        assert fault(answer) == ("invalid_signature", None)


# Reading and writing without permission.


@pytest.mark.req("R-288", "R-289", "R-292")
async def test_no_way_in_or_out_is_open_to_who_is_not_a_member(closed: RelayProcess, member: BareClient):
    packet = make(MEMBER)
    assert (await member.publish(packet))["type"] == "OK"
    path = f"/packets/{packet.packet_id}"
    async with open_client(closed.ws) as stranger:
        for attempt in ("anonymous", "authenticated"):
            if attempt == "authenticated":
                answer = await stranger.authenticate(
                    new_identity(), capabilities=["publish", "subscribe", "replicate"]
                )
                assert answer["capabilities"] == []
            for request in (
                {"filters": {"authors": [MEMBER.did]}},
                {"filters": {"packet_ids": [packet.packet_id]}},
                {"filters": {"limit": 0}},
                {"gapless": True},
                {"replication_profile": "full"},
            ):
                answer = await stranger.ask({"type": "SUBSCRIBE", "subscription_id": "s", **request})
                assert fault(answer) == MISSING
                assert answer["subscription_id"] == "s"
            # A packet that it may not publish is not even checked: a known packet is refused like any other.
            for published in (packet, make(new_identity()), seal(MEMBER, {"version": 9})):
                assert fault(await stranger.publish(published)) == MISSING
        assert (await member.publish(make(MEMBER)))["type"] == "OK"
        assert await stranger.quiet("s") == []
    assert closed.get(path)[0] == 401
    unknown = closed.get("/packets/0x" + "ab" * 32)
    assert unknown[0] == 401
    assert unknown[2] == closed.get(path)[2]  # and reveals nothing about what is there


@pytest.mark.req("R-283", "R-288")
async def test_who_gives_up_the_right_to_read_gets_nothing_further(closed: RelayProcess, member: BareClient):
    async with open_client(closed.ws) as reader:
        first = await reader.challenge()
        await reader.authenticate(MEMBER, challenge=first)
        await reader.subscribe("live", {"authors": [MEMBER.did]})
        await reader.send({"type": "SUBSCRIBE", "subscription_id": "gapless", "gapless": True})
        await reader.authenticate(MEMBER, challenge=first)  # a refusal, in exchange for a fresh challenge
        answer = await reader.authenticate(MEMBER, capabilities=["publish"])
        assert answer["capabilities"] == ["publish"]
        for name in ("live", "gapless"):
            ended = await reader.expect(partial(is_error_of, name))
            assert fault(ended) == MISSING
        reader.taken("live"), reader.taken("gapless")
        assert (await member.publish(make(MEMBER)))["type"] == "OK"
        assert await reader.quiet("live") == await reader.quiet("gapless") == []


@pytest.mark.req("R-282", "R-289")
async def test_trying_harder_only_closes_the_connection(closed: RelayProcess):
    async with open_client(closed.ws) as attacker:
        with contextlib.suppress(ConnectionClosed):
            for _ in range(20):
                answer = await attacker.authenticate(MEMBER, signature="0x" + "11" * 64)
                assert fault(answer)[0] == "invalid_signature"
                assert fault(await attacker.publish(make(MEMBER))) == MISSING
        assert attacker.socket.close_code == 1008


# Addresses.


@pytest.mark.req("R-316", "R-321")
async def test_a_forwarding_header_buys_no_second_budget(tmp_path: Path):
    settings: dict[str, Any] = {
        "anonymous_publish_limit": 3,
        "limit_window_seconds": 3600,
        "trusted_proxies": ["192.0.2.0/24"],
        "unlimited_addresses": ["192.0.2.0/24"],
    }
    with running(RelayProcess(tmp_path, **settings)) as process:
        outcomes: list[str] = []
        for number in range(8):
            headers = {"X-Forwarded-For": f"192.0.2.{number}", "Forwarded": f"for=192.0.2.{number}"}
            async with open_client(process.ws, additional_headers=headers) as client:
                outcomes.append((await client.publish(make(new_identity())))["type"])
        assert outcomes == ["OK"] * 3 + ["ERROR"] * 5


@pytest.mark.req("R-321")
async def test_a_page_of_another_origin_is_turned_away(tmp_path: Path):
    with running(RelayProcess(tmp_path, allowed_origins=["https://good.example"])) as process:
        async with open_client(process.ws, origin="https://good.example") as client:
            await client.barrier()
        async with open_client(process.ws) as client:
            await client.barrier()
        with pytest.raises(InvalidStatus) as refused:
            async with open_client(process.ws, origin="https://evil.example"):
                pass
        assert refused.value.response.status_code == 403
        assert http_get(process.http + "/healthz", headers={"Origin": "https://evil.example"})[0] == 200


@pytest.mark.req("R-330")
async def test_no_address_gets_into_the_log(tmp_path: Path):
    with running(RelayProcess(tmp_path, trusted_proxies=["127.0.0.1"], log_level="debug")) as process:
        headers = {"X-Forwarded-For": "198.51.100.77"}
        async with open_client(process.ws, additional_headers=headers) as client:
            await client.authenticate(new_identity())
            await client.publish(make(new_identity()))
        assert process.stop() == 0
        log = process.log.read_text()
        assert "connection_opened" in log
        assert "198.51" not in log


@pytest.mark.req("R-330")
async def test_an_address_is_logged_truncated_if_asked_for(tmp_path: Path):
    settings: dict[str, Any] = {"trusted_proxies": ["127.0.0.1"], "log_addresses": "truncated"}
    with running(RelayProcess(tmp_path, **settings)) as process:
        async with open_client(process.ws, additional_headers={"X-Forwarded-For": "198.51.100.77"}) as client:
            await client.barrier()
        assert process.stop() == 0
        log = process.log.read_text()
        assert "198.51.100.0/24" in log
        assert "198.51.100.77" not in log


# Crowds.


async def misbehave(relay: RelayProcess, number: int, until: asyncio.Event) -> int:
    """Open one hostile connection after another, of five kinds; returns their number."""
    identity, made = new_identity(), 0
    forged = json.loads(make(identity).canonical) | {"signature": "0x" + "00" * 64}
    texts = [
        ["{", "[1]", '{"type":"X"}'],
        [publish_text(json.dumps(forged), "m")] * 10,
        [f'{{"type":"SUBSCRIBE","subscription_id":"s{each}","gapless":true}}' for each in range(80)],
        [
            json.dumps({"type": "AUTH", "author_id": identity.did, "challenge": "x", "signature": "0x"}),
        ]
        * 6,
    ]
    while not until.is_set():
        made += 1
        # A client that takes ten seconds for the handshake, as a crowd on a busy machine may, is dropped.
        with contextlib.suppress(ConnectionClosed, InvalidHandshake, OSError):
            if number % 5 == 4:  # connects, and sends half a word
                host, port = relay.http.removeprefix("http://").split(":")
                _, writer = await asyncio.open_connection(host, int(port))
                writer.write(b"GET /stra")
                await writer.drain()
                writer.transport.abort()
                continue
            async with open_client(relay.ws, close_timeout=1) as client:
                for text in texts[number % 5]:
                    await client.send(text)
                await client.barrier()
    return made


@pytest.mark.req("R-321")
async def test_the_honest_are_served_beside_the_idle_and_the_hostile(relay: RelayProcess):
    """The honest come from another address: clients that share one also share its part of the loop."""
    identity, until = new_identity(), asyncio.Event()
    packets = [make(identity) for _ in range(30)]
    async with AsyncExitStack() as stack:
        for _ in range(IDLE):
            await stack.enter_async_context(open_client(relay.ws))
        elsewhere = {"local_addr": ("127.0.0.2", 0)}
        reader = await stack.enter_async_context(open_client(relay.ws, **elsewhere))
        writer = await stack.enter_async_context(open_client(relay.ws, **elsewhere))
        await reader.subscribe("s", {"authors": [identity.did]})
        async with asyncio.TaskGroup() as group:
            attacks = [group.create_task(misbehave(relay, number, until)) for number in range(HOSTILE)]
            try:
                for packet in packets:
                    assert (await writer.publish(packet))["type"] == "OK"
                assert ids_of(await reader.events("s", len(packets))) == [
                    packet.packet_id for packet in packets
                ]
            finally:
                until.set()
        assert all(attack.result() > 0 for attack in attacks)


@pytest.mark.req("R-321")
async def test_sockets_that_never_speak_leave_room_for_the_others(tmp_path: Path):
    settings: dict[str, Any] = {
        "max_connections_per_address": 10,
        "unlimited_addresses": ["192.0.2.0/24"],
        "trusted_proxies": ["::1/128"],
    }
    with running(RelayProcess(tmp_path, **settings)) as process, contextlib.ExitStack() as stack:
        host, port = process.http.removeprefix("http://").split(":")
        silent = [stack.enter_context(socket.create_connection((host, int(port)))) for _ in range(40)]
        for each in silent[20:]:  # beyond twice the cap they are dropped at once
            each.settimeout(20)
            with contextlib.suppress(ConnectionResetError):
                assert each.recv(1) == b""
        for each in silent[:20]:
            each.setblocking(False)
            with pytest.raises(BlockingIOError):
                each.recv(1)
