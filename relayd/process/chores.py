"""What a process does now and then besides serving; each chore runs until it is cancelled."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Final

from relayd.access.memory import MemoryCeiling, Pressure
from relayd.config import Settings
from relayd.faults import FaultLog
from relayd.logs import get_logger, problem_of
from relayd.metrics import Metrics
from relayd.process.memory import default_limit, give_back, resident_bytes
from relayd.sessions.registry import Registry
from relayd.store import Store
from relayd.store.guard import Guard
from relayd.store.types import StoreError

__all__ = ["GuardKeeper", "maintain", "sweep", "watch_memory"]

_log = get_logger("relayd.server")

_SWEEP_INTERVAL: Final = 1.0
_SWEEP_PARTS: Final = 20
_MEMORY_INTERVAL: Final = 0.5
_LOOKS_PER_LIMIT: Final = 64
_MAINTENANCE_INTERVAL: Final = 600.0
_GUARD_INTERVAL: Final = 10.0


async def sweep(registry: Registry, count: Callable[[], None]) -> None:
    """Look after every connection about once a second, in parts: all at once would cause a noticeable pause.

    `count` is called once in each round.
    """
    while True:
        count()
        sockets = list(registry.sockets)
        for part in range(_SWEEP_PARTS):
            due = time.monotonic() + _SWEEP_INTERVAL / _SWEEP_PARTS
            await asyncio.sleep(_SWEEP_INTERVAL / _SWEEP_PARTS)
            if time.monotonic() - due > _SWEEP_INTERVAL:
                # This process, or the machine, has slept: first read what peers have sent meanwhile.
                await asyncio.sleep(_SWEEP_INTERVAL)
            registry.sweep(sockets[part::_SWEEP_PARTS], time.monotonic())


async def watch_memory(settings: Settings, registry: Registry, metrics: Metrics) -> None:
    """Keep the process below its memory limit: the nearer it comes to the limit, the more is refused."""
    ceiling = MemoryCeiling(settings.memory_limit_bytes or default_limit(settings.workers))

    def look() -> None:
        before, pressure = registry.pressure, ceiling.update(resident_bytes())
        registry.relieve(pressure)
        metrics.memory_pressure.set(pressure)
        if pressure is not before:
            _log.warning("memory", pressure=pressure.name.lower(), limit=ceiling.limit)

    registry.look, registry.look_after_bytes = look, ceiling.limit // _LOOKS_PER_LIMIT
    while True:
        await asyncio.sleep(_MEMORY_INTERVAL)
        if registry.pressure is not Pressure.FINE:
            with contextlib.suppress(RuntimeError):  # the system allows no more threads
                await asyncio.to_thread(give_back)
        look()


async def maintain(settings: Settings, store: Store, faults: FaultLog) -> None:
    """Create and drop partitions of the log."""
    # Comparing days with the archive takes a while, so the first round runs here and not at the start.
    await asyncio.sleep(0 if settings.retention_requires_archive else _MAINTENANCE_INTERVAL)
    while True:
        try:
            await store.maintain()
        except StoreError as error:
            _log.warning("maintenance_failed", problem=problem_of(error))
        except Exception as error:
            faults.caught("background", error)
        await asyncio.sleep(_MAINTENANCE_INTERVAL)


class GuardKeeper:
    """Records from time to time how far the log was acknowledged."""

    def __init__(self, guard: Guard, store: Store) -> None:
        self._guard = guard
        self._store = store
        self._has_failed = False

    async def run(self) -> None:
        while True:
            await self.write()
            await asyncio.sleep(_GUARD_INTERVAL)

    async def write(self) -> None:
        """Record it. A file that cannot be written is logged once, and the relay goes on."""
        try:
            await asyncio.to_thread(self._guard.write, self._store.known.claim)
        except (OSError, RuntimeError) as error:  # RuntimeError: the system allows no more threads
            if not self._has_failed:
                _log.warning("log_guard_not_written", problem=problem_of(error))
            self._has_failed = True
