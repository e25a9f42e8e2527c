"""The batches of a lake, checked against their manifests and divided into parts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import numpy as np
import pyarrow as pa
from strata.protocol.sequences import Span, first_of_day

from strata_pipeline.errors import LakeError
from strata_pipeline.lake.checking import batch_name
from strata_pipeline.lake.contents import UNREADABLE, Contents
from strata_pipeline.lake.layout import LakeLayout, span_over
from strata_pipeline.lake.rows import cut, digest_of, read_places, received_on
from strata_pipeline.lake_format import Manifest

__all__ = ["Batch", "BatchPart", "leading_days_with_holes"]


@dataclass(frozen=True, slots=True)
class BatchPart:
    """Consecutive rows of a batch."""

    span: Span
    packets: int
    last_received_at: int
    """The time of receipt of its last row (`received_on`)."""


@dataclass(frozen=True)
class Batch:
    """Rows that agree with their manifest, or with the manifests of consecutive batches of a day."""

    manifests: list[Manifest]
    folders: list[Path]
    """The folders of its packets; they may also hold files of other batches."""
    aside: list[Path]
    """The folders of its quarantined rows."""
    packets: pa.Table
    """The places of its packets, in log order (see `lake.rows`)."""
    rows: pa.Table
    """The places of all its rows, including quarantined ones."""

    @classmethod
    def read(cls, lake: LakeLayout, *manifests: Manifest) -> Batch:
        """Read the places of all rows, listing and opening the files once for all the manifests.

        The manifests are consecutive and of one day. Raises `LakeError`, with the name of the batch, unless
        counts and digest agree.
        """
        manifests = tuple(lake.erasures.told(manifests))
        span = span_over(manifests)
        sound, aside = lake.folders_of(span)
        try:
            packets = read_places(sound, span)
            quarantined = read_places(aside, span)
        except UNREADABLE as error:
            raise _damaged(manifests[0], f"its files cannot be read: {error}") from None
        rows = pa.concat_tables([packets, quarantined]).sort_by("sequence") if aside else packets
        spans = [manifest.span for manifest in manifests]
        cuts = (cut(table, spans) for table in (packets, quarantined, rows))
        for manifest, *tables in zip(manifests, *cuts, strict=True):
            _check(manifest, *tables)
        return cls(list(manifests), sound, aside, packets, rows)

    @property
    def span(self) -> Span:
        """The span of its sequences."""
        return span_over(self.manifests)

    def manifest_of(self, sequence: int) -> Manifest:
        """The manifest of the batch that has a row."""
        return next(manifest for manifest in self.manifests if sequence <= manifest.up_to)

    def check_contents(self) -> None:
        """Raise `LakeError` unless bodies, annotations and quarantined rows match the manifests' digests."""
        try:
            contents = Contents.of(self.folders, self.aside, self.span)
        except UNREADABLE as error:
            raise _damaged(self.manifests[0], f"its files cannot be read: {error}") from None
        for manifest in self.manifests:
            if contents.digest(manifest.span) != manifest.contents:
                raise _damaged(manifest, "a body, an annotation or a quarantined row was altered")

    def packets_up_to(self, sequence: int) -> int:
        """The number of packets at or below a sequence."""
        return _rows_up_to(self.packets, sequence)

    def quarantined_up_to(self, sequence: int) -> int:
        """The number of quarantined rows at or below a sequence."""
        return _rows_up_to(self.rows, sequence) - _rows_up_to(self.packets, sequence)

    def parts(self, after: int, max_rows: int) -> list[BatchPart]:
        """The rows after a sequence in parts of at most `max_rows`; the last part ends with the batch."""
        sequences = self.rows["sequence"].to_numpy()
        received = self.rows["received_at"].to_numpy()
        low = max(after, self.span.after)
        parts = []
        first = _rows_up_to(self.rows, low)
        for start in range(first, len(sequences), max_rows):
            last = min(start + max_rows, len(sequences)) - 1
            high = self.span.up_to if last == len(sequences) - 1 else int(sequences[last])
            packets = self.packets_up_to(high) - self.packets_up_to(low)
            parts.append(BatchPart(Span(low, high), packets, received_on(self.span.day, int(received[last]))))
            low = high
        return parts


def leading_days_with_holes(manifests: Iterable[Manifest]) -> int:
    """The border above the lake's leading days with missing sequences; 0 if its first day is complete. Of the
    manifests, no more are read than that takes.

    A day has no gaps in its sequences, so a missing row was removed before it was archived: by retention,
    which keeps only the rows that it spares.
    """
    border = 0
    for day, some in groupby(manifests, lambda one: one.span.day):
        rows = end = 0
        for manifest in some:
            rows += manifest.packets + manifest.quarantined
            end = manifest.up_to
        if rows == end - first_of_day(day):
            break
        border = first_of_day(day + 1)
    return border


def _check(manifest: Manifest, packets: pa.Table, quarantined: pa.Table, rows: pa.Table) -> None:
    found = (packets.num_rows, quarantined.num_rows)
    if found != (manifest.packets, manifest.quarantined):
        raise _damaged(
            manifest,
            f"it has {found[0]} packets and {found[1]} quarantined rows, and must have "
            f"{manifest.packets} and {manifest.quarantined}",
        )
    if digest_of(rows) != manifest.rows:
        raise _damaged(manifest, "its rows have other ids, or places, than its manifest says")


def _rows_up_to(rows: pa.Table, sequence: int) -> int:
    return int(np.searchsorted(rows["sequence"].to_numpy(), sequence, side="right"))


def _damaged(manifest: Manifest, why: str) -> LakeError:
    return LakeError(
        f"the lake's {batch_name(manifest)} is damaged: {why}. Bring its files back from a copy of the lake"
    )
