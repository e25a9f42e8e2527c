"""A relay whose clock was ahead for a moment, by hours or by years, with packets stored meanwhile."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import strata
from strata.protocol.documents import method_id
from strata.protocol.ids import Identity
from strata.protocol.keys import add_content, revoke_content
from strata.protocol.packets import Packet, build

from tests.faults.clock import SteppedClock
from tests.support.bare_client import open_client
from tests.support.forks import RELAYD, run_fork
from tests.support.made_packets import make, new_identity
from tests.support.relay_process import RelayProcess, environment, running
from tests.support.waiting import until
from tests.system.test_identity import Holder

HOUR, YEARS = 3600, 10 * 365 * 86_400
SKEW = 300
JUMPS = [2 * HOUR, -2 * HOUR, YEARS, -YEARS]


@pytest.fixture
def clock(tmp_path: Path) -> Iterator[SteppedClock]:
    with SteppedClock(tmp_path / "clock") as stepped:
        yield stepped


def relay_with(clock: SteppedClock, folder: Path, *arguments: str) -> RelayProcess:
    return RelayProcess(
        folder,
        arguments=arguments,
        environ=clock.environ,
        python_path=clock.python_path,
        max_packet_age_seconds=YEARS + HOUR,
        dedup_window_seconds=YEARS + HOUR,
    )


def said(author: Identity | Holder, content: dict[str, object]) -> Packet:
    return build(author, content, timestamp=int(time.time()), nonce=str(time.monotonic_ns()))


def with_key_until(who: Identity, key: Identity, ends_at: int) -> Packet:
    """An ADD of a key that is valid until `ends_at`."""
    name, begins_at = method_id(who.did, "keys-2"), int(time.time()) - 10
    return said(who, add_content(name, key.public_key, valid_from=begins_at, valid_until=ends_at))


async def jump(clock: SteppedClock, relay: RelayProcess, seconds: float) -> int:
    """Step the clock, have a packet stored, and step it back. Returns how far that packet is told ahead."""
    clock.step(seconds)
    packet = make(new_identity(), "of then", age=max(0, -int(seconds)))
    async with open_client(relay.ws) as client:
        told = await client.publish(packet)
    clock.step(0.0)
    assert told["type"] == "OK", told
    return int(told["received_at"] - time.time())


@pytest.mark.req("R-074", "R-076", "R-099")
@pytest.mark.parametrize("seconds", JUMPS)
async def test_a_revocation_that_is_acknowledged_takes_effect(tmp_path, clock, seconds):
    who, key = new_identity(), new_identity()
    holder = Holder(key, who.did)
    with running(relay_with(clock, tmp_path / "relay")) as relay:
        async with open_client(relay.ws) as client:
            assert (await client.publish(with_key_until(who, key, int(time.time()) + HOUR)))["type"] == "OK"
        await jump(clock, relay, seconds)
        revoked_at = int(time.time()) - 1
        revoke = said(holder, revoke_content(method_id(who.did, "keys-2"), revoked_at=revoked_at))
        async with open_client(relay.ws) as client:
            assert (await client.publish(revoke))["type"] == "OK"
            assert (await client.publish(make(holder, "behind")))["code"] == "key_revoked"
        assert not relay.logged("identity_packet_ignored")
        relay.stop()
        relay.start()
        async with open_client(relay.ws) as client:
            assert (await client.publish(make(holder, "behind, again")))["code"] == "key_revoked"


@pytest.mark.req("R-099", "R-336", "R-337")
@pytest.mark.parametrize("seconds", JUMPS)
async def test_what_is_acknowledged_reaches_readers(tmp_path, clock, seconds):
    who, key = new_identity(), new_identity()
    with running(relay_with(clock, tmp_path / "relay", "--workers", "2")) as relay:
        async with open_client(relay.ws) as client:
            assert (await client.publish(with_key_until(who, key, int(time.time()) + HOUR)))["type"] == "OK"
        await jump(clock, relay, seconds)
        packets = [make(Holder(key, who.did), f"brief {n}", expires_in=2 * SKEW) for n in range(4)]
        async with asyncio.timeout(60):
            for packet in packets:  # perhaps by another worker each, which may hear of the key a little later
                answer = {"code": "invalid_signature"}
                while answer.get("code") == "invalid_signature":
                    async with open_client(relay.ws) as client:
                        answer = await client.publish(packet)
                assert answer["type"] == "OK", answer
        for _ in range(2):
            async with strata.connect(relay.ws) as reader:
                got = [
                    event.packet.packet_id async for event in reader.fetch(authors=[who.did], types=["POST"])
                ]
            assert got == [packet.packet_id for packet in packets]
            relay.stop()
            relay.start()


def said_by(relay: RelayProcess, *command: str) -> Any:
    """What a command says about this relay's log, as JSON."""
    env = environment({"data_dir": relay.settings["data_dir"]})
    _, out, err = run_fork(RELAYD, [*command, "--json"], env=env)
    assert out, err.decode()
    return json.loads(out)


