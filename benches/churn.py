"""Clients that come, do something, and leave in every possible way, many of them at once.

They use their own sockets and do not spare the relay. A `Chorus` remembers what it has published, so that it
can be compared at the end with what a permanent reader has read.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import socket
import struct
import time
import urllib.error
import urllib.request
from collections import Counter, deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Final

from strata.protocol.ids import Identity
from strata.protocol.packets import build
from websockets.asyncio.client import ClientConnection
from websockets.exceptions import WebSocketException

from tests.support.sockets import connect

__all__ = ["LEAVES", "Chorus", "Steady", "short_id"]

LEAVES: Final = ("clean", "reset", "vanished", "amid a frame", "amid a handshake", "with history under way")
_GONE: Final = (OSError, EOFError, TimeoutError, WebSocketException)
_PATIENCE: Final = 20.0
_POOL: Final = 200
_TOPICS: Final = 1000
_RECENT_SECONDS: Final = 10
_SILENCE: Final = 9.0
"""Longer than the relay waits for a pong before it ends the connection of a client that vanished."""

Message = dict[str, Any]


def short_id(packet_id: str) -> int:
    """Eight bytes of an id: enough to recognise it, and little to keep."""
    return int(packet_id[2:18], 16)


async def _said(socket_: ClientConnection) -> Message:
    async with asyncio.timeout(_PATIENCE):
        message: Message = json.loads(await socket_.recv())
    return message


@dataclass(slots=True)
class Chorus:
    """The clients of a soak. `places` of them are connected at a time, and each is followed by another."""

    ws_url: str
    http_url: str
    seed: int
    places: int
    visits: int = 0
    left: Counter[str] = field(default_factory=Counter)
    acknowledged: set[int] = field(default_factory=set)
    refused: int = 0
    _stopping: bool = False
    _number: int = 0
    _authors: deque[Identity] = field(default_factory=lambda: deque(maxlen=_POOL))
    _vanished: set[asyncio.Task[None]] = field(default_factory=set)

    async def sing(self, until: asyncio.Event) -> None:
        """Come and go until the event is set and everybody has left."""
        async with asyncio.TaskGroup() as group:
            places = [group.create_task(self._place(number)) for number in range(self.places)]
            await until.wait()
            self._stopping = True
            await asyncio.wait(places)
        await asyncio.gather(*self._vanished)

    async def _place(self, number: int) -> None:
        chance = random.Random(f"{self.seed}/{number}")
        await asyncio.sleep(chance.random())
        while not self._stopping:
            self.visits += 1
            with contextlib.suppress(*_GONE):
                if chance.random() < 0.1:
                    await asyncio.to_thread(
                        self._ask, chance.choice(("/", "/healthz", "/packets/0x" + "0" * 64))
                    )
                elif chance.random() < 0.1:
                    await self._knock(chance)
                else:
                    await self._visit(chance)

    def _ask(self, path: str) -> None:
        with contextlib.suppress(urllib.error.HTTPError):
            urllib.request.urlopen(self.http_url + path, timeout=_PATIENCE).close()

    async def _knock(self, chance: random.Random) -> None:
        """Leave in the middle of the handshake, after a part of the request and a pause."""
        host, port = self.http_url.removeprefix("http://").rsplit(":", 1)
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"GET /strata HTTP/1.1\r\nHost: relay\r\n"[: chance.randrange(40)])
        await asyncio.sleep(chance.random())
        writer.transport.abort()
        self.left["amid a handshake"] += 1

    async def _visit(self, chance: random.Random) -> None:
        opened = await connect(self.ws_url, open_timeout=_PATIENCE, ping_interval=None, compression=None)
        try:
            challenge = await _said(opened)
            me = self._author(chance)
            if chance.random() < 0.5:
                await self._authenticate(opened, me, challenge, chance)
            acts: list[Callable[[], Coroutine[Any, Any, None]]] = [
                lambda: self._subscribe(opened, chance),
                lambda: self._publish(opened, me, chance),
            ]
            for _ in range(chance.randrange(1, 5)):
                await chance.choice(acts)()
            await self._listen(opened, chance.random() * 2)
        finally:
            await self._leave(opened, chance)

    def _author(self, chance: random.Random) -> Identity:
        if len(self._authors) < _POOL or chance.random() < 0.2:
            self._authors.append(Identity.from_seed(chance.randbytes(32)))
        return chance.choice(self._authors)

    async def _authenticate(
        self, opened: ClientConnection, me: Identity, challenge: Message, chance: random.Random
    ) -> None:
        signed = (challenge["challenge"] + challenge["server_id"]).encode()
        message = {
            "type": "AUTH",
            "author_id": me.did,
            "challenge": challenge["challenge"],
            "signature": "0x" + (me.sign(signed) if chance.random() < 0.9 else bytes(64)).hex(),
        }
        await self._ask_for(opened, message)

    async def _ask_for(self, opened: ClientConnection, message: Message) -> Message:
        self._number += 1
        name = f"m{self._number}"
        await opened.send(json.dumps({**message, "client_msg_id": name}))
        while (answer := await _said(opened)).get("client_msg_id") != name:
            pass
        return answer

    async def _subscribe(self, opened: ClientConnection, chance: random.Random) -> None:
        filters: dict[str, Any] = {
            "types": [f"TOPIC-{chance.randrange(_TOPICS)}" for _ in range(chance.randrange(1, 30))]
        }
        if chance.random() < 0.4:
            filters = {"authors": [self._author(chance).did for _ in range(chance.randrange(1, 5))]}
        if chance.random() < 0.2:
            filters = {}
        message = {"type": "SUBSCRIBE", "subscription_id": f"s{chance.randrange(4)}", "filters": filters}
        if chance.random() < 0.2:
            # The same amount at the end as at the beginning, however long the log has become.
            filters["received_since"] = int(time.time()) - _RECENT_SECONDS
            await opened.send(json.dumps({**message, "gapless": True}))
            return
        filters["limit"] = chance.randrange(200)
        await self._ask_for(opened, {**message, "history_marker": True})
        if chance.random() < 0.3:
            await opened.send(
                json.dumps({"type": "UNSUBSCRIBE", "subscription_id": message["subscription_id"]})
            )

    async def _publish(self, opened: ClientConnection, me: Identity, chance: random.Random) -> None:
        for _ in range(chance.randrange(1, 6)):
            content = {"type": f"TOPIC-{chance.randrange(_TOPICS)}", "text": "x" * chance.randrange(400)}
            body = build(me, content, timestamp=int(time.time()), nonce=f"{chance.random()}").canonical
            if chance.random() < 0.1:  # then the signature is no longer right
                body = body.replace(b'"text":"', b'"text":"y', 1)
            self._number += 1
            name = f"m{self._number}"
            await opened.send(
                b'{"type":"PUBLISH","client_msg_id":"%s","packet":%s}' % (name.encode(), body), text=True
            )
            while (answer := await _said(opened)).get("client_msg_id") != name:
                pass
            if answer["type"] == "OK":
                self.acknowledged.add(short_id(answer["packet_id"]))
            else:
                self.refused += 1

    async def _listen(self, opened: ClientConnection, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                async for _ in opened:
                    pass

    async def _leave(self, opened: ClientConnection, chance: random.Random) -> None:
        how = chance.choices(LEAVES, (4, 2, 1, 1, 0, 1))[0]
        self.left[how] += 1
        match how:
            case "clean":
                await opened.close()
                return
            case "reset":
                _reset_on_close(opened)
            case "vanished":
                opened.transport.pause_reading()
                away = asyncio.create_task(self._stay_away(opened))
                self._vanished.add(away)
                away.add_done_callback(self._vanished.discard)
                return
            case "amid a frame":
                opened.transport.write(b"\x81\xfe\x40\0half a fra")
            case "with history under way":
                recent = {"received_since": int(time.time()) - _RECENT_SECONDS}
                message = {"type": "SUBSCRIBE", "subscription_id": "all", "filters": recent, "gapless": True}
                with contextlib.suppress(*_GONE):
                    await opened.send(json.dumps(message))
        opened.transport.abort()

    async def _stay_away(self, opened: ClientConnection) -> None:
        await asyncio.sleep(_SILENCE)
        opened.transport.abort()


def _reset_on_close(opened: ClientConnection) -> None:
    """Have the kernel send RST when the socket is closed."""
    with contextlib.suppress(OSError):
        own = opened.transport.get_extra_info("socket")
        with socket.socket(fileno=os.dup(own.fileno())) as same:
            same.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


class Steady:
    """A reader that stays, and takes everything."""

    def __init__(self, ws_url: str) -> None:
        self._ws_url = ws_url
        self.opened = asyncio.Event()
        self.seen: set[int] = set()
        self.twice = 0

    async def read(self) -> None:
        """Read until cancelled. Raises if the relay ends the connection."""
        async with connect(self._ws_url, ping_interval=None, compression=None, max_queue=None) as opened:
            message = {"type": "SUBSCRIBE", "subscription_id": "all", "filters": {}, "gapless": True}
            await opened.send(json.dumps(message))
            self.opened.set()
            async for frame in opened:
                said = json.loads(frame)
                if said["type"] == "EVENT":
                    packet = short_id(said["packet"]["packet_id"])
                    self.twice += packet in self.seen
                    self.seen.add(packet)
