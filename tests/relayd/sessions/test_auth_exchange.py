"""AUTH on one connection: what waits, and what an outcome changes."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time
from types import SimpleNamespace
from typing import Any, cast

import pytest
from strata.protocol import packets
from strata.protocol.ids import Identity
from strata.protocol.keys import KeyChain, KeyRules, revoke_content
from strata.protocol.packets import Packet
from websockets.datastructures import Headers

from relayd.access.auth import Grants
from relayd.moderation import Ban, Bans, SubjectKind
from relayd.sessions import auth_exchange
from relayd.sessions.session import Session
from relayd.store.payers import Asker
from relayd.store.types import LogEntry, NewPacket, StoreTimeout, StoreUnavailable
from tests.relayd.sessions.connection_rig import (
    ALICE,
    CLOSE,
    NOW,
    Rig,
    auth,
    eventually,
    frame,
    publish,
    until,
)

BOB = Identity(bytes([7]) * 32)


class SlowIdentities:
    """Looks up an identity when the test says so."""

    generation = 0

    def __init__(self) -> None:
        self.answers: asyncio.Queue[Any] = asyncio.Queue()
        self.asked: list[str] = []
        self.askers: list[object] = []

    async def resolve(self, did: str, asker: Asker) -> Any:
        self.asked.append(did)
        self.askers.append(asker)
        answer = await self.answers.get()
        if isinstance(answer, Exception):
            raise answer
        if isinstance(answer, float):
            asker.checked_for(answer)
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
    rig.socket.data_received(publish(2))  # a transport may still have delivered it
    assert (rig.messages(), rig.relay.admission.pending) == ([], 0)
    identities.answers.put_nowait(None)
    ok, error = await until(rig, 2)
    assert (ok["type"], ok["author_id"], error["client_msg_id"]) == ("AUTH_OK", ALICE.did, "x")
    assert rig.relay.admission.pending == 2
    assert rig.transport.reading
    assert rig.connection._lane.identity == ALICE.did
    assert identities.askers == [rig.connection]


@pytest.mark.req("R-133", "R-321")
async def test_more_frames_than_one_step_takes_are_all_heard_behind_an_auth(slow):
    rig, identities = slow
    count = 1000
    received = rig.relay.metrics.messages_received["UNSUBSCRIBE"]._value
    rig.socket.data_received(
        auth(rig.challenge) + frame('{"type":"UNSUBSCRIBE","subscription_id":"s"}') * count
    )
    await asyncio.sleep(0)
    assert received.get() == 0
    identities.answers.put_nowait(None)
    await eventually(lambda: received.get() == count)
    await eventually(lambda: rig.transport.reading)


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
    assert rig.messages() == []  # nobody would read them
    rig.socket.resume_writing()
    rig.sweep(1)
    (challenge,) = rig.messages()
    assert (challenge["type"], challenge["expires_at"]) == ("AUTH_CHALLENGE", NOW + 241)
    rig.socket.data_received(auth(rig.challenge))
    late, _ = await until(rig, 2)
    assert late["detail"] == "challenge_expired"


# The grounds on which a session was admitted must continue to hold.


def revocation_of_alice(sequence: int = 1) -> LogEntry:
    """Alice's KEY_EVENT against the key in her DID, as the feed delivers it; the key is dead from `NOW`."""
    content = revoke_content(f"{ALICE.did}#{ALICE.did.rpartition(':')[2]}", revoked_at=NOW - 1)
    packet = packets.build(ALICE, content, timestamp=NOW)
    stored = NewPacket(packet.digest, ALICE.did, "KEY_EVENT", NOW, None, packet.canonical)
    return LogEntry(sequence, NOW, stored)


async def authenticated(rigs: Any, **settings: Any) -> Rig:
    rig: Rig = rigs(**settings)
    rig.socket.data_received(auth(rig.challenge))
    (answer,) = await until(rig, 1)
    assert answer["type"] == "AUTH_OK"
    return rig


@pytest.mark.req("R-277", "R-281")
async def test_a_key_that_is_revoked_lets_nobody_in(rigs):
    first = await authenticated(rigs)
    first.relay.identities.observe([revocation_of_alice()])
    rig = rigs(relay=first.relay)
    rig.socket.data_received(auth(rig.challenge))
    error, *_ = await until(rig, 1)
    assert (error.get("code"), error.get("detail")) == ("invalid_signature", "key_revoked")


