"""How a moderator handles pages that lead nowhere, and whose challenges it answers; the rest is in
tests/system/test_moderation.py."""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from strata.protocol import wire
from strata.protocol.errors import ConnectionFailed, IdentityError, InvalidMessage
from strata.relays.moderating import Moderator
from websockets.asyncio.server import ServerConnection, serve

from tests.support.made_packets import new_identity


class Paged(Moderator):
    """A session whose relay answers each place with this many entries and the next place."""

    def __init__(self, pages: dict[str | None, tuple[int, str | None]]) -> None:
        super().__init__("ws://relay.example/strata", new_identity())
        self.pages = pages
        self.asked = 0

    async def _rule(self, message: wire.Moderate) -> wire.Moderated:
        self.asked += 1
        entries, following = self.pages[message.after]
        return wire.Moderated(action="log", entries=[{"number": 1}] * entries, next=following)


async def test_pages_are_read_to_their_end():
    session = Paged({None: (2, "a"), "a": (2, "b"), "b": (1, "c"), "c": (0, None)})
    assert len([entry async for entry in session.log()]) == 5


@pytest.mark.parametrize("before", [0, 1, 5])
@pytest.mark.parametrize("length", [1, 2, 3, 17])
async def test_a_circle_of_pages_is_told(before: int, length: int):
    names = [str(number) for number in range(before + length)]
    following = dict(zip([None, *names], [*names, names[before]], strict=True))
    session = Paged({place: (1, after) for place, after in following.items()})
    with pytest.raises(ConnectionFailed, match="in a circle"):
        async for _ in session.log():
            assert session.asked < 100
    assert session.asked <= 3 * (before + length) + 3


async def test_a_page_of_nothing_that_names_another_is_told():
    session = Paged({None: (1, "a"), "a": (0, "b")})
    with pytest.raises(ConnectionFailed, match="pages of nothing"):
        async for _ in session.bans():
            pass


HOME, OTHER = "did:strata:relay_1", "did:strata:relay_2"


@asynccontextmanager
async def relay_showing(*names: str) -> AsyncIterator[tuple[str, list[str]]]:
    """A relay that shows these DIDs, one with each challenge, and then says AUTH_OK: its URL, and the names
    whose challenges were answered."""
    answered: list[str] = []

    async def challenge(socket: ServerConnection) -> None:
        for number, name in enumerate(names):
            text = base64.b64encode(bytes([number]) * 32).decode()
            await socket.send(
                wire.encode(wire.AuthChallenge(challenge=text, server_id=name, expires_at=2**40)).decode()
            )
            auth = json.loads(await socket.recv())
            answered.append(name)
        ok = wire.AuthOk(author_id=auth["author_id"], client_msg_id="auth", capabilities=["operate"])
        await socket.send(wire.encode(ok).decode())
        await socket.wait_closed()

    async with serve(challenge, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        yield f"ws://127.0.0.1:{port}/strata", answered


@pytest.mark.req("R-298")
async def test_a_moderator_holds_a_relay_to_the_did_that_is_pinned(tmp_path: Path):
    pins = tmp_path / "pins.json"
    async with relay_showing(HOME) as (url, answered):
        for _ in range(2):
            async with Moderator(url, new_identity(), pins=pins):
                assert json.loads(pins.read_text()) == {url: HOME}
        pins.write_text(json.dumps({url: OTHER}))
        with pytest.raises(InvalidMessage) as refused:
            async with Moderator(url, new_identity(), pins=pins):
                pass
        assert refused.value.detail == "server_id_unexpected"
        assert answered == [HOME] * 2
    assert json.loads(pins.read_text()) == {url: OTHER}


@pytest.mark.req("R-298")
async def test_a_moderator_answers_no_challenge_of_a_relay_that_is_pinned_elsewhere(tmp_path: Path):
    pins = tmp_path / "pins.json"
    async with relay_showing(OTHER) as (url, answered):
        pins.write_text(json.dumps({"ws://other.example:80/strata": OTHER}))
        with pytest.raises(InvalidMessage) as refused:
            async with Moderator(url, new_identity(), pins=pins):
                pass
        assert refused.value.detail == "server_id_elsewhere"
        assert not answered


@pytest.mark.req("R-298")
async def test_a_moderator_answers_challenges_of_one_relay_in_a_session():
    async with relay_showing(HOME, OTHER) as (url, answered):
        with pytest.raises(InvalidMessage) as refused:
            async with Moderator(url, new_identity()):
                pass
        assert refused.value.detail == "server_id_unexpected"
        assert answered == [HOME]


async def test_a_file_that_holds_no_pins_stops_a_moderator(tmp_path: Path):
    pins = tmp_path / "pins.json"
    pins.write_text("no pins")
    async with relay_showing(HOME) as (url, answered):
        with pytest.raises(IdentityError):
            async with Moderator(url, new_identity(), pins=pins):
                pass
        assert not answered
