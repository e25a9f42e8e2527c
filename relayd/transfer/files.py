"""The whole log as JSON lines, exported from one database and imported into another.

A line is `{"packet":…,"received_at":…}` with the stored bytes unchanged, in log order; if this relay found
something about the packet's origin, `annotation` says what. For a packet that was erased, the line has the
`tombstone` instead; an import skips it, and accepts no packet that this relay has erased. Both directions may
be stopped anywhere and started again: an export continues after the last whole line of its file, and an
import finds the packets that it has already stored to be duplicates.

An import trusts nothing: each line's packet is parsed, its id recomputed, and its size, signature and origin
are checked like those of a PUBLISH (see `examiner`). Its age is not checked, since a log is old by nature,
and neither is policy, which applies when the packet is served. So annotations are determined again, and a
file cannot bring its own. Lines that fail are counted, and kept if requested.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, NamedTuple, Protocol

import msgspec
from strata.protocol.errors import ErrorCode, InvalidInput, InvalidPacket
from strata.protocol.packets import MAX_FUTURE_SECONDS, Packet
from strata.protocol.text_files import utf8_of
from strata.protocol.tombstones import read_tombstone

from relayd.admission.limits import AdmissionLimits
from relayd.config import Settings
from relayd.database import database
from relayd.identity.authors import DECISIVE_TYPES
from relayd.store import Store
from relayd.store.types import Appended, AppendOutcome, IdentitiesMoved, LogEntry, NewPacket, TimeMoved
from relayd.transfer.examiner import Examiner, ImportCandidate

__all__ = ["ExportSummary", "ImportSummary", "export_log", "import_log", "open_store", "resume_point"]

_PAGE_ROWS = 500
_BATCH_LINES = 256
_MAX_LINE_BYTES = 4 * 2**20  # a packet of the hard limit with its escapes, and some room
_CLOCK_TOLERANCE_SECONDS = 300
_BEGINNINGS = (b'{"packet":', b'{"tombstone":')
"""The possible beginnings of a line of an export."""
_NAMELESS = b'{"tombstone":null,'
"""The beginning of the line of an empty row whose tombstone the log lacks."""


class _Log(Protocol):
    """The part of the store that a transfer needs; each method may raise `StoreError`."""

    async def head(self) -> int: ...

    async def tail(self, after: int, up_to: int | None, limit: int) -> list[LogEntry]: ...

    async def find(self, ids: Sequence[bytes]) -> dict[bytes, tuple[int, int]]: ...

    async def append(self, batch: Sequence[NewPacket], now: int, followed: int | None = None) -> Appended: ...

    async def tombstones(self, ids: Sequence[bytes]) -> dict[bytes, bytes]: ...


@dataclass(slots=True)
class ExportSummary:
    """The totals of an export."""

    packets: int = 0
    erased: int = 0
    """Packets that were erased: their lines hold tombstones."""
    bytes_written: int = 0
    last_sequence: int = 0


@dataclass(slots=True)
class ImportSummary:
    """The totals of an import; `lines` is the sum of the four others."""

    lines: int = 0
    stored: int = 0
    duplicates: int = 0
    erased: int = 0
    """Lines that hold a tombstone, and packets that this relay has erased: neither is stored."""
    quarantined: int = 0
    bytes_read: int = 0
    reasons: dict[str, int] = field(default_factory=dict)
    """How many lines were quarantined, by error code."""


class _Exported(msgspec.Struct, frozen=True):
    received_at: int
    witnessed_at: int | None = None
    packet: msgspec.Raw = msgspec.Raw(b"null")
    tombstone: msgspec.Raw = msgspec.Raw(b"")


class _Line(NamedTuple):
    number: int
    text: bytes


class _Parsed(NamedTuple):
    line: _Line
    candidate: ImportCandidate


class _Judged(NamedTuple):
    line: _Line
    candidate: ImportCandidate
    verdict: NewPacket | InvalidPacket


class _Refused(NamedTuple):
    line: _Line
    code: str
    reason: str


_DECODER = msgspec.json.Decoder(_Exported)


@contextlib.asynccontextmanager
async def open_store(settings: Settings) -> AsyncIterator[Store]:
    """The migrated store of these settings, for a command. Raises `StoreError`.

    The embedded server runs as long as the block does; it cannot start while a relay uses its folder.
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


