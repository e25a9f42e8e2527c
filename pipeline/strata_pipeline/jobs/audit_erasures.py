"""What an audit checks where rows were erased: there is a tombstone for each, and nothing left of the row."""

from __future__ import annotations

import contextlib
from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from strata.protocol.sequences import day_of
from strata.protocol.tombstones import Tombstone, told_place

from strata_pipeline.errors import LakeError
from strata_pipeline.jobs.audit_result import Audited, Finding, add_faults
from strata_pipeline.lake.checking import batch_name
from strata_pipeline.lake.contents import UNREADABLE, parquet_files, read_rows
from strata_pipeline.lake.faults import Fault
from strata_pipeline.lake.places import AnyLake
from strata_pipeline.lake_format import Erasure, Manifest

__all__ = ["check_erasures"]


def check_erasures(lake: AnyLake, relays: Collection[str], audited: Audited) -> set[str]:
    """Check that each tombstone is valid and has a row of which only the place is left; return the ids of all
    that was erased. Tombstones are read one day at a time.

    Anyone who can write to a lake can sign tombstones as some relay: `relays` are those that count, if any
    are given.
    """
    if lake.is_half_copied:
        why = (
            "the lake tells of erasures from a day that its chain does not reach the end of: its copy is not "
            "complete, or manifests are missing. Run strata-pipeline copy again, or bring _manifests back "
            "from a copy of the lake"
        )
        add_faults([Fault("erasure", "unreached", why)], audited)
    ids: set[str] = set()
    by_day: dict[int, list[Erasure]] = {}
    for record in lake.erasures.records:
        by_day.setdefault(record.day, []).append(record)
    for day, records in by_day.items():
        found: list[Finding] = []
        left: dict[int, Tombstone] = {}
        # The manifests within this audit: only a complete audit has already read all of them.
        gained = lake.chain.of_day(day) if day >= day_of(audited.after) else []
        manifests = [one for one in gained if one.up_to > audited.after]
        held = {one.hash: _Held(one, one.packets, one.quarantined) for one in manifests}
        for record in records:
            try:
                stones = {one.sequence: one for one in lake.erasures.tombstones(record)}
            except LakeError as error:
                found.append(Finding("erasure", "tombstones", detail=str(error)))
                audited.erased += record.erased
            else:
                audited.erased += len(stones)
                found += _miscounted(record, held, sorted(stones), left)
                left |= stones
                ids.update(one.packet_id for one in stones.values())
                found += _foreign(stones.values(), relays, audited)
            for batch in record.batches:
                if batch.manifest in held:
                    held[batch.manifest].packets = batch.packets
        # A copy puts a record before the batches that it names.
        left = {sequence: one for sequence, one in left.items() if sequence <= lake.reached}
        try:
            for row in _rows_at(lake, day, sorted(left)) if left else ():
                tombstone = left[row["sequence"]]
                place = told_place(row["packet_id"] or b"", row["received_at"] or 0)
                is_empty = not (row["body"] or row["author_id"] or row["annotation"])
                if is_empty and place == (tombstone.packet_id, tombstone.received_at):
                    del left[row["sequence"]]
        except LakeError as error:  # the day lacks an object or a listing in a bucket, a finding by itself
            found.append(Finding("erasure", "unchecked", detail=str(error)))
            left = {}
        found += [
            Finding("erasure", "row", sequence, one.packet_id, "there is no empty row for this tombstone")
            for sequence, one in left.items()
        ]
        audited.found(Counter(f"{one.about}: {one.reason}" for one in found), found)
    return ids


def _foreign(stones: Iterable[Tombstone], relays: Collection[str], audited: Audited) -> Iterator[Finding]:
    """A finding for each tombstone of another relay; all are counted under the relay that has signed them."""
    for one in stones:
        audited.erased_by[one.relay_id] = audited.erased_by.get(one.relay_id, 0) + 1
        if relays and one.relay_id not in relays:
            yield Finding("erasure", "foreign", one.sequence, one.packet_id, f"{one.relay_id} has signed it")


@dataclass(slots=True)
class _Held:
    """A batch as it was before a record."""

    manifest: Manifest
    packets: int
    aside: int
    """The number of rows that were quarantined when they were archived and that no record has emptied."""


def _miscounted(
    record: Erasure, held: Mapping[str, _Held], stones: list[int], before: Container[int]
) -> Iterator[Finding]:
    """Findings where a record removes more or fewer packets than it has tombstones for, or names a batch from
    which it removes nothing: for the record as a whole, and for the batches in `held`, which are as they were
    before. `before` has the places of tombstones of earlier records.

    A tombstone stands for a packet, or for a row that was quarantined when it was archived and is empty now.
    """
    told = {one.manifest: one.packets for one in record.batches}
    whole = sum(one.packets - told.get(name, one.packets) for name, one in held.items())
    if record.erased > len(stones) or (record.erased != whole and told.keys() <= held.keys()):
        why = f"erasure {record.number} takes {record.erased} packets, and has tombstones for {len(stones)}"
        yield Finding("erasure", "count", detail=why)
    for stone in stones:
        if stone in before:
            why = f"erasure {record.number} has a tombstone for a row that was erased before"
            yield Finding("erasure", "count", stone, detail=why)
    for name, batch in held.items():
        manifest, taken = batch.manifest, batch.packets - told.get(name, batch.packets)
        there = bisect_right(stones, manifest.up_to) - bisect_right(stones, manifest.after)
        emptied = there - taken
        if not 0 <= emptied <= batch.aside or (there and name not in told):
            why = f"erasure {record.number} takes {taken} packets out of {batch_name(manifest)}"
            why += f", and has tombstones for {there}"
            yield Finding("erasure", "count", manifest.up_to, detail=why)
        elif name in told and not there:  # else anyone who can write records could change a digest with one
            why = (
                f"erasure {record.number} tells anew what {batch_name(manifest)} holds, and takes nothing out"
            )
            yield Finding("erasure", "count", manifest.up_to, detail=why)
        batch.aside -= max(0, emptied)


def _rows_at(lake: AnyLake, day: int, sequences: list[int]) -> Iterator[dict[str, Any]]:
    """The quarantined rows of a day at these places, the first one at each; the files are read once."""
    columns = ["sequence", "received_at", "packet_id", "author_id", "body", "annotation"]
    wanted = set(sequences)
    with lake.quarantine_at_hand(day) as layout:
        folders = layout.folders_of_day(layout.quarantine, day)
        for path in parquet_files(folders):
            with contextlib.suppress(*UNREADABLE):  # a finding of its batch
                for _, _, rows in read_rows([path], columns):
                    is_wanted = pc.is_in(rows.column("sequence"), pa.array(sequences, pa.int64()))
                    for row in rows.filter(is_wanted).to_pylist():
                        if row["sequence"] in wanted:
                            wanted.remove(row["sequence"])
                            yield row
