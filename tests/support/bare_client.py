"""A client that knows RFC-0004's JSON and nothing else, for testing a relay from outside."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from strata.protocol.ids import Identity
from strata.protocol.packets import Packet
from websockets.asyncio.client import ClientConnection

from tests.support.sockets import connect

__all__ = ["TIMEOUT", "BareClient", "Message", "open_client", "publish_text"]

TIMEOUT = 60.0

Message = dict[str, Any]


def publish_text(packet: Packet | bytes | str, name: str | None = None) -> str:
    """A PUBLISH with exactly these bytes as its packet."""
    if isinstance(packet, Packet):
        packet = packet.canonical
    text = packet.decode() if isinstance(packet, bytes) else packet
    identifier = "" if name is None else f'"client_msg_id":{json.dumps(name)},'
    return f'{{"type":"PUBLISH",{identifier}"packet":{text}}}'


class BareClient:
    """One WebSocket. Messages not yet read wait in `inbox`, in order of arrival; challenges, which are
    unsolicited, wait in `challenges`."""

    def __init__(self, socket: ClientConnection) -> None:
        self.socket = socket
        self.inbox: deque[Message] = deque()
        self.challenges: deque[Message] = deque()
        self._names = itertools.count(1)

    def name(self) -> str:
        """A fresh `client_msg_id`."""
        return f"m{next(self._names)}"

    async def send(self, message: Message | str | bytes) -> None:
        """Send an object as JSON, or a text or binary frame as it is."""
        await self.socket.send(json.dumps(message) if isinstance(message, dict) else message)

    async def receive(self, timeout: float = TIMEOUT) -> Message:
        """The next message, those in the inbox first."""
        if self.inbox:
            return self.inbox.popleft()
        return await self._read(timeout)

    async def _read(self, timeout: float) -> Message:
        while True:
            message = await self._read_any(timeout)
            if message["type"] != "AUTH_CHALLENGE":
                return message
            self.challenges.append(message)

    async def _read_any(self, timeout: float) -> Message:
        async with asyncio.timeout(timeout):
            frame = await self.socket.recv()
        assert isinstance(frame, str), "a relay sends text frames alone"
        message = json.loads(frame)
        assert isinstance(message, dict)
        return message

    async def challenge(self, timeout: float = TIMEOUT) -> Message:
        """The oldest AUTH_CHALLENGE not yet read."""
        while not self.challenges:
            message = await self._read_any(timeout)
            (self.challenges if message["type"] == "AUTH_CHALLENGE" else self.inbox).append(message)
        return self.challenges.popleft()

    async def authenticate(
        self, identity: Identity, *, challenge: Message | None = None, **members: Any
    ) -> Message:
        """AUTH as `identity`, with the next challenge unless one is given; returns the AUTH_OK or ERROR."""
        challenge = challenge or await self.challenge()
        signed = (challenge["challenge"] + challenge["server_id"]).encode()
        message = {
            "type": "AUTH",
            "author_id": identity.did,
            "challenge": challenge["challenge"],
            "signature": "0x" + identity.sign(signed).hex(),
        }
        return await self.ask({**message, **members})

    async def expect(self, wanted: Callable[[Message], bool], timeout: float = TIMEOUT) -> Message:
        """The first message that is wanted; the others stay in the inbox."""
        for message in self.inbox:
            if wanted(message):
                self.inbox.remove(message)
                return message
        async with asyncio.timeout(timeout):
            while not wanted(message := await self._read(timeout)):
                self.inbox.append(message)
        return message

    async def answer(self, name: str) -> Message:
        """The OK, ERROR or marker that echoes this `client_msg_id`."""
        return await self.expect(lambda message: message.get("client_msg_id") == name)

    async def ask(self, message: Message) -> Message:
        """Send a request under a fresh `client_msg_id` and return its answer."""
        name = self.name()
        await self.send({**message, "client_msg_id": name})
        return await self.answer(name)

    async def publish(self, packet: Packet | bytes | str) -> Message:
        """Publish and return the OK or ERROR."""
        name = self.name()
        await self.send(publish_text(packet, name))
        return await self.answer(name)

    async def publish_all(self, packets: list[Packet]) -> list[Message]:
        """Publish all without waiting in between; returns the answers, in the order of the packets."""
        names = [self.name() for _ in packets]
        wanted = set(names)
        for name, packet in zip(names, packets, strict=True):
            await self.send(publish_text(packet, name))
        answers: dict[str, Message] = {}
        while len(answers) < len(names):
            message = await self.expect(lambda m: m.get("client_msg_id") in wanted)
            answers[message["client_msg_id"]] = message
        return [answers[name] for name in names]

    async def subscribe(
        self, subscription_id: str, filters: Message | None = None, **members: Any
    ) -> tuple[list[Message], Message]:
        """Subscribe with a marker; returns the historical EVENTs and the END_OF_HISTORY (or the ERROR)."""
        name = self.name()
        await self.send(
            {
                "type": "SUBSCRIBE",
                "subscription_id": subscription_id,
                "filters": filters or {},
                "history_marker": True,
                "client_msg_id": name,
                **members,
            }
        )
        end = await self.answer(name)
        return self.taken(subscription_id), end

    def taken(self, subscription_id: str) -> list[Message]:
        """Take this subscription's EVENTs out of the inbox."""
        events = [m for m in self.inbox if m["type"] == "EVENT" and m["subscription_id"] == subscription_id]
        self.inbox = deque(message for message in self.inbox if message not in events)
        return events

    async def events(self, subscription_id: str, count: int, timeout: float = TIMEOUT) -> list[Message]:
        """The next `count` EVENTs of a subscription."""
        return [
            await self.expect(
                lambda m: m["type"] == "EVENT" and m["subscription_id"] == subscription_id, timeout
            )
            for _ in range(count)
        ]

    async def barrier(self) -> None:
        """Wait until the relay has handled everything sent before: a message not here by now was not sent."""
        answer = await self.ask({"type": "BARRIER"})
        assert answer["detail"] == "unknown_type"

    async def quiet(self, subscription_id: str) -> list[Message]:
        """The EVENTs sent to this subscription up to now."""
        await self.barrier()
        return self.taken(subscription_id)


@asynccontextmanager
async def open_client(url: str, **options: Any) -> AsyncIterator[BareClient]:
    """Connect; `options` go to the WebSocket library. Closes at the end."""
    defaults: dict[str, Any] = {"compression": None, "max_size": None, "ping_interval": None}
    defaults["close_timeout"] = 5
    async with connect(url, **{**defaults, **options}) as socket:
        await take_challenge(client := BareClient(socket))
        yield client


async def take_challenge(client: BareClient) -> None:
    """Read the first frame, which is an AUTH_CHALLENGE (R-266); `challenge` still returns it next."""
    client.challenges.append(await client.challenge())
    assert not client.inbox
