"""A run with a user's identity: the relay under test may be hostile, and the identity is no throw-away."""

from __future__ import annotations

import base64
import contextlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from strata.protocol import packets
from strata.protocol.ids import Identity, verify
from strata_testkit.conformance.context import survey
from strata_testkit.conformance.peer import Patience
from strata_testkit.conformance.verdicts import Skipped
from websockets.asyncio.server import ServerConnection, serve
from websockets.http11 import Request, Response

from tests.support.strata_command import run_strata

CHALLENGE = base64.b64encode(bytes(32)).decode()
HOME, OTHER = "did:strata:relay_1", "did:strata:relay_2"


@asynccontextmanager
async def relay_that_says(challenge: str, server_id: str) -> AsyncIterator[tuple[str, list[str]]]:
    """A relay with this challenge: its URL, and the signatures that it has got."""
    signatures: list[str] = []

    async def converse(socket: ServerConnection) -> None:
        await socket.send(
            json.dumps(
                {
                    "type": "AUTH_CHALLENGE",
                    "challenge": challenge,
                    "server_id": server_id,
                    "expires_at": 2**40,
                }
            )
        )
        async for text in socket:
            message = json.loads(text)
            if message["type"] == "AUTH":
                signatures.append(message["signature"])
                answer = {"type": "AUTH_OK", "author_id": message["author_id"], "capabilities": []}
                await socket.send(json.dumps(answer | {"client_msg_id": message.get("client_msg_id")}))

    def page(socket: ServerConnection, request: Request) -> Response | None:
        return None if request.path == "/strata" else socket.respond(404, "no\n")

    async with serve(converse, "127.0.0.1", 0, process_request=page) as server:
        yield f"ws://127.0.0.1:{server.sockets[0].getsockname()[1]}/strata", signatures


@pytest.mark.req("R-298")
async def test_a_relay_under_test_gets_no_packet_signed_in_the_users_name():
    user = Identity.generate()
    packet = packets.build(user, {"type": "POST", "text": "I never said that"}, timestamp=1_760_000_000)
    text = packet.signed_bytes
    for challenge, server_id in ((text.decode(), ""), (text[:-20].decode(), text[-20:].decode())):
        async with relay_that_says(challenge, server_id) as (url, signatures):
            with contextlib.suppress(Skipped):
                await survey(url, identity=user, patience=Patience(answer=1.0))
            assert not [each for each in signatures if verify(user.public_key, text, bytes.fromhex(each[2:]))]
            assert not signatures


@pytest.mark.req("R-298")
async def test_a_relay_under_test_is_held_to_its_pin(tmp_path: Path):
    key, pins = tmp_path / "me.json", tmp_path / "pins"
    Identity.generate().save(key)
    async with relay_that_says(CHALLENGE, HOME) as (url, signatures):
        for known in ({url: OTHER}, {"ws://other.example:80/strata": HOME}):
            pins.write_text(json.dumps(known))
            for by_option in (True, False):
                run = ["conformance", url, "--identity", key, *(["--pins", pins] if by_option else [])]
                code, out, err = await run_strata(*run, STRATA_PINS=tmp_path / "none" if by_option else pins)
                assert (code, out) == (1, ""), err
                assert "answers no such challenge" in err
        assert not signatures
