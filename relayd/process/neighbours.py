"""Workers of one machine report to each other what their peers take: datagrams between sockets in one folder.

A lost datagram makes a limit wider for a moment; nothing waits for one.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from relayd.access.ledger import Ledger
from relayd.faults import FaultLog
from relayd.logs import get_logger, problem_of

__all__ = ["Neighbourhood", "Neighbours"]

_log = get_logger("relayd.workers")

_INTERVAL: Final = 0.2
_INTERVAL_EACH: Final = 0.02
"""For each worker: the traffic of all workers together grows no faster than their number."""
_PATIENCE: Final = 25
"""The intervals of silence after which a worker counts as gone."""
_LARGEST: Final = 2**18
_READ_AT_ONCE: Final = 64


class Neighbourhood(NamedTuple):
    """Where a worker finds the others."""

    folder: Path
    number: int
    """The worker's own number."""
    workers: int


class Neighbours:
    """Reports what this worker's peers take, and hears what the peers of others take."""

    def __init__(self, place: Neighbourhood, ledger: Ledger, faults: FaultLog) -> None:
        self._place = place
        self._ledger = ledger
        self._faults = faults
        self._others = [
            str(place.folder / str(number)) for number in range(place.workers) if number != place.number
        ]
        self._interval = max(_INTERVAL, _INTERVAL_EACH * place.workers)

    async def run(self) -> None:
        """Report and hear until cancelled. A machine without such sockets goes on without reports."""
        try:
            own = self._open()
        except OSError as error:
            problem = problem_of(error)
            _log.warning("limits_not_shared", problem=problem, consequence="each worker counts for itself")
            while True:  # what cannot be reported is dropped, or it would pile up
                await asyncio.sleep(self._interval)
                self._ledger.report()
        loop = asyncio.get_running_loop()
        with own:
            loop.add_reader(own, self._hear, own)
            try:
                self._say(own, [self._ledger.begin()])
                while True:
                    await asyncio.sleep(self._interval)
                    self._ledger.look(time.monotonic(), _PATIENCE * self._interval)
                    self._say(own, self._ledger.report())
            finally:
                loop.remove_reader(own)

    def _open(self) -> socket.socket:
        path = self._place.folder / str(self._place.number)
        path.unlink(missing_ok=True)  # the socket of the previous worker
        own = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            own.setblocking(False)
            own.bind(str(path))
        except BaseException:
            own.close()
            raise
        return own

    def _say(self, own: socket.socket, messages: Iterable[bytes]) -> None:
        for message in messages:
            for other in self._others:
                # The worker may have ended, be starting, or have too much to read already.
                with contextlib.suppress(OSError):
                    own.sendto(message, other)

    def _hear(self, own: socket.socket) -> None:
        for _ in range(_READ_AT_ONCE):
            try:
                message = own.recv(_LARGEST)
            except BlockingIOError:
                return
            except OSError as error:
                self._faults.caught("background", error)
                return
            try:
                self._ledger.hear(message, time.monotonic())
            except msgspec.MsgspecError:
                continue  # from a worker of another release, while workers are renewed
            except Exception as error:
                self._faults.caught("background", error)
