"""The sockets of one process: all that are open, and those with bytes to write at the end of a step."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import sys
import time
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Final, Protocol

from relayd.access.memory import HOLDS_MUCH, Pressure, dearest
from relayd.faults import Faults
from relayd.roll import OpenSession
from relayd.slices import SLICE_SECONDS, Slices

__all__ = ["OpenSocket", "Queue", "Registry"]

_CLOSED_AT_ONCE: Final = {Pressure.FINE: 0, Pressure.TIGHT: 0, Pressure.SHORT: 1, Pressure.FULL: 16}
"""Sockets that are closed at one look. At `SHORT` too: else whoever holds much keeps everybody else out."""

_WRITTEN_AT_ONCE: Final = 32
"""Sockets that are written to between two looks at the time."""


class Queue(Protocol):
    """Frames that wait for the end of a step."""

    def flush(self) -> None:
        """Write them."""

    def abort(self) -> None:
        """They cannot be written: drop the socket."""


class OpenSocket(Protocol):
    """A socket, as the process that holds it sees it."""

    def check_deadlines(self, now: float) -> None:
        """Called about once a second; `now` is monotonic."""

    def withdraw(self) -> None:
        """What was written before now and waits still must leave within a second, or not at all."""

    def stop_reading(self) -> None:
        """Take nothing further from the peer."""

    def close(self, code: int, reason: str, cause: str | None = None) -> None:
        """Start the closing handshake; `cause` counts it among the closed connections."""

    def dismiss(self, code: int, reason: str, cause: str) -> None:
        """Close, and hold nothing further for the peer but what it was given already: for a second."""

    def abort(self) -> None:
        """Drop the socket."""

    @property
    def account(self) -> Hashable:
        """Whose bytes it holds."""

    @property
    def held_bytes(self) -> int:
        """What is kept for the peer, about: unsent answers, unfinished frames, publishes, subscriptions."""

    def described(self, process: str) -> OpenSession | None:
        """The session as operators see it, in the process of this name; None where there is none."""

    def expel(self) -> None:
        """An operator ends the session: tell the peer so, and close."""

    def refuse_publishes(self, refuse: bool) -> None:
        """Whether the peer may publish nothing now, for want of memory."""


class Registry:
    """The open sockets. While `draining`, no new one becomes a session.

    What is done to many sockets is done to as many in a turn of the loop as `slices` allows.
    """

    def __init__(self, faults: Faults | None = None, slices: Slices | None = None) -> None:
        self._faults = faults or Faults()
        self._slices = slices or Slices(self._faults)
        self.sockets: set[OpenSocket] = set()
        self.draining = False
        self.arriving = 0
        """Sockets in their TLS handshake, which are none of `sockets` yet."""
        self.pressure = Pressure.FINE
        self.unseen_bytes = 0
        """Read from sockets since memory was looked at."""
        self.look_after_bytes = sys.maxsize
        """How much of that calls for a look at once: a crowd fills memory within one turn of the loop."""
        self.look: Callable[[], None] = lambda: None
        """Looks at memory, and calls `relieve`."""
        self._dirty: list[Queue] = []
        self.wants_flush: Callable[[Queue], None] = self._dirty.append
        """To be called when the first frames are queued: they are written at the end of this step. The list's
        own method, for it is called once for each subscriber of each batch."""
        self._is_flushing = False
        self._is_weighing = False
        self._changed = asyncio.Event()

    def __len__(self) -> int:
        return len(self.sockets)

    def add(self, socket: OpenSocket) -> None:
        """A socket was accepted."""
        self.sockets.add(socket)

    def remove(self, socket: OpenSocket) -> None:
        """A socket is gone; one that was never added changes nothing."""
        self.sockets.discard(socket)
        self._changed.set()

    def flush(self) -> None:
        """End a step: write to each socket that has something, once, before long. Never raises."""
        if not self._is_flushing:
            self._go_on_flushing()

    def _go_on_flushing(self) -> None:
        # Not one of the jobs that wait for a slice: answers are not to stand in line behind requests.
        dirty, done, until = self._dirty, 0, time.monotonic() + SLICE_SECONDS
        for done, queue in enumerate(dirty, 1):  # those that are added meanwhile too
            try:
                queue.flush()
            except Exception as error:
                # What it was to send is lost, so its peer must not wait for it; others get theirs.
                self._faults.caught("write", error)
                self._drop(queue, "write")
            if not done % _WRITTEN_AT_ONCE and time.monotonic() >= until:
                break
        del dirty[:done]
        self._is_flushing = bool(dirty)
        if dirty:
            asyncio.get_running_loop().call_soon(self._go_on_flushing)
        self._changed.set()

    def _drop(self, failed: Queue | OpenSocket, place: str) -> None:
        """Drop one with which something has failed; where that fails too, the others come all the same."""
        try:
            failed.abort()
        except Exception as error:
            self._faults.caught(place, error)

    def _do(self, socket: OpenSocket, act: Callable[[OpenSocket], None]) -> None:
        """Do this to one of many sockets. Never raises."""
        try:
            act(socket)
        except Exception as error:
            self._faults.caught("message", error)
            self._drop(socket, "message")

    def each(
        self,
        sockets: Iterable[OpenSocket],
        act: Callable[[OpenSocket], None],
        then: Callable[[], None] = lambda: None,
    ) -> None:
        """Do this to each of these sockets, what they queue is written, and `then` is called."""
        self._go_on_with(iter(sockets), act, then)

    def _go_on_with(
        self, sockets: Iterator[OpenSocket], act: Callable[[OpenSocket], None], then: Callable[[], None]
    ) -> None:
        for socket in sockets:
            self._do(socket, act)
            if self._slices.is_over():
                self._slices.later(functools.partial(self._go_on_with, sockets, act, then))
                break
        else:
            then()
        self.flush()

    async def settle(self, condition: Callable[[], bool], timeout: float) -> bool:
        """Wait up to `timeout` seconds until `condition` holds, looking after every step; whether it does."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                while not condition():
                    self._changed.clear()
                    await self._changed.wait()
        return condition()

    def withdraw(self) -> None:
        """More is declined now: no socket may go on sending for long what it was given before."""
        self.each(list(self.sockets), lambda socket: socket.withdraw())

    def review(self) -> None:
        """Have every session follow what has changed now, and not when its turn comes."""
        self.sweep(list(self.sockets), time.monotonic())

    def close_all(self, code: int, reason: str) -> None:
        """Start the closing handshake with everybody."""
        self.each(list(self.sockets), lambda socket: socket.close(code, reason))

    def abort_all(self) -> None:
        """Drop every socket, at once. Never raises."""
        for socket in list(self.sockets):
            self._drop(socket, "message")

    def stop_reading(self) -> None:
        """Take nothing further from anybody."""
        self.each(list(self.sockets), lambda socket: socket.stop_reading())

    def relieve(self, pressure: Pressure) -> None:
        """Memory is this short: refuse the dearest accounts, and close the sockets that hold most."""
        self.unseen_bytes = 0
        if pressure is self.pressure is Pressure.FINE:
            return
        self.pressure = pressure
        if self._is_weighing:
            return
        self._is_weighing = True
        held: dict[OpenSocket, tuple[Hashable, int]] = {}

        def weigh(socket: OpenSocket) -> None:
            held[socket] = socket.account, socket.held_bytes

        self.each(list(self.sockets), weigh, functools.partial(self._relieve, held))

    def _relieve(self, held: dict[OpenSocket, tuple[Hashable, int]]) -> None:
        self._is_weighing = False
        pressure = self.pressure
        held = {socket: what for socket, what in held.items() if socket in self.sockets}
        dear = dearest(held.values()) if pressure else set()
        for socket in held:
            self._do(socket, lambda socket: socket.refuse_publishes(held[socket][0] in dear))
        holders = [
            socket for socket, (account, size) in held.items() if account in dear and size >= HOLDS_MUCH // 4
        ]
        holders.sort(key=lambda socket: -held[socket][1])
        for socket in holders[: _CLOSED_AT_ONCE[pressure]]:
            self._do(socket, lambda socket: socket.dismiss(1013, "the relay is short of memory", "memory"))

    def sweep(self, sockets: Iterable[OpenSocket], now: float) -> None:
        """Let these sockets look at their deadlines; `now` is monotonic."""
        self.each(sockets, lambda socket: socket.check_deadlines(now))
