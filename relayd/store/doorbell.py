"""Learn of commits by other processes: LISTEN on a separate connection (R-311)."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from types import MappingProxyType

import asyncpg

from relayd import failpoints
from relayd.logs import get_logger
from relayd.pauses import Pauses
from relayd.store.connection import close_quietly, connect, deadline
from relayd.store.queries import CHANNEL
from relayd.store.roll import ROLL_CHANNEL, RollCall
from relayd.store.types import StoreError, StoreUnavailable

__all__ = ["Doorbell"]

_log = get_logger("relayd.store")

_PROBE_INTERVAL = 20.0
_BUS_PROBE_INTERVAL = 1.0
"""With a bus there are no notifications: a commit that the bus misses is found this much later."""
_PROBE_TIMEOUT = 10.0
_BACKOFF_SECONDS = (0.05, 2.0)


class Doorbell:
    """Calls back with the log's last sequence whenever another backend has appended.

    A ring says "look", not "this is all": several commits may ring once, and after a lost connection the
    first ring gives the head at that moment, so nothing committed meanwhile is missed. Over one connection,
    sequences never decrease.
    """

    def __init__(
        self,
        url: str,
        callback: Callable[[int], None],
        *,
        own_pid: Callable[[], int | None],
        read_head: Callable[[asyncpg.Connection], Awaitable[int]],
        connect_timeout: float,
        others: Mapping[str, Callable[[], None]] = MappingProxyType({}),
        has_bus: bool = False,
        roll: RollCall | None = None,
        on_question: Callable[[str], None] = lambda question: None,
    ) -> None:
        """`others` are called back for notifications on further channels; these may be lost.

        With `has_bus` no channel is listened to: something else rings, and all `others` are called at every
        look. (A session that listens to one channel is woken for all of them.) Questions of a roll call
        arrive only as notifications, so their channel is listened to while somebody is asking.
        """
        self._roll = roll
        self._on_question = on_question
        self._hears_questions = False
        self._has_bus = has_bus
        self._url = url
        self._callback = callback
        self._own_pid = own_pid
        self._read_head = read_head
        self._connect_timeout = connect_timeout
        self._others = others
        self._wake = asyncio.Event()

    def doubt(self) -> None:
        """Ring with the current head: an append of ours has an unknown outcome, and may be in the log."""
        self._wake.set()

    async def run(self, listening: asyncio.Event) -> None:
        """Listen until cancelled, through every loss of the connection; sets `listening` once it does."""
        pauses = Pauses(*_BACKOFF_SECONDS)
        while True:
            try:
                connection = await connect(
                    self._url, name="relayd doorbell", connect_timeout=self._connect_timeout
                )
                try:
                    await self._start(connection)
                    listening.set()
                    pauses.reset()
                    await self._wait_for_loss(connection)
                finally:
                    await close_quietly(connection)
            except StoreError:
                pass
            except Exception:  # else this process would no longer hear of others' commits
                _log.exception("doorbell_failed")  # our bug, or a damaged schema
            await pauses.wait()

    async def _start(self, connection: asyncpg.Connection) -> None:
        async with deadline(connection, _PROBE_TIMEOUT):
            if not self._has_bus:
                await connection.add_listener(CHANNEL, self._ring)
                for channel in self._others:
                    await connection.add_listener(channel, self._ring_other)
            self._hears_questions = False
            if self._roll is not None:
                await self._hear_questions(connection, not self._has_bus)
                await self._roll.attend(connection)
            # Only now: later commits ring, and earlier ones are below this head.
            head = await self._read_head(connection)
        self._callback(head)

    async def _wait_for_loss(self, connection: asyncpg.Connection) -> None:
        connection.add_termination_listener(lambda _: self._wake.set())
        interval = _BUS_PROBE_INTERVAL if self._has_bus else _PROBE_INTERVAL
        while not connection.is_closed():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(interval):
                    await self._wake.wait()
            self._wake.clear()
            if self._has_bus:
                for other in self._others.values():
                    other()
            # A half-open connection looks idle forever, so query now and then; the answer also rings.
            async with deadline(connection, _PROBE_TIMEOUT):
                head = await self._read_head(connection)
                if self._has_bus and self._roll is not None:
                    await self._hear_questions(connection, await self._roll.is_asking(connection))
            self._callback(head)
        raise StoreUnavailable("the connection was lost")

    def _ring_other(self, connection: object, pid: int, channel: str, payload: object) -> None:
        self._others[channel]()

    async def _hear_questions(self, connection: asyncpg.Connection, wanted: bool) -> None:
        if wanted is not self._hears_questions:
            change = connection.add_listener if wanted else connection.remove_listener
            await change(ROLL_CHANNEL, self._asked)
            self._hears_questions = wanted

    def _asked(self, connection: object, pid: int, channel: str, payload: object) -> None:
        self._on_question(str(payload))

    def _ring(self, connection: object, pid: int, channel: str, payload: object) -> None:
        if failpoints.ARMED:
            failpoints.hit("store.notify")
        if pid != self._own_pid():
            self._callback(int(str(payload)))