@pytest.mark.req("R-277", "R-284")
async def test_a_revoked_key_ends_the_sessions_it_let_in_and_no_other(rigs):
    alice = await authenticated(rigs)
    bob = rigs(relay=alice.relay)
    bob.socket.data_received(auth(bob.challenge, signer=BOB, author_id=BOB.did))
    await until(bob, 1)
    alice.relay.identities.observe([revocation_of_alice()])
    alice.sweep(1)
    ((_, error), (opcode, close)) = alice.frames()
    assert b'"unauthenticated"' in error and b'"key_revoked"' in error
    assert (opcode, int.from_bytes(close[:2], "big")) == (CLOSE, 1008)
    assert bob.frames() == [] and bob.connection.socket.is_open
    bob.sweep(1)
    assert bob.frames() == []


@pytest.mark.req("R-277")
async def test_a_key_that_dies_by_time_alone_ends_its_session(rigs):
    rig = await authenticated(rigs)
    content = revoke_content(f"{ALICE.did}#{ALICE.did.rpartition(':')[2]}", revoked_at=NOW + 5)
    packet = packets.build(ALICE, content, timestamp=NOW)
    stored = NewPacket(packet.digest, ALICE.did, "KEY_EVENT", NOW, None, packet.canonical)
    rig.relay.identities.observe([LogEntry(1, NOW, stored)])
    rig.relay.clock = lambda: NOW + 5
    rig.sweep(5)
    assert rig.frames() == []
    rig.relay.clock = lambda: NOW + 6
    rig.sweep(1)
    assert b'"key_revoked"' in rig.frames()[0][1]


async def test_a_chain_that_must_be_read_first_is_waited_for_and_a_lost_database_ends_nothing(rigs):
    rig = await authenticated(rigs)
    chain = KeyChain.genesis(ALICE.did).apply(Packet.parse(revocation_of_alice().packet.body), NOW)
    answers: list[Any] = [StoreUnavailable("away"), chain]

    class Elsewhere:
        """The log has news of Alice, and her chain is not in memory."""

        generation = 1

        def is_plain(self, did: str) -> bool:
            return False

        def changed_since(self, did: str, generation: int) -> bool:
            return True

        def chain(self, did: str) -> None:
            return None

        async def resolve(self, did: str, asker: Asker, *, in_turn: bool) -> Any:
            assert not in_turn, "a peer cannot put off the end of its session by what it owes"
            answer = answers.pop(0)
            asker.checked_for(5.0)
            if isinstance(answer, Exception):
                raise answer
            return answer

    rig.relay.identities = cast(Any, Elsewhere())
    rig.sweep(1)
    await eventually(lambda: len(answers) == 1)
    await asyncio.sleep(0)
    assert rig.socket.is_open and rig.frames() == []
    rig.sweep(1)
    await eventually(lambda: not rig.socket.is_open)
    assert b'"key_revoked"' in rig.frames()[0][1]
    assert rig.connection.turn(0.0) > 9.0, "its address pays for what is read again"


@pytest.mark.req("R-285", "R-289")
async def test_who_is_no_member_any_more_loses_what_members_may_and_gets_it_back(rigs):
    rig = await authenticated(rigs, require_auth=("publish", "subscribe"), members=(ALICE.did,))
    settings = rig.relay.settings
    rig.socket.data_received(frame('{"type":"SUBSCRIBE","subscription_id":"s","gapless":true}'))
    rig.relay.access.reload(dataclasses.replace(settings, members=(BOB.did,)))
    rig.sweep(1)
    (error,) = rig.messages()
    assert (error["code"], error["detail"]) == ("unauthenticated", "missing_capability")
    assert error["subscription_id"] == "s" and rig.socket.is_open
    rig.socket.data_received(publish(1))
    assert rig.messages()[0]["detail"] == "missing_capability"
    rig.relay.access.reload(settings)
    rig.sweep(1)
    rig.socket.data_received(publish(1))
    assert rig.relay.admission.pending == 1