async def resume_point(path: Path, store: _Log) -> int:
    """The sequence after which an export into `path` continues, 0 for a new file; cuts off a torn last line.

    Lines at the end that name no packet are also cut off, and will be written again: those of damaged rows,
    and of empty ones without a tombstone. Raises ValueError if the file's last packet is not in this store,
    or not at the same place, so that two logs never mix, or if the file is not an export; then the file stays
    as it is.
    """
    after = end = 0
    is_export = _is_empty_or_begun(path)
    for line, up_to in _whole_lines(path):
        last = _place_of(line)
        if last is not None:
            packet_id, received_at = last
            place = (await store.find([packet_id])).get(packet_id)
            if place is None:
                raise ValueError(f"{path}: its last packet is not in this database; export into another file")
            after, end, is_export = place[0], up_to, True
            # Retention may have removed the row. If it is there with another time, the log has lost the
            # packet since and got it back, and others that are not in the file may be before it.
            row = await store.tail(after - 1, after, 1)
            if row and row[0].received_at != received_at:
                raise ValueError(
                    f"{path}: its last packet has another place in this database, whose log has lost its end"
                    " since; export into another file"
                )
            break
        is_export = line.startswith(_NAMELESS)
        if not line.startswith(_BEGINNINGS):
            break
    if not is_export:
        raise ValueError(f"{path}: its last line is not one of an export")
    with contextlib.suppress(FileNotFoundError):
        os.truncate(path, end)
    return after


async def export_log(
    store: _Log, output: BinaryIO, *, after: int = 0, progress: Callable[[ExportSummary], None] | None = None
) -> ExportSummary:
    """Write every packet after sequence `after` that is in the log now. Raises `StoreError`, OSError.

    Cancelling it leaves whole lines, except for what the caller's file still buffers.
    """
    summary = ExportSummary(last_sequence=after)
    end = await store.head()
    while summary.last_sequence < end:
        page = await store.tail(summary.last_sequence, end, _PAGE_ROWS)
        if not page:
            break
        erased = [entry.packet.packet_id for entry in page if not entry.packet.body]
        tombstones = await store.tombstones(erased) if erased else {}
        lines = [_line_of(entry, tombstones.get(entry.packet.packet_id, b"null")) for entry in page]
        summary.bytes_written += output.write(b"".join(lines))
        summary.packets += len(page) - len(erased)
        summary.erased += len(erased)
        summary.last_sequence = page[-1].sequence
        if progress is not None:
            progress(summary)
    output.flush()
    return summary


async def import_log(
    store: _Log,
    source: BinaryIO,
    examiner: Examiner,
    *,
    now: Callable[[], float],
    quarantine: BinaryIO | None = None,
    progress: Callable[[ImportSummary], None] | None = None,
) -> ImportSummary:
    """Append every valid packet of `source`. Raises `StoreError`; after that or cancelling, start it again.

    A packet keeps its `received_at` unless the log already holds later ones: time never goes back in a log
    (A-038), so such a packet gets the time of the log's last one.
    """
    summary = ImportSummary()
    await examiner.refresh()
    for lines in _batches(_lines(source), _BATCH_LINES):
        parsed, refused, erased = await asyncio.to_thread(_parse_lines, lines, now(), examiner.limits)
        summary.erased += erased
        gone = await store.tombstones([item.candidate.packet.digest for item in parsed])
        if gone:
            summary.erased += sum(item.candidate.packet.digest in gone for item in parsed)
            parsed = [item for item in parsed if item.candidate.packet.digest not in gone]
        for group in _groups(parsed):
            refused += await _bring_in(store, group, examiner, summary)
        refused.sort(key=lambda item: item.line.number)
        _count_refused(refused, summary, quarantine)
        summary.lines += len(lines)
        summary.bytes_read += sum(len(line.text) for line in lines)
        if progress is not None:
            progress(summary)
    if quarantine is not None:
        quarantine.flush()
    return summary


