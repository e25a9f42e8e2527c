"""Packet ids on disk, for subscriptions that have delivered more than memory should hold."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable

__all__ = ["OlderIdsOnDisk"]


class OlderIdsOnDisk:
    """A set of ids in its own temporary SQLite file, made at first use and deleted when closed.

    It is used from the event loop: adding 256 ids takes about a millisecond, a lookup some microseconds. An
    id takes about 40 bytes of disk. For one thread.
    """

    def __init__(self) -> None:
        self._database: sqlite3.Connection | None = None

    def add(self, digests: Iterable[bytes]) -> None:
        """Keep these ids. Raises `OSError` if they cannot be written."""
        try:
            if self._database is None:
                self._database = self._open()
            with self._database:
                self._database.executemany(
                    "INSERT OR IGNORE INTO seen VALUES (?)", [(digest,) for digest in digests]
                )
        except sqlite3.Error as error:
            raise OSError(f"packet ids could not be kept on disk: {error}") from error

    def __contains__(self, digest: bytes) -> bool:
        if self._database is None:
            return False
        try:
            row = self._database.execute("SELECT 1 FROM seen WHERE digest = ?", (digest,)).fetchone()
        except sqlite3.Error as error:
            raise OSError(f"packet ids kept on disk cannot be read: {error}") from error
        return row is not None

    def close(self) -> None:
        """Delete the file. Idempotent."""
        if self._database is not None:
            self._database.close()
            self._database = None

    @staticmethod
    def _open() -> sqlite3.Connection:
        database = sqlite3.connect("")  # the empty name: a private file that SQLite deletes itself
        try:
            database.execute("PRAGMA journal_mode = MEMORY")  # the file does not outlive a crash
            database.execute("PRAGMA cache_size = -8192")
            database.execute("CREATE TABLE seen (digest BLOB PRIMARY KEY) WITHOUT ROWID")
        except sqlite3.Error:
            database.close()
            raise
        return database
