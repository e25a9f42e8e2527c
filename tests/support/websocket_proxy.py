"""A WebSocket proxy in front of a relay: a slow one, or one that lies in every way a relay can."""

from __future__ import annotations

import asyncio
import json
import random
import urllib.request
from http import HTTPStatus
from typing import Any, Self

from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import WebSocketException

from tests.support.sockets import connect

__all__ = ["LyingProxy", "SlowProxy"]

MANIFEST = "/.well-known/strata-relay.json"


class SlowProxy:
    """Forwards everything, each frame after `delay` seconds and in order."""

    def __init__(self, upstream: str, *, delay: float = 0.0) -> None:
        self._upstream = upstream
        self._delay = delay
        self.connections = 0

    async def __aenter__(self) -> Self:
        http = self._upstream.replace("ws://", "http://").removesuffix("/strata")

        def manifest() -> bytes:
            with urllib.request.urlopen(http + MANIFEST, timeout=20) as answer:
                body: bytes = answer.read()
                return body

        body = (await asyncio.to_thread(manifest)).decode()

        def answer(connection: ServerConnection, request: Any) -> Any:
            return connection.respond(HTTPStatus.OK, body) if request.path == MANIFEST else None

        self._server = await serve(
            self._handle, "127.0.0.1", 0, process_request=answer, max_size=None, close_timeout=1
        )
        port = self._server.sockets[0].getsockname()[1]
        self.url = f"ws://127.0.0.1:{port}/strata"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        await self._server.wait_closed()

    async def _handle(self, client: ServerConnection) -> None:
        self.connections += 1
        try:
            async with connect(self._upstream, max_size=None, close_timeout=1) as relay:
                ways = [
                    asyncio.create_task(self._pass(client, relay, self.from_client)),
                    asyncio.create_task(self._pass(relay, client, self.from_relay)),
                ]
                await asyncio.wait(ways, return_when="FIRST_COMPLETED")
                for way in ways:
                    way.cancel()
                await asyncio.gather(*ways, return_exceptions=True)
        except (OSError, WebSocketException):
            pass

    async def _pass(self, source: Any, sink: Any, judge: Any) -> None:
        loop = asyncio.get_running_loop()
        waiting: asyncio.Queue[tuple[float, str]] = asyncio.Queue()

        async def deliver() -> None:
            while True:
                due_at, frame = await waiting.get()
                await asyncio.sleep(max(0.0, due_at - loop.time()))
                forward, answer = judge(frame)
                if answer is not None:
                    await source.send(answer)
                if forward is not None:
                    await sink.send(forward)

        deliverer = asyncio.create_task(deliver())
        try:
            async for frame in source:
                waiting.put_nowait((loop.time() + self._delay, frame))
        except WebSocketException:
            pass
        finally:
            deliverer.cancel()
            await asyncio.gather(deliverer, return_exceptions=True)

    def from_client(self, frame: str) -> tuple[str | None, str | None]:
        """The frame to send on to the relay, and one to send back at once."""
        return frame, None

    def from_relay(self, frame: str) -> tuple[str | None, str | None]:
        """The frame to send on to the client, and one to send back to the relay at once."""
        return frame, None


class LyingProxy(SlowProxy):
    """Says OK to a third of all packets and drops them; drops events, and changes the text of others."""

    def __init__(self, upstream: str, chance: random.Random) -> None:
        super().__init__(upstream)
        self._chance = chance
        self.forgotten = self.withheld = self.tampered = 0

    def from_client(self, frame: str) -> tuple[str | None, str | None]:
        message = json.loads(frame)
        if message["type"] != "PUBLISH" or self._chance.random() > 0.33:
            return frame, None
        self.forgotten += 1
        ok = {
            "type": "OK",
            "packet_id": message["packet"]["packet_id"],
            "status": "ACCEPTED",
            "client_msg_id": message.get("client_msg_id"),
        }
        return None, json.dumps(ok)

    def from_relay(self, frame: str) -> tuple[str | None, str | None]:
        if '"EVENT"' not in frame[:40]:
            return frame, None
        draw = self._chance.random()
        if draw < 0.15:
            self.withheld += 1
            return None, None
        if draw < 0.3:
            self.tampered += 1
            return frame.replace("packet ", "forged ", 1), None
        return frame, None
