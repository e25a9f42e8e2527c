"""The SQLite file in which a client keeps its scores of relays, for this program and for others that read it.

`relay_scores` has one row per relay, replaced as it changes. `relay_probes` is the log of all observations:
rows are appended, never changed, and dropped after 14 days. docs/guides/pool.md describes both. WAL lets
others read at any time; several programs may write, one at a time. Every call blocks: `ScoreLog` keeps the
calls off the loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sqlite3
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from strata.protocol.errors import StrataError
from strata.relays.conduct import WINDOW_SECONDS, Aspect, Saved, Score, Standing
from strata.relays.pool.reputation import Observation

__all__ = ["KEEP_SECONDS", "SCHEMA_VERSION", "ScoreFile", "ScoreFileError", "ScoreLog", "ScoredRelay"]

SCHEMA_VERSION = 1
"""SQLite's `user_version` of the file."""

KEEP_SECONDS = 2 * WINDOW_SECONDS
"""How long `relay_probes` keeps a row: twice the window of the scores."""

_BUSY_TIMEOUT = 5.0
_FLUSH_INTERVAL = 60.0
_MAX_PENDING = 4096
_log = logging.getLogger("strata.pool")

_SCHEMA = """
CREATE TABLE relay_scores (
    url TEXT PRIMARY KEY,
    standing TEXT NOT NULL,
    score REAL,
    integrity REAL,
    latency_seconds REAL,
    throughput_bytes REAL,
    uptime REAL,
    strikes INTEGER NOT NULL DEFAULT 0,
    blacklisted_until REAL,
    last_seen_at REAL,
    added_at REAL NOT NULL,
    updated_at REAL NOT NULL
) STRICT;
CREATE TABLE relay_probes (
    probe_id INTEGER PRIMARY KEY AUTOINCREMENT,
    url TEXT NOT NULL,
    at REAL NOT NULL,
    kind TEXT NOT NULL,
    good INTEGER NOT NULL,
    bad INTEGER NOT NULL,
    value REAL
) STRICT;
CREATE INDEX relay_probes_at ON relay_probes (at);
"""

_PUT_SCORE = """
INSERT INTO relay_scores VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (url) DO UPDATE SET
    standing = excluded.standing, score = excluded.score, integrity = excluded.integrity,
    latency_seconds = excluded.latency_seconds, throughput_bytes = excluded.throughput_bytes,
    uptime = excluded.uptime, strikes = excluded.strikes, blacklisted_until = excluded.blacklisted_until,
    last_seen_at = excluded.last_seen_at, updated_at = excluded.updated_at
"""


class ScoreFileError(StrataError, OSError):
    """The file is not a scores file, has another version, or cannot be used."""


@dataclass(frozen=True, slots=True)
class ScoredRelay:
    """One row of `relay_scores`."""

    url: str
    saved: Saved
    score: Score
    added_at: float


