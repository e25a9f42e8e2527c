"""The whole log as JSON lines, out of one database and into another.

A line is `{"packet":…,"received_at":…}` with the stored bytes unchanged, in log order. Both directions may
be stopped anywhere and started again: an export goes on behind the last whole line of its file, and an
import meets the packets it has brought in already as duplicates.

An import believes nothing: each line's packet is parsed, its id recomputed and its signature checked, as a
PUBLISH is, but for freshness, since a log is old by nature. What fails is counted, and kept where asked.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import msgspec
from strata.errors import ErrorCode, InvalidPacket
from strata.packets import Packet

from relayd.store import Store
from relayd.store.types import LogEntry, NewPacket, Outcome

__all__ = ["ExportSummary", "ImportSummary", "export_log", "import_log", "resume_point"]

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


@dataclass(frozen=True, slots=True)
class _Refused:
    line: int
    code: str
    reason: str
    text: bytes


class _Line(msgspec.Struct, frozen=True):
    packet: msgspec.Raw
    received_at: int


_DECODER = msgspec.json.Decoder(_Line)


async def resume_point(path: Path, store: Store) -> int:
    """The sequence an export into `path` goes on behind, once a torn last line is cut off; 0 for a new file.

    Raises ValueError if the file's last packet is not in this store, so that two logs never mix.
    """
    if not path.exists():
        return 0
    with path.open("r+b") as file:
        last_line = _cut_torn_line(file)
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
        # The checks are most of the work and release the interpreter lock.
        entries, refused = await asyncio.to_thread(_check_lines, lines, now())
        for received_at, group in itertools.groupby(entries, key=lambda entry: entry[1]):
            await _append(store, [packet for packet, _, _ in (group := list(group))], received_at, summary)
            del group
        _count_refused(refused, summary, quarantine)
        summary.lines += len(lines)
        summary.bytes_read += sum(len(text) for _, text in lines)
        if progress is not None:
            progress(summary)
    if quarantine is not None:
        quarantine.flush()
    return summary
