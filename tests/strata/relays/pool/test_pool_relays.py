"""The pool over real connections to naive relays: what the simulated connections cannot show."""

from __future__ import annotations

import json
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import pytest
import strata
from msgspec import Raw
from strata.relays.bootstrap import read_bootstrap
from strata.relays.connection import PacketRelay
from strata.relays.pool import PacketPool, PoolOptions, Profile, Standing
from strata.relays.pool.score_file import ScoreFile

from tests.support.waiting import until

EXTENSIONS = ("packet_ids", "received_range", "history_marker", "gapless")
OPTIONS = PoolOptions(
    relay=strata.Options(backoff_base=0.01, backoff_cap=0.05, resolve_keys=False),
    replace_after=0.1,
    presence_delay=0.1,
    sweep_interval=0.3,
    sample_interval=None,
    request_timeout=3.0,
)


@pytest.fixture
async def three(fake_relay, naive_relay):
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(fake_relay(naive_relay(EXTENSIONS))) for _ in range(3)]


@pytest.mark.slow
@pytest.mark.req("C-270", "C-271", "C-272")
async def test_publish_read_and_lose_a_relay(three, make):
    urls = [relay.url for relay in three]
    async with strata.connect_pool(urls, options=OPTIONS) as relays:
        await until(lambda: len(relays._relays.connected()) == 3)
        subscription = relays.subscribe(types=["POST"])
        received = []
        for n in range(30):
            if n == 10:
                await three[0].__aexit__()
            published = await relays.publish(make(n))
            assert published.packet_id == make(n).packet_id
            received.append((await anext(subscription)).packet)
        assert set(received) == {make(n) for n in range(30)}
        await until(lambda: not relays.unsettled)
        stored = [packet for relay in three[1:] for packet, _ in relay.model.log]
        assert all(stored.count(make(n)) >= 1 for n in range(30))


@pytest.mark.req("R-342", "R-344", "R-340")
async def test_a_tampering_relay_is_blacklisted_in_the_next_session_too(three, make, tmp_path):
    def forge(event):
        return replace_packet(event, bytes(event.packet).replace(b"packet", b"forged"))

    liar = three[0]
    liar.model.disguise = forge
    options = replace(OPTIONS, scores=tmp_path / "scores.db")
    urls = [relay.url for relay in three]
    async with strata.connect_pool(urls, options=options) as relays:
        await until(lambda: len(relays._relays.connected()) == 3)
        subscription = relays.subscribe()
        for n in range(6):
            for relay in three:
                await relay.append(make(n))
        assert {(await anext(subscription)).packet for _ in range(6)} == {make(n) for n in range(6)}
        await until(lambda: relays.relays[-1].standing is Standing.BLACKLISTED)
        assert relays.relays[-1].url == liar.url
    connections = liar.connections
    async with strata.connect_pool(urls, options=options) as relays:
        await until(lambda: len(relays._relays.connected()) == 2)
        assert relays.relays[-1].standing is Standing.BLACKLISTED
        await relays.publish(make(7))
        assert liar.connections == connections, "not contacted"
        assert relays.statistics.scores_lost == 0
    with ScoreFile(tmp_path / "scores.db") as file:
        assert {o.kind for o in file.observations(0)} >= {"connect", "validity", "publish"}
        assert len(file.relays()) == 3


def replace_packet(event, raw: bytes):
    from msgspec.structs import replace as replace_struct

    return replace_struct(event, packet=Raw(raw))


def made_for(relays: PacketPool, url: str) -> PacketRelay:
    """A relay as the pool makes it, not yet open."""
    made = relays._relays._make(url, print)
    assert isinstance(made, PacketRelay)
    return made


@pytest.mark.req("R-347", "R-346")
async def test_a_bootstrap_file_alone_is_enough_to_start_and_pins_who_the_relays_are(
    three, make, identities, tmp_path
):
    path, pinned = Path(tmp_path) / "relays.json", identities[1].did
    http = three[0].url.replace("ws://", "http://").removesuffix("/strata")
    first = {"type": "strata.relay", "v": 1, "http": http, "relay_id": pinned}
    path.write_text(json.dumps([first, *(relay.url for relay in three[1:])]))
    async with strata.connect_pool(read_bootstrap(path).relays, options=OPTIONS) as relays:
        await relays.publish(make(1))
        made = [made_for(relays, relay.url)._options.relay_id for relay in three]
        assert made == [pinned, None, None]


async def test_an_unusable_scores_file_is_said_at_once(three, tmp_path):
    (tmp_path / "scores.db").write_bytes(b"something else" * 100)
    options = replace(OPTIONS, scores=tmp_path / "scores.db")
    with pytest.raises(OSError, match=r"scores\.db"):
        await strata.connect_pool([three[0].url], options=options).open()


@pytest.mark.req("R-405", "R-406")
async def test_profiles_need_no_more_of_the_options_than_they_say(three):
    shy = replace(OPTIONS.relay, authenticate="always")
    options = replace(OPTIONS, relay=shy, profile=Profile.SHIELDED, connections=2)
    async with strata.connect_pool([relay.url for relay in three], options=options) as relays:
        await until(lambda: len(relays._relays.connected()) == 3)
        assert relays.profile.profile is Profile.SHIELDED
        assert shy.authenticate == "always", "what was given stays as it is"
        made = made_for(relays, three[0].url)
        assert made._options.authenticate == "when_needed", "R-405: only where needed"


async def test_posting_needs_an_identity_and_signs_with_it(three, identities):
    me, _ = identities
    async with strata.connect_pool([three[0].url], options=OPTIONS) as relays:
        with pytest.raises(ValueError, match="identity"):
            await relays.post({"type": "POST", "text": "x"})
    async with strata.connect_pool([three[0].url], identity=me, options=OPTIONS) as relays:
        published = await relays.post({"type": "POST", "text": "x"})
        found = await relays.get(published.packet_id)
        assert found is not None and found.packet.author_id == me.did
