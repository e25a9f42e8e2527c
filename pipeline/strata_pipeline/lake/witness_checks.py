"""The files of witnesses compared with manifests and rows, without Spark and without the log."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from strata_pipeline.lake.checking import batch_name
from strata_pipeline.lake.contents import UNREADABLE
from strata_pipeline.lake.faults import Fault
from strata_pipeline.lake.layout import span_over
from strata_pipeline.lake.rows import cut, read_places
from strata_pipeline.lake.witnesses import Times, Witnesses
from strata_pipeline.lake_format import LakeError, Manifest, read_witnesses, witnesses_hash, witnesses_name

__all__ = ["surplus_witnesses", "witnesses_faults"]

_SKEW_SECONDS: Final = 300
"""A relay takes no time later than its own clock's. That clock may be set back before it stores the packet,
and RFC-0004 lets clocks differ by so much."""
_LISTED: Final = 1_000


def witnesses_faults(
    witnesses: Witnesses, manifests: Sequence[Manifest], packets: Sequence[Path], quarantine: Sequence[Path]
) -> list[Fault]:
    """The faults in the files of witnesses of consecutive batches, whose rows lie in these folders."""
    bound = [manifest for manifest in manifests if manifest.witnesses]
    if not bound:
        return []
    span = span_over(bound)
    try:
        rows = pa.concat_tables([read_places(packets, span), read_places(quarantine, span)])
    except UNREADABLE:
        return []  # a fault of its batch
    tables = cut(rows.sort_by("sequence"), [manifest.span for manifest in bound])
    pairs = zip(bound, tables, strict=True)
    return [fault for manifest, table in pairs for fault in _faults(witnesses, manifest, table)]


def surplus_witnesses(names: Iterable[str], manifests: Iterable[Manifest], first: int, end: int) -> list[str]:
    """The names of files that none of these manifests binds, which have the numbers from `first` up to `end`.

    A file of a later number may be that of a batch which is being committed. A name without a number is
    always surplus.
    """
    bound = {witnesses_name(manifest) for manifest in manifests if manifest.witnesses}
    return [name for name in names if name not in bound and _is_asked(name, first, end)]


def _is_asked(name: str, first: int, end: int) -> bool:
    number = name.partition("-")[0]
    is_number = len(number) == 10 and number.isascii() and number.isdecimal()
    return not is_number or first <= int(number) < end


def _faults(witnesses: Witnesses, manifest: Manifest, rows: pa.Table) -> Iterator[Fault]:
    name, file = batch_name(manifest), witnesses.place(manifest)
    try:
        text = witnesses.read(manifest)
    except FileNotFoundError:
        yield Fault("witness", "missing", f"{file}, of {name}, is missing", manifest.up_to, file=file)
        return
    except OSError as error:
        yield Fault("witness", "unreadable", f"{file}: {error}", manifest.up_to, file=file)
        return
    except LakeError as error:
        yield Fault("witness", "malformed", str(error), manifest.up_to, file=file)
        return
    if witnesses_hash(text) != manifest.witnesses:
        why = f"{file}, of {name}, has other bytes than were written"
        yield Fault("witness", "changed", why, manifest.up_to, file=file)
        return
    try:
        told = Times.of(read_witnesses(text, manifest))
    except LakeError as error:
        yield Fault("witness", "malformed", str(error), manifest.up_to, file=file)
        return
    places = rows["sequence"].to_numpy()
    for sequence in told.sequences[~np.isin(told.sequences, places)][:_LISTED].tolist():
        yield Fault("witness", "stranger", f"{name} has no row with this sequence", sequence, file=file)
    yield from _late(told, rows, file)


def _late(told: Times, rows: pa.Table, file: str) -> Iterator[Fault]:
    """A fault for each row that is said to have been received elsewhere after it was received here."""
    rows = rows.select(["sequence", "received_at", "packet_id"]).combine_chunks()
    rows = rows.append_column("at", told.at(rows["sequence"].combine_chunks()))
    is_late = pc.greater(rows["at"], pc.add(rows["received_at"], _SKEW_SECONDS))
    # A damaged row may have no time: it is a fault of its batch.
    for row in rows.filter(pc.fill_null(is_late, False)).slice(0, _LISTED).to_pylist():
        why = f"a peer's relay received it at {row['at']}, and this relay already at {row['received_at']}"
        yield Fault("witness", "late", why, row["sequence"], row["packet_id"], file)
