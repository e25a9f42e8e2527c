"""Section 15: AUTH and capabilities."""

from __future__ import annotations

import asyncio
import base64
import binascii
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from strata.protocol.ids import Signer, is_did

from strata_testkit.conformance.checks.keys import Keys
from strata_testkit.conformance.context import Context
from strata_testkit.conformance.forge import auth_message
from strata_testkit.conformance.model import Group, Keyword
from strata_testkit.conformance.peer import Peer, expect_error, expect_ok
from strata_testkit.conformance.verdicts import DECISIONS, Message, Skipped, expect, expect_equal

__all__ = ["CHECKS"]

CHECKS = Group(15)

_MIN_CHALLENGE_BYTES = 32
_MIN_LIFETIME = 60
_MAX_LIFETIME = 600
_CLOCKS = 5
"""The clock difference, in seconds, that does not fail a check."""

_PROMPT = 5.0
_FAILURES = 5


@asynccontextmanager
async def _challenged(context: Context) -> AsyncIterator[tuple[Peer, Message]]:
    """A fresh session and its challenge. Skips the check if the relay sends no challenge."""
    if not context.subject.sends_challenge:
        raise Skipped("the relay sends no AUTH_CHALLENGE")
    async with context.connect(anonymous=True) as peer:
        yield peer, await peer.challenge()


async def _auth(
    peer: Peer, signer: Signer, challenge: Message, *, signed: bytes | None = None, **changes: object
) -> Message:
    return await peer.ask(auth_message(signer, challenge, signed=signed, **changes))


def _expect_auth_ok(answer: Message, did: str) -> list[str]:
    """The effective capabilities of an AUTH_OK. Fails if it is not one for this identity."""
    expect(answer.get("type") == "AUTH_OK", "AUTH_OK", answer)
    expect_equal(answer.get("author_id"), did, "author_id of the AUTH_OK")
    capabilities = answer.get("capabilities")
    expect(isinstance(capabilities, list), "capabilities in the AUTH_OK", answer)
    return [str(item) for item in capabilities or ()]


@CHECKS("R-266", source="RFC-0004 §3.7", level=Keyword.SHOULD)
async def the_challenge_comes_first(context: Context) -> None:
    """The relay sends AUTH_CHALLENGE on connect"""
    expect(context.subject.sends_challenge, "an AUTH_CHALLENGE", "none before the answer to a PUBLISH")
    async with context.connect(anonymous=True) as peer:
        await peer.challenge()


@CHECKS("R-267", source="RFC-0004 §3.7, §8")
async def auth_is_optional(context: Context) -> None:
    """A session that ignores the challenge publishes, within the relay's policy"""
    async with context.connect(anonymous=True) as peer:
        expect_ok(await peer.publish(context.packet(context.identity())))


@CHECKS("R-268", "R-269", source="RFC-0004 §3.7; RFC-0007 §4.2")
async def challenges_are_sound(context: Context) -> None:
    """A challenge is base64 of at least 32 bytes, differs for each session, and names the relay's DID"""
    async with _challenged(context) as (_, first), _challenged(context) as (_, second):
        for challenge in (first, second):
            text = str(challenge.get("challenge"))
            try:
                size = len(base64.b64decode(text, validate=True))
            except (binascii.Error, ValueError):
                size = 0
            expect(size >= _MIN_CHALLENGE_BYTES, "base64 of at least 32 bytes", text)
            server_id = challenge.get("server_id")
            expect(isinstance(server_id, str) and is_did(server_id), "a DID as server_id", server_id)
            expect_equal(server_id, context.subject.relay_id, "server_id, as the manifest names the relay")
        expect(first["challenge"] != second["challenge"], "another challenge for each session", first)


@CHECKS("R-270", source="RFC-0004 §3.7")
async def challenges_leave_time(context: Context) -> None:
    """`expires_at` leaves at least 60 s"""
    async with _challenged(context) as (_, challenge):
        left = challenge.get("expires_at")
        expect(type(left) is int, "an integer expires_at", left)
        left = int(left or 0) - context.now()
        expect(left >= _MIN_LIFETIME - _CLOCKS, f"at least {_MIN_LIFETIME} s", f"{left} s")


@CHECKS("R-271", "R-272", source="RFC-0004 §3.7", level=Keyword.SHOULD)
async def challenges_do_not_last(context: Context) -> None:
    """A challenge lasts no longer than 600 s"""
    async with _challenged(context) as (_, challenge):
        left = int(challenge.get("expires_at") or 0) - context.now()
        expect(left <= _MAX_LIFETIME + _CLOCKS, f"at most {_MAX_LIFETIME} s", f"{left} s")


