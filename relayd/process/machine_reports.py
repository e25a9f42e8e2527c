"""Processes of several machines report to each other over the bus what identities take, once a second.

A lost report makes a limit wider for a moment. Use of a budget while the bus was down is not reported later,
because by then most of the budget has refilled.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import socket
import time
from collections.abc import Callable
from typing import Final

import msgspec

from relayd.access.machines import Machines
from relayd.config import Settings
from relayd.faults import FaultLog
from relayd.process.neighbours import Neighbourhood

__all__ = ["MachineReports", "machines_of"]

_INTERVAL: Final = 1.0
_NAME_BYTES: Final = 8


def machines_of(settings: Settings, place: Neighbourhood | None) -> Machines | None:
    """What this process reports to those of other machines; None if the settings have it report nothing."""
    if settings.bus_url is None or not settings.bus_limits:
        return None
    process = os.urandom(_NAME_BYTES)
    if place is None:
        return Machines(process, process)
    # The workers of a machine share a folder, whose name was made up for them.
    together = f"{socket.gethostname()}:{place.folder}".encode()
    return Machines(hashlib.blake2s(together, digest_size=_NAME_BYTES).digest(), process)


class MachineReports:
    """Reports by `tell` what was taken here, and takes in the reports of others."""

    def __init__(self, machines: Machines, tell: Callable[[bytes], None], faults: FaultLog) -> None:
        self._machines = machines
        self._tell = tell
        self._faults = faults

    async def run(self) -> None:
        """Report until cancelled."""
        while True:
            await asyncio.sleep(_INTERVAL)
            for report in self._machines.report(time.time()):
                self._tell(report)

    def hear(self, report: bytes) -> bool:
        """Take in a report; False if it does not count."""
        try:
            return self._machines.hear(report, time.time(), time.monotonic())
        except msgspec.MsgspecError:
            return False  # a process of another release
        except Exception as error:
            self._faults.caught("background", error)
            return False