class ScoreFile:
    """An open scores file; every method blocks and may raise `ScoreFileError`. For one thread at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._database = sqlite3.connect(path, timeout=_BUSY_TIMEOUT, check_same_thread=False)
        except (OSError, sqlite3.Error) as error:
            raise ScoreFileError(f"{path} cannot be opened: {error}") from error
        try:
            with self._translated():
                self._prepare()
        except BaseException:
            self._database.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._database.close()

    def relays(self) -> list[ScoredRelay]:
        """Every relay, in the order added."""
        query = (
            "SELECT url, standing, strikes, blacklisted_until, last_seen_at, score, integrity, uptime,"
            " latency_seconds, throughput_bytes, added_at FROM relay_scores ORDER BY added_at, rowid"
        )
        with self._translated():
            rows = self._database.execute(query).fetchall()
        return [
            ScoredRelay(
                row[0],
                Saved(Standing(row[1]), *row[2:5]),
                Score(row[5] or 0.0, 1.0 if row[6] is None else row[6], *row[7:10]),
                row[10],
            )
            for row in rows
        ]

    def observations(self, since: float) -> list[Observation]:
        """The observations from a time on, oldest first."""
        query = "SELECT url, at, kind, good, bad, value FROM relay_probes WHERE at >= ? ORDER BY probe_id"
        with self._translated():
            rows = self._database.execute(query, (since,)).fetchall()
        kinds = set(Aspect)  # other kinds come from a newer program
        return [Observation(url, at, Aspect(kind), *rest) for url, at, kind, *rest in rows if kind in kinds]

    def add(self, url: str, now: float) -> bool:
        """Add a relay; false if it was known."""
        row = (url, Standing.ACTIVE.value, *[None] * 5, 0, None, None, now, now)
        with self._translated(), self._database:
            # The upsert of `_PUT_SCORE` would erase a known relay's score.
            query = "INSERT OR IGNORE INTO relay_scores VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
            return self._database.execute(query, row).rowcount == 1

    def forget(self, url: str) -> bool:
        """Delete a relay and all its observations; false if it was not known."""
        with self._translated(), self._database:
            return self._forget(url)

    def write(
        self,
        observations: Iterable[Observation],
        scores: Iterable[tuple[str, Saved, Score]],
        now: float,
        forgotten: Iterable[str] = (),
    ) -> None:
        """Delete relays, append observations, replace scores and delete old rows, in one transaction."""
        probes = [(o.url, o.at, o.kind.value, o.good, o.bad, o.value) for o in observations]
        with self._translated(), self._database:
            for url in forgotten:
                self._forget(url)
            self._database.executemany(
                "INSERT INTO relay_probes (url, at, kind, good, bad, value) VALUES (?, ?, ?, ?, ?, ?)", probes
            )
            self._database.executemany(_PUT_SCORE, [_score_row(*score, now) for score in scores])
            self._database.execute("DELETE FROM relay_probes WHERE at < ?", (now - KEEP_SECONDS,))

    def _forget(self, url: str) -> bool:
        self._database.execute("DELETE FROM relay_probes WHERE url = ?", (url,))
        return self._database.execute("DELETE FROM relay_scores WHERE url = ?", (url,)).rowcount == 1

    def _prepare(self) -> None:
        database = self._database
        self._require_ours(is_new_too=True)  # before any change: the file may be another program's
        database.execute("PRAGMA journal_mode = WAL")
        # A crash may lose the last minute of observations, but never the file.
        database.execute("PRAGMA synchronous = NORMAL")
        if not database.execute("SELECT 1 FROM sqlite_master").fetchone():
            database.execute("BEGIN IMMEDIATE")  # two programs may open a new file at once
            try:
                if database.execute("PRAGMA user_version").fetchone()[0] == 0:
                    for statement in _SCHEMA.split(";"):
                        database.execute(statement)
                    database.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
                database.commit()
            except BaseException:
                database.rollback()
                raise
            self._require_ours()

    def _require_ours(self, *, is_new_too: bool = False) -> None:
        """Raise `ScoreFileError` unless this is a scores file of this version or, with `is_new_too`, new."""
        query = "SELECT count(*), count(*) FILTER (WHERE name = 'relay_scores') FROM sqlite_master"
        self._database.execute("BEGIN")  # another program may create the tables between the two queries
        try:
            version = self._database.execute("PRAGMA user_version").fetchone()[0]
            tables, ours = self._database.execute(query).fetchone()
        finally:
            self._database.rollback()
        if is_new_too and (version, tables) == (0, 0):
            return
        if version != SCHEMA_VERSION or not ours:
            raise ScoreFileError(
                f"{self.path} is not a relay scores file of version {SCHEMA_VERSION} (it says {version});"
                " move it away or use another one"
            )

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise ScoreFileError(f"{self.path}: {error}") from error


def _score_row(url: str, saved: Saved, score: Score, now: float) -> tuple[object, ...]:
    return (
        url,
        saved.standing.value,
        score.value,
        score.integrity,
        score.latency,
        score.throughput,
        score.uptime,
        saved.strikes,
        saved.blacklisted_until,
        saved.last_seen_at,
        now,
        now,
    )


class ScoreLog:
    """Writes observations about once a minute, from its own thread.

    Until then, observations of one relay and kind are added up, so the log grows by a few rows per relay and
    minute. A failing disk costs observations, which are counted in `lost`, and nothing else.
    """

    def __init__(
        self,
        file: ScoreFile,
        *,
        scores: Callable[[], list[tuple[str, Saved, Score]]],
        wall: Callable[[], float],
    ) -> None:
        self.lost = 0
        self._file = file
        self._scores = scores
        self._wall = wall
        self._pending: dict[tuple[str, Aspect], Observation] = {}
        self._forgotten: set[str] = set()
        self._thread = ThreadPoolExecutor(1, "strata-scores")
        self._hurry = asyncio.Event()
        self._has_begun = False

    def put(self, observation: Observation) -> None:
        """Add this to the next write."""
        key = observation.url, observation.kind
        before = self._pending.get(key)
        if before is None and len(self._pending) >= _MAX_PENDING:
            self.lost += 1
        else:
            self._pending[key] = observation if before is None else _added(before, observation)

    def forget(self, url: str) -> None:
        """Delete a relay, and all its observations up to now, with the next write."""
        for key in [key for key in self._pending if key[0] == url]:
            del self._pending[key]
        self._forgotten.add(url)
        self.hurry()

    def hurry(self) -> None:
        """Write soon, because something happened that should outlive this process."""
        self._hurry.set()

    async def run(self) -> None:
        """Write periodically until cancelled; then write once more and close the file."""
        self._has_begun = True
        try:
            while True:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_FLUSH_INTERVAL):
                        await self._hurry.wait()
                self._hurry.clear()
                await self._flush()
        finally:
            last = asyncio.get_running_loop().run_in_executor(self._thread, self._write_last, *self._take())
            self._thread.shutdown(wait=False)
            await asyncio.wait([last])  # `_BUSY_TIMEOUT` at most

    def close(self) -> None:
        """Close the file unless `run` has begun, which closes it itself. Idempotent."""
        if not self._has_begun:
            self._file.close()

    async def _flush(self) -> None:
        taken = observations, _, _, forgotten = self._take()
        loop = asyncio.get_running_loop()
        try:
            await loop.run_in_executor(self._thread, self._file.write, *taken)
        except OSError as error:
            self.lost += len(observations)
            self._forgotten |= forgotten
            _log.warning("relay scores were not written: %s", error)

    def _take(self) -> tuple[list[Observation], list[tuple[str, Saved, Score]], float, set[str]]:
        observations, forgotten = list(self._pending.values()), self._forgotten
        self._pending.clear()
        self._forgotten = set()
        return observations, self._scores(), self._wall(), forgotten

    def _write_last(
        self,
        observations: list[Observation],
        scores: list[tuple[str, Saved, Score]],
        now: float,
        forgotten: set[str],
    ) -> None:
        try:
            self._file.write(observations, scores, now, forgotten)
        except OSError as error:
            _log.warning("relay scores were not written: %s", error)
        finally:
            self._file.close()


def _added(a: Observation, b: Observation) -> Observation:
    """Two observations as one, at the later time; its value is the mean over the good ones of both."""
    values = [(max(o.good, 1), o.value) for o in (a, b) if o.value is not None]
    weight = sum(w for w, _ in values)
    mean = sum(w * v for w, v in values) / weight if values else None
    return Observation(b.url, b.at, b.kind, a.good + b.good, a.bad + b.bad, mean)