async def test_what_failed_while_a_session_followed_a_change_is_done_at_the_next_look(rigs, monkeypatch):
    rig = await authenticated(rigs, require_auth=("publish",), members=(ALICE.did,))
    faults = rig.relay.metrics.faults["auth"]
    monkeypatch.setattr(Session, "regrant", lambda *_: 1 / 0)
    rig.relay.access.reload(dataclasses.replace(rig.relay.settings, members=(BOB.did,)))
    rig.sweep(1)
    assert faults._value.get() == 1 and rig.socket.is_open
    monkeypatch.undo()
    rig.sweep(1)
    rig.socket.data_received(publish(1))
    assert rig.messages()[0]["detail"] == "missing_capability"


async def with_subscriptions(rigs: Any, count: int, **settings: Any) -> Rig:
    """A member's connection with `count` subscriptions; a turn of the loop has time for one action."""
    limits = {"max_subscriptions": count, "anonymous_subscribe_limit": 0, "subscribe_limit": 0}
    rig = await authenticated(rigs, require_auth=("subscribe",), members=(ALICE.did,), **limits, **settings)

    async def page(*_: object, **__: object) -> None:
        await asyncio.Event().wait()

    cast(Any, rig.relay.store).page = page
    for number in range(count):
        rig.socket.data_received(frame(f'{{"type":"SUBSCRIBE","subscription_id":"{number}","gapless":true}}'))
    assert len(rig.connection._session.subscriptions) == count
    await asyncio.sleep(0)
    rig.relay.slices.seconds = 0.0
    await asyncio.sleep(0)  # the turn that had unlimited time is over
    return rig


async def test_an_auth_ends_a_crowd_of_subscriptions_a_few_at_a_time_and_answers_then(rigs):
    rig = await with_subscriptions(rigs, 50)
    subscriptions = rig.connection._session.subscriptions
    rig.challenge = await fresh_challenge(rig)
    rig.socket.data_received(auth(rig.challenge, capabilities=["publish"]))
    left: set[int] = set()
    async with asyncio.timeout(60):
        while not (said := rig.messages()):
            left.add(len(subscriptions))
            await asyncio.sleep(0)
    assert len(left) > 10, "not all in one turn"
    assert said[0]["type"] == "AUTH_OK" and not subscriptions
    assert sorted(int(message["subscription_id"]) for message in said[1:]) == list(range(50))
    assert rig.transport.reading


async def test_a_reload_ends_a_crowd_of_subscriptions_a_few_at_a_time(rigs):
    rig = await with_subscriptions(rigs, 50)
    subscriptions = rig.connection._session.subscriptions
    rig.relay.access.reload(dataclasses.replace(rig.relay.settings, members=(BOB.did,)))
    rig.sweep(1)
    assert 0 < len(subscriptions) < 50, "not all in one turn"
    said = await until(rig, 50)
    assert not subscriptions
    assert sorted(int(message["subscription_id"]) for message in said) == list(range(50))


async def test_a_connection_that_goes_while_its_subscriptions_end_leaves_none(rigs):
    rig = await with_subscriptions(rigs, 50)
    rig.challenge = await fresh_challenge(rig)
    rig.socket.data_received(auth(rig.challenge, capabilities=["publish"]))
    subscriptions = rig.connection._session.subscriptions
    await eventually(lambda: len(subscriptions) < 40)
    rig.socket.connection_lost(None)
    await eventually(lambda: rig.relay.metrics.subscriptions._value.get() == 0)
    assert len(rig.relay.fanout) == 0 and not rig.messages()


async def fresh_challenge(rig: Rig) -> dict[str, Any]:
    """The next challenge, which a refused AUTH brings."""
    rig.socket.data_received(auth(rig.challenge))
    return (await until(rig, 2))[-1]


async def test_a_page_whose_origin_is_taken_off_the_list_is_sent_away(rigs):
    rig = rigs()
    rig.relay.access.judge(rig.connection._visitor, Headers([("Origin", "https://Page.example")]), 0.0)
    for allowed, stays in ((("https://page.example",), True), (("https://other.example",), False)):
        rig.relay.access.reload(dataclasses.replace(rig.relay.settings, allowed_origins=allowed))
        rig.sweep(1)
        assert rig.socket.is_open is stays
    assert b'"policy_rejected"' in rig.frames()[0][1]


