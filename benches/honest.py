"""An honest load beside an attack: publishers with a timetable, and a live reader of what they publish.

A packet is timed from the moment when it was due, whether or not the relay took it then. A packet that was
never answered, or never delivered, counts with the time it has waited so far, so that a stalled relay shows.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import ssl
import time
from dataclasses import dataclass
from typing import Any, Final

from strata.protocol.ids import Identity
from strata.protocol.packets import build
from websockets.asyncio.client import ClientConnection
from websockets.exceptions import WebSocketException

from benches.load import CONTENT_TYPE, text_of
from benches.measures import percentile
from tests.support.sockets import connect

__all__ = ["PUBLISHERS", "Honest", "Service"]

PUBLISHERS: Final = 20
_PUBLISHES_PER_SECOND: Final = 5
"""By each publisher. Per minute, that is a quarter of what an address may publish. All of them together
publish 400 packets in four seconds, so that the 99th percentile is not a single packet that met a hiccup of
the disk."""
_RETRY_SECONDS: Final = 0.1
_GONE: Final = (OSError, EOFError, TimeoutError, WebSocketException)


@dataclass(frozen=True, slots=True)
class Service:
    """How honest clients were served for a while: times in seconds, ascending, and packets not served."""

    answers: list[float]
    deliveries: list[float]
    unanswered: int
    refused: int

    def milliseconds(self, share: float, *, deliveries: bool = False) -> float:
        """The percentile of the times from a publish to its OK or, with `deliveries`, to the reader."""
        times = self.deliveries if deliveries else self.answers
        return percentile(times, share) * 1e3 if times else float("nan")


@dataclass(slots=True)
class _Publish:
    due: float
    answered: float | None = None
    seen: float | None = None
    refused: bool = False


class Honest:
    """The publishers and the reader, as a context manager; each has its own address."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._identities = [Identity(os.urandom(32)) for _ in range(PUBLISHERS)]
        self._publishes: dict[str, _Publish] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._ready = asyncio.Event()

    async def __aenter__(self) -> Honest:
        _go_first()
        start = asyncio.create_task
        self._tasks = [start(self._again(self._read, PUBLISHERS), name="honest reader")]
        await asyncio.wait_for(self._ready.wait(), 60)
        for number in range(PUBLISHERS):
            self._tasks.append(start(self._again(self._publish, number), name=f"honest {number}"))
        return self

    async def __aexit__(self, *_: object) -> None:
        _go_on_as_before()
        for task in self._tasks:
            task.cancel()
        for result in await asyncio.gather(*self._tasks, return_exceptions=True):
            if isinstance(result, Exception):
                raise result

    def since(self, start: float, end: float) -> Service:
        """How the packets that were due in this time (`time.perf_counter`) were served."""
        now = time.perf_counter()
        own = [each for each in self._publishes.values() if start <= each.due < end]
        good = [each for each in own if not each.refused]
        return Service(
            sorted((each.answered or now) - each.due for each in good),
            sorted((each.seen or now) - each.due for each in good),
            sum(each.answered is None for each in good),
            len(own) - len(good),
        )

    async def settled(self, end: float, timeout: float) -> None:
        """Wait until packets due before `end` are answered and delivered, but no longer than `timeout`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                while any(  # noqa: ASYNC110 - nothing announces it
                    each.due < end and not each.refused and (each.answered is None or each.seen is None)
                    for each in self._publishes.values()
                ):
                    await asyncio.sleep(0.05)

    async def _again(self, visit: Any, number: int) -> None:
        """Visit the relay, and again whenever it ends the visit. Ends when cancelled."""
        tls = _trusting() if self._url.startswith("wss") else None
        while True:
            with contextlib.suppress(*_GONE):
                async with connect(
                    self._url,
                    ssl=tls,
                    local_addr=(f"127.0.3.{number + 1}", 0),
                    compression=None,
                    max_size=None,
                    close_timeout=0.5,
                    proxy=None,
                ) as socket:
                    await visit(socket, number)
            await asyncio.sleep(_RETRY_SECONDS)

    async def _publish(self, socket: ClientConnection, number: int) -> None:
        sending = asyncio.create_task(self._send(socket, number), name=f"honest sender {number}")
        try:
            async for frame in socket:
                message = json.loads(frame)
                publish = self._publishes.get(message.get("client_msg_id", ""))
                if publish is not None:
                    publish.answered = time.perf_counter()
                    publish.refused = message["type"] != "OK"
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)

    async def _send(self, socket: ClientConnection, number: int) -> None:
        interval = 1 / _PUBLISHES_PER_SECOND
        due = time.perf_counter() + interval * (number + 1) / PUBLISHERS
        run = os.urandom(8).hex()
        for count in range(10**9):
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            content = {"type": CONTENT_TYPE, "text": text_of(count, run)}
            packet = build(self._identities[number], content, timestamp=int(time.time()))
            self._publishes[packet.packet_id] = _Publish(due)
            text = f'{{"type":"PUBLISH","client_msg_id":"{packet.packet_id}","packet":'
            await socket.send(text + packet.canonical.decode() + "}")
            due += interval

    async def _read(self, socket: ClientConnection, number: int) -> None:
        filters = {"authors": [identity.did for identity in self._identities], "limit": 0}
        message = {"type": "SUBSCRIBE", "subscription_id": "s", "filters": filters, "history_marker": True}
        await socket.send(json.dumps(message))
        async for frame in socket:
            message = json.loads(frame)
            if message["type"] == "EVENT":
                publish = self._publishes.get(message["packet"]["packet_id"])
                if publish is not None:
                    publish.seen = time.perf_counter()
            elif message["type"] == "END_OF_HISTORY":
                self._ready.set()


def _go_first() -> None:
    """Let this thread get a CPU at once, if the system allows it: honest clients stand for other machines."""
    with contextlib.suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))


def _go_on_as_before() -> None:
    with contextlib.suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


def _trusting() -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context
