"""The default store, in memory. It survives `stop` and `close` of a channel, but no restart (C-251)."""

from __future__ import annotations

from collections.abc import Sequence

from strata.channels.persistence.interface import (
    Change,
    ParticipantKey,
    PersistenceClosed,
    StoredState,
    check_changes,
)

__all__ = ["MemoryPersistence"]


class MemoryPersistence:
    """State that is kept in this process and lost with it. Its size is bounded by what its users keep."""

    def __init__(self) -> None:
        self._states: dict[ParticipantKey, StoredState] = {}
        self._closed = False

    async def load(self, participant: ParticipantKey) -> StoredState:
        """The state of a participant, as a copy."""
        self._check_open()
        state = self._states.get(participant, StoredState())
        return StoredState(
            {kind: dict(records) for kind, records in state.records.items()}, dict(state.counters)
        )

    async def apply(self, participant: ParticipantKey, changes: Sequence[Change]) -> None:
        """Make these changes at once; nothing can fail once they have been checked."""
        self._check_open()
        check_changes(changes)
        if changes:
            self._states.setdefault(participant, StoredState()).apply(changes)

    async def participants(self) -> list[ParticipantKey]:
        """All participants whose state is stored, in order."""
        self._check_open()
        return sorted(self._states)

    async def purge(self, participant: ParticipantKey) -> None:
        """Remove all state of a participant."""
        self._check_open()
        self._states.pop(participant, None)

    async def close(self) -> None:
        """Release everything."""
        self._closed = True
        self._states.clear()

    def _check_open(self) -> None:
        if self._closed:
            raise PersistenceClosed("the store is closed")
