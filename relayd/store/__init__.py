"""The relay's log in PostgreSQL. `Store` is the interface; the values that pass through it are in `types`."""

from __future__ import annotations

from relayd.store.migrate import migrate
from relayd.store.store import Store
from relayd.store.types import (
    Appended,
    AppendOutcome,
    Disposition,
    Gone,
    LogEntry,
    LogPage,
    LogQuery,
    NewPacket,
    RelaySecrets,
    StoredPacket,
    StoreError,
    StoreTimeout,
    StoreUnavailable,
    UnsafeDatabase,
)
from relayd.store.writer import Writer

__all__ = [
    "AppendOutcome",
    "Appended",
    "Disposition",
    "Gone",
    "LogEntry",
    "LogPage",
    "LogQuery",
    "NewPacket",
    "RelaySecrets",
    "Store",
    "StoreError",
    "StoreTimeout",
    "StoreUnavailable",
    "StoredPacket",
    "UnsafeDatabase",
    "Writer",
    "migrate",
]
