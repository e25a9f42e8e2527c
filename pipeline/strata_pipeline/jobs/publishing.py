"""The Delta log kept in step by jobs that change the lake."""

from __future__ import annotations

import time
from pathlib import Path

from strata_pipeline.lake.delta import OpenTable, is_published, publish
from strata_pipeline.lake.lake import Lake
from strata_pipeline.lake.places import AnyLake, open_lake

__all__ = ["DeltaFollower", "publish_rewritten"]

_PAUSE_SECONDS = 60.0
"""Each commit is a file that readers of the table read: a chain of small batches must not make as many."""


def publish_rewritten(place: str | Path) -> None:
    """Bring the Delta log, where there is one, to all days that were written anew.

    A run that was killed before it could tell of a day leaves that to the next: nothing else says that the
    log lacks it. Raises as `publish`.
    """
    lake = open_lake(place)
    days = lake.written_anew()
    if days and is_published(lake):
        publish(lake, days=days)


class DeltaFollower:
    """Publishes what a lake gains by its only archive, at most once a minute."""

    def __init__(self, lake: AnyLake) -> None:
        self._lake = lake
        self._table = OpenTable()
        self._reached = -1
        self._next_at = 0.0

    def look(self, reached: int, *, at_once: bool = False) -> None:
        """The lake reaches up to this sequence: publish, if it is new and time for it.

        Raises `LakeError`: a log that does not fit is for a person to look at.
        """
        if reached in (self._reached, 0) or (not at_once and time.monotonic() < self._next_at):
            return
        # On a disk the archive's own chain is the newest; in a bucket others may have written days anew.
        lake = self._lake
        publish(lake if isinstance(lake, Lake) else open_lake(lake.place), days=(), opened=self._table)
        self._reached, self._next_at = reached, time.monotonic() + _PAUSE_SECONDS
