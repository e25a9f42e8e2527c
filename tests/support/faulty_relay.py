"""A small relay in memory that can be made to do one thing wrong.

Without faults it does what RFC-0004 requires in sections 1 to 12 and 15, well enough for the checks; it knows
no key events, no provenance and no content types. Each fault is a name in `faults`, looked up where it
matters.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Any

from strata.protocol import canonical, packets, wire
from strata.protocol.auth import signing_input
from strata.protocol.errors import InvalidMessage, InvalidPacket
from strata.protocol.ids import Identity, is_did, public_key_from_did, verify
from strata.protocol.packets import Packet
from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.datastructures import Headers
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response

__all__ = ["FaultyRelay", "faulty_relay"]

Message = dict[str, Any]
MAX_PACKET_BYTES = 20_480
MAX_LIMIT = 500
EXTENSIONS = ["packet_ids", "received_range", "history_marker", "gapless"]
CAPABILITIES = ["publish", "subscribe"]


class Stored:
    """One packet of the log."""

    def __init__(self, packet: Packet, received_at: int, sequence: int) -> None:
        self.packet = packet
        self.received_at = received_at
        self.sequence = sequence


class FaultyRelay:
    """The log, the sessions, and the faults of the relay."""

    def __init__(self, *faults: str, extensions: list[str] | None = None) -> None:
        self.faults = frozenset(faults)
        self.takes = 0.0
        self.extensions = EXTENSIONS if extensions is None else extensions
        self.identity = Identity.generate()
        self.log: list[Stored] = []
        self.grown = asyncio.Event()
        """Set by the next packet, then replaced by a new event."""
        self.by_id: dict[str, Stored] = {}
        self.sessions: set[Session] = set()
        self.lock = asyncio.Lock()
        """Held from a commit to its last EVENT, and while a history is sent: live events follow history."""
        self.shared_challenge = base64.b64encode(secrets.token_bytes(32)).decode()

    async def handle(self, socket: ServerConnection) -> None:
        session = Session(self, socket)
        self.sessions.add(session)
        try:
            await session.run()
        except ConnectionClosed:
            pass
        finally:
            self.sessions.discard(session)

    async def next_packet(self) -> None:
        """Wait briefly until another packet is stored."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.grown.wait(), 0.2)

    def respond(self, connection: ServerConnection, request: Request) -> Response | None:
        if request.path.partition("?")[0] == "/strata":
            return None
        if request.path != "/.well-known/strata-relay.json":
            return connection.respond(HTTPStatus.NOT_FOUND, "no such thing\n")
        manifest = {
            "relay_id": self.identity.did,
            "extensions": self.extensions,
            "limits": {"max_packet_bytes": MAX_PACKET_BYTES, "max_limit": MAX_LIMIT, "max_subscriptions": 64},
        }
        body = json.dumps(manifest).encode()
        headers = Headers({"Content-Type": "application/json", "Content-Length": str(len(body))})
        return Response(200, "OK", headers, body)

    async def store(self, packet: Packet) -> Stored:
        now = packet.timestamp if "arrival is the timestamp" in self.faults else int(time.time())
        stored = Stored(packet, now, len(self.log) + 1)
        self.log.append(stored)
        self.grown.set()
        self.grown = asyncio.Event()
        self.by_id[packet.packet_id] = stored
        return stored

    async def fan_out(self, stored: Stored, publisher: Session) -> None:
        for session in list(self.sessions):
            if session is publisher and "own packets are withheld" in self.faults:
                continue
            # It is not the publisher's fault if a reader has just left.
            with contextlib.suppress(ConnectionClosed):
                await session.deliver(stored)


