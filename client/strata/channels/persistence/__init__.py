"""Stores for the state of channels: the interface, memory, SQLite, and checks for backends of your own.

    from strata.channels.persistence import SqlitePersistence
    async with await SqlitePersistence.open("channels.db") as store:
        ...

`MemoryPersistence` is the default and loses everything when the program ends; use `SqlitePersistence` if a
restart must not lose sent and received messages (C-251, C-252).

The names below are loaded when they are first used, so that the parts of the library that only use changes
load neither SQLite nor asyncio.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from strata.channels.persistence.interface import (
        Change,
        CorruptStore,
        ParticipantKey,
        Persistence,
        PersistenceClosed,
        PersistenceError,
        Put,
        Raise,
        Remove,
        StorageFull,
        StoredState,
        StoreInUse,
        WrongStoreVersion,
    )
    from strata.channels.persistence.memory import MemoryPersistence
    from strata.channels.persistence.sqlite import SqlitePersistence
    from strata.channels.persistence.state import ChannelState, sds_changes
    from strata.channels.persistence.writer import ChangeWriter, WriterHealth

__all__ = [
    "Change",
    "ChangeWriter",
    "ChannelState",
    "CorruptStore",
    "MemoryPersistence",
    "ParticipantKey",
    "Persistence",
    "PersistenceClosed",
    "PersistenceError",
    "Put",
    "Raise",
    "Remove",
    "SqlitePersistence",
    "StorageFull",
    "StoreInUse",
    "StoredState",
    "WriterHealth",
    "WrongStoreVersion",
    "sds_changes",
]

_ELSEWHERE = {
    "ChangeWriter": "writer",
    "ChannelState": "state",
    "MemoryPersistence": "memory",
    "SqlitePersistence": "sqlite",
    "WriterHealth": "writer",
    "sds_changes": "state",
}
"""The modules of the names that are not in `interface`."""


if not TYPE_CHECKING:  # a type checker would accept a misspelt name, as Any

    def __getattr__(name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        home = importlib.import_module(f"{__name__}.{_ELSEWHERE.get(name, 'interface')}")
        value = globals()[name] = getattr(home, name)
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
