"""AUTH on one connection: what waits, and what an outcome changes."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest
from strata.protocol.ids import Identity
from strata.protocol.keys import KeyChain, KeyRules

from relayd.access.auth import Grants
from relayd.sessions import auth_exchange
from relayd.store.types import StoreTimeout, StoreUnavailable
from tests.relayd.sessions.connection_rig import (
    ALICE,
    NOW,
    Rig,
    auth,
    eventually,
    frame,
    publish,
    until,
)


class SlowIdentities:
    """Looks an identity up when the test says so."""

    def __init__(self) -> None:
        self.answers: asyncio.Queue[Any] = asyncio.Queue()
        self.asked: list[str] = []

    async def resolve(self, did: str) -> Any:
        self.asked.append(did)
        answer = await self.answers.get()
        if isinstance(answer, Exception):
            raise answer
        return KeyChain.genesis(did, rules=KeyRules())


@pytest.fixture
async def slow(rigs) -> tuple[Rig, SlowIdentities]:
    rig, identities = rigs(), SlowIdentities()
    rig.relay.identities = cast(Any, identities)
    return rig, identities


@pytest.mark.req("R-266", "R-268", "R-269", "R-354")
async def test_the_first_frame_is_a_challenge_of_its_own(rigs):
    one, other = rigs(), rigs()
    assert one.challenge["type"] == other.challenge["type"] == "AUTH_CHALLENGE"
    assert one.challenge["server_id"] == one.relay.relay_id
    assert one.challenge["expires_at"] == NOW + 120
    assert one.challenge["challenge"] != other.challenge["challenge"]


@pytest.mark.req("R-133", "R-283")
async def test_what_follows_an_auth_waits_for_its_outcome(slow):
    rig, identities = slow
    rig.relay.access.grants = Grants(require_auth=frozenset({"publish"}))
    rig.connection._session._allow(frozenset())
    rig.socket.data_received(auth(rig.challenge) + publish(1) + frame(b'{"type":"X","client_msg_id":"x"}'))
    assert not rig.transport.reading
    await asyncio.sleep(0)
    rig.socket.data_received(publish(2))  # a transport may still have had it
    assert (rig.messages(), rig.relay.admission.pending) == ([], 0)
    identities.answers.put_nowait(None)
    ok, error = await until(rig, 2)
    assert (ok["type"], ok["author_id"], error["client_msg_id"]) == ("AUTH_OK", ALICE.did, "x")
    assert rig.relay.admission.pending == 2
    assert rig.transport.reading
    assert rig.connection._lane.identity == ALICE.did


@pytest.mark.req("R-277", "R-281", "R-282")
async def test_a_bad_signature_is_refused_and_a_challenge_follows(rigs):
    rig = rigs()
    rig.socket.data_received(auth(rig.challenge, signer=Identity(bytes(32))))
    error, challenge = await until(rig, 2)
    assert (error["code"], error["client_msg_id"]) == ("invalid_signature", "auth")
    assert challenge["type"] == "AUTH_CHALLENGE"
    assert challenge["challenge"] != rig.challenge["challenge"]
    rig.socket.data_received(auth(challenge))
    assert [message["type"] for message in await until(rig, 1)] == ["AUTH_OK"]


@pytest.mark.req("R-282")
async def test_the_fifth_failed_auth_closes_with_1008(rigs):
    rig = rigs()
    for _ in range(5):
        rig.socket.data_received(auth(rig.challenge, author_id="did:strata:stranger"))
        await until(rig, 1)
        if rig.transport.closing:
            break
    closed = rig.relay.metrics.connections_closed
    assert rig.socket._close_reason == "auth_failures"
    assert "auth_failures" in closed


@pytest.mark.req("R-280")
@pytest.mark.parametrize("failure", [StoreUnavailable("gone"), StoreTimeout("slow"), RuntimeError("a bug")])
async def test_an_identity_that_cannot_be_looked_up_is_no_failure_of_the_peer(slow, failure):
    rig, identities = slow
    challenge = rig.challenge
    for _ in range(7):
        identities.answers.put_nowait(failure)
        rig.socket.data_received(auth(challenge))
        error, challenge = await until(rig, 2)
        assert (error["code"], error["detail"]) == ("internal_error", "store_unavailable")
    identities.answers.put_nowait(None)
    rig.socket.data_received(auth(challenge))
    assert (await until(rig, 1))[0]["type"] == "AUTH_OK"


@pytest.mark.req("R-280")
async def test_looking_up_takes_no_longer_than_a_client_waits(slow, monkeypatch):
    rig, _ = slow
    monkeypatch.setattr(auth_exchange, "_RESOLVE_TIMEOUT", 0.0)
    rig.socket.data_received(auth(rig.challenge))
    error, challenge = await until(rig, 2)
    assert (error["code"], challenge["type"]) == ("internal_error", "AUTH_CHALLENGE")


async def test_a_peer_that_leaves_meanwhile_leaves_nothing_behind(slow):
    rig, identities = slow
    rig.socket.data_received(auth(rig.challenge) + publish(1))
    await asyncio.sleep(0)
    assert identities.asked == [ALICE.did]
    rig.socket.connection_lost(None)
    identities.answers.put_nowait(None)
    await eventually(lambda: not any(task.get_name().startswith("auth-") for task in asyncio.all_tasks()))
    assert rig.relay.admission.pending == 0
    assert len(rig.relay.access.identities) == 0


@pytest.mark.req("R-282")
async def test_an_anonymous_session_gets_a_fresh_challenge_when_the_old_one_is_too_old(rigs):
    rig = rigs(ping_interval=86_400.0)
    unix = SimpleNamespace(now=NOW + 120)
    rig.relay.clock = lambda: unix.now
    rig.sweep(1)
    assert rig.messages() == []
    unix.now += 1
    rig.socket.pause_writing()
    rig.sweep(1)
    assert rig.messages() == []  # nobody would read it
    rig.socket.resume_writing()
    rig.sweep(1)
    (challenge,) = rig.messages()
    assert (challenge["type"], challenge["expires_at"]) == ("AUTH_CHALLENGE", NOW + 241)
    rig.socket.data_received(auth(rig.challenge))
    late, _ = await until(rig, 2)
    assert late["detail"] == "challenge_expired"
