"""How a finished day of a bucket becomes another: by one put, of a generation under the next free number."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from strata.protocol.lake import (
    ErasedBatch,
    Erasure,
    Generation,
    LakeError,
    Part,
    check_day_listing,
    day_text,
    encode_day_listing,
    seal_day_listing,
    seal_generation,
)

from strata_pipeline.errors import LakeBusy, StoreError
from strata_pipeline.lake.object_lake import ObjectLake
from strata_pipeline.lake.rewrites import Rewrite, give_up

__all__ = ["Erasing", "attempting", "supersede"]


class Erasing(NamedTuple):
    """What a generation erases."""

    batches: list[ErasedBatch]
    """What these batches hold with it."""
    tombstones: bytes
    """Their texts, a line for each in order of sequence."""
    emptied: int = 0
    """So many of them are of rows that had been put aside when they were archived."""
    record: Erasure | None = None
    """The record, where it is that of the lake that is copied."""


@contextlib.contextmanager
def attempting(lake: ObjectLake, day: int) -> Iterator[Rewrite]:
    """A new attempt to write a day anew. What it has put is deleted where the block fails.

    It must not commit within the block: after a put whose answer is lost nobody may delete.
    """
    rewrite = Rewrite.begin(lake.store, day, lake.base_of(day))
    try:
        yield rewrite
    except Exception:
        with contextlib.suppress(StoreError):
            give_up(lake.store, rewrite)
        raise


def supersede(
    lake: ObjectLake, rewrite: Rewrite, parts: Sequence[Part], written_at: int, erasing: Erasing | None = None
) -> Generation:
    """Make parts, all of a day, what counts of it; returns the generation. Of a day that is being copied,
    parts after the end of the chain count once their manifests are there.

    Raises `LakeBusy` where somebody else has written the day anew meanwhile, and `LakeError` where the parts
    have not as many rows as the manifests tell. Then nothing of the attempt counts, and it is deleted.
    """
    manifests = lake.chain.of_day(rewrite.day)
    listing = seal_day_listing(rewrite.day, rewrite.name, parts)
    rows = sum(one.rows for part in parts if part.up_to <= lake.reached for one in part.objects)
    if rows != sum(one.packets + one.quarantined for one in manifests):
        give_up(lake.store, rewrite)
        raise LakeError(f"{rows} rows were written of {day_text(rewrite.day)}, and its manifests tell others")
    if erasing is not None:
        lake.store.put(rewrite.tombstones, erasing.tombstones)
    lake.store.put(rewrite.listing, encode_day_listing(listing))
    while lake.base_of(rewrite.day) == rewrite.base and _is_next(lake, erasing):
        generation = seal_generation(
            Generation(
                number=len(lake.generations.records),
                day=rewrite.day,
                attempt=rewrite.name,
                listing=listing.hash,
                written_at=written_at,
                erasure=None if erasing is None else _record(lake, rewrite, written_at, erasing),
                previous=lake.generations.tip,
            )
        )
        ahead = erasing is not None and erasing.record is not None and lake.may_grow(rewrite.day)
        check_day_listing(listing, generation, manifests, ahead=ahead)
        if lake.generations.put(generation):
            lake.erasures.load()
            return generation
        lake.generations.load()  # another day was written anew, or this one
        lake.erasures.load()
    give_up(lake.store, rewrite)
    raise LakeBusy(
        f"somebody else has written {day_text(rewrite.day)} of {lake.place} anew meanwhile: that counts, and "
        "nothing of this attempt does. Nothing is lost; run this again"
    )


def _is_next(lake: ObjectLake, erasing: Erasing | None) -> bool:
    """Whether a record of another lake, if there is one, still follows those of this lake."""
    record = None if erasing is None else erasing.record
    return record is None or (record.number, record.previous) == (
        len(lake.erasures.records),
        lake.erasures.tip,
    )


def _record(lake: ObjectLake, rewrite: Rewrite, written_at: int, erasing: Erasing) -> Erasure:
    if erasing.record is not None:
        return erasing.record
    return lake.erasures.next(
        rewrite.day, written_at, erasing.batches, erasing.tombstones, emptied=erasing.emptied
    )