class Session:
    """One connection."""

    def __init__(self, relay: FaultyRelay, socket: ServerConnection) -> None:
        self.relay = relay
        self.socket = socket
        self.open: dict[str, wire.Subscribe] = {}
        self.extra: list[wire.Subscribe] = []
        self.challenge: str | None = None
        self.capabilities = list(CAPABILITIES)
        self.failures = 0

    def wrong(self, fault: str) -> bool:
        return fault in self.relay.faults

    async def send(self, message: Message) -> None:
        if self.wrong("members are camelCase"):
            message["receivedAt"] = 1
        await self.socket.send(json.dumps({k: v for k, v in message.items() if v is not None}))

    async def error(self, code: str, reason: str, **members: Any) -> None:
        if self.wrong("errors lack a reason"):
            reason = ""
        if self.wrong("reasons leak"):
            reason = 'Traceback: File "/usr/lib/relay.py"'
        await self.send({"type": "ERROR", "code": code, "reason": reason, **members})
        if self.wrong("errors close"):
            await self.socket.close(1008)

    async def run(self) -> None:
        if not self.wrong("there is no challenge"):
            await self.send_challenge()
        async for frame in self.socket:
            if isinstance(frame, bytes):
                await self.error("invalid_schema", "binary frame")
                continue
            try:
                message = wire.decode_client_message(frame.encode())
            except InvalidMessage as error:
                ids = {"client_msg_id": error.client_msg_id, "subscription_id": error.subscription_id}
                await self.error(error.code, error.reason, detail=error.detail, **ids)
                continue
            match message:
                case wire.Publish():
                    await self.publish(message)
                case wire.Subscribe() if self.wrong("packets fall through the seam"):
                    await self.subscribe(message)
                case wire.Subscribe():
                    async with self.relay.lock:
                        await self.subscribe(message)
                case wire.Unsubscribe():
                    if not self.wrong("unsubscribe does nothing"):
                        self.open.pop(message.subscription_id, None)
                case wire.Auth():
                    await self.auth(message)

    # PUBLISH.

    async def publish(self, message: wire.Publish) -> None:
        name = message.client_msg_id
        await asyncio.sleep(self.relay.takes)
        if self.wrong("ids are echoed wrongly"):
            name = None if name is None else name.upper() + "!"
        if "publish" not in self.capabilities:
            await self.error("unauthenticated", "no", detail="missing_capability", client_msg_id=name)
            return
        if self.wrong("acknowledges before verifying"):
            claimed = json.loads(bytes(message.packet))
            await self.send(
                {
                    "type": "OK",
                    "packet_id": claimed.get("packet_id", "0x"),
                    "status": "ACCEPTED",
                    "client_msg_id": name,
                }
            )
        try:
            packet = self.checked(bytes(message.packet))
        except InvalidPacket as error:
            if not self.wrong("bad packets are met with silence"):
                await self.error(
                    error.code,
                    error.reason,
                    detail=error.detail,
                    max_bytes=error.max_bytes,
                    client_msg_id=name,
                )
            return
        async with self.relay.lock:
            await self.accept(packet, name)

    async def accept(self, packet: Packet, name: str | None) -> None:
        known = self.relay.by_id.get(packet.packet_id)
        stored = known or await self.relay.store(packet)
        if known and self.wrong("repeats are stored"):
            stored = await self.relay.store(packet)
        if not self.wrong("acknowledges before verifying"):
            ok = {
                "type": "OK",
                "packet_id": packet.packet_id,
                "status": "ACCEPTED",
                "client_msg_id": name,
                "received_at": stored.received_at,
                "duplicate": True if known else None,
            }
            await self.send(ok)
            if self.wrong("acknowledges twice"):
                await self.send(ok)
        if known is None or self.wrong("repeats are stored") or self.wrong("repeats are forwarded"):
            await self.relay.fan_out(stored, self)

    def checked(self, raw: bytes) -> Packet:
        limit = MAX_PACKET_BYTES + (1 if self.wrong("the size limit is off by one") else 0)
        if self.wrong("ids are not recomputed"):
            raw = _with_right_id(raw)
        packet = Packet.parse(raw, max_bytes=limit)
        known = self.relay.by_id.get(packet.packet_id)
        if known is not None:
            return known.packet
        now = time.time()
        if self.wrong("the future is fine"):
            now = max(now, packet.timestamp)
        if not (self.wrong("expiry does not matter") and (packet.expires_at or now) < now):
            age = 10**8 if self.wrong("age does not matter") else packets.DEFAULT_MAX_PACKET_AGE_SECONDS
            packets.check_freshness(packet, now, max_age_seconds=age)
        if not self.wrong("signatures are not verified"):
            packet.verify()
        return packet

    # SUBSCRIBE and EVENT.

    def matches(self, stored: Stored, filters: wire.Filters, *, live: bool) -> bool:
        packet = stored.packet
        author, kind = packet.author_id, packet.content_type
        authors, types = filters.authors or [author], filters.types or [kind]
        if self.wrong("prefixes of authors match"):
            by_author = any(author.startswith(item) for item in authors)
        else:
            by_author = author in authors
        if self.wrong("types ignore case"):
            by_type = kind.lower() in [item.lower() for item in types]
        else:
            by_type = kind in types
        both = by_author or by_type if self.wrong("filters combine with or") else by_author and by_type
        since = filters.since if not (live and self.wrong("live ignores since")) else None
        until = filters.until if not live or self.wrong("live heeds until") else None
        return (
            both
            and (since is None or packet.timestamp >= since + self.wrong("since is exclusive"))
            and (until is None or packet.timestamp <= until)
            and (not filters.packet_ids or packet.packet_id in filters.packet_ids)
            and (filters.received_since is None or stored.received_at >= filters.received_since)
            and (filters.received_until is None or stored.received_at <= filters.received_until)
            and (
                packet.expires_at is None
                or time.time() <= packet.expires_at
                or self.wrong("expired packets are served")
            )
        )

    async def deliver(self, stored: Stored) -> None:
        for subscription in [*self.open.values(), *self.extra]:
            if self.matches(stored, subscription.filters or wire.Filters(), live=True):
                gapless = bool(subscription.gapless)
                await self.event(subscription, stored, cursor=gapless)
                if self.wrong("live events come twice"):
                    await self.event(subscription, stored, cursor=gapless)

    async def event(self, subscription: wire.Subscribe, stored: Stored, *, cursor: bool) -> None:
        packet = dict(stored.packet.value)
        if self.wrong("unknown members are dropped"):
            packet.pop("x_top", None)
        if self.wrong("numbers are respelled"):
            packet = json.loads(json.dumps(packet), parse_float=lambda text: round(float(text), 6))
        ascending = (subscription.filters or wire.Filters()).order != "desc"
        subscription_id = subscription.subscription_id
        await self.send({
            "type": "EVENT",
            "subscription_id": None if self.wrong("events lack their subscription") else subscription_id,
            "packet": packet,
            "received_at": None if self.wrong("events lack received_at") else stored.received_at,
            "cursor": self.cursor(stored, ascending) if cursor else None,
        })  # fmt: skip

    def cursor(self, stored: Stored, ascending: bool) -> str | None:
        if self.wrong("history has no cursors"):
            return None
        sequence = stored.sequence + self.wrong("cursors are off by one")
        text = f"{'a' if ascending else 'd'}{sequence}"
        return f"{text}.{packets.byte_hash(text.encode())[2:34]}"

    def position(self, filters: wire.Filters) -> int | None:
        text, _, check = (filters.cursor or "").partition(".")
        right = check == packets.byte_hash(text.encode())[2:34]
        if self.wrong("cursors are not checked"):
            return int("".join(c for c in text if c in "0123456789")[:9] or 0)
        if not right or text[0] != ("d" if filters.order == "desc" else "a"):
            return None
        return int(text[1:])

    async def subscribe(self, message: wire.Subscribe) -> None:
        name, filters = message.client_msg_id, message.filters or wire.Filters()
        ids = {"client_msg_id": name, "subscription_id": message.subscription_id}
        if "subscribe" not in self.capabilities:
            await self.error("unauthenticated", "no", detail="missing_capability", **ids)
            return
        if message.gapless and (filters.limit is not None or filters.order is not None):
            await self.error("invalid_schema", "gapless", **ids)
            return
        position = None if filters.cursor is None else self.position(filters)
        if filters.cursor is not None and position is None:
            await self.error("invalid_cursor", "no such cursor", **ids)
            return
        if len(self.open) >= 64 and message.subscription_id not in self.open:
            await self.error(
                "rate_limited", "too many", detail="too_many_subscriptions", retry_after=1, **ids
            )
            return
        found, more = self.history(filters, position, bounded=not message.gapless)
        if self.wrong("packets fall through the seam"):
            await self.relay.next_packet()
        if message.subscription_id in self.open and self.wrong("the same id adds"):
            self.extra.append(self.open[message.subscription_id])
        self.open[message.subscription_id] = message
        for stored in found:
            await self.event(message, stored, cursor=True)
        if message.history_marker or self.wrong("markers come unasked"):
            cursor = self.cursor(found[-1], filters.order != "desc") if found else filters.cursor
            marker = {"type": "END_OF_HISTORY", "complete": not more, **ids}
            await self.socket.send(
                json.dumps({k: v for k, v in marker.items() if v is not None} | {"cursor": cursor})
            )

    def history(
        self, filters: wire.Filters, position: int | None, *, bounded: bool
    ) -> tuple[list[Stored], bool]:
        log = self.relay.log
        if self.wrong("history is in order of timestamps"):
            log = sorted(log, key=lambda stored: stored.packet.timestamp)
        descending = filters.order == "desc" and not self.wrong("desc is ignored")
        matching = [stored for stored in log if self.matches(stored, filters, live=False)]
        if position is not None:
            matching = [
                s for s in matching if (s.sequence < position if descending else s.sequence > position)
            ]
        if descending:
            matching.reverse()
        limit = min(100 if filters.limit is None else filters.limit, MAX_LIMIT)
        if not bounded:
            return matching, False
        if self.wrong("limits are not kept"):
            limit += 1
        return matching[:limit], len(matching) > limit

    # AUTH.

    async def send_challenge(self) -> None:
        fresh = base64.b64encode(
            secrets.token_bytes(8 if self.wrong("challenges are short") else 32)
        ).decode()
        self.challenge = self.relay.shared_challenge if self.wrong("challenges are shared") else fresh
        lifetime = 20 if self.wrong("challenges expire at once") else 120
        did = Identity.generate().did if self.wrong("server_id is another's") else self.relay.identity.did
        await self.send({
            "type": "AUTH_CHALLENGE",
            "challenge": self.challenge,
            "server_id": did,
            "expires_at": int(time.time()) + lifetime,
            "extensions": self.relay.extensions,
        })  # fmt: skip

    async def auth(self, message: wire.Auth) -> None:
        name = message.client_msg_id
        if message.challenge != self.challenge:
            await self.error("unauthenticated", "no", detail="challenge_unknown", client_msg_id=name)
            return await self.auth_failed()
        if not self.wrong("challenges can be used again"):
            self.challenge = None
        key = public_key_from_did(message.author_id) if is_did(message.author_id) else None
        if key is None:
            await self.error("unauthenticated", "no", detail="unresolved_key", client_msg_id=name)
            return await self.auth_failed()
        signature = bytes.fromhex(message.signature[2:])
        did = self.relay.identity.did
        signed = (signing_input(message.challenge, did), base64.b64decode(message.challenge) + did.encode())
        good = any(verify(key, text, signature) for text in signed)
        if not good and not self.wrong("any AUTH will do"):
            await self.error("invalid_signature", "no", client_msg_id=name)
            return await self.auth_failed()
        granted = ["publish", "subscribe", *(["replicate"] if self.wrong("strangers may replicate") else [])]
        asked = message.capabilities
        effective = granted if asked is None else [item for item in granted if item in asked]
        if self.wrong("requests are granted whole") and asked is not None:
            effective = asked
        if not self.wrong("capabilities are not enforced"):
            self.capabilities = effective
        await self.send(
            {
                "type": "AUTH_OK",
                "author_id": message.author_id,
                "capabilities": effective,
                "client_msg_id": name,
            }
        )

    async def auth_failed(self) -> None:
        self.failures += 1
        if self.failures >= 5:
            await self.socket.close(1008)
        else:
            await self.send_challenge()


def _with_right_id(raw: bytes) -> bytes:
    """The packet under the id it should have, whatever id it claims."""
    value = json.loads(raw)
    if isinstance(value, dict) and {"packet_id", "signature"} <= value.keys():
        body = {name: item for name, item in value.items() if name not in ("packet_id", "signature")}
        value["packet_id"] = packets.byte_hash(canonical.encode(body))
        return canonical.encode(value)
    return raw


@asynccontextmanager
async def faulty_relay(
    *faults: str, extensions: list[str] | None = None, takes: float = 0
) -> AsyncIterator[str]:
    """A relay on a free local port; yields its URL. It takes `takes` seconds to check a packet."""
    relay = FaultyRelay(*faults, extensions=extensions)
    relay.takes = takes
    server: Server
    async with serve(
        relay.handle, "127.0.0.1", 0, process_request=relay.respond, compression=None, max_size=2**20,
        ping_interval=None, close_timeout=1,
    ) as server:  # fmt: skip
        yield f"ws://127.0.0.1:{server.sockets[0].getsockname()[1]}/strata"
