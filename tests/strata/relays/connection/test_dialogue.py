"""A separate session for requests: how a relay may answer its AUTH."""

from __future__ import annotations

import base64
import contextlib
import itertools
import secrets
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import msgspec
import pytest
from strata.protocol import wire
from strata.protocol.errors import ConnectionFailed, ErrorCode, RequestRefused
from strata.protocol.ids import Identity
from strata.relays.connection.dialogue import Dialogue
from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed

from tests.support.made_packets import new_identity

RELAY = new_identity()
ME = new_identity()


@asynccontextmanager
async def answering(answers: Callable[[wire.Auth], list[wire.RelayMessage]] | None) -> AsyncIterator[str]:
    """The URL of a relay that sends a challenge, and then these messages after an AUTH; or only challenges,
    each with extensions of its own."""

    async def session(socket: ServerConnection) -> None:
        text = base64.b64encode(secrets.token_bytes(32)).decode()
        expires_at = int(time.time()) + 120
        challenge = wire.AuthChallenge(challenge=text, server_id=RELAY.did, expires_at=expires_at)
        await socket.send(wire.encode(challenge).decode())
        if answers is None:
            with contextlib.suppress(ConnectionClosed):
                for number in itertools.count():
                    names = [f"{number} {each}" for each in range(100)]
                    again = msgspec.structs.replace(challenge, extensions=names)
                    await socket.send(wire.encode(again).decode())
            return
        message = wire.decode_client_message(await socket.recv(decode=False))
        assert isinstance(message, wire.Auth)
        for answer in answers(message):
            await socket.send(wire.encode(answer).decode())
        await socket.wait_closed()

    async with serve(session, "127.0.0.1", 0) as server:
        port = next(iter(server.sockets)).getsockname()[1]
        yield f"ws://127.0.0.1:{port}/strata/ws"


def dialogue(url: str, identity: Identity = ME) -> Dialogue:
    return Dialogue(url, identity, relay_id=RELAY.did, ssl=None, timeout=20)


async def test_a_refusal_that_names_no_request_ends_the_session():
    def refuse(_: wire.Auth) -> list[wire.RelayMessage]:
        return [wire.Error(code=ErrorCode.UNAUTHENTICATED, reason="not you")]

    async with answering(refuse) as url:
        with pytest.raises(RequestRefused, match="not you"):
            async with dialogue(url):
                pass


async def test_the_session_of_another_identity_is_not_taken():
    def answer(auth: wire.Auth) -> list[wire.RelayMessage]:
        name = auth.client_msg_id
        return [
            wire.AuthOk(author_id=RELAY.did, capabilities=["publish"]),
            wire.AuthOk(author_id=ME.did, client_msg_id="another"),
            wire.AuthOk(author_id=ME.did, client_msg_id=name, capabilities=["moderate"]),
        ]

    async with answering(answer) as url, dialogue(url) as session:
        assert session.granted == ("moderate",)


async def test_a_relay_that_challenges_for_ever_is_left_with_what_it_has_made_up():
    async with answering(None) as url:
        session = dialogue(url)
        with pytest.raises(ConnectionFailed, match="again and again"):
            await session.__aenter__()
    assert len(session.extensions) <= 256