@CHECKS("R-275", "R-280", "R-285", source="RFC-0004 §3.7; decision A-070")
async def auth_is_answered(context: Context) -> None:
    """AUTH with a signature over challenge and server_id is AUTH_OK, at once, with capabilities"""
    identity = context.identity()
    async with _challenged(context) as (peer, challenge):
        started_at = asyncio.get_running_loop().time()
        answer = await _auth(peer, identity, challenge)
        waited = asyncio.get_running_loop().time() - started_at
        _expect_auth_ok(answer, identity.did)
        expect(waited < _PROMPT, f"an answer within {_PROMPT:g} s", f"{waited:.1f} s")


@CHECKS("R-136", source="RFC-0004 §3.7", level=Keyword.SHOULD)
async def auth_answers_echo(context: Context) -> None:
    """AUTH_OK and the ERROR for AUTH echo `client_msg_id`"""
    async with _challenged(context) as (peer, challenge):
        answer = await _auth(peer, context.identity(), challenge, client_msg_id="auth")
        expect_equal(answer.get("client_msg_id"), "auth", "client_msg_id of the AUTH_OK")
    async with _challenged(context) as (peer, challenge):
        answer = await _auth(
            peer, context.identity(), challenge, client_msg_id="auth", signature="0x" + "00" * 64
        )
        expect_equal(answer.get("client_msg_id"), "auth", "client_msg_id of the ERROR")


@CHECKS("R-276", source="decision A-070", level=Keyword.MAY, extension=DECISIONS)
async def decoded_challenges_are_taken(context: Context) -> None:
    """A signature over the decoded challenge and server_id is accepted too"""
    identity = context.identity()
    async with _challenged(context) as (peer, challenge):
        signed = base64.b64decode(challenge["challenge"]) + challenge["server_id"].encode()
        _expect_auth_ok(await _auth(peer, identity, challenge, signed=signed), identity.did)


@CHECKS("R-275", "R-281", source="RFC-0004 §3.7")
async def wrong_signatures_are_refused(context: Context) -> None:
    """A signature over anything else, or by another key, is `invalid_signature`"""
    identity, other = context.identity(), context.identity()
    wrong: list[Message] = [
        {"signed": b"nothing"},
        {"author_id": other.did},
        {"signature": "0x" + "00" * 64},
    ]
    for changes in wrong:
        async with _challenged(context) as (peer, challenge):
            answer = await _auth(peer, identity, challenge, **changes)
            expect_error(answer, "invalid_signature")
    async with _challenged(context) as (peer, challenge):
        alone = str(challenge["challenge"]).encode()
        expect_error(await _auth(peer, identity, challenge, signed=alone), "invalid_signature")


@CHECKS("R-268", "R-278", "R-284", source="RFC-0004 §3.7; decision A-073")
async def challenges_belong_to_their_session(context: Context) -> None:
    """AUTH for an invented challenge, or for another session's, is `unauthenticated`"""
    identity = context.identity()
    async with _challenged(context) as (peer, own), _challenged(context) as (_, foreign):
        for text in (foreign["challenge"], base64.b64encode(b"x" * 32).decode()):
            answer = await _auth(peer, identity, {**own, "challenge": text})
            expect_error(answer, "unauthenticated")
            if context.subject.announces(DECISIONS):
                expect_equal(answer.get("detail"), "challenge_unknown", "detail")


@CHECKS("R-268", source="RFC-0004 §3.7; decision A-073")
async def challenges_are_used_once(context: Context) -> None:
    """A challenge can be answered only once"""
    identity = context.identity()
    async with _challenged(context) as (peer, challenge):
        _expect_auth_ok(await _auth(peer, identity, challenge), identity.did)
        expect_error(await _auth(peer, identity, challenge), "unauthenticated")


@CHECKS("R-277", source="RFC-0004 §3.7")
async def revoked_keys_do_not_authenticate(context: Context) -> None:
    """AUTH by a revoked key is `invalid_signature`; by the key that replaces it, AUTH_OK"""
    keys = Keys(context)
    async with context.connect() as publisher:
        await publisher.store(keys.add(), keys.revoke(keys.first_id, keys.second))
    async with _challenged(context) as (peer, challenge):
        answer = expect_error(await _auth(peer, keys.first, challenge), "invalid_signature")
        if context.subject.announces(DECISIONS):
            expect_equal(answer.get("detail"), "key_revoked", "detail (R-281)")
    async with _challenged(context) as (peer, challenge):
        _expect_auth_ok(await _auth(peer, keys.second, challenge), keys.did)


@CHECKS("R-279", source="RFC-0004 §3.7; decision A-019")
async def unresolved_identities_are_refused(context: Context) -> None:
    """AUTH by an identity whose key is not known is `unauthenticated`"""
    async with _challenged(context) as (peer, challenge):
        answer = await _auth(peer, context.identity(), challenge, author_id="did:strata:nobody_knows")
        expect_error(answer, "unauthenticated")
        if context.subject.announces(DECISIONS):
            expect_equal(answer.get("detail"), "unresolved_key", "detail")


