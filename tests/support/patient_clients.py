"""Clients that know RFC-0004 alone and never give up, and a ledger of what they were promised and saw."""

from __future__ import annotations

import asyncio
import contextlib
import json
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol

import pytest
from strata.protocol.ids import Identity
from strata.protocol.packets import Packet
from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed, InvalidMessage, InvalidStatus

from tests.support.bare_client import publish_text
from tests.support.made_packets import make, new_identity
from tests.support.sockets import connect

__all__ = [
    "DEADLINE",
    "GONE",
    "Ledger",
    "Publishing",
    "Way",
    "follow",
    "grown",
    "opened",
    "page_of",
    "publish",
    "publish_over",
    "settle",
    "until",
    "whole_log",
]

GONE = (ConnectionClosed, OSError, InvalidMessage, InvalidStatus, EOFError, TimeoutError)
WINDOW = 32
DEADLINE = 90.0


class Way(Protocol):
    """A relay, or a way to look one up: it is consulted before each connection."""

    @property
    def ws(self) -> str: ...


class Publishing(ABC):
    """The books of a publisher: the packets to send, and their outcomes."""

    def __init__(self, identity: Identity | None = None) -> None:
        self.identity = identity or new_identity()
        self.waiting: deque[Packet] = deque()
        self.made = 0

    def next(self) -> Packet:
        """The packet to send now: first those that were never answered."""
        if self.waiting:
            return self.waiting.popleft()
        self.made += 1
        return make(self.identity, n=self.made)

    @abstractmethod
    def answered(self, message: dict[str, Any], packet: Packet) -> None:
        """Record an OK or an ERROR."""


class Ledger(Publishing):
    """What was promised, and what a reader saw."""

    def __init__(self, identity: Identity | None = None) -> None:
        super().__init__(identity)
        self.acknowledged: set[str] = set()
        self.refused: dict[str, int] = {}
        """How often a packet was answered with `internal_error`."""
        self.seen: list[str] = []
        self.cursor: str | None = None
        self.resets: list[str] = []
        """The cursors of entries that the log had lost."""
        self.places: dict[str, int] = {}
        """The number of packets seen when this cursor came."""

    def answered(self, message: dict[str, Any], packet: Packet) -> None:
        if message["type"] == "OK":
            self.acknowledged.add(packet.packet_id)
            return
        assert message["code"] == "internal_error", message
        self.refused[packet.packet_id] = self.refused.get(packet.packet_id, 0) + 1
        self.waiting.append(packet)


@contextlib.asynccontextmanager
async def opened(relay: Way) -> AsyncIterator[ClientConnection]:
    async with connect(
        relay.ws, compression=None, max_size=None, ping_interval=None, close_timeout=1
    ) as socket:
        await socket.recv()  # the challenge
        yield socket


async def publish_over(socket: ClientConnection, ledger: Publishing, window: int = WINDOW) -> None:
    """Publish until the connection ends; packets without an answer then wait in the ledger."""
    flying: dict[str, Packet] = {}
    try:
        while True:
            while len(flying) < window:
                packet = ledger.next()
                flying[packet.packet_id] = packet
                await socket.send(publish_text(packet, packet.packet_id))
            message = json.loads(await socket.recv())
            ledger.answered(message, flying.pop(message["client_msg_id"]))
    finally:
        ledger.waiting.extend(flying.values())


async def publish(relay: Way, ledger: Ledger) -> None:
    """Publish until cancelled, as a patient client: packets without a good answer are sent again."""
    while True:
        with contextlib.suppress(*GONE):
            async with opened(relay) as socket:
                await publish_over(socket, ledger)
        await asyncio.sleep(0.05)


async def follow(relay: Way, ledger: Ledger) -> None:
    """Read the log until cancelled, continuing from the last place whenever the connection ends."""
    while True:
        with contextlib.suppress(*GONE):
            async with opened(relay) as socket:
                await socket.send(subscription(ledger))
                while True:
                    message = json.loads(await socket.recv())
                    if message["type"] == "EVENT":
                        ledger.seen.append(message["packet"]["packet_id"])
                        ledger.cursor = message["cursor"]
                        ledger.places[message["cursor"]] = len(ledger.seen)
                    elif message.get("detail") == "log_reset":
                        ledger.resets.append(str(ledger.cursor))
                        ledger.cursor = message["cursor"]
                        # Packets seen behind this place are no longer in the log.
                        del ledger.seen[place_of(ledger) :]
                        await socket.send(subscription(ledger))
                    else:
                        assert message["type"] == "ERROR" and message["code"] == "internal_error", message
                        break
        await asyncio.sleep(0.05)


def place_of(ledger: Ledger) -> int:
    """The number of packets seen at the reader's cursor; -1 if that was reissued in another form."""
    return ledger.places.get(str(ledger.cursor), -1)


def subscription(ledger: Ledger) -> str:
    filters = {"authors": [ledger.identity.did], "cursor": ledger.cursor}
    return json.dumps({"type": "SUBSCRIBE", "subscription_id": "s", "filters": filters, "gapless": True})


async def until(condition: Callable[[], object], what: str) -> None:
    try:
        async with asyncio.timeout(DEADLINE):
            while not condition():  # noqa: ASYNC110 - other processes
                await asyncio.sleep(0.01)
    except TimeoutError:
        pytest.fail(f"it never came to this: {what}")


async def settle(relay: Way, ledger: Ledger) -> None:
    """Publish what still waits for a good answer."""
    async with opened(relay) as socket, asyncio.timeout(DEADLINE):
        while ledger.waiting:
            packet = ledger.waiting.popleft()
            await socket.send(publish_text(packet, packet.packet_id))
            ledger.answered(json.loads(await socket.recv()), packet)


async def whole_log(relay: Way, ledger: Ledger) -> list[str]:
    """The present log, from its beginning."""
    ids: list[str] = []
    cursor = None
    async with opened(relay) as socket, asyncio.timeout(DEADLINE):
        while True:
            await socket.send(json.dumps(page_of(ledger, cursor)))
            while (message := json.loads(await socket.recv()))["type"] == "EVENT":
                ids.append(message["packet"]["packet_id"])
            assert message["type"] == "END_OF_HISTORY", message
            if message["complete"]:
                return ids
            cursor = message["cursor"]
            await socket.send(json.dumps({"type": "UNSUBSCRIBE", "subscription_id": "page"}))


def page_of(ledger: Ledger, cursor: str | None) -> dict[str, Any]:
    filters = {"authors": [ledger.identity.did], "limit": 500, "cursor": cursor}
    return {"type": "SUBSCRIBE", "subscription_id": "page", "filters": filters, "history_marker": True}


async def grown(ledger: Ledger, by: int) -> None:
    goal = len(ledger.acknowledged) + by
    await until(lambda: len(ledger.acknowledged) >= goal, f"{goal} acknowledged")
