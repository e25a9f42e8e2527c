"""Checking quarantined rows again: each must have a fault. No Spark.

An archive quarantines a row because of what `checking.fault_of` finds in the columns that the lake keeps. So
the same check has the same result later, and a sound row in quarantine is a packet that somebody is hiding
from readers of `packets/`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from strata.protocol.sequences import Span

from strata_pipeline.lake.contents import UNREADABLE, Rows, parquet_files, read_rows
from strata_pipeline.lake.faults import Fault
from strata_pipeline.transforms.checking import fault_of

__all__ = ["sound_rows"]

_COLUMNS: Final = (
    "sequence",
    "body",
    "packet_id",
    "author_id",
    "content_type",
    "timestamp",
    "expires_at",
)
_LISTED: Final = 1_000
_WHY: Final = "it lies in quarantine, and nothing is wrong with it: a reader of packets does not see it"


def sound_rows(folders: Iterable[Path], span: Span) -> list[Fault]:
    """A fault for each quarantined row of a span that is sound. Files that cannot be read are skipped: that
    is a finding of their batch."""
    faults: list[Fault] = []
    for path in parquet_files(folders):
        with contextlib.suppress(*UNREADABLE):
            for rows in read_rows([path], _COLUMNS, span):
                faults += _sound(rows, span)
    return faults[:_LISTED]


def _sound(rows: Rows, span: Span) -> Iterator[Fault]:
    columns = (rows.columns.column(name).to_pylist() for name in _COLUMNS)
    for number, (sequence, *row) in enumerate(zip(*columns, strict=True), rows.first):
        if sequence is not None and span.after < sequence <= span.up_to and fault_of(*row) is None:
            yield Fault("row", "sound", _WHY, sequence, row[1], str(rows.file), number)
