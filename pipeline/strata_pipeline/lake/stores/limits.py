"""How many bytes the small files of a lake may have. No I/O.

A lake may be a stranger's copy, and these files are read as a whole. Each limit is far above what any archive
has written: the most frequent one makes 100,000 batches a day, and kinds of packets are 18. `RECORD_BYTES`
is for the record of an attempt too.
"""

from __future__ import annotations

from typing import Final

from strata_pipeline.errors import LakeError
from strata_pipeline.lake_format import RECORD_BYTES

__all__ = [
    "BATCH_LISTING_BYTES",
    "DAY_RECORD_BYTES",
    "NOTE_BYTES",
    "RECORD_BYTES",
    "ROWS_BYTES",
    "check_size",
]

NOTE_BYTES: Final = 2**23
"""For the note of what was searched: 90,000 days, with 90 bytes for each."""
BATCH_LISTING_BYTES: Final = 2**26
"""For the listing of a batch: 180,000 objects, with 370 bytes for each."""
DAY_RECORD_BYTES: Final = 2**29
"""For what tells of each batch of a day, an erasure, a generation or its listing: for 100,000 batches, five
KiB each. An erasure has about 700 bytes for a batch, a listing 400 for an object."""
ROWS_BYTES: Final = 2**32
"""For what has a line for each of some rows. The rows, of which the lake tells, give a lower limit."""


def check_size(where: str, size: int, most: int) -> None:
    """Raise `LakeError` for a file with more bytes than it may have."""
    if size > most:
        raise LakeError(
            f"{where} has {size:,} bytes, and may have {most:,}: no writer of a lake has written it"
        )
