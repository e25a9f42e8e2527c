"""Values that a relay looks up from time to time, not as they change: sizes, room, files."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import shutil
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

from relayd.access.gate import Access
from relayd.config import Settings
from relayd.faults import FaultLog
from relayd.lineage import SKEW_SECONDS
from relayd.logs import get_logger
from relayd.metrics import Metrics
from relayd.store.sizes import Sizes
from relayd.store.types import StoreError

__all__ = ["Gauges", "open_files_share"]

_log = get_logger("relayd.gauges")

_INTERVAL: Final = 15.0
_SIZES_EVERY: Final = 4


def open_files_share() -> float:
    """The part of this process's limit on open files that is in use; 0 if the system does not report it."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        return 0.0 if soft == resource.RLIM_INFINITY else len(os.listdir("/proc/self/fd")) / soft
    except OSError:
        return 0.0


class Gauges:
    """Sets the gauges that nothing else sets, and warns of conditions that only they show."""

    def __init__(
        self,
        metrics: Metrics,
        access: Access,
        faults: FaultLog,
        *,
        settings: Callable[[], Settings],
        sizes: Callable[[], Awaitable[Sizes]],
        latest_told_at: Callable[[], Awaitable[int]],
    ) -> None:
        self._metrics = metrics
        self._access = access
        self._faults = faults
        self._settings = settings
        self._sizes = sizes
        self._latest_told_at = latest_told_at
        self._knows_of_gateway = False
        self._knows_of_future = False

    async def run(self) -> None:
        """Update the gauges repeatedly, until cancelled. A value that cannot be read stays as it was."""
        rounds = 0
        while True:
            try:
                self.look()
                if rounds % _SIZES_EVERY == 0:
                    await self._look_at_database()
                await asyncio.to_thread(self._look_at_files)
            except Exception as error:
                self._faults.caught("background", error)
            rounds += 1
            await asyncio.sleep(_INTERVAL)

    def look(self) -> None:
        """Update the gauges that cost nothing; call it on the loop as often as wanted."""
        sources = self._access.sources
        self._metrics.address_share.set(sources.share)
        only = sources.only
        if only is not None and not self._knows_of_gateway and not self._access.is_unlimited(only):
            self._knows_of_gateway = True
            _log.warning(
                "clients_share_an_address",
                consequence="all clients have the limits of one",
                advice="a proxy or container gateway in front of the relay belongs into trusted_proxies",
            )

    async def _look_at_database(self) -> None:
        with contextlib.suppress(StoreError):
            sizes = await self._sizes()
            self._metrics.log_bytes.set(sizes.log_bytes)
            self._metrics.database_bytes.set(sizes.database_bytes)
            self._metrics.database_connections.set(sizes.connections)
            self._metrics.database_max_connections.set(sizes.max_connections)
            self._look_at_times(await self._latest_told_at() - int(time.time()))

    def _look_at_times(self, ahead: int) -> None:
        """Report packets that are told as received in the future: a clock was ahead, here or elsewhere."""
        self._metrics.log_ahead_seconds.set(max(0, ahead))
        if ahead > SKEW_SECONDS and not self._knows_of_future:
            advice = "set the clock if it is behind; else run `relayd mend-times`"
            _log.warning("log_ahead_of_clock", seconds=ahead, advice=advice)
        self._knows_of_future = ahead > SKEW_SECONDS

    def _look_at_files(self) -> None:
        settings = self._settings()
        self._metrics.open_files_share.set(open_files_share())
        with contextlib.suppress(OSError):
            self._metrics.disk_free_bytes.set(shutil.disk_usage(_nearest(settings.data_dir)).free)


def _nearest(path: Path) -> Path:
    return next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists())
