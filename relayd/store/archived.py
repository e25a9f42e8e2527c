"""Checks that a lake holds a day of the log before retention drops the day.

The evidence is the lake's manifests (`strata_pipeline.lake_format`), and no manifest is believed alone:

1. Each must match its hash, and they must form one chain from the first. For finished days that are not in
   question, summaries may stand in for the manifests; they form their own chain.
2. Those of the day must reach its last packet. The chain leaves no sequence out, so they begin at its border.
3. The count and the hash of its rows' places and ids in each manifest must recompute from our own rows.

So with a lake of another relay, an older copy of a lake, or a log that was changed after it was archived, the
day is kept. Whether the lake's files still hold what the manifests say is checked by the audit: to check it
here, the relay would have to read them all.

This is the one module of relayd that needs strata-pipeline (`relayd[archive]`), so it is imported where an
archive is required, and not before.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import asyncpg
from blake3 import blake3
from strata.protocol.errors import InvalidInput
from strata.protocol.sequences import day_of, day_text, first_of_day
from strata_pipeline.lake_format import (
    RECORD_BYTES,
    SUMMARIES,
    ChainEnd,
    DaySummary,
    LakeError,
    Manifest,
    RowsDigest,
    check_chain,
    check_day,
    check_summaries,
    decode,
    decode_summary,
)

from relayd.store.types import NotArchived, Unproven

__all__ = ["ArchivedDays"]

_MANIFEST = re.compile(r"\d{10}\.json")
_SUMMARY = re.compile(r"\d{4}-\d\d-\d\d\.json")
_READ_TIMEOUT = 60.0
_LOOK_AHEAD = 10_000
"""How many manifests beyond the end are looked for, to tell a chain with a hole from one that ends."""
_PAGE_SEQUENCES = 10_000

_RECHECK_SECONDS = 3600
"""How soon a day that differs is hashed again although its manifests have not changed: its rows may have been
repaired, and hashing is the only way to know."""

_ROWS = "FROM {table} WHERE sequence > $1 AND sequence <= $2"
# The database joins the values to hash: one value per row would cost this process more than the hashing.
# Pages are short ranges instead of a LIMIT, so that no plan can read a whole day for a page; a day leaves no
# number out, so the ranges are full.
_JOINED = (
    "SELECT count(*), bool_and(octet_length(packet_id) = 32),"
    " string_agg(int8send(sequence) || int8send(received_at) || packet_id, ''::bytea ORDER BY sequence) "
    + _ROWS
)
_SINGLE = f"SELECT sequence, received_at, packet_id {_ROWS} ORDER BY sequence"


class _Batch(NamedTuple):
    """The needed parts of a manifest: a lake that follows the log has thousands of manifests per day."""

    after: int
    up_to: int
    rows: int
    digest: str


class _Lake(NamedTuple):
    """The result of reading the manifests."""

    stamp: bytes
    """A value that changes with every change in the folder; empty if the folder could not be read."""
    days: frozenset[int]
    """The requested days."""
    batches: dict[int, list[_Batch]]
    """The batches that the chain has of these days."""
    reached: int
    """The sequence up to which the lake holds the log."""
    problem: tuple[Unproven, str] | None


class _Refused(NamedTuple):
    """A day whose hashes did not match."""

    batches: Sequence[_Batch]
    checked_at: int
    problem: tuple[Unproven, str]


class ArchivedDays:
    """The days that the manifests in `folder`, a lake's `_manifests`, prove to be in the lake."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lake: _Lake | None = None
        self._reading: asyncio.Future[_Lake] | None = None
        self._refused: _Refused | None = None

    async def look(self, days: frozenset[int]) -> None:
        """Read what the manifests say about `days` (from 1970-01-01 UTC), unless nothing has changed since.

        A thread does the reading. Raises `NotArchived` if the manifests cannot be read, if they do not form a
        chain, or if reading takes longer than a minute. In the last case, and after cancelling, the reading
        continues for the next call.
        """
        if not days:
            self._lake = None
            return
        lake = await self._read(days)
        if not days <= lake.days:  # an earlier call began this reading
            lake = await self._read(days)
        self._lake = lake
        if lake.problem is not None:
            raise NotArchived(*lake.problem)

    async def _read(self, days: frozenset[int]) -> _Lake:
        # One at a time: storage that hangs must not use up the threads, which name resolution also needs.
        if self._reading is None:
            self._reading = asyncio.ensure_future(
                asyncio.to_thread(_read_lake, self._folder, days, self._lake)
            )
        await asyncio.wait({self._reading}, timeout=_READ_TIMEOUT)
        if not self._reading.done():
            raise NotArchived(
                Unproven.UNREADABLE,
                f"{self._folder} is still being read after {_READ_TIMEOUT:.0f} seconds",
            )
        reading, self._reading = self._reading, None
        return reading.result()

    async def check(self, connection: asyncpg.Connection, table: str, day: int, now: int) -> None:
        """Compare a finished day, whose partition is `table`, with the lake as `look` has seen it.

        Returns if the lake holds all its rows, and raises `NotArchived` if not; errors of the driver pass. A
        million rows take some seconds, in pages of some hundred KiB. `now` is in Unix seconds.
        """
        assert self._lake is not None
        batches = self._lake.batches.get(day, [])
        refused = self._refused
        is_fresh = refused is not None and 0 <= now - refused.checked_at < _RECHECK_SECONDS
        if refused is not None and is_fresh and refused.batches == batches:
            raise NotArchived(*refused.problem)
        last = await connection.fetchval(f"SELECT max(sequence) FROM {table}") or 0
        held = batches[-1].up_to if batches else 0
        if held < last:
            raise NotArchived(*_short_of(day, last, held, self._lake.reached))
        for batch in batches:
            found = await _digest(connection, table, batch, last)
            if (found.rows, found.hexdigest()) != (batch.rows, batch.digest):
                problem = Unproven.DIFFERS, _difference(day, batch, found.rows)
                self._refused = _Refused(batches, now, problem)
                raise NotArchived(*problem)


