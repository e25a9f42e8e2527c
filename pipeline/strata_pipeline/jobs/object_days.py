"""Rewriting finished days of a lake in a bucket: compacted, or without what was erased.

Both rewrite parts of a day (`parts`), leave its other parts as they are, and commit once for the whole day
(`lake.superseding`). The function that runs the tasks is passed in.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from strata.protocol.tombstones import Tombstone

from strata_pipeline.jobs.parts import PartDone, PartWork, groups_of
from strata_pipeline.lake.object_generations import batches_of
from strata_pipeline.lake.object_lake import ObjectLake
from strata_pipeline.lake.rewrite_attempts import give_up
from strata_pipeline.lake.superseding import Erasing, attempting, supersede
from strata_pipeline.lake_format import Part
from strata_pipeline.transforms.emptying import held_aside, read_aside

__all__ = ["Asked", "Found", "RemovedRows", "Run", "compact_day", "erase_from_day", "still_there"]

Run = Callable[[ObjectLake, Sequence[PartWork]], list[PartDone]]
"""Does the work of tasks, in any order."""
Found = Mapping[int, tuple[Tombstone, bytes]]
"""Tombstones by sequence, each with its text."""


class RemovedRows(NamedTuple):
    """What an erasure has removed from a day."""

    packets: int = 0
    emptied: int = 0
    """Quarantined rows of which only the place is left."""
    strangers: tuple[str, ...] = ()
    """A sentence for each place that has another packet than its tombstone names, and keeps it."""

    @property
    def rows(self) -> int:
        """The number of rows that were emptied."""
        return self.packets + self.emptied


class Asked(NamedTuple):
    """What there is to erase from a day."""

    found: Found
    """Tombstones whose packets the day may hold, or whose quarantined rows still hold something."""
    others: int
    """The number of quarantined rows at places of tombstones that may or may not be what was erased."""


def compact_day(
    lake: ObjectLake, day: int, run: Run, part_bytes: int, *, again: bool = False
) -> tuple[int, int] | None:
    """Join the small parts of a day; return the numbers of objects before and after, or None if nothing had
    to be joined. With `again` all parts are rewritten, also those that are large enough.

    Raises `LakeBusy` if another process was faster, `LakeError` for a damaged day, and what `run` raises.
    """
    summary = lake.chain.summary_of(day)
    if summary is not None and summary.batches == 1 and not again:
        return None
    manifests, parts = lake.chain.of_day(day), lake.parts(day)
    groups = groups_of(parts, manifests, part_bytes)
    if len(groups) == len(parts) and not again:
        return None
    now = lake.erasures.told(manifests)
    with attempting(lake, day) as rewrite:
        joined = [_joined(group) for group in groups if len(group) > 1 or again]
        pairs = zip(joined, batches_of(joined, now), strict=True)
        works = [PartWork(rewrite.name, part, inside) for part, inside in pairs]
        made = _with([group[0] for group in groups], run(lake, works))
    supersede(lake, rewrite, made, int(time.time()))
    before, after = (sum(len(part.objects) for part in some) for some in (parts, made))
    return before, after


def still_there(lake: ObjectLake, day: int, found: Found) -> Asked:
    """The tombstones of a day whose rows the lake has not erased yet, and which were not erased when they
    were archived."""
    gone = {one.sequence for record in lake.erasures.of_day(day) for one in lake.erasures.tombstones(record)}
    left = {sequence: one for sequence, one in found.items() if sequence not in gone}
    order = sorted(left)
    concerned = [one for one in lake.chain.of_day(day) if _between(order, one.after, one.up_to)]
    if not concerned:
        return Asked({}, 0)
    with lake.at_hand(concerned, "quarantine") as layout:
        folders = layout.folders_of_day(layout.quarantine, day)
        aside = set(read_aside(folders)["sequence"].to_pylist())
        held = held_aside(folders, [tombstone for tombstone, _ in left.values()])
    aside -= {one.sequence for one in held.full}
    return Asked({n: one for n, one in left.items() if n not in aside}, len(held.others))


def erase_from_day(lake: ObjectLake, day: int, found: Found, run: Run) -> RemovedRows:
    """Erase packets from a finished day and from its quarantined rows; return how many were there.

    Raises what `compact_day` raises.
    """
    manifests = lake.erasures.told(lake.chain.of_day(day))
    parts = lake.parts(day)
    with attempting(lake, day) as rewrite:
        order, works = sorted(found), []
        for part, batches in zip(parts, batches_of(parts, manifests), strict=True):
            gone = [found[sequence][0] for sequence in _between(order, part.after, part.up_to)]
            if gone:
                works.append(PartWork(rewrite.name, part, batches, gone))
        done = sorted(run(lake, works), key=lambda one: one.part.after)
    erased = sorted(sequence for one in done for sequence in one.erased)
    strangers = tuple(text for one in done for text in one.strangers)
    if not erased:  # they were removed before they were archived
        give_up(lake.store, rewrite)
        return RemovedRows(strangers=strangers)
    batches_now = [batch for one in done for batch in one.batches]
    emptied = sum(one.emptied for one in done)
    erasing = Erasing(batches_now, b"".join(found[sequence][1] + b"\n" for sequence in erased), emptied)
    supersede(lake, rewrite, _with(parts, done), int(time.time()), erasing)
    return RemovedRows(len(erased) - emptied, emptied, strangers)


def _joined(group: Sequence[Part]) -> Part:
    objects = [one for part in group for one in part.objects]
    return Part(after=group[0].after, up_to=group[-1].up_to, objects=objects)


def _between(sequences: Sequence[int], after: int, up_to: int) -> Sequence[int]:
    """The sequences, given in order, that lie in a span."""
    return sequences[bisect_right(sequences, after) : bisect_right(sequences, up_to)]


def _with(parts: Iterable[Part], done: Iterable[PartDone]) -> list[Part]:
    """The parts, with rewritten ones in place of those that begin at the same sequence."""
    return list(({part.after: part for part in parts} | {one.part.after: one.part for one in done}).values())
