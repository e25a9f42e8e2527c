"""The whole log as JSON lines, out of one database and into another.

A line is `{"packet":…,"received_at":…}` with the stored bytes unchanged, in log order. Both directions may
be stopped anywhere and started again: an export goes on behind the last whole line of its file, and an
import meets the packets it has brought in already as duplicates.

An import believes nothing: each line's packet is parsed, its id recomputed and its signature checked, as a
PUBLISH is, but for freshness, since a log is old by nature. What fails is counted, and kept where asked.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, NamedTuple

import msgspec
from strata.errors import ErrorCode, InvalidPacket
from strata.packets import Packet

from relayd.config import HARD_MAX_PACKET_BYTES, Settings
from relayd.server import database
from relayd.store import Store
from relayd.store.types import LogEntry, NewPacket, Outcome

__all__ = ["ExportSummary", "ImportSummary", "export_log", "import_log", "open_store", "resume_point"]

_PAGE_ROWS = 500
_BATCH_LINES = 256
_MAX_LINE_BYTES = 4 * 2**20  # a packet of the hard limit, its escapes, and some
_CLOCK_TOLERANCE_SECONDS = 300


@dataclass(slots=True)
class ExportSummary:
    """What an export did."""

    packets: int = 0
    bytes_written: int = 0
    last_sequence: int = 0


@dataclass(slots=True)
class ImportSummary:
    """What an import did; `lines` is the sum of the three others."""

    lines: int = 0
    stored: int = 0
    duplicates: int = 0
    quarantined: int = 0
    bytes_read: int = 0
    reasons: dict[str, int] = field(default_factory=dict)
    """How many lines were quarantined, by error code."""


class _Exported(msgspec.Struct, frozen=True):
    packet: msgspec.Raw
    received_at: int


class _Line(NamedTuple):
    number: int
    text: bytes


class _Entry(NamedTuple):
    line: _Line
    received_at: int
    packet: NewPacket


class _Refused(NamedTuple):
    line: _Line
    code: str
    reason: str


_DECODER = msgspec.json.Decoder(_Exported)


@contextlib.asynccontextmanager
async def open_store(settings: Settings) -> AsyncIterator[Store]:
    """The migrated store of these settings, for a command beside the relay. Raises `StoreError`.

    The embedded server runs for as long as the block does; it is refused while a relay uses its folder.
    """
    async with database(settings) as url:
        store = await Store.open(
            url,
            read_connections=1,
            read_timeout=settings.read_timeout,
            retention_days=settings.retention_days,
            dedup_window_seconds=settings.dedup_window_seconds,
            allow_unsafe=settings.allow_unsafe_database,
        )
        try:
            yield store
        finally:
            await store.close()


async def resume_point(path: Path, store: Store) -> int:
    """The sequence an export into `path` goes on behind, once a torn last line is cut off; 0 for a new file.

    Raises ValueError if the file's last packet is not in this store, so that two logs never mix.
    """
    last_line = _last_whole_line(path)
    if last_line is None:
        return 0
    try:
        packet_id = Packet.parse(_DECODER.decode(last_line).packet).digest
    except (msgspec.MsgspecError, InvalidPacket):
        raise ValueError(f"{path}: its last line is not one of an export") from None
    place = (await store.find([packet_id])).get(packet_id)
    if place is None:
        raise ValueError(f"{path}: its last packet is not in this database; export into another file")
    return place[0]


async def export_log(
    store: Store, output: BinaryIO, *, after: int = 0, progress: Callable[[ExportSummary], None] | None = None
) -> ExportSummary:
    """Write every packet behind sequence `after` that is in the log now. Raises `StoreError`, OSError.

    Cancelling it leaves whole lines, but for what the caller's file still buffers.
    """
    summary = ExportSummary(last_sequence=after)
    end = await store.head()
    while summary.last_sequence < end:
        page = await store.tail(summary.last_sequence, end, _PAGE_ROWS)
        if not page:
            break
        summary.bytes_written += output.write(b"".join(_line_of(entry) for entry in page))
        summary.packets += len(page)
        summary.last_sequence = page[-1].sequence
        if progress is not None:
            progress(summary)
    output.flush()
    return summary


async def import_log(
    store: Store,
    source: BinaryIO,
    *,
    now: Callable[[], float],
    quarantine: BinaryIO | None = None,
    progress: Callable[[ImportSummary], None] | None = None,
) -> ImportSummary:
    """Append every valid packet of `source`. Raises `StoreError`; then, as after cancelling, start it again.

    A packet keeps its `received_at` unless the log already holds later ones: in a log time never goes back
    (A-038), so such a packet is received now, as far as this log is concerned.
    """
    summary = ImportSummary()
    for lines in _batches(_lines(source), _BATCH_LINES):
        # The checks are most of the work, and a thread keeps the loop free for the database.
        entries, refused = await asyncio.to_thread(_check_lines, lines, now())
        for received_at, group in itertools.groupby(entries, key=lambda entry: entry.received_at):
            refused += await _append(store, list(group), received_at, summary)
        _count_refused(refused, summary, quarantine)
        summary.lines += len(lines)
        summary.bytes_read += sum(len(line.text) for line in lines)
        if progress is not None:
            progress(summary)
    if quarantine is not None:
        quarantine.flush()
    return summary


def _line_of(entry: LogEntry) -> bytes:
    return b'{"packet":%b,"received_at":%d}\n' % (entry.packet.body, entry.received_at)


def _last_whole_line(path: Path) -> bytes | None:
    """Cut what follows the last newline, and return the line before it, None for an empty file or none."""
    try:
        with path.open("r+b") as file:
            start = max(0, file.seek(0, os.SEEK_END) - 2 * _MAX_LINE_BYTES)
            file.seek(start)
            tail = file.read()
            end = tail.rfind(b"\n") + 1
            file.truncate(start + end)
    except FileNotFoundError:
        return None
    whole = tail[:end].splitlines()
    return whole[-1] if whole else None


def _lines(source: BinaryIO) -> Iterator[_Line]:
    """The lines of a file. One that is too long comes as its first part, and the rest of it is skipped."""
    for number in itertools.count(1):
        text = source.readline(_MAX_LINE_BYTES)
        if not text:
            return
        rest = text
        while rest and not rest.endswith(b"\n"):
            rest = source.readline(_MAX_LINE_BYTES)
        if text.strip():
            yield _Line(number, text)


def _batches(lines: Iterable[_Line], size: int) -> Iterator[list[_Line]]:
    iterator = iter(lines)
    while batch := list(itertools.islice(iterator, size)):
        yield batch


def _check_lines(lines: list[_Line], now: float) -> tuple[list[_Entry], list[_Refused]]:
    entries, refused = [], []
    for line in lines:
        try:
            entries.append(_check_line(line, now))
        except InvalidPacket as error:
            refused.append(_Refused(line, error.code, error.reason))
    return entries, refused


def _check_line(line: _Line, now: float) -> _Entry:
    try:
        decoded = _DECODER.decode(line.text)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise InvalidPacket(ErrorCode.INVALID_SCHEMA, "not a line of an export") from None
    if not 0 <= decoded.received_at <= now + _CLOCK_TOLERANCE_SECONDS:
        raise InvalidPacket(ErrorCode.TIMESTAMP_IN_FUTURE, "received_at lies in the future")
    packet = Packet.parse(decoded.packet, max_bytes=HARD_MAX_PACKET_BYTES)
    packet.verify()
    return _Entry(
        line,
        decoded.received_at,
        NewPacket(
            packet.digest,
            packet.author_id,
            packet.content_type,
            packet.timestamp,
            packet.expires_at,
            packet.canonical,
        ),
    )


async def _append(
    store: Store, entries: list[_Entry], received_at: int, summary: ImportSummary
) -> list[_Refused]:
    appended = await store.append([entry.packet for entry in entries], received_at)
    refused = []
    for entry, disposition in zip(entries, appended.dispositions, strict=True):
        match disposition.outcome:
            case Outcome.STORED:
                summary.stored += 1
            case Outcome.DUPLICATE:
                summary.duplicates += 1
            case Outcome.INVALID:
                refused.append(_Refused(entry.line, ErrorCode.INVALID_SCHEMA, "the database refused it"))
    return refused


def _count_refused(refused: list[_Refused], summary: ImportSummary, quarantine: BinaryIO | None) -> None:
    summary.quarantined += len(refused)
    for item in refused:
        summary.reasons[item.code] = summary.reasons.get(item.code, 0) + 1
        if quarantine is not None:
            text = item.line.text.decode("utf-8", "backslashreplace").rstrip("\n")
            kept = {"line": item.line.number, "code": item.code, "reason": item.reason, "text": text}
            quarantine.write(msgspec.json.encode(kept) + b"\n")
