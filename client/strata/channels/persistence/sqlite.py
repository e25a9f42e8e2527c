"""The durable store: one SQLite file in WAL mode (C-251, C-252).

One thread owns the only connection. It takes all calls that are waiting, runs them in one transaction, and
answers them after the commit: many channels share one sync to disk, and a lone call does not wait for others.
If that transaction fails, each call gets its own transaction, so that a call that cannot succeed makes no
other fail.

The connection holds the file's exclusive lock as long as it is open, from the first statement on. Two
processes on one store would each continue from a state that the other has changed, so the second is refused
(`StoreInUse`). The operating system drops the lock when the process ends, however it ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import sqlite3
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

from strata.channels.persistence.interface import (
    Change,
    CorruptStore,
    ParticipantKey,
    PersistenceClosed,
    PersistenceError,
    Put,
    Raise,
    Remove,
    StorageFull,
    StoredState,
    StoreInUse,
    WrongStoreVersion,
    check_changes,
)

__all__ = ["LAYOUT_VERSION", "SqlitePersistence"]

LAYOUT_VERSION = 1
"""The layout that this version reads and writes, stored in the file as `user_version`."""

_APPLICATION_ID = 0x53545241  # "STRA", so that another program's database is not mistaken for a store
_MAX_CALLS_PER_COMMIT = 256

_SCHEMA = """
CREATE TABLE participants (
    id INTEGER PRIMARY KEY,
    channel_id TEXT NOT NULL,
    sender_id TEXT NOT NULL,
    UNIQUE (channel_id, sender_id)
);
CREATE TABLE records (
    position INTEGER PRIMARY KEY,
    participant INTEGER NOT NULL,
    kind TEXT NOT NULL,
    key TEXT NOT NULL,
    value BLOB NOT NULL,
    UNIQUE (participant, kind, key)
);
CREATE TABLE counters (
    participant INTEGER NOT NULL,
    counter TEXT NOT NULL,
    value INTEGER NOT NULL,
    PRIMARY KEY (participant, counter)
) WITHOUT ROWID;
"""

_PUT = """
INSERT INTO records (participant, kind, key, value) VALUES (?, ?, ?, ?)
ON CONFLICT (participant, kind, key) DO UPDATE SET value = excluded.value
"""
_REMOVE = "DELETE FROM records WHERE participant = ? AND kind = ? AND key = ?"
_RAISE = """
INSERT INTO counters (participant, counter, value) VALUES (?, ?, ?)
ON CONFLICT (participant, counter) DO UPDATE SET value = max(value, excluded.value)
"""

_Result = TypeVar("_Result")


class _Call(NamedTuple):
    work: Callable[[], object]
    answer: Future[Any]


class SqlitePersistence:
    """State in a file, safe against a crash of the program at any point.

    With `synchronous="FULL"` it is also safe against loss of power, if the disk really syncs; with `"NORMAL"`
    the last changes before a loss of power may be missing, but none is half stored.

    Calls wait in memory until the thread runs them; their number is bounded by the callers, because each
    caller waits for its answer.
    """

    def __init__(self, connection: sqlite3.Connection, path: str) -> None:
        """Use `open`, which prepares the connection and holds the file's lock."""
        self._connection = connection
        self._path = path
        self._ids: dict[ParticipantKey, int] = {}
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._closing: Future[None] | None = None
        self._thread = threading.Thread(target=self._serve, name=f"strata-store {path}", daemon=True)
        self._thread.start()

    @classmethod
    async def open(
        cls,
        path: str | os.PathLike[str],
        *,
        synchronous: Literal["FULL", "NORMAL"] = "FULL",
        max_bytes: int | None = None,
    ) -> SqlitePersistence:
        """Open a store, creating it if it does not exist, readable only by its owner.

        `max_bytes` limits the size of the file; a change beyond it raises `StorageFull`. Raises `StoreInUse`,
        `WrongStoreVersion`, `CorruptStore` for a file that is no store, `PersistenceError` for a path that
        cannot be opened. If cancelled, the opening may continue in its thread, which then closes the store.
        """
        if synchronous not in ("FULL", "NORMAL"):
            raise ValueError("synchronous must be FULL or NORMAL")
        # An absolute path is always a file; ":memory:" would not be.
        where = str(Path.cwd() / path)
        opening = asyncio.ensure_future(asyncio.to_thread(_connect, where, synchronous, max_bytes))
        try:
            connection = await asyncio.shield(opening)
        except asyncio.CancelledError:
            opening.add_done_callback(_close_unwanted)
            raise
        return cls(connection, where)

    async def __aenter__(self) -> SqlitePersistence:
        return self

    async def __aexit__(self, *_exception: object) -> None:
        await self.close()

    async def load(self, participant: ParticipantKey) -> StoredState:
        """The state of a participant; empty for an unknown one."""
        return await self._call(lambda: self._load(participant))

    async def apply(self, participant: ParticipantKey, changes: Sequence[Change]) -> None:
        """Make these changes, all or none; on disk when it returns."""
        check_changes(changes)
        if changes:
            # The caller's list may change before the thread uses it.
            frozen = tuple(changes)
            await self._call(lambda: self._apply(participant, frozen))

    async def participants(self) -> list[ParticipantKey]:
        """All participants whose state is stored, in order."""
        return await self._call(self._participants)

    async def purge(self, participant: ParticipantKey) -> None:
        """Remove all state of a participant."""
        await self._call(lambda: self._purge(participant))

    async def close(self) -> None:
        """Finish all calls made so far, then close the file and drop its lock."""
        if self._closing is None:
            self._closing = Future()
            self._calls.put(None)
        await asyncio.shield(asyncio.wrap_future(self._closing))

    async def _call(self, work: Callable[[], _Result]) -> _Result:
        if self._closing is not None:
            raise PersistenceClosed(f"{self._path} is closed")
        answer: Future[_Result] = Future()
        # From here on the call cannot be withdrawn: cancelling the wait does not stop the work.
        answer.set_running_or_notify_cancel()
        self._calls.put(_Call(work, answer))
        return await asyncio.wrap_future(answer)

    # Everything below runs in the thread.

    def _serve(self) -> None:
        while (calls := self._waiting_calls()) is not None:
            self._commit_together(calls)
        # Closing checkpoints the log, which speeds up the next start; a full disk must not prevent closing.
        with contextlib.suppress(sqlite3.Error):
            self._connection.close()
        if self._closing is not None:
            self._closing.set_result(None)

    def _waiting_calls(self) -> list[_Call] | None:
        """The waiting calls, at least one; None once `close` was called and all earlier calls are done."""
        first = self._calls.get()
        if first is None:
            return None
        calls = [first]
        while len(calls) < _MAX_CALLS_PER_COMMIT:
            try:
                call = self._calls.get_nowait()
            except queue.Empty:
                break
            if call is None:
                self._calls.put(None)  # the end comes after this batch
                break
            calls.append(call)
        return calls

    def _commit_together(self, calls: Sequence[_Call]) -> None:
        """Run calls in one transaction and answer them; if that fails, run each in its own transaction."""
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            results = [call.work() for call in calls]
            self._connection.execute("COMMIT")
        except Exception as error:
            self._roll_back()
            if len(calls) == 1:
                calls[0].answer.set_exception(_typed(error, self._path))
                return
            for call in calls:
                self._commit_together([call])
            return
        # Answers come only after the commit: confirmed changes are on disk (C-255).
        for call, result in zip(calls, results, strict=True):
            call.answer.set_result(result)

    def _roll_back(self) -> None:
        self._ids.clear()  # numbers assigned in this transaction are void
        if self._connection.in_transaction:  # a full disk may have ended it by itself
            with contextlib.suppress(sqlite3.Error):
                self._connection.execute("ROLLBACK")

    def _load(self, participant: ParticipantKey) -> StoredState:
        state = StoredState()
        number = self._number(participant)
        if number is None:
            return state
        rows = self._connection.execute(
            "SELECT kind, key, value FROM records WHERE participant = ? ORDER BY position", (number,)
        )
        for kind, key, value in rows:
            state.records.setdefault(kind, {})[key] = value
        rows = self._connection.execute(
            "SELECT counter, value FROM counters WHERE participant = ?", (number,)
        )
        state.counters.update(rows)
        return state

    def _apply(self, participant: ParticipantKey, changes: Sequence[Change]) -> None:
        number = self._number(participant)
        if number is None:
            cursor = self._connection.execute(
                "INSERT INTO participants (channel_id, sender_id) VALUES (?, ?)", participant
            )
            number = self._ids[participant] = cursor.lastrowid or 0
        # Consecutive changes of one type are executed in one call; the order between runs is kept.
        for kind, run in groupby(changes, type):
            statement, values = _STATEMENTS[kind]
            self._connection.executemany(statement, [(number, *values(change)) for change in run])

    def _participants(self) -> list[ParticipantKey]:
        rows = self._connection.execute("SELECT channel_id, sender_id FROM participants")
        return sorted(ParticipantKey(*row) for row in rows)

    def _purge(self, participant: ParticipantKey) -> None:
        number = self._number(participant)
        if number is None:
            return
        self._connection.execute("DELETE FROM records WHERE participant = ?", (number,))
        self._connection.execute("DELETE FROM counters WHERE participant = ?", (number,))
        self._connection.execute("DELETE FROM participants WHERE id = ?", (number,))
        del self._ids[participant]

    def _number(self, participant: ParticipantKey) -> int | None:
        number = self._ids.get(participant)
        if number is None:
            row = self._connection.execute(
                "SELECT id FROM participants WHERE channel_id = ? AND sender_id = ?", participant
            ).fetchone()
            if row is None:
                return None
            number = self._ids[participant] = int(row[0])
        return number


