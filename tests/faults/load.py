"""Clients of a relay under faults: each abandons a silent relay, reconnects, and continues where it was.

They speak RFC-0004's JSON and do not use the client library, so that no leniency of a library hides a
fault.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import urllib.error
import urllib.request
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

from strata.protocol.ids import Identity
from strata.protocol.packets import Packet
from websockets.exceptions import WebSocketException

from tests.faults.ledger import Ledger, Reading
from tests.support.bare_client import BareClient, Message, publish_text, take_challenge
from tests.support.made_packets import make, new_identity
from tests.support.sockets import connect

__all__ = ["Load"]

_GONE = (OSError, EOFError, TimeoutError, WebSocketException)
_PATIENCE = 8.0
_BATCH = 8
_PAGE = 200


class Load:
    """Publishers, readers and requesters of pages and packets, until `stop`."""

    def __init__(self, url: str, http: str, ledger: Ledger, *, seed: int) -> None:
        self._url = url
        self._http = http
        self.ledger = ledger
        self.author = new_identity()
        self._chance = random.Random(seed)
        self._unanswered: deque[Packet] = deque()
        self._made = 0
        self._stopping = asyncio.Event()
        self._publishers: list[asyncio.Task[None]] = []
        self._others: list[asyncio.Task[None]] = []

    def start(self, *, publishers: int = 3, readers: int = 4) -> None:
        """Start the clients, each in a separate task."""
        start = asyncio.create_task
        self._publishers = [start(self._publish(), name=f"publisher {n}") for n in range(publishers)]
        self._others = [
            *(start(self._follow(self.ledger.reading(f"reader {n}"))) for n in range(readers)),
            start(self._walk_pages(), name="pages"),
            start(self._get_by_id(), name="by id"),
            start(self._authenticate(), name="auth"),
        ]

    async def stop(self, timeout: float) -> None:
        """Have everything answered, let every reader reach the end of the log, compare, and stop.

        The relay must have recovered: `timeout` seconds in which nobody received anything are too many. The
        whole may take longer, depending on the log and the machine. Raises exceptions that bugs in a client
        raised.
        """
        self._stopping.set()
        log = self.ledger.reading("reader of the whole log")
        arriving = asyncio.create_task(self._arrive(log), name="arriving")
        is_well = await self._ends(arriving, timeout)
        tasks = [arriving, *self._publishers, *self._others]
        for task in tasks:
            task.cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(result, Exception):
                raise result
        self.ledger.readings.remove(log)
        if is_well:
            self.ledger.close(log.packets)
        else:
            what = f"nobody got anything for {timeout:g} seconds, so nothing could be compared"
            self.ledger.breaks("the relay did not become well again", what)

    async def _arrive(self, log: Reading) -> None:
        await asyncio.gather(*self._publishers)
        last = make(self.author, "last")
        await self._have_answered([last])
        await self._follow(log, until=last.packet_id)
        while any(len(reading) < len(log) for reading in self.ledger.readings):  # noqa: ASYNC110
            await asyncio.sleep(0.05)

    async def _ends(self, task: asyncio.Task[None], timeout: float) -> bool:
        """Whether a task ends without such a standstill."""
        got, since = -1, 0.0
        while not task.done():
            now = asyncio.get_running_loop().time()
            if self.ledger.checked["publish"] + self.ledger.checked["event"] != got:
                got, since = self.ledger.checked["publish"] + self.ledger.checked["event"], now
            elif now - since > timeout:
                return False
            await asyncio.wait([task], timeout=min(1.0, timeout))
        return True

    async def _again(self, visit: Callable[[BareClient], Coroutine[Any, Any, bool]]) -> None:
        """Visit the relay until a visit reports that it was the last; faults end visits, never this loop."""
        while True:
            with contextlib.suppress(*_GONE):
                async with self._connected() as client:
                    if await visit(client):
                        return
            await asyncio.sleep(self._chance.uniform(0.02, 0.2))

    @contextlib.asynccontextmanager
    async def _connected(self) -> AsyncIterator[BareClient]:
        options: dict[str, Any] = {"compression": None, "max_size": None, "close_timeout": 0.5}
        async with connect(
            self._url, open_timeout=_PATIENCE, ping_interval=1.5, ping_timeout=3.0, proxy=None, **options
        ) as socket:
            await take_challenge(client := BareClient(socket))
            yield client

    # -- publishers

    async def _publish(self) -> None:
        async def visit(client: BareClient) -> bool:
            while not self._stopping.is_set() or self._unanswered:
                await self._publish_some(client, self._next_packets())
                await asyncio.sleep(0.02)
            return True

        await self._again(visit)

    async def _have_answered(self, packets: list[Packet]) -> None:
        self._unanswered.extend(packets)

        async def visit(client: BareClient) -> bool:
            while self._unanswered:
                await self._publish_some(client, self._next_packets())
            return True

        await self._again(visit)

    def _next_packets(self) -> list[Packet]:
        """The packets that a publisher sends now: first those that were never answered."""
        packets = [self._unanswered.popleft() for _ in range(min(_BATCH, len(self._unanswered)))]
        while len(packets) < _BATCH and not self._stopping.is_set():
            self._made += 1
            packets.append(make(self.author, n=self._made))
        return packets

    async def _publish_some(self, client: BareClient, packets: list[Packet]) -> None:
        flying = {packet.packet_id: packet for packet in packets}
        try:
            for packet in packets:
                await client.send(publish_text(packet, packet.packet_id))
            while flying:
                answer = await client.receive(_PATIENCE)
                packet = flying.pop(answer["client_msg_id"])
                if answer["type"] == "OK":
                    self.ledger.ok(packet.packet_id, answer["received_at"])
                else:
                    self._refused(answer, packet)
        finally:
            self._unanswered.extend(flying.values())

    def _refused(self, answer: Message, packet: Packet) -> None:
        reason = f"{answer['code']} {answer.get('detail') or ''}".strip()
        self.ledger.refused[reason] += 1
        # The relay's clock may have been stepped: the packet is valid at another time.
        self._unanswered.append(packet)

    # -- readers

    async def _follow(self, reading: Reading, *, until: str | None = None) -> None:
        async def visit(client: BareClient) -> bool:
            filters = {"authors": [self.author.did], "cursor": reading.cursor}
            await client.send(
                {"type": "SUBSCRIBE", "subscription_id": "s", "filters": filters, "gapless": True}
            )
            while until is None or not reading.packets or reading.packets[-1] != until:
                message = await client.receive(timeout=3600.0)  # pings detect a relay that has gone
                if message.get("detail") == "log_reset":
                    self.ledger.log_reset(reading, message.get("cursor"))
                    return False
                if message["type"] != "EVENT":
                    self.ledger.refused[f"reader: {message.get('code', message['type'])}"] += 1
                    return False
                packet_id = message["packet"]["packet_id"]
                self.ledger.event(reading, packet_id, message["received_at"], message["cursor"])
            return True

        await self._again(visit)

    async def _walk_pages(self) -> None:
        async def visit(client: BareClient) -> bool:
            while True:
                asked = list(self.ledger.acknowledged)
                walked = await self._one_walk(client)
                if walked is not None:
                    self.ledger.page_walk(asked, walked)
                await asyncio.sleep(1.0)

        await self._again(visit)

    async def _one_walk(self, client: BareClient) -> list[str] | None:
        cursor: str | None = None
        walked: list[str] = []
        order = self._chance.choice(["asc", "desc"])
        while True:
            filters = {"authors": [self.author.did], "limit": _PAGE, "order": order, "cursor": cursor}
            name = client.name()  # live events belong to no page
            events, end = await client.subscribe(name, filters)
            await client.send({"type": "UNSUBSCRIBE", "subscription_id": name})
            if end["type"] != "END_OF_HISTORY":
                self.ledger.refused[f"page: {end['code']}"] += 1
                return None
            walked += [event["packet"]["packet_id"] for event in events]
            if end["complete"] or not events:
                return walked
            cursor = end["cursor"]

    # -- askers

    async def _get_by_id(self) -> None:
        while True:
            if self.ledger.acknowledged:
                packet_id, restored = (
                    self._chance.choice(list(self.ledger.acknowledged)),
                    self.ledger.restored,
                )
                status = await asyncio.to_thread(_status, f"{self._http}/packets/{packet_id}")
                if status is not None and restored == self.ledger.restored:
                    self.ledger.by_id(packet_id, status)
            await asyncio.sleep(0.1)

    async def _authenticate(self) -> None:
        identity = Identity.generate()

        async def visit(client: BareClient) -> bool:
            answer = await client.authenticate(identity)
            if answer["type"] == "AUTH_OK":
                self.ledger.checked["auth"] += 1
            else:
                self.ledger.refused[f"auth: {answer['code']}"] += 1
            await asyncio.sleep(0.3)
            return False

        await self._again(visit)


def _status(url: str) -> int | None:
    """The status of a GET; None if the relay did not answer."""
    try:
        with urllib.request.urlopen(url, timeout=_PATIENCE) as answer:
            answer.read()
            return int(answer.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code
    except OSError:
        return None
