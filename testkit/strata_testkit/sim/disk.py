"""A participant's store that outlives its process: slow, and failing on demand."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

from strata.channels.persistence.interface import (
    Change,
    ParticipantKey,
    PersistenceClosed,
    StorageFull,
    StoredState,
    check_changes,
)
from strata.channels.persistence.memory import MemoryPersistence

from strata_testkit.sim.faults import FaultCounts, Faults
from strata_testkit.sim.loop import virtual_time

__all__ = ["Disk", "DiskContent", "SimStore"]


_MESSAGE_KINDS = ("sds.log", "sds.known", "sds.waiting", "sds.outgoing")
"""The kinds of records whose keys are the ids of stored messages."""


class DiskContent(MemoryPersistence):
    """Records in memory that can be searched without waiting."""

    def holds(self, message_id: str) -> bool:
        """Whether an SDS message has been written."""
        return any(
            message_id in state.records.get(kind, ())
            for state in self._states.values()
            for kind in _MESSAGE_KINDS
        )


class Disk:
    """The written data, which survives the process unless the disk is lost."""

    def __init__(self) -> None:
        self.content = DiskContent()
        self.writes = 0
        self.trying_since: float | None = None
        """The start of the first attempt at the write that has not succeeded yet; None if there is none."""
        self.written_from = 0.0
        """The start of the first attempt at the last write that succeeded; failures make writes take long."""


class SimStore:
    """A disk as one process sees it. Once it is `unplugged`, nothing from that process reaches the disk."""

    def __init__(self, disk: Disk, faults: Faults, rng: random.Random, counts: FaultCounts) -> None:
        self.faults = faults
        self.unplugged = False
        self._disk = disk
        self._rng = rng
        self._counts = counts
        disk.trying_since = None

    async def load(self, participant: ParticipantKey) -> StoredState:
        """The state of a participant, after a delay."""
        await self._wait()
        return await self._disk.content.load(participant)

    async def apply(self, participant: ParticipantKey, changes: Sequence[Change]) -> None:
        """Write all changes or none; a failure does not say which. Raises `StorageFull`."""
        check_changes(changes)
        disk = self._disk
        if disk.trying_since is None:
            disk.trying_since = virtual_time()
        await self._wait()
        failed = self._rng.random() < self.faults.disk_failure
        if failed:
            self._counts["disk_failures"] += 1
            if self._rng.random() < 0.5:
                raise StorageFull("the simulated disk is full")
        disk.writes += 1
        await disk.content.apply(participant, changes)
        if failed:
            raise StorageFull("the simulated disk failed after writing")
        disk.written_from, disk.trying_since = disk.trying_since, None

    async def participants(self) -> list[ParticipantKey]:
        """All participants whose state is stored."""
        return await self._disk.content.participants()

    async def purge(self, participant: ParticipantKey) -> None:
        """Forget a participant."""
        await self._wait()
        await self._disk.content.purge(participant)

    async def close(self) -> None:
        """Do nothing: the disk stays."""

    async def _wait(self) -> None:
        await asyncio.sleep(self._rng.uniform(*self.faults.disk_delay))
        if self.unplugged:
            raise PersistenceClosed("the process is gone")