_STATEMENTS: dict[type, tuple[str, Callable[[Any], tuple[Any, ...]]]] = {
    Put: (_PUT, lambda change: (change.kind, change.key, change.value)),
    Remove: (_REMOVE, lambda change: (change.kind, change.key)),
    Raise: (_RAISE, lambda change: (change.counter, change.value)),
}


def _connect(path: str, synchronous: str, max_bytes: int | None) -> sqlite3.Connection:
    try:
        # SQLite creates files that other users may read; the messages of channels are private.
        with contextlib.suppress(FileExistsError):
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
        # Opened here and used only by the store's thread; no statement begins a transaction implicitly.
        connection = sqlite3.connect(path, timeout=0, isolation_level=None, check_same_thread=False)
    except (OSError, sqlite3.Error) as error:
        raise PersistenceError(f"{path} cannot be opened: {error}") from error
    try:
        _prepare(connection, path, synchronous, max_bytes)
    except BaseException as error:
        connection.close()
        if isinstance(error, sqlite3.Error):
            raise _typed(error, path) from error
        raise
    return connection


def _prepare(connection: sqlite3.Connection, path: str, synchronous: str, max_bytes: int | None) -> None:
    execute = connection.execute
    execute("PRAGMA locking_mode = EXCLUSIVE")
    execute("BEGIN EXCLUSIVE")  # takes the lock, which is then kept
    (application,) = execute("PRAGMA application_id").fetchone()
    (version,) = execute("PRAGMA user_version").fetchone()
    (tables,) = execute("SELECT count(*) FROM sqlite_schema").fetchone()
    if tables and application != _APPLICATION_ID:
        raise CorruptStore(f"{path} is a database of another program")
    if tables and version != LAYOUT_VERSION:
        raise WrongStoreVersion(path, version, LAYOUT_VERSION)
    if not tables:
        for statement in _SCHEMA.split(";"):
            execute(statement)
        execute(f"PRAGMA application_id = {_APPLICATION_ID}")
        execute(f"PRAGMA user_version = {LAYOUT_VERSION}")
    execute("COMMIT")
    execute("PRAGMA journal_mode = WAL")
    execute(f"PRAGMA synchronous = {synchronous}")
    if max_bytes is not None:
        (page_bytes,) = execute("PRAGMA page_size").fetchone()
        execute(f"PRAGMA max_page_count = {max(1, max_bytes // page_bytes)}")


def _typed(error: Exception, path: str) -> Exception:
    """The corresponding error of this library; errors of other kinds are returned unchanged."""
    if not isinstance(error, sqlite3.Error):
        return error
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    if code == sqlite3.SQLITE_FULL:
        return StorageFull(f"{path} cannot grow: {error}")
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return StoreInUse(f"{path} is open elsewhere")
    if code in (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT):
        return CorruptStore(f"{path} is damaged or no store: {error}")
    return PersistenceError(f"{path}: {error}")


def _close_unwanted(opening: asyncio.Future[sqlite3.Connection]) -> None:
    if not opening.cancelled() and opening.exception() is None:
        opening.result().close()
