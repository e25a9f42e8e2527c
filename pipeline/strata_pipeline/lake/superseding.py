"""Replacing a finished day in a bucket: by one put, of a generation under the next free number."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from strata.protocol.sequences import day_text

from strata_pipeline.errors import LakeBusy, ObjectStoreError
from strata_pipeline.lake.object_lake import ObjectLake
from strata_pipeline.lake.rewrite_attempts import Rewrite, give_up
from strata_pipeline.lake_format import (
    ErasedBatch,
    Erasure,
    Generation,
    LakeError,
    Part,
    check_day_listing,
    encode_day_listing,
    seal_day_listing,
    seal_generation,
)

__all__ = ["Erasing", "attempting", "supersede"]


class Erasing(NamedTuple):
    """What a generation erases."""

    batches: list[ErasedBatch]
    """What the affected batches hold after it."""
    tombstones: bytes
    """The texts of the tombstones, a line for each in order of sequence."""
    emptied: int = 0
    """How many of them are for rows that were quarantined when they were archived."""
    record: Erasure | None = None
    """The record of the source lake, if a lake is being copied."""


@contextlib.contextmanager
def attempting(lake: ObjectLake, day: int) -> Iterator[Rewrite]:
    """A new attempt to rewrite a day. If the block fails, the objects that it has put are deleted.

    It must not commit within the block: after a put whose response was lost, nothing may be deleted.
    """
    rewrite = Rewrite.begin(lake.store, day, lake.base_of(day))
    try:
        yield rewrite
    except Exception:
        with contextlib.suppress(ObjectStoreError):
            give_up(lake.store, rewrite)
        raise


def supersede(
    lake: ObjectLake, rewrite: Rewrite, parts: Sequence[Part], written_at: int, erasing: Erasing | None = None
) -> Generation:
    """Make parts, which cover a whole day, what counts for it; return the generation. On a day that is being
    copied, parts after the end of the chain count once their manifests are there.

    Raises `LakeBusy` if another process has rewritten the day meanwhile, and `LakeError` if the parts do not
    have as many rows as the manifests say. Then nothing of the attempt counts, and its objects are deleted.
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
        lake.generations.load()  # another day was rewritten, or this one
        lake.erasures.load()
    give_up(lake.store, rewrite)
    raise LakeBusy(
        f"somebody else has written {day_text(rewrite.day)} of {lake.place} anew meanwhile: that counts, and "
        "nothing of this attempt does. Nothing is lost; run this again"
    )


def _is_next(lake: ObjectLake, erasing: Erasing | None) -> bool:
    """Whether the record of another lake, if there is one, still follows the records of this lake."""
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