@pytest.mark.req("R-074", "R-099")
async def test_a_log_of_the_future_is_reported_and_mended(tmp_path, clock):
    """An author that adds a key while the clock is ahead cannot use it: no reader takes it as valid yet."""
    who, key = new_identity(), new_identity()
    with running(relay_with(clock, tmp_path / "relay")) as relay:
        clock.step(2 * HOUR)
        async with open_client(relay.ws) as client:
            await client.publish(with_key_until(who, key, int(time.time()) + HOUR * 9))
        clock.step(0.0)
        early = make(Holder(key, who.did), "early")
        async with open_client(relay.ws) as client:
            assert (await client.publish(early))["code"] == "invalid_signature"
        relay.stop()
        relay.start()
        await until(lambda: relay.metric("relayd_log_ahead_seconds") > HOUR)
        assert relay.logged("log_ahead_of_clock")
        (found,) = [row for row in said_by(relay, "doctor")["checks"] if row["name"] == "log"]
        assert found["verdict"] == "warning" and "relayd mend-times" in found["advice"]
        mended = said_by(relay, "mend-times")
        assert (mended["packets"], mended["identity_packets"]) == (1, 1)
        relay.stop()
        relay.start()
        await until(lambda: relay.metric("relayd_log_bytes") > 0)
        assert relay.metric("relayd_log_ahead_seconds") <= SKEW
        assert not [row for row in said_by(relay, "doctor")["checks"] if row["name"] == "log"]
        async with open_client(relay.ws) as client:
            assert (await client.publish(early))["type"] == "OK"
        async with strata.connect(relay.ws) as reader:
            read = reader.fetch(authors=[who.did], types=["POST"])
            assert [delivery.packet.packet_id async for delivery in read] == [early.packet_id]


async def test_a_ban_that_ends_in_an_hour_holds_after_the_clock_was_ahead(tmp_path, clock):
    who = new_identity()

    async def answer() -> dict[str, Any]:
        async with open_client(relay.ws) as client:
            return await client.publish(make(who, age=HOUR))

    with running(relay_with(clock, tmp_path / "relay")) as relay:
        said_by(relay, "ban", who.did, "--for", "1h", "--reason", "a test")
        while (await answer())["type"] == "OK":
            pass
        clock.step(2 * HOUR)
        while (await answer())["type"] != "OK":
            pass
        clock.step(0.0)
        while (await answer())["type"] == "OK":
            pass


@pytest.mark.req("R-099", "R-305")
@pytest.mark.parametrize("seconds", JUMPS)
async def test_no_time_is_told_further_ahead_of_the_clock_than_the_skew(tmp_path, clock, seconds):
    with running(relay_with(clock, tmp_path / "relay")) as relay:
        assert 0 <= await jump(clock, relay, 0) + 1 <= 60
        ahead = await jump(clock, relay, seconds)
        assert abs(ahead - (seconds if seconds > 0 else seconds + SKEW)) < 60
        for _ in range(2):
            packet = make(new_identity())
            async with open_client(relay.ws) as client:
                told = await client.publish(packet)
                assert (await client.publish(packet))["received_at"] == told["received_at"]
            assert -60 < told["received_at"] - time.time() <= SKEW
            relay.stop()
            relay.start()
