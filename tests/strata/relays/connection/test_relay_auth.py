"""AUTH over real sockets: when it happens, what waits for it, what is refused."""

from __future__ import annotations

import asyncio
import json
import logging
from dataclasses import replace

import pytest
import strata
from strata.channels.connecting import connect
from strata.protocol import wire
from strata.relays.connection import Options

RELAY = "did:strata:relay_1"
FAST = Options(
    backoff_base=0.001,
    backoff_cap=0.01,
    idle_timeout=0.05,
    manifest_timeout=2,
    connect_timeout=5,
    close_timeout=1,
    auth_timeout=2,
)
ALWAYS = replace(FAST, authenticate="always")


@pytest.fixture
def closed(fake):
    fake.model.server_id = RELAY
    fake.model.lifetime = 10**9
    fake.model.needs_auth = frozenset({"publish", "subscribe"})
    return fake


@pytest.mark.req("R-293", "R-339")
async def test_with_always_a_connection_is_open_once_it_is_authenticated(closed, me, make):
    async with connect(closed.url, identity=me, options=ALWAYS) as relay:
        assert relay.session is not None and relay.session.author_id == me.did
        assert relay.relay_id == RELAY
        await relay.publish(make(1))
    kinds = [type(m) for m in closed.received_so_far()]
    assert kinds == [wire.Auth, wire.Publish]


async def test_when_needed_authenticates_on_demand_and_repeats_the_request(closed, me, make):
    async with connect(closed.url, identity=me, options=FAST) as relay:
        await asyncio.gather(relay.publish(make(1)), relay.publish(make(2)))
        assert (await anext(relay.subscribe())).packet == make(1)
        assert relay.statistics.authentications == 1


@pytest.mark.req("R-339")
async def test_after_a_cut_it_authenticates_first(closed, me, make):
    async with connect(closed.url, identity=me, options=FAST) as relay:
        subscription = relay.subscribe()
        await relay.publish(make(1))
        assert (await anext(subscription)).packet == make(1)
        closed.cut()
        await relay.publish(make(2))
        assert (await anext(subscription)).packet == make(2)
        (session,) = closed.model.sessions
        assert type(session.received[0]) is wire.Auth
        assert relay.statistics.authentications == 2


async def test_a_refusal_raises_out_of_opening_and_leaves_nothing(closed, me):
    closed.model.answer_auth = lambda m: wire.Error(
        code="invalid_signature", reason="no", detail="key_revoked", client_msg_id=m.client_msg_id
    )
    with pytest.raises(strata.RequestRefused) as caught:
        await connect(closed.url, identity=me, options=ALWAYS).open()
    assert caught.value.detail == "key_revoked"
    assert not [t for t in asyncio.all_tasks() if t.get_name().startswith("strata")]


@pytest.mark.req("R-295", "R-297")
async def test_a_relay_that_does_not_answer_authenticates_nobody(closed, me, make):
    closed.model.answer_auth = lambda message: "silence"
    options = replace(FAST, auth_timeout=0.05)
    async with connect(closed.url, identity=me, options=options) as relay:
        with pytest.raises(strata.RequestRefused) as caught:
            await relay.publish(make(1))
        assert isinstance(caught.value.__cause__, strata.RequestTimeout)
        assert relay.session is None
        with pytest.raises(strata.RequestTimeout):
            await relay.authenticate()


async def test_asking_by_hand(closed, me):
    async with connect(closed.url, identity=me, options=FAST) as relay:
        both = await asyncio.gather(relay.authenticate(), relay.authenticate())
        assert both[0] is both[1] is await relay.authenticate()
        assert relay.statistics.authentications == 1


async def test_cancelling_leaves_it_under_way(closed, me):
    closed.model.answer_auth = lambda message: "silence"
    async with connect(closed.url, identity=me, options=FAST) as relay:
        asking = asyncio.create_task(relay.authenticate())
        request = await closed.next(wire.Auth)
        asking.cancel()
        await asyncio.wait([asking])
        (session,) = closed.model.sessions
        session.send(wire.AuthOk(author_id=me.did, capabilities=[], client_msg_id=request.client_msg_id))
        await closed.flush()
        assert (await relay.authenticate()).author_id == me.did


async def test_without_an_identity_there_is_nothing_to_prove(closed, me):
    with pytest.raises(ValueError, match="identity"):
        connect(closed.url, options=ALWAYS)
    async with connect(closed.url, options=FAST) as relay:
        with pytest.raises(ValueError, match="identity"):
            await relay.authenticate()
    async with connect(closed.url, identity=me, options=replace(FAST, authenticate="never")) as relay:
        with pytest.raises(ValueError, match="options"):
            await relay.authenticate()


async def test_closing_ends_who_waits_for_it(closed, me):
    closed.model.answer_auth = lambda message: "silence"
    async with connect(closed.url, identity=me, options=FAST) as relay:
        asking = asyncio.create_task(relay.authenticate())
        await closed.next(wire.Auth)
        await relay.close()
        with pytest.raises(strata.Closed):
            await asking


@pytest.mark.req("R-298")
async def test_a_pin_file_remembers_the_relay(closed, me, tmp_path):
    pins = tmp_path / "pins.json"
    async with connect(closed.url, identity=me, options=ALWAYS, pins=pins):
        pass
    assert json.loads(pins.read_text()) == {closed.url: RELAY}
    closed.model.server_id = "did:strata:impostor"
    with pytest.raises(strata.InvalidMessage) as caught:
        await connect(closed.url, identity=me, options=ALWAYS, pins=pins).open()
    assert caught.value.detail == "server_id_unexpected"


async def test_a_pin_file_that_cannot_be_written_harms_no_message(
    closed, me, make, tmp_path, caplog, monkeypatch
):
    def no_space(url: str, relay_id: str) -> None:
        raise OSError("no space")

    blocker = tmp_path / "file"
    blocker.write_text("")
    relay = connect(closed.url, identity=me, options=ALWAYS, pins=tmp_path / "pins.json")
    async with relay:
        pass
    (tmp_path / "pins.json").unlink()
    broken = connect(closed.url, identity=me, options=ALWAYS, pins=tmp_path / "pins.json")
    monkeypatch.setattr(broken._driver._pins, "add", no_space)
    async with broken:
        await broken.publish(make(1))
    assert "could not be pinned" in caplog.text


@pytest.mark.req("R-273")
async def test_too_short_a_challenge_draws_a_warning(closed, me, make, caplog):
    closed.model.lifetime = -(10**9)
    with caplog.at_level(logging.WARNING, "strata.relay"):
        async with connect(closed.url, identity=me, options=FAST) as relay:
            await relay.publish(make(1))
            assert relay.statistics.challenges_short == 1
    assert "only 0 s to answer" in caplog.text


@pytest.mark.req("R-291")
async def test_what_is_not_granted_fails_here_and_not_there(closed, me, make):
    closed.model.grants = frozenset({"publish"})
    async with connect(closed.url, identity=me, options=ALWAYS) as relay:
        await relay.publish(make(1))
        with pytest.raises(strata.MissingCapability):
            await anext(relay.subscribe())
    assert not [m for m in closed.received_so_far() if isinstance(m, wire.Subscribe)]