def _read_lake(folder: Path, days: frozenset[int], known: _Lake | None) -> _Lake:
    """Read and check the manifests needed; returns `known` again if nothing has changed. Raises nothing.

    If there are summaries that fit, only these are read, with the manifests of `days` and those after the
    last summary; otherwise all manifests are read.
    """
    with contextlib.suppress(OSError, LakeError):
        found = _read_by_summaries(folder, days, known)
        if found is not None:
            return found
    try:
        names = sorted(entry.name for entry in os.scandir(folder) if _MANIFEST.fullmatch(entry.name))
        if not names and (folder / "_manifests").is_dir():
            problem = f"{folder} is a lake: archive_manifests must name the folder _manifests in it"
            return _Lake(b"", days, {}, 0, (Unproven.UNREADABLE, problem))
        stamp = _stamp(folder, names)  # before reading, so that a change in the meantime is read next time
        if known is not None and known.stamp == stamp and days <= known.days:
            return known
        return _read_chain(folder, names, days, stamp)
    except OSError as error:
        problem = f"{error.filename or folder} cannot be read: {error.strerror or error}"
        return _Lake(b"", days, {}, 0, (Unproven.UNREADABLE, problem))


def _read_by_summaries(folder: Path, days: frozenset[int], known: _Lake | None) -> _Lake | None:
    """The result from summaries; None if there are none. Raises OSError, and `LakeError` for a mismatch."""
    listed = sorted(entry.name for entry in os.scandir(folder / SUMMARIES) if _SUMMARY.fullmatch(entry.name))
    if not listed:
        return None
    summaries = [decode_summary(_read(folder / SUMMARIES / name), name) for name in listed]
    before = check_summaries(summaries)
    asked = [n for n, summary in enumerate(summaries) if summary.day in days]
    names = [f"{SUMMARIES}/{name}" for name in listed]
    names += [_name(summary.end.number - 1) for summary in summaries]
    of_days = itertools.chain.from_iterable(_names(summaries[n]) for n in asked)
    later: list[str] = []
    while (folder / (name := _name(before.number + len(later)))).exists():
        later.append(name)
    if any((folder / _name(before.number + len(later) + n)).exists() for n in range(1, _LOOK_AHEAD)):
        raise LakeError("a manifest is missing")  # reading all of them will show which one
    stamp = _stamp(folder, itertools.chain(names, of_days, later))
    if known is not None and known.stamp == stamp and days <= known.days:
        return known
    batches: dict[int, list[_Batch]] = {}
    for n in asked:
        manifests = [_decode(folder / name) for name in _names(summaries[n])]
        check_day(summaries[n], summaries[n - 1].end if n else ChainEnd(), manifests)
        batches[summaries[n].day] = [_batch(manifest) for manifest in manifests]

    def opened() -> Iterator[Manifest]:
        for name in later:
            manifest = _decode(folder / name)
            yield manifest
            if (day := day_of(manifest.up_to)) in days:
                batches.setdefault(day, []).append(_batch(manifest))

    return _Lake(stamp, days, batches, check_chain(opened(), before).up_to, None)


