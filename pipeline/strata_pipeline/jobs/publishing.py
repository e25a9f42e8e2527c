"""Keeping the Delta log in step, for jobs that change the lake."""

from __future__ import annotations

import time
from pathlib import Path

from strata_pipeline.lake.delta import is_published, publish
from strata_pipeline.lake.lake import Lake
from strata_pipeline.lake.places import AnyLake, open_lake

__all__ = ["DeltaFollower", "publish_rewritten"]

_PAUSE_SECONDS = 60.0
"""Each commit is a file that readers of the table read, so there must be fewer than small batches."""


def publish_rewritten(place: str | Path) -> None:
    """Bring the Delta log, if there is one, up to date with all days that were rewritten.

    A run that was killed before it could publish a day leaves that to the next: nothing else records that the
    log lacks it. Raises what `publish` raises.
    """
    lake = open_lake(place)
    days = lake.written_anew()
    if days and is_published(lake):
        publish(lake, days=days)


class DeltaFollower:
    """Publishes what a lake gains from its only archive, at most once a minute."""

    def __init__(self, lake: AnyLake) -> None:
        self._lake = lake
        self._reached = -1
        self._next_at = 0.0

    def look(self, reached: int, *, at_once: bool = False) -> None:
        """Publish if the lake, which now reaches up to this sequence, has grown and a publication is due.

        Raises `LakeError`: if a log does not fit, a person must look at it.
        """
        if reached in (self._reached, 0) or (not at_once and time.monotonic() < self._next_at):
            return
        # On a disk the archive's own chain is the newest; in a bucket others may have rewritten days.
        lake = self._lake
        publish(lake if isinstance(lake, Lake) else open_lake(lake.place), days=())
        self._reached, self._next_at = reached, time.monotonic() + _PAUSE_SECONDS
