"""A relay so simple that it can be trusted, without I/O, and a WebSocket server around it."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Iterable
from functools import cache
from http import HTTPStatus
from typing import Any, Self, TypeVar

from msgspec import Raw
from strata.protocol import ids, packets, wire
from strata.protocol.ids import Identity
from strata.protocol.packets import Packet
from strata.relays.connection.values import Delivery
from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response

ALL_EXTENSIONS = ("packet_ids", "received_range", "history_marker", "gapless")
START = 1_760_000_000
AUTHOR = Identity.from_seed(bytes(range(32)))
Message = TypeVar("Message")
OTHER = Identity.from_seed(bytes(range(1, 33)))


@cache
def make_packet(n: int, kind: str = "POST", author: Identity = AUTHOR, **extra: Any) -> Packet:
    return packets.build(author, {"type": kind, "text": f"packet {n}"}, timestamp=START + n, **extra)


class Session:
    """One peer of the model: its subscriptions and the frames waiting to be sent to it."""

    def __init__(self) -> None:
        self.subscriptions: dict[str, wire.Subscribe] = {}
        self.outbox: list[bytes] = []
        self.received: list[Any] = []
        self.challenge: str | None = None
        self.identity: str | None = None
        self.capabilities: frozenset[str] | None = None

    def send(self, message: Any) -> None:
        self.outbox.append(wire.encode(message))


class NaiveRelay:
    """RFC-0004 on a list. Every list is scanned, nothing is clever; faults that a test wants are hooks."""

    def __init__(
        self, extensions: Iterable[str] = (), *, max_limit: int = 500, live_cursors: bool = False
    ) -> None:
        self.extensions = frozenset(extensions)
        self.max_limit = max_limit
        self.live_cursors = live_cursors
        self.log: list[tuple[Packet, int]] = []
        self.sessions: list[Session] = []
        self.generation = 0
        """Cursors of an earlier generation are invalid."""
        self.answer: Callable[[wire.Publish], Any] | None = None
        """Answers a PUBLISH instead of the model: a message, or "silence"; None leaves it to the model."""
        self.answer_subscribe: Callable[[wire.Subscribe], Any] | None = None
        self.disguise: Callable[[wire.Event], wire.Event] = lambda event: event
        """Transforms an event before it is sent."""
        self.server_id: str | None = None
        """If set, sessions are challenged in this name as soon as they begin."""
        self.lifetime = 120
        """The seconds from `START` for which a challenge is valid."""
        self.needs_auth: frozenset[str] = frozenset()
        """The actions that an anonymous session may not do: publish, subscribe."""
        self.grants: frozenset[str] | None = frozenset({"publish", "subscribe"})
        self.answer_auth: Callable[[wire.Auth], Any] | None = None
        self.challenges = 0

    # The log.

    def append(self, packet: Packet) -> bool:
        if any(stored.packet_id == packet.packet_id for stored, _ in self.log):
            return False
        self.log.append((packet, START + len(self.log)))
        for session in self.sessions:
            for subscribe in session.subscriptions.values():
                if self._matches(subscribe, *self.log[-1], live=True):
                    carries = bool(subscribe.gapless) or self.live_cursors
                    session.send(self._event(subscribe, len(self.log) - 1, carries))
        return True

    def _event(self, subscribe: wire.Subscribe, index: int, with_cursor: bool) -> wire.Event:
        packet, received_at = self.log[index]
        return self.disguise(
            wire.Event(
                packet=Raw(packet.canonical),
                received_at=received_at,
                subscription_id=subscribe.subscription_id,
                cursor=f"{self.generation}:{index}" if with_cursor else None,
            )
        )

    def _matches(self, subscribe: wire.Subscribe, packet: Packet, received_at: int, *, live: bool) -> bool:
        f = subscribe.filters or wire.Filters()
        by_id = f.packet_ids if "packet_ids" in self.extensions else None
        return (
            (not f.authors or packet.author_id in f.authors)
            and (not f.types or packet.content_type in f.types)
            and (not by_id or packet.packet_id in by_id)
            and (f.since is None or packet.timestamp >= f.since)
            and (f.until is None or live or packet.timestamp <= f.until)
            and (f.received_since is None or received_at >= f.received_since)
        )

    # One peer.

    def connect(self) -> Session:
        self.sessions.append(Session())
        if self.server_id is not None:
            self.send_challenge(self.sessions[-1])
        return self.sessions[-1]

    def send_challenge(self, session: Session) -> None:
        self.challenges += 1
        session.challenge = base64.b64encode(self.challenges.to_bytes(32, "big")).decode()
        session.send(
            wire.AuthChallenge(
                challenge=session.challenge,
                server_id=self.server_id or "",
                expires_at=START + self.lifetime,
                extensions=sorted(self.extensions) or None,
            )
        )

    def _auth(self, session: Session, message: wire.Auth) -> None:
        answer = self.answer_auth(message) if self.answer_auth else None
        if answer == "silence":
            return
        if answer is None:
            answer = self._judge(session, message)
        session.send(answer)
        if isinstance(answer, wire.AuthOk):
            session.identity = message.author_id
            granted = self.grants
            if granted is not None and message.capabilities is not None:
                granted &= frozenset(message.capabilities)
            session.capabilities = granted
        else:
            self.send_challenge(session)

    def _judge(self, session: Session, message: wire.Auth) -> Any:
        challenge, session.challenge = session.challenge, None
        key = ids.public_key_from_did(message.author_id)
        signed = (message.challenge + (self.server_id or "")).encode()
        if message.challenge != challenge:
            return refusal("unauthenticated", message, detail="challenge_unknown")
        if key is None or not ids.verify(key, signed, bytes.fromhex(message.signature[2:])):
            return refusal("invalid_signature", message)
        granted = self.grants
        if granted is not None and message.capabilities is not None:
            granted &= frozenset(message.capabilities)
        return wire.AuthOk(
            author_id=message.author_id,
            capabilities=None if granted is None else sorted(granted),
            client_msg_id=message.client_msg_id,
        )

    def _may(self, session: Session, capability: str) -> bool:
        if session.identity is None:
            return capability not in self.needs_auth
        return session.capabilities is None or capability in session.capabilities

    def disconnect(self, session: Session) -> None:
        if session in self.sessions:
            self.sessions.remove(session)

    def receive(self, session: Session, data: bytes) -> None:
        message = wire.decode_client_message(data)
        session.received.append(message)
        needed = {wire.Publish: "publish", wire.Subscribe: "subscribe"}.get(type(message))
        if needed is not None and not self._may(session, needed):
            session.send(refusal("unauthenticated", message, detail="missing_capability"))
            return
        match message:
            case wire.Auth():
                self._auth(session, message)
            case wire.Publish():
                self._publish(session, message)
            case wire.Subscribe():
                self._subscribe(session, message)
            case wire.Unsubscribe():
                session.subscriptions.pop(message.subscription_id, None)

    def _publish(self, session: Session, message: wire.Publish) -> None:
        answer = self.answer(message) if self.answer else None
        if answer == "silence":
            return
        if answer is None:
            packet = Packet.parse(message.packet)
            new = self.append(packet)
            answer = wire.Ok(
                packet_id=packet.packet_id,
                status="ACCEPTED",
                client_msg_id=message.client_msg_id,
                duplicate=None if new else True,
                received_at=START,
            )
        session.send(answer)

    def _subscribe(self, session: Session, message: wire.Subscribe) -> None:
        answer = self.answer_subscribe(message) if self.answer_subscribe else None
        if answer is not None:
            session.send(answer)
            return
        f = message.filters or wire.Filters()
        after = -1 if f.order != "desc" else len(self.log)
        if f.cursor is not None:
            generation, _, last_index = f.cursor.partition(":")
            if int(generation) != self.generation:
                session.send(
                    wire.Error(
                        code="invalid_cursor",
                        reason="not mine",
                        # A plain relay knows only the request's id.
                        subscription_id=message.subscription_id if self.extensions else None,
                        client_msg_id=message.client_msg_id,
                    )
                )
                return
            after = int(last_index)
        session.subscriptions[message.subscription_id] = message
        indexes = range(after + 1, len(self.log)) if f.order != "desc" else range(after - 1, -1, -1)
        found = [i for i in indexes if self._matches(message, *self.log[i], live=False)]
        limit = len(found) if message.gapless else min(self.max_limit, 100 if f.limit is None else f.limit)
        for index in found[:limit]:
            session.send(self._event(message, index, True))
        if message.history_marker and "history_marker" in self.extensions:
            last = f"{self.generation}:{found[:limit][-1]}" if found[:limit] else f.cursor
            if last is None and not found and f.order != "desc":
                last = f"{self.generation}:{len(self.log) - 1}"
            session.send(
                wire.EndOfHistory(
                    subscription_id=message.subscription_id, complete=len(found) <= limit, cursor=last
                )
            )


def refusal(code: str, message: Any, **members: Any) -> wire.Error:
    """The ERROR that answers a message."""
    return wire.Error(code=code, reason="because", client_msg_id=message.client_msg_id, **members)


class FakeRelay:
    """The model behind a real socket. `cut` drops every connection without a close frame."""

    def __init__(self, model: NaiveRelay, ssl: Any = None) -> None:
        self.model = model
        self.ssl = ssl
        self.deaf = False
        """New connections are accepted and then never read from."""
        self.connections = 0
        self.refuse_with: int | None = None
        self.manifest_body: bytes | None = None
        self.received: asyncio.Queue[Any] = asyncio.Queue()
        self._open: dict[ServerConnection, Session] = {}
        self.abandoned = asyncio.Event()
        self.abandoned.set()
        """Set while nobody is connected."""

    async def __aenter__(self) -> Self:
        self._server = await serve(
            self._handle,
            "127.0.0.1",
            0,
            process_request=self._http,
            ping_interval=None,
            close_timeout=0.1,
            ssl=self.ssl,
        )
        self.port = self._server.sockets[0].getsockname()[1]
        self.url = f"{'wss' if self.ssl else 'ws'}://127.0.0.1:{self.port}/strata"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        await self._server.wait_closed()

    def _http(self, connection: ServerConnection, request: Request) -> Response | None:
        if request.path == "/.well-known/strata-relay.json":
            if self.manifest_body is None and not self.model.extensions:
                return connection.respond(HTTPStatus.NOT_FOUND, "no\n")
            body = self.manifest_body or json.dumps({"extensions": sorted(self.model.extensions)}).encode()
            return connection.respond(HTTPStatus.OK, body.decode())
        if self.refuse_with is not None:
            return connection.respond(HTTPStatus(self.refuse_with), "no\n")
        return None

    async def _handle(self, socket: ServerConnection) -> None:
        session = self.model.connect()
        self._open[socket] = session
        await self.flush()
        self.abandoned.clear()
        self.connections += 1
        if self.deaf:
            socket.transport.pause_reading()
        try:
            async for data in socket:
                assert isinstance(data, str), "R-128: one JSON object per text frame"
                self.model.receive(session, data.encode())
                self.received.put_nowait(session.received[-1])
                await self.flush()
        except ConnectionClosed:
            pass
        finally:
            self.model.disconnect(session)
            del self._open[socket]
            if not self._open:
                self.abandoned.set()

    async def flush(self) -> None:
        """Send the model's frames; a peer that has left meanwhile is ignored."""
        for socket, session in list(self._open.items()):
            frames, session.outbox[:] = session.outbox[:], []
            for frame in frames:
                with contextlib.suppress(ConnectionClosed):
                    await socket.send(frame, text=True)

    async def append(self, *some: Packet) -> None:
        for packet in some:
            self.model.append(packet)
        await self.flush()

    def received_so_far(self) -> list[wire.ClientMessage]:
        """What clients have sent since it was last asked for."""
        return [self.received.get_nowait() for _ in range(self.received.qsize())]

    def cut(self) -> None:
        for socket in list(self._open):
            socket.transport.abort()

    async def shut(self, code: int) -> None:
        for socket in list(self._open):
            await socket.close(code)

    async def next(self, kind: type[Message]) -> Message:
        """The next message of this kind that the client sent."""
        async with asyncio.timeout(20):
            while True:
                message = await self.received.get()
                if isinstance(message, kind):
                    return message


async def take(subscription: AsyncIterator[Delivery], count: int) -> list[Packet]:
    """The next packets of a subscription."""
    return [(await anext(subscription)).packet for _ in range(count)]
