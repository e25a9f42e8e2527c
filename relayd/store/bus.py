"""Wake-ups over NATS in place of NOTIFY: each process tells the others how far the log reaches.

A message says "look", as a notification does; the log in PostgreSQL stays the truth. So a message that is
lost, duplicated or late costs only latency: the doorbell also looks every second. A message counts only with
the MAC of this log, and under the current term: neither a stranger on the bus nor another log, nor this one
before it lost its end, can move a reader past the end of the log.

On a second subject, processes report to each other what identities have used (`relayd.access.machines`). The
bus seals these reports and looks at nothing but the seal.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import importlib
import time
from collections.abc import Awaitable, Callable
from types import ModuleType
from typing import TYPE_CHECKING, Final

from relayd.lineage import KnownLog
from relayd.logs import get_logger, problem_of
from relayd.pauses import Pauses

if TYPE_CHECKING:
    from nats.aio.client import Client
    from nats.aio.msg import Msg

__all__ = ["BUS_EVENTS", "Bus", "BusMessages", "probe_bus"]

_log = get_logger("relayd.store")

_CONNECT_SECONDS: Final = 5
_PING_SECONDS: Final = 2
_PINGS_UNANSWERED: Final = 2
_BACKOFF_SECONDS: Final = (0.1, 5.0)
_MOST_WAITING: Final = 1024
"""The most messages that wait to be read; NATS drops the rest, and the next message makes up for them."""
_MAC_BYTES: Final = 16
_MOST_REPORTS: Final = 64
"""The most reports that wait to be sent; reports made while the bus is away are not wanted later."""
BUS_EVENTS: Final = ("connected", "failed", "sent", "heard", "doubted", "refused")
"""The bus is connected, or failed; a wake-up was sent, heard, or of another term; a message was refused, as
not sent by a process of this log."""


class BusMessages:
    """The messages of the bus: the tag of the current term, a sequence, and the MAC of both."""

    def __init__(self, log_key: bytes) -> None:
        self._key = hashlib.blake2s(b"bus", key=log_key).digest()
        self._report_key = hashlib.blake2s(b"report", key=self._key).digest()
        self.subject = f"relayd.{hashlib.blake2s(b'subject', key=self._key, digest_size=8).hexdigest()}"
        self.report_subject = f"{self.subject}.taken"

    def encode(self, tag: bytes, sequence: int) -> bytes:
        """A wake-up message."""
        said = tag + sequence.to_bytes(8, "big")
        return said + _mac(self._key, said)

    def decode(self, message: bytes) -> tuple[bytes, int] | None:
        """The tag and the sequence; None for a message that no process of this log has sent."""
        said = _unsealed(self._key, message)
        return None if said is None or len(said) <= 8 else (said[:-8], int.from_bytes(said[-8:], "big"))

    def seal(self, report: bytes) -> bytes:
        """A report in the form sent over the bus."""
        return report + _mac(self._report_key, report)

    def unseal(self, message: bytes) -> bytes | None:
        """The report; None for a message that no process of this log has sent."""
        return _unsealed(self._report_key, message)


def _mac(key: bytes, said: bytes) -> bytes:
    return hashlib.blake2s(said, key=key, digest_size=_MAC_BYTES).digest()


def _unsealed(key: bytes, message: bytes) -> bytes | None:
    said, mac = message[:-_MAC_BYTES], message[-_MAC_BYTES:]
    return said if hmac.compare_digest(mac, _mac(key, said)) else None


class Bus:
    """A connection to a NATS server, remade after every loss.

    `heard(sequence)` is called when another process has committed, and `doubt()` when only the database can
    say how far the log reaches. `log_key` is a secret of the log.
    """

    def __init__(
        self,
        url: str,
        log_key: bytes,
        known: KnownLog,
        *,
        heard: Callable[[int], None],
        doubt: Callable[[], None],
        told: Callable[[str], None] = lambda what: None,
        reported: Callable[[bytes], bool] | None = None,
    ) -> None:
        """`told` is called with each of `BUS_EVENTS` that happens, `reported` with the reports of others; it
        returns whether it accepts one. Without it, reports are not subscribed to."""
        self._nats = importlib.import_module("nats")  # slow, so not while connections are open
        self._url = url
        self._messages = BusMessages(log_key)
        self._known = known
        self._heard = heard
        self._doubt = doubt
        self._told = told
        self._reported = reported
        self._reports: list[bytes] = []
        self._committed: int | None = None
        self._wake = asyncio.Event()
        self.is_connected = False
        """Whether other processes can be heard at the moment."""

    def committed(self, sequence: int) -> None:
        """Tell the others. Of several commits between two turns of the loop, they hear of the last."""
        self._committed = sequence
        self._wake.set()

    def report(self, report: bytes) -> None:
        """Tell the others what was used; a report is dropped while the bus is away or overloaded."""
        if self.is_connected and len(self._reports) < _MOST_REPORTS:
            self._reports.append(report)
            self._wake.set()

    async def run(self) -> None:
        """Stay connected until cancelled."""
        pauses, problem = Pauses(*_BACKOFF_SECONDS), ""
        while True:
            try:
                client = await _connect(self._nats, self._url, closed=self._lost)
                if problem:
                    _log.info("bus_back")
                problem = ""
                pauses.reset()
                try:
                    await self._serve(client)
                finally:
                    self.is_connected = False
                    await _close(client)
            except Exception as error:  # whatever the client raises, the bus is away
                self._told("failed")
                if not problem:
                    problem = problem_of(error)
                    _log.warning("bus_lost", problem=problem, consequence="others hear within a second")
            await pauses.wait()

    async def _serve(self, client: Client) -> None:
        await client.subscribe(self._messages.subject, cb=self._received, pending_msgs_limit=_MOST_WAITING)
        if self._reported is not None:
            subject = self._messages.report_subject
            await client.subscribe(subject, cb=self._received_report, pending_msgs_limit=_MOST_WAITING)
        self._reports.clear()
        await client.flush(_CONNECT_SECONDS)
        self.is_connected = True
        self._told("connected")
        self._doubt()  # messages may have been missed meanwhile
        while client.is_connected:
            await self._wake.wait()
            self._wake.clear()
            sequence, self._committed = self._committed, None
            if sequence is not None:
                tag = self._known.lineage.current.tag
                await client.publish(self._messages.subject, self._messages.encode(tag, sequence))
                self._told("sent")
            reports, self._reports = self._reports, []
            for report in reports:
                await client.publish(self._messages.report_subject, self._messages.seal(report))
        raise ConnectionResetError("the bus closed the connection")

    async def _received(self, message: Msg) -> None:
        said = self._messages.decode(message.data)
        if said is None:
            self._told("refused")
            return
        tag, sequence = said
        if tag == self._known.lineage.current.tag:
            self._told("heard")
            self._heard(sequence)
        else:
            self._told("doubted")
            self._doubt()

    async def _received_report(self, message: Msg) -> None:
        report = self._messages.unseal(message.data)
        if report is None or self._reported is None or not self._reported(report):
            self._told("refused")

    async def _lost(self) -> None:
        self._wake.set()


async def probe_bus(url: str) -> float:
    """The round trip to a NATS server, in seconds. Raises `ConnectionError`, which says why it failed."""
    try:
        client = await _connect(importlib.import_module("nats"), url, closed=_nothing)
        try:
            began = time.perf_counter()
            await client.flush(_CONNECT_SECONDS)
            return time.perf_counter() - began
        finally:
            await _close(client)
    except Exception as error:
        raise ConnectionError(problem_of(error)) from None


async def _connect(nats: ModuleType, url: str, *, closed: Callable[[], Awaitable[None]]) -> Client:
    client: Client = nats.NATS()
    try:
        async with asyncio.timeout(_CONNECT_SECONDS):
            await client.connect(
                url,
                name="relayd",
                no_echo=True,
                allow_reconnect=False,
                connect_timeout=_CONNECT_SECONDS,
                ping_interval=_PING_SECONDS,
                max_outstanding_pings=_PINGS_UNANSWERED,
                error_cb=_ignore,
                closed_cb=closed,
            )
    except BaseException:
        await _close(client)  # an interrupted attempt leaves its socket open
        raise
    return client


async def _close(client: Client) -> None:
    with contextlib.suppress(Exception):  # the client is no longer used, whatever it raises
        async with asyncio.timeout(1.0):
            await client.close()


async def _ignore(error: Exception) -> None:
    """Ignore the client's errors: those that matter also end in `closed_cb`."""


async def _nothing() -> None:
    pass
