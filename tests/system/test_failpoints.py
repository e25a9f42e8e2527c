"""Failpoints of a running relay: every one is reached, and a fault at any of them loses nothing."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
import time
from pathlib import Path

import pytest
from strata.protocol.documents import method_id
from strata.protocol.keys import add_content
from strata.protocol.packets import build
from websockets.exceptions import ConnectionClosed

from relayd.failpoints import POINTS
from tests.support.bare_client import open_client, publish_text
from tests.support.made_packets import ids_of, make, new_identity
from tests.support.relay_process import RelayProcess, environment, running
from tests.support.waiting import until

ERASING = {place for place in POINTS if place.startswith("store.erase.")}


def fired(relay: RelayProcess) -> list[str]:
    """The places at which a fault occurred, in order."""
    lines = relay.log.read_text().splitlines() if relay.log.exists() else []
    said = [json.loads(line) for line in lines if '"failpoint"' in line]
    return [line["place"] for line in said]


async def test_every_place_is_reached(tmp_path: Path):
    who, key = new_identity(), new_identity()
    relay = RelayProcess(tmp_path, workers=2, failpoints="*=delay:0")
    with running(relay):
        content = add_content(method_id(who.did, "k"), key.public_key, valid_from=1)
        event = build(who, content, timestamp=int(time.time()))
        # Connections until both workers have one: each learns of the other's commits.
        for _ in range(40):
            async with open_client(relay.ws) as client:
                assert (await client.publish(make(new_identity())))["type"] == "OK"
                assert (await client.publish(event))["type"] == "OK"
                assert (await client.authenticate(new_identity()))["type"] == "AUTH_OK"
                await client.subscribe("s", {"limit": 3})
                stale = await client.publish(make(new_identity(), age=10**6))
                assert stale["code"] == "timestamp_too_old"
            if {"store.notify", "feed.tail.read"} <= set(fired(relay)):
                break
        assert relay.get("/healthz")[0] == 200
        assert relay.process is not None
        relay.process.send_signal(signal.SIGHUP)
        relay.postgres().kill()
        await until(lambda: {"postgres.supervise", "server.reload"} <= set(fired(relay)))
        assert relay.stop() == 0
        relay.start()  # the author's keys are not in memory now
        async with open_client(relay.ws) as client:
            assert (await client.publish(make(who)))["type"] == "OK"
        # Relays do not erase: the command does.
        command = [sys.executable, "-m", "relayd", "erase", "--author", who.did, "--reason", "asked for"]
        for place in sorted(ERASING, reverse=True):  # committed erasures are not repeated
            env = environment({**relay.settings, "failpoints": f"{place}=kill"})
            process = await asyncio.create_subprocess_exec(*command, env=env)
            assert await process.wait() == -signal.SIGKILL
        assert relay.stop() == 0
    assert set(fired(relay)) == POINTS.keys() - ERASING


@pytest.mark.req("R-189", "R-192", "R-200")
async def test_faults_between_commit_and_answer_lose_nothing(tmp_path: Path):
    """With a kill in the middle: everything acknowledged is there."""
    places = (
        "store.append.before_commit=raise@2",
        "store.append.after_commit=raise@4",
        "admission.answer=raise@5",
        "feed.dispatch=raise@3",
        "admission.verify=raise@9",
        "admission.submit=kill@40",
    )
    relay = RelayProcess(tmp_path, failpoints=",".join(places))
    with running(relay):
        acknowledged: list[str] = []
        async with open_client(relay.ws) as reader, open_client(relay.ws) as client:
            await reader.send({"type": "SUBSCRIBE", "subscription_id": "all", "gapless": True})
            for _ in range(20):
                packet = make(new_identity())
                while (answer := await client.publish(packet))["type"] != "OK":
                    assert answer["code"] == "internal_error"
                acknowledged.append(packet.packet_id)
            events = await reader.events("all", len(acknowledged))
            assert ids_of(events) == acknowledged
            with contextlib.suppress(ConnectionClosed):
                for _ in range(40):
                    await client.send(publish_text(make(new_identity())))
            await until(lambda: not relay.is_running())
        assert relay.wait() == -signal.SIGKILL
        made = set(fired(relay))
        relay.settings["failpoints"] = ""
        relay.start()
        async with open_client(relay.ws) as client:
            events, _ = await client.subscribe("s", {"limit": 500, "order": "asc"})
            assert ids_of(events)[: len(acknowledged)] == acknowledged
    assert {"store.append.before_commit", "store.append.after_commit", "admission.answer"} <= made