def _name(number: int) -> str:
    return f"{number:010}.json"


def _names(summary: DaySummary) -> Iterator[str]:
    """The names of its manifests, one by one: a summary may claim any number of them."""
    return map(_name, range(summary.first, summary.end.number))


def _batch(manifest: Manifest) -> _Batch:
    rows = manifest.packets + manifest.quarantined
    return _Batch(manifest.after, manifest.up_to, rows, manifest.rows)


def _stamp(folder: Path, names: Iterable[str]) -> bytes:
    """Raises OSError at the first file that is missing."""
    stamp = blake3()
    for name in names:
        found = os.stat(folder / name)
        times = f"{found.st_mtime_ns} {found.st_ctime_ns}"
        stamp.update(f"{name} {found.st_ino} {found.st_size} {times}\n".encode())
    return stamp.digest()


def _read_chain(folder: Path, names: Sequence[str], days: frozenset[int], stamp: bytes) -> _Lake:
    batches: dict[int, list[_Batch]] = {}
    reached = 0

    def manifests() -> Iterator[Manifest]:
        nonlocal reached
        for name in names:
            manifest = _decode(folder / name)
            yield manifest
            # The next one was requested, so this one was found to follow the one before.
            reached = manifest.up_to
            day = day_of(manifest.up_to)
            if day in days:
                batches.setdefault(day, []).append(_batch(manifest))

    try:
        # They are checked as they are read: a lake of some years may have a million.
        check_chain(manifests())
    except LakeError as error:
        return _Lake(stamp, days, {}, 0, (Unproven.INVALID, str(error)))
    return _Lake(stamp, days, batches, reached, None)


def _read(path: Path) -> bytes:
    with path.open("rb") as file:
        text = file.read(RECORD_BYTES + 1)
    if len(text) > RECORD_BYTES:
        problem = f"it has more than {RECORD_BYTES:,} bytes, and no writer of a lake has written it"
        raise LakeError(f"the lake's {path.name} cannot be used: {problem}")
    return text


def _decode(path: Path) -> Manifest:
    try:
        return decode(_read(path), path.name)
    except InvalidInput as error:  # without a canonical form there is no hash
        raise LakeError(f"the lake's {path.name} cannot be used: it is damaged: {error}") from None


async def _digest(connection: asyncpg.Connection, table: str, batch: _Batch, last: int) -> RowsDigest:
    """The digest of our own rows in the range of a batch; `last` is the last sequence of the table."""
    digest = RowsDigest()
    joined, single = _JOINED.format(table=table), _SINGLE.format(table=table)
    first = max(batch.after, first_of_day(day_of(batch.up_to)))
    for after in range(first, min(batch.up_to, last), _PAGE_SEQUENCES):
        span = after, min(after + _PAGE_SEQUENCES, batch.up_to)
        rows, whole, data = await connection.fetchrow(joined, *span)
        if whole:
            digest.update_bytes(data, rows)
        elif rows:  # a damaged id must be hashed first, which the database cannot do
            found = await connection.fetch(single, *span)
            # A time before 1970 cannot be hashed and never was: such rows are missing from the count.
            with contextlib.suppress(OverflowError):
                digest.update(tuple(row) for row in found)
    return digest


def _short_of(day: int, last: int, held: int, reached: int) -> tuple[Unproven, str]:
    """The reason and problem of a lake that does not reach a day's last packet."""
    if reached < last:
        return Unproven.BEHIND, f"the lake ends at {reached}, and {day_text(day)} ends at {last}"
    where = f"behind {held}" if held else "at all"
    return (
        Unproven.DIFFERS,
        f"{day_text(day)} ends at {last}, and the lake has none of its packets {where}",
    )


def _difference(day: int, batch: _Batch, rows: int) -> str:
    where = f"between {batch.after} and {batch.up_to}, of {day_text(day)},"
    if rows != batch.rows:
        return f"{where} the lake has {batch.rows} packets and the log {rows}"
    return f"{where} the lake and the log have different packets, or had them at different times"