def _line_of(entry: LogEntry, tombstone: bytes) -> bytes:
    if not entry.packet.body:
        return b'{"tombstone":%b,"received_at":%d}\n' % (tombstone, entry.received_at)
    annotation = entry.packet.annotation
    found = b"" if annotation is None else b',"annotation":' + annotation
    witness = None if entry.packet.ingest_peer == 0 else entry.packet.witnessed_at
    first = b"" if witness is None else b',"witnessed_at":%d' % witness
    return b'{"packet":%b,"received_at":%d%b%b}\n' % (entry.packet.body, entry.filtered_at, found, first)


def _is_empty_or_begun(path: Path) -> bool:
    """Whether a file does not exist, is empty, or has the beginning of an export's first line."""
    try:
        with path.open("rb") as file:
            first = file.readline(max(map(len, _BEGINNINGS)))
            is_short = file.seek(0, os.SEEK_END) <= _MAX_LINE_BYTES
    except FileNotFoundError:
        return True
    return not first or (is_short and any(begins.startswith(first[: len(begins)]) for begins in _BEGINNINGS))


def _whole_lines(path: Path) -> Iterator[tuple[bytes, int]]:
    """The whole lines of a file from the last to the first, each with the offset of its end; none if the file
    does not exist."""
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        start, tail = file.seek(0, os.SEEK_END), b""
        stop = 0
        while True:
            begin = tail.rfind(b"\n", 0, max(0, stop - 1)) + 1
            if not begin and start:
                step = min(start, 2 * _MAX_LINE_BYTES)
                start = file.seek(start - step)
                tail = file.read(step) + tail[:stop]
                stop = stop + step if stop else tail.rfind(b"\n") + 1
                continue
            if not stop:
                return
            yield tail[begin : stop - 1], start + stop
            stop = begin


def _place_of(line: bytes) -> tuple[bytes, int] | None:
    """The id of the packet in a line of an export, and its time of receipt; None if the line names none."""
    try:
        exported = _DECODER.decode(line)
        packet_id = _erased_id(exported) or Packet.read(exported.packet).digest
        return packet_id, exported.received_at
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, InvalidInput):
        return None


def _lines(source: BinaryIO) -> Iterator[_Line]:
    """The lines of a file. Of a line that is too long, only the first part is returned.

    Raises `ValueError` for UTF-16.
    """
    for number in itertools.count(1):
        text = source.readline(_MAX_LINE_BYTES)
        if number == 1:
            text = utf8_of(text)
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


def _parse_lines(
    lines: list[_Line], now: float, limits: AdmissionLimits
) -> tuple[list[_Parsed], list[_Refused], int]:
    """The lines that can be read, those that cannot, and the number of lines that hold a tombstone."""
    parsed, refused, erased = [], [], 0
    for line in lines:
        try:
            candidate = _parse_line(line, now, limits)
            if candidate is None:
                erased += 1
            else:
                parsed.append(_Parsed(line, candidate))
        except InvalidPacket as error:
            refused.append(_Refused(line, error.code, error.reason))
    return parsed, refused, erased


def _parse_line(line: _Line, now: float, limits: AdmissionLimits) -> ImportCandidate | None:
    """The packet of a line; None if the line says that it was erased. Raises `InvalidPacket`."""
    try:
        decoded = _DECODER.decode(line.text)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise InvalidPacket(ErrorCode.INVALID_SCHEMA, "not a line of an export") from None
    if bytes(decoded.tombstone):
        return None
    if not 0 <= decoded.received_at <= now + _CLOCK_TOLERANCE_SECONDS:
        raise InvalidPacket(ErrorCode.TIMESTAMP_IN_FUTURE, "received_at lies in the future")
    packet = limits.parse(bytes(decoded.packet))
    if packet.timestamp - decoded.received_at > MAX_FUTURE_SECONDS:
        # No relay accepts such a packet, and a query by time would not find it: see `Reader`.
        raise InvalidPacket(ErrorCode.TIMESTAMP_IN_FUTURE, "timestamp is later than received_at")
    witness = decoded.witnessed_at
    if witness is not None and not packet.timestamp - MAX_FUTURE_SECONDS <= witness <= decoded.received_at:
        witness = None  # as if a peer had said it
    return ImportCandidate(packet, decoded.received_at, witness)


