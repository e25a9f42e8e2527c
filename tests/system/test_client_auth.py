"""The real client authenticating to the real relay, and judging others by keys that change."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import strata
from strata.protocol import packets
from strata.protocol.ids import Identity
from strata.protocol.keys import revoke_content, rotate_content
from strata.relays.bootstrap import KnownRelay

from tests.support.ports import free_port
from tests.support.relay_process import RelayProcess, running
from tests.support.websocket_proxy import SlowProxy

pytestmark = pytest.mark.timeout(400)

OPTIONS = strata.Options(publish_timeout=60.0, ack_timeout=5.0, backoff_cap=0.5)
ALWAYS = strata.Options(publish_timeout=60.0, ack_timeout=5.0, backoff_cap=0.5, authenticate="always")


@pytest.fixture(scope="module")
def closed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RelayProcess]:
    """A relay that serves no strangers."""
    folder = tmp_path_factory.mktemp("closed")
    with running(RelayProcess(folder, require_auth=["publish", "subscribe"])) as process:
        yield process
        assert not process.complaints()


async def first(deliveries: AsyncIterator[strata.Delivery]) -> strata.Delivery:
    async with asyncio.timeout(20):
        return await anext(deliveries)


@pytest.mark.req("R-288", "R-289", "R-293")
async def test_a_client_authenticates_where_the_relay_demands_it(closed: RelayProcess) -> None:
    me = Identity.generate()
    async with strata.connect(closed.ws, identity=me, options=OPTIONS) as relay:
        before = relay.session
        assert before is None, "nobody has asked yet"
        published = await relay.post({"type": "POST", "text": "hello"})
        assert relay.session is not None and relay.session.author_id == me.did
        assert relay.session.capabilities == frozenset({"publish", "subscribe"})
        assert relay.relay_id == closed.ready["relay_id"]
        delivery = await first(relay.subscribe(authors=[me.did]))
        assert delivery.packet.packet_id == published.packet_id
        assert relay.statistics.authentications == 1


async def test_a_stranger_is_told_why(closed: RelayProcess) -> None:
    async with strata.connect(closed.ws, options=OPTIONS) as relay:
        with pytest.raises(strata.RequestRefused) as caught:
            await first(relay.subscribe())
        assert (caught.value.code, caught.value.detail) == ("unauthenticated", "missing_capability")
        assert caught.value.retry is strata.Retry.AUTHENTICATE


@pytest.mark.req("R-291")
async def test_what_is_not_granted_is_not_attempted(closed: RelayProcess) -> None:
    options = strata.Options(authenticate="always", capabilities=("subscribe",))
    async with strata.connect(closed.ws, identity=Identity.generate(), options=options) as relay:
        with pytest.raises(strata.MissingCapability):
            await relay.post({"type": "POST"})
        assert [d async for d in relay.fetch(types=["NOTHING"])] == []


@pytest.mark.req("R-298")
async def test_another_relay_than_the_one_expected_is_not_signed_for(closed: RelayProcess) -> None:
    options = strata.Options(authenticate="always", relay_id="did:strata:relay_1")
    with pytest.raises(strata.InvalidMessage) as caught:
        async with strata.connect(closed.ws, identity=Identity.generate(), options=options):
            pass
    assert caught.value.detail == "server_id_unexpected"


@pytest.mark.req("R-298")
async def test_an_impostor_at_the_same_address_is_not_signed_for(tmp_path: Path) -> None:
    port, me, pins = free_port(), Identity.generate(), tmp_path / "pins.json"
    with running(RelayProcess(tmp_path / "one", port=port)) as real:
        async with strata.connect(real.ws, identity=me, pins=pins, options=ALWAYS) as relay:
            assert relay.session is not None
        assert json.loads(pins.read_text()) == {real.ws: real.ready["relay_id"]}
    with running(RelayProcess(tmp_path / "two", port=port)) as impostor:
        with pytest.raises(strata.InvalidMessage) as caught:
            async with strata.connect(impostor.ws, identity=me, pins=pins, options=ALWAYS):
                pass
        assert caught.value.detail == "server_id_unexpected"
        assert impostor.ready["relay_id"] not in pins.read_text()


@pytest.mark.req("R-339")
async def test_after_a_kill_it_authenticates_before_anything_else(tmp_path: Path) -> None:
    me = Identity.generate()
    process = RelayProcess(tmp_path / "relay", port=free_port(), require_auth=["publish", "subscribe"])
    with running(process):
        async with strata.connect(process.ws, identity=me, options=OPTIONS) as relay:
            subscription = relay.subscribe(authors=[me.did])
            for number in range(3):
                if number:
                    await asyncio.to_thread(process.kill)
                    sending = asyncio.create_task(relay.post({"type": "POST", "n": number}))
                    await asyncio.to_thread(process.start)
                    await sending
                else:
                    await relay.post({"type": "POST", "n": number})
                assert (await first(subscription)).packet.content["n"] == number
            refusals = relay.statistics.refusals.get("unauthenticated", 0)
            assert refusals <= 2, "only the first session had to be told"
            assert relay.statistics.authentications == relay.statistics.connections == 3


@pytest.mark.req("R-075", "R-336")
async def test_a_rotated_key_speaks_for_its_did_and_readers_know(relay: RelayProcess) -> None:
    old, now = Identity.generate(), int(time.time())
    new = Identity.generate().speaking_for(old.did)
    rotation = rotate_content(
        f"{old.did}#keys-2", new.public_key, replaces=f"{old.did}#keys-1", valid_from=now
    )
    async with (
        strata.connect(relay.ws, identity=new, options=OPTIONS) as writing,
        strata.connect(relay.ws, options=OPTIONS) as reading,
    ):
        subscription = reading.subscribe(authors=[old.did], types=["POST"])
        before = packets.build(old, {"type": "POST", "text": "before"}, timestamp=now)
        await writing.publish(before)
        assert (await first(subscription)).packet == before
        await writing.publish(packets.build(old, rotation, timestamp=now))
        after = packets.build(new, {"type": "POST", "text": "after"}, timestamp=now)
        await writing.publish(after)
        assert (await first(subscription)).packet == after
        session = await writing.authenticate()
        assert session.author_id == old.did
        # A later reader sees both, each by the key of its time.
        found = [d.packet async for d in reading.fetch(authors=[old.did], types=["POST"])]
        assert found == [before, after]
        assert reading.statistics.events_tampered == reading.statistics.events_invalid == 0


@pytest.mark.req("R-277", "R-281", "R-294")
async def test_a_revoked_key_cannot_authenticate_and_the_client_says_so(relay: RelayProcess) -> None:
    me, now = Identity.generate(), int(time.time())
    async with strata.connect(relay.ws, identity=me, options=OPTIONS) as connection:
        revocation = revoke_content(f"{me.did}#keys-1", revoked_at=now - 1)
        await connection.publish(packets.build(me, revocation, timestamp=now))
        with pytest.raises(strata.RequestRefused) as caught:
            await connection.authenticate()
        assert (caught.value.code, caught.value.detail) == ("invalid_signature", "key_revoked")
        assert connection.session is None
        with pytest.raises(strata.RequestRefused):
            await connection.authenticate()
    with pytest.raises(strata.RequestRefused):
        async with strata.connect(relay.ws, identity=me, options=ALWAYS):
            pass


@pytest.mark.req("R-298")
async def test_a_relay_that_passes_on_another_ones_challenge_gets_no_signature(
    closed: RelayProcess, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The relay would be logged in at the other relay as its own client. First sight is its only chance."""
    me, pins, did = Identity.generate(), tmp_path / "pins.json", closed.ready["relay_id"]
    async with SlowProxy(closed.ws) as forwarding:

        async def session(**options: Any) -> str:
            made = dataclasses.replace(ALWAYS, **options)
            async with strata.connect(forwarding.url, identity=me, pins=pins, options=made) as relay:
                assert relay.session is not None
                return relay.session.author_id

        async with strata.connect(closed.ws, identity=me, pins=pins, options=ALWAYS):
            pass
        with pytest.raises(strata.InvalidMessage) as caught:
            await session()
        assert caught.value.detail == "server_id_elsewhere" and closed.ws in str(caught.value)
        # That two addresses belong to one relay is declared by the program, or by a line in the file.
        assert await session(relay_id=did) == me.did
        assert await session() == me.did
        assert json.loads(pins.read_text()) == {closed.ws: did, forwarding.url: did}
        assert "at first sight" not in caplog.text
        async with strata.connect(forwarding.url, identity=me, options=ALWAYS) as relay:
            assert relay.session is not None, "what nobody can tell from a relay of its own"
        assert [record.levelname for record in caplog.records if "at first sight" in record.message] == [
            "WARNING"
        ]


@pytest.mark.req("R-298")
async def test_the_relays_of_a_pool_are_told_apart(closed: RelayProcess) -> None:
    me = Identity.generate()
    async with SlowProxy(closed.ws) as forwarding:
        known = [
            KnownRelay(closed.ws, relay_id=closed.ready["relay_id"]),
            KnownRelay(forwarding.url),
        ]
        options = strata.PoolOptions(relay=OPTIONS, confirmations=2)
        before = closed.metric("relayd_auths_total", outcome="ok")
        async with strata.connect_pool(known, identity=me, options=options) as pool:
            with pytest.raises(strata.StrataError):
                await pool.post({"type": "POST", "text": "hello"}, timeout=2)
        assert closed.metric("relayd_auths_total", outcome="ok") == before + 1
