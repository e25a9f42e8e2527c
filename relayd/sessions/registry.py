"""The sockets of one process: all open sockets, and those with bytes to write at the end of a step."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import sys
import time
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Final, Protocol

from relayd.access.memory import HOLDS_MUCH, Pressure, dearest
from relayd.faults import FaultLog
from relayd.roll import OpenSession
from relayd.slices import SLICE_SECONDS, Slices

__all__ = ["OpenSocket", "Queue", "Registry"]

_CLOSED_AT_ONCE: Final = {Pressure.FINE: 0, Pressure.TIGHT: 0, Pressure.SHORT: 1, Pressure.FULL: 16}
"""The sockets closed at one look. One at `SHORT`: else a peer that holds much keeps all others out."""

_WRITTEN_AT_ONCE: Final = 32
"""The sockets written to between two looks at the clock."""


class Queue(Protocol):
    """Frames that wait for the end of a step."""

    def flush(self) -> None:
        """Write the frames."""

    def abort(self) -> None:
        """Drop the socket: the frames cannot be written."""


class OpenSocket(Protocol):
    """A socket, as seen by the process that holds it."""

    def check_deadlines(self, now: float) -> None:
        """Look at the deadlines. Called about once a second; `now` is monotonic."""

    def withdraw(self) -> None:
        """Anything written before now that still waits must leave within a second, or not at all."""

    def stop_reading(self) -> None:
        """Take nothing further from the peer."""

    def close(self, code: int, reason: str, cause: str | None = None) -> None:
        """Start the closing handshake; `cause` counts it among the closed connections."""

    def dismiss(self, code: int, reason: str, cause: str) -> None:
        """Close, and from now on hold for the peer only what it was already given, for a second."""

    def abort(self) -> None:
        """Drop the socket."""

    @property
    def account(self) -> Hashable:
        """The account that pays for the bytes the socket holds."""

    @property
    def held_bytes(self) -> int:
        """The bytes kept for the peer, about: unsent answers, unfinished frames, publishes, subscriptions."""

    def described(self, process: str) -> OpenSession | None:
        """The session as operators see it, in the process of this name; None if there is no session."""

    def expel(self) -> None:
        """End the session for an operator: report this to the peer, and close."""

    def refuse_publishes(self, refuse: bool) -> None:
        """Say whether publishes of the peer are refused, for lack of memory."""


class Registry:
    """The open sockets. While `draining`, no new socket becomes a session.

    An action on many sockets is spread over turns of the loop, each as long as `slices` allows.
    """

    def __init__(self, faults: FaultLog | None = None, slices: Slices | None = None) -> None:
        self._faults = faults or FaultLog()
        self._slices = slices or Slices(self._faults)
        self.sockets: set[OpenSocket] = set()
        self.draining = False
        self.arriving = 0
        """The number of sockets in their TLS handshake, not yet in `sockets`."""
        self.pressure = Pressure.FINE
        self.unseen_bytes = 0
        """Bytes read from sockets since the last look at memory."""
        self.look_after_bytes = sys.maxsize
        """How many unseen bytes call for a look at once: peers can fill memory in one turn of the loop."""
        self.look: Callable[[], None] = lambda: None
        """Looks at memory, and calls `relieve`."""
        self._dirty: list[Queue] = []
        self.wants_flush: Callable[[Queue], None] = self._dirty.append
        """Call this when the first frames of a step are queued: they are written when the step ends. It is
        the list's own method, because it is called once for each subscriber of each batch."""
        self._is_flushing = False
        self._is_weighing = False
        self._changed = asyncio.Event()

    def __len__(self) -> int:
        return len(self.sockets)

    def add(self, socket: OpenSocket) -> None:
        """A socket was accepted."""
        self.sockets.add(socket)

    def remove(self, socket: OpenSocket) -> None:
        """A socket has ended. A socket that was never added changes nothing."""
        self.sockets.discard(socket)
        self._changed.set()

    def flush(self) -> None:
        """End a step: write once to each socket that has frames, soon. Never raises."""
        if not self._is_flushing:
            self._go_on_flushing()

    def _go_on_flushing(self) -> None:
        # This does not wait for a slice as other jobs do: answers must not queue behind requests.
        dirty, done, until = self._dirty, 0, time.monotonic() + SLICE_SECONDS
        for done, queue in enumerate(dirty, 1):  # including those that are added meanwhile
            try:
                queue.flush()
            except Exception as error:
                # The frames are lost, so the peer must not wait for them; the others get theirs.
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
        """Drop a socket after a failure. If that fails too, the other sockets are still served."""
        try:
            failed.abort()
        except Exception as error:
            self._faults.caught(place, error)

    def _do(self, socket: OpenSocket, act: Callable[[OpenSocket], None]) -> None:
        """Perform this action on one of many sockets. Never raises."""
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
        """Perform this action on each of these sockets, write what it queues, and call `then` at the end."""
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
        """Wait up to `timeout` seconds for `condition`, checked after every step; return whether it holds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                while not condition():
                    self._changed.clear()
                    await self._changed.wait()
        return condition()

    def withdraw(self) -> None:
        """More is declined now: no socket may go on for long sending what it was given before."""
        self.each(list(self.sockets), lambda socket: socket.withdraw())

    def review(self) -> None:
        """Have every session apply the current rules now, ahead of its turn."""
        self.sweep(list(self.sockets), time.monotonic())

    def close_all(self, code: int, reason: str) -> None:
        """Start the closing handshake with all peers."""
        self.each(list(self.sockets), lambda socket: socket.close(code, reason))

    def abort_all(self) -> None:
        """Drop every socket at once. Never raises."""
        for socket in list(self.sockets):
            self._drop(socket, "message")

    def stop_reading(self) -> None:
        """Take nothing more from any peer."""
        self.each(list(self.sockets), lambda socket: socket.stop_reading())

    def relieve(self, pressure: Pressure) -> None:
        """React to this pressure: refuse publishes of the accounts that hold most, and close the sockets that
        hold most of their bytes.
        """
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