def _erased_id(exported: _Exported) -> bytes | None:
    """The id in the tombstone of a line; None for a line with a packet. Raises `InvalidInput`."""
    if not bytes(exported.tombstone):
        return None
    return bytes.fromhex(read_tombstone(bytes(exported.tombstone)).packet_id[2:])


def _groups(parsed: Iterable[_Parsed]) -> Iterator[list[_Parsed]]:
    """Split after every packet that decides about later ones."""
    group: list[_Parsed] = []
    for item in parsed:
        group.append(item)
        if item.candidate.packet.content_type in DECISIVE_TYPES:
            yield group
            group = []
    if group:
        yield group


async def _bring_in(
    store: _Log, group: list[_Parsed], examiner: Examiner, summary: ImportSummary
) -> list[_Refused]:
    """Examine and append one group. Returns the refused lines."""
    refused: list[_Refused] = []
    while group:
        verdicts = await examiner.examine([item.candidate for item in group])
        judged = [_Judged(*item, verdict) for item, verdict in zip(group, verdicts, strict=True)]
        try:
            for received_at, part in itertools.groupby(judged, key=lambda item: item.candidate.received_at):
                items = list(part)
                refused += await _append(store, items, received_at, examiner, summary)
                group = group[len(items) :]
        except IdentitiesMoved:  # another process has appended identity packets: judge the rest by them
            await examiner.refresh()
    return refused


async def _append(
    store: _Log, items: list[_Judged], received_at: int, examiner: Examiner, summary: ImportSummary
) -> list[_Refused]:
    """Append the items received in the same second that passed. Returns the refused lines."""
    passed = [(item.line, item.verdict) for item in items if isinstance(item.verdict, NewPacket)]
    # Decision 3 also holds here: a packet of the log is a duplicate, whatever its author's keys are by now.
    known = await store.find(
        [item.candidate.packet.digest for item in items if isinstance(item.verdict, InvalidPacket)]
    )
    try:
        appended = await store.append([packet for _, packet in passed], received_at, examiner.followed)
    except TimeMoved:  # the log has gone on since: as packets of a peer, they keep the time of the file
        passed = [(line, _witnessed(packet, received_at)) for line, packet in passed]
        appended = await store.append([packet for _, packet in passed], received_at, examiner.followed)
    refused: list[_Refused] = []
    for line, candidate, verdict in items:
        if isinstance(verdict, InvalidPacket) and candidate.packet.digest in known:
            summary.duplicates += 1
        elif isinstance(verdict, InvalidPacket):
            refused.append(_Refused(line, verdict.code, verdict.reason))
    stored: list[LogEntry] = []
    for (line, packet), place in zip(passed, appended.dispositions, strict=True):
        match place.outcome:
            case AppendOutcome.STORED:
                stored.append(LogEntry(place.sequence, place.received_at, packet))
            case AppendOutcome.DUPLICATE:
                summary.duplicates += 1
            case AppendOutcome.ERASED:
                reason = "it states the same as a packet that was erased"
                refused.append(_Refused(line, ErrorCode.POLICY_REJECTED, reason))
            case AppendOutcome.INVALID:
                refused.append(_Refused(line, ErrorCode.INVALID_SCHEMA, "the database refused it"))
    summary.stored += len(stored)
    if stored:
        examiner.observe(stored)
    return refused


def _witnessed(packet: NewPacket, at: int) -> NewPacket:
    return packet if packet.witnessed_at is not None else msgspec.structs.replace(packet, witnessed_at=at)


def _count_refused(refused: list[_Refused], summary: ImportSummary, quarantine: BinaryIO | None) -> None:
    summary.quarantined += len(refused)
    for item in refused:
        summary.reasons[item.code] = summary.reasons.get(item.code, 0) + 1
        if quarantine is not None:
            text = item.line.text.decode("utf-8", "backslashreplace").rstrip("\n")
            kept = {"line": item.line.number, "code": item.code, "reason": item.reason, "text": text}
            quarantine.write(msgspec.json.encode(kept) + b"\n")
