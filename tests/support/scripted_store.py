"""Stores that die, fail or block when the test wants."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol, TypeVar

from strata.channels.persistence import (
    Change,
    ParticipantKey,
    Persistence,
    PersistenceError,
    StoredState,
)
from strata.channels.persistence.interface import check_changes

T = TypeVar("T")


class Closable(Protocol):
    async def close(self) -> None: ...


class DictStore:
    """A store as a user might write one: a few lines around a dictionary that outlives it."""

    def __init__(self, held: dict[ParticipantKey, StoredState]) -> None:
        self._held = held

    async def load(self, participant: ParticipantKey) -> StoredState:
        found = self._held.get(participant, StoredState())
        return StoredState({k: dict(v) for k, v in found.records.items()}, dict(found.counters))

    async def apply(self, participant: ParticipantKey, changes: Sequence[Change]) -> None:
        check_changes(changes)
        self._held.setdefault(participant, StoredState()).apply(changes)

    async def participants(self) -> list[ParticipantKey]:
        return sorted(self._held)

    async def purge(self, participant: ParticipantKey) -> None:
        self._held.pop(participant, None)

    async def close(self) -> None:
        pass


class InPlace:
    """A store with a thread, for a loop in virtual time: each call finishes before it returns to the loop."""

    def __init__(self, open_store: Callable[[], Coroutine[Any, Any, Persistence]]) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        try:
            self._store = self._run(open_store())
        except BaseException:
            self._end()
            raise

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _end(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def load(self, participant: ParticipantKey) -> StoredState:
        return self._run(self._store.load(participant))

    async def apply(self, participant: ParticipantKey, changes: Sequence[Change]) -> None:
        self._run(self._store.apply(participant, changes))

    async def participants(self) -> list[ParticipantKey]:
        return self._run(self._store.participants())

    async def purge(self, participant: ParticipantKey) -> None:
        self._run(self._store.purge(participant))

    async def close(self) -> None:
        self._run(self._store.close())
        self._end()


class Mortal:
    """A store that dies with its process at its `crash_at`th write, which then has taken effect or not."""

    def __init__(self, inner: Persistence, crash_at: int | None, *, written: bool) -> None:
        self.inner = inner
        self.writes = 0
        self.crashed = asyncio.Event()
        self._never = asyncio.Event()
        self._crash_at = crash_at
        self._written = written

    async def load(self, participant: ParticipantKey) -> StoredState:
        return await self.inner.load(participant)

    async def apply(self, participant: ParticipantKey, changes: Sequence[Change]) -> None:
        if self.crashed.is_set():
            await self._never.wait()
        self.writes += 1
        if self.writes != self._crash_at:
            await self.inner.apply(participant, changes)
            return
        if self._written:
            await self.inner.apply(participant, changes)
        self.crashed.set()
        await self._never.wait()

    async def participants(self) -> list[ParticipantKey]:
        return await self.inner.participants()

    async def purge(self, participant: ParticipantKey) -> None:
        await self.inner.purge(participant)

    async def close(self) -> None:
        await self.inner.close()


class Failing:
    """A store that refuses every write as long as `error` is set."""

    def __init__(self, inner: Persistence) -> None:
        self.inner = inner
        self.error: PersistenceError | Exception | None = None
        self.refused = 0

    async def load(self, participant: ParticipantKey) -> StoredState:
        return await self.inner.load(participant)

    async def apply(self, participant: ParticipantKey, changes: Sequence[Change]) -> None:
        if self.error is not None:
            self.refused += 1
            raise self.error
        await self.inner.apply(participant, changes)

    async def participants(self) -> list[ParticipantKey]:
        return await self.inner.participants()

    async def purge(self, participant: ParticipantKey) -> None:
        await self.inner.purge(participant)

    async def close(self) -> None:
        await self.inner.close()
