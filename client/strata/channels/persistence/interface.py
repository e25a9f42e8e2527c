"""The interface of a store for channel state (C-248 … C-258).

State belongs to a participant, which is one sender in one channel (C-258). It consists of records, each under
a kind and a key, and of counters that only rise. A backend does not know the meaning of the bytes, so a
custom backend (C-253) is a page of code. `state` defines the meaning, and `testing` checks a backend.

    apply(participant, changes)   all of the changes or none, and durable once it has returned
    load(participant)             the state that results from the changes applied so far

Changes are idempotent: applied once or repeatedly, in the same order, they lead to the same state. A batch
whose outcome is unknown, because the disk failed or the program died, is therefore applied again (C-255,
C-256).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, runtime_checkable

from strata.protocol.errors import StrataError

__all__ = [
    "MAX_COUNTER",
    "Change",
    "CorruptStore",
    "ParticipantKey",
    "Persistence",
    "PersistenceClosed",
    "PersistenceError",
    "Put",
    "Raise",
    "Remove",
    "StorageFull",
    "StoreInUse",
    "StoredState",
    "WrongStoreVersion",
    "check_changes",
]

MAX_COUNTER = 2**63 - 1
"""The highest value of a counter."""


class PersistenceError(StrataError):
    """A store could not carry out a call; the state stored before is untouched.

    `retry` says whether the same call may succeed later.
    """

    retry = True


class StorageFull(PersistenceError):
    """The disk is full, or the store has reached its size limit (C-256)."""


class StoreInUse(PersistenceError):
    """Another process, or another object in this one, has the store open."""


class WrongStoreVersion(PersistenceError):
    """The store was written by a version of this library with another layout; it is left unchanged."""

    retry = False

    def __init__(self, path: str, found: int, expected: int) -> None:
        super().__init__(path, found, expected)
        self.path = path
        self.found = found
        self.expected = expected

    def __str__(self) -> str:
        return f"{self.path} has layout {self.found}; this version of strata reads layout {self.expected}"


class CorruptStore(PersistenceError):
    """The file is damaged, or is not a store of this library."""

    retry = False


class PersistenceClosed(PersistenceError):
    """The store was closed on this side."""

    retry = False


class ParticipantKey(NamedTuple):
    """The owner of stored state. State shared by channels, such as a budget, has an empty `channel_id`."""

    channel_id: str
    sender_id: str


@dataclass(frozen=True, slots=True)
class Put:
    """Set the record under a kind and key, whether or not it exists."""

    kind: str
    key: str
    value: bytes


@dataclass(frozen=True, slots=True)
class Remove:
    """Remove the record under a kind and key, if there is one."""

    kind: str
    key: str


@dataclass(frozen=True, slots=True)
class Raise:
    """Raise a counter to at least this value. It never falls, because a Lamport time does not go back."""

    counter: str
    value: int


Change = Put | Remove | Raise


@dataclass(slots=True)
class StoredState:
    """The stored state of one participant.

    `records[kind]` maps keys to values, in the order in which the keys were put. A key that is put again
    keeps its place; a key that is put after its removal comes last.
    """

    records: dict[str, dict[str, bytes]] = field(default_factory=dict)
    counters: dict[str, int] = field(default_factory=dict)

    def apply(self, changes: Iterable[Change]) -> None:
        """Apply changes to this value. Every backend must have the effect that this method defines."""
        for change in changes:
            match change:
                case Put(kind, key, value):
                    self.records.setdefault(kind, {})[key] = value
                case Remove(kind, key):
                    held = self.records.get(kind, {})
                    held.pop(key, None)
                    if not held:
                        self.records.pop(kind, None)
                case Raise(counter, value):
                    self.counters[counter] = max(value, self.counters.get(counter, 0))


@runtime_checkable
class Persistence(Protocol):
    """A store for channel state. Each object is used by one event loop.

    Every call may raise `PersistenceError`. Cancelling a call abandons the wait but not the work: a cancelled
    `apply` may still take effect, as a whole.
    """

    async def load(self, participant: ParticipantKey) -> StoredState:
        """The state of a participant; empty for an unknown one."""
        ...

    async def apply(self, participant: ParticipantKey, changes: Sequence[Change]) -> None:
        """Make these changes, all or none. When it returns they are as durable as the store is.

        Calls for one participant take effect in the order in which they were made. Raises `ValueError` for a
        change that cannot be stored; then none was stored.
        """
        ...

    async def participants(self) -> list[ParticipantKey]:
        """All participants whose state is stored, in order."""
        ...

    async def purge(self, participant: ParticipantKey) -> None:
        """Remove all state of a participant, counters included (C-020)."""
        ...

    async def close(self) -> None:
        """Finish the calls under way and release the store. Idempotent."""
        ...


def check_changes(changes: Iterable[Change]) -> None:
    """Raise `ValueError` unless every change can be stored. Backends call it before they begin."""
    for change in changes:
        if isinstance(change, Raise):
            if not 0 <= change.value <= MAX_COUNTER:
                raise ValueError(f"counter {change.counter!r} is not between 0 and {MAX_COUNTER}")
        elif not change.kind:
            raise ValueError("a record needs a kind")