@CHECKS("R-282", source="RFC-0004 §3.7; decision A-073", level=Keyword.SHOULD, extension=DECISIONS)
async def failures_bring_new_challenges(context: Context) -> None:
    """A failed AUTH brings a new challenge, which can be answered; five failures close with 1008"""
    identity = context.identity()
    async with _challenged(context) as (peer, challenge):
        expect_error(await _auth(peer, identity, challenge, signed=b"nothing"))
        fresh = await _fresh(peer, challenge)
        _expect_auth_ok(await _auth(peer, identity, fresh), identity.did)
    async with _challenged(context) as (peer, challenge):
        for failure in range(_FAILURES):
            expect_error(await _auth(peer, identity, challenge, signed=b"nothing"))
            if failure < _FAILURES - 1:
                challenge = await _fresh(peer, challenge)
        expect_equal(await peer.close_code(), 1008, "the close code after five failures")


async def _fresh(peer: Peer, old: Message) -> Message:
    """The challenge that follows `old`."""
    for _ in range(3):
        if peer.challenges and peer.challenges[-1] != old:
            return peer.challenges[-1]
        await peer.barrier()
    expect(peer.challenges[-1] != old, "a new AUTH_CHALLENGE", "none")
    return peer.challenges[-1]


@CHECKS("R-283", source="decision A-073", level=Keyword.MAY, extension=DECISIONS)
async def auth_may_be_repeated(context: Context) -> None:
    """A later AUTH with a fresh challenge replaces the identity; a failed one keeps it"""
    one, two = context.identity(), context.identity()
    async with _challenged(context) as (peer, challenge):
        _expect_auth_ok(await _auth(peer, one, challenge), one.did)
        expect_error(await _auth(peer, two, challenge, signed=b"nothing"))
        expect_ok(await peer.publish(context.packet(one)))
        _expect_auth_ok(await _auth(peer, two, await _fresh(peer, challenge)), two.did)


@CHECKS("R-286", "R-287", "R-290", source="RFC-0004 §3.7; RFC-0007 §5.2; decision A-074")
async def capabilities_are_what_was_asked_and_granted(context: Context) -> None:
    """Effective capabilities are those both requested and granted, without unknown ones and `replicate`"""

    async def effective(**changes: list[str]) -> set[str]:
        identity = context.identity()
        async with _challenged(context) as (peer, challenge):
            answer = await _auth(peer, identity, challenge, signed=None, **changes)
            return set(_expect_auth_ok(answer, identity.did))

    granted = await effective()
    expect("replicate" not in granted, "no `replicate` for a stranger", sorted(granted))
    expect_equal(await effective(capabilities=[]), set(), "nothing, where nothing was asked for")
    for asked in (["publish"], ["subscribe"], ["publish", "fly"], ["subscribe", "replicate"]):
        expect_equal(
            await effective(capabilities=asked), granted & set(asked), f"what was granted of {asked}"
        )


@CHECKS("R-288", "R-289", source="RFC-0007 §5.2; decision A-075")
async def capabilities_are_enforced(context: Context) -> None:
    """`publish` allows PUBLISH, `subscribe` allows SUBSCRIBE; without them both are `unauthenticated`"""
    author = context.identity()
    async with _challenged(context) as (peer, challenge):
        held = _expect_auth_ok(await _auth(peer, author, challenge, capabilities=["subscribe"]), author.did)
        if held == ["subscribe"]:
            peer.is_authenticated = True
            _expect_missing(await peer.publish(context.packet(author)), context)
            expect_equal((await peer.subscribe("s", {"authors": [author.did]})).ids, [], "nothing stored")
    async with _challenged(context) as (peer, challenge):
        held = _expect_auth_ok(await _auth(peer, author, challenge, capabilities=["publish"]), author.did)
        if held == ["publish"]:
            _expect_missing(await peer.refused_subscription({"subscription_id": "s"}), context)
            expect_ok(await peer.publish(context.packet(author)))


def _expect_missing(answer: Message, context: Context) -> None:
    detail = "missing_capability" if context.subject.announces(DECISIONS) else None
    expect_error(answer, "unauthenticated", detail=detail)


@CHECKS("R-191", source="RFC-0004 §3.2; decision A-076", extension=DECISIONS)
async def sessions_publish_for_others(context: Context) -> None:
    """An authenticated session may publish packets of other authors"""
    identity = context.identity()
    async with _challenged(context) as (peer, challenge):
        _expect_auth_ok(await _auth(peer, identity, challenge), identity.did)
        await peer.store(context.packet(context.identity()), context.packet(identity))