async def test_an_open_session_of_an_identity_that_is_restricted_has_the_limits_of_an_anonymous_one(rigs):
    rig = await authenticated(rigs, anonymous_publish_limit=1)
    access, visitor = rig.relay.access, rig.connection._visitor

    def budget() -> int:
        assert visitor.charged is not None and visitor.charged.publish is not None
        return visitor.charged.publish.excess(time.monotonic()).limit

    most = budget()
    for restricted, limit in ((frozenset({ALICE.did}), 1), (frozenset(), most)):
        access.restricted = restricted
        rig.sweep(1)
        assert budget() == limit
        rig.socket.data_received(publish(1) + publish(2))
        said = rig.messages()
        assert [each["limit"] for each in said] == ([1] if limit == 1 else [])


@pytest.mark.req("R-316")
async def test_auths_stay_charged_to_the_address_though_the_identity_is_restricted(rigs):
    rig = rigs(auth_limit=2)
    rig.relay.access.restricted = frozenset({ALICE.did})
    rig.socket.data_received(auth(rig.challenge))
    await until(rig, 1)
    challenge = await fresh_challenge(rig)
    rig.socket.data_received(auth(challenge))
    (refused,) = await until(rig, 1)
    assert (refused["code"], refused["detail"], refused["limit"]) == ("rate_limited", "auth_limit", 2)


@pytest.mark.req("R-321", "R-323")
@pytest.mark.parametrize("banned", ["author", "network"])
async def test_an_open_session_of_somebody_who_is_banned_ends(rigs, banned):
    rig = await authenticated(rigs)
    authors = frozenset({ALICE.did} if banned == "author" else ())
    bans = [Ban(SubjectKind.NETWORK, "192.0.2.0/24", "x", "ann", None, NOW)] if banned == "network" else []
    assert rig.relay.access.ban(authors, Bans.at(NOW, bans))
    rig.sweep(1)
    error, close = rig.frames()
    told = json.loads(error[1])
    code, detail = ("blocked_author", None) if banned == "author" else ("policy_rejected", "banned_address")
    assert (told["code"], told.get("detail")) == (code, detail)
    assert close[1][:2] == (1008).to_bytes(2, "big") and not rig.socket.is_open


@pytest.mark.req("R-186")
async def test_somebody_who_is_banned_gets_no_session(rigs):
    rig = rigs()
    rig.relay.access.ban(frozenset({ALICE.did}), Bans())
    rig.socket.data_received(auth(rig.challenge))
    await eventually(lambda: not rig.socket.is_open)
    error, close = rig.frames()
    assert json.loads(error[1])["code"] == "blocked_author" and close[1][:2] == (1008).to_bytes(2, "big")
    assert rig.connection._session.identity is None


async def test_keys_that_come_late_do_not_judge_who_has_authenticated_anew_meanwhile(rigs):
    """By then the session speaks for another identity, whose key is good."""
    rig = await authenticated(rigs)
    lost = KeyChain.genesis(ALICE.did).apply(Packet.parse(revocation_of_alice().packet.body), NOW)
    answers = {ALICE.did: asyncio.Queue[Any](), BOB.did: asyncio.Queue[Any]()}

    class Elsewhere:
        generation = 1

        def is_plain(self, did: str) -> bool:
            return did == BOB.did

        def changed_since(self, did: str, generation: int) -> bool:
            return did == ALICE.did

        def chain(self, did: str) -> None:
            return None

        async def resolve(self, did: str, *_: Any, **__: Any) -> Any:
            return await answers[did].get()

    rig.challenge = await fresh_challenge(rig)
    rig.relay.identities = cast(Any, Elsewhere())
    rig.sweep(1)  # requests Alice's keys
    answers[BOB.did].put_nowait(KeyChain.genesis(BOB.did))
    rig.socket.data_received(auth(rig.challenge, signer=BOB, author_id=BOB.did))
    assert (await until(rig, 1))[0]["type"] == "AUTH_OK"
    answers[ALICE.did].put_nowait(lost)
    await eventually(lambda: not any(task.get_name().startswith("keys-") for task in asyncio.all_tasks()))
    assert rig.frames() == [] and rig.socket.is_open
