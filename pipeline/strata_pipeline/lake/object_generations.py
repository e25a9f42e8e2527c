"""The generations of a lake in a bucket (`strata_pipeline.lake_format.generation`), and the erasures in them.

_generations/0000000000.json          a rewritten day: it counts from the moment when this is put
_days/2026-11-21-<attempt>.json       the objects of that day, put earlier
_erased/<attempt>.jsonl               the tombstones of an erasure, put earlier
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence

from strata_pipeline.errors import LakeError
from strata_pipeline.lake.erasures import Erasures
from strata_pipeline.lake.stores.limits import DAY_RECORD_BYTES
from strata_pipeline.lake.stores.objects import ObjectStore
from strata_pipeline.lake.stores.records import ObjectRecords
from strata_pipeline.lake_format import (
    DAY_LISTINGS,
    GENERATIONS,
    GENESIS,
    DayListing,
    Erasure,
    Generation,
    Manifest,
    Part,
    check_day_listing,
    check_generations,
    day_listing_name,
    decode_day_listing,
    decode_generation,
    encode_generation,
    generation_name,
)

__all__ = ["ERASED", "Generations", "ObjectErasures", "batches_of"]

ERASED = "_erased"


class Generations:
    """All generations, of all days."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._records = ObjectRecords(store, GENERATIONS)
        self._listings: dict[str, DayListing] = {}
        self.records: list[Generation] = []
        self._newest: dict[int, Generation] = {}

    def load(self) -> None:
        """Read and check them. Raises `LakeError`."""
        names = self._records.names()
        try:
            texts = self._records.read_all(names, DAY_RECORD_BYTES)
            found = [
                decode_generation(text, f"{GENERATIONS}/{name}")
                for text, name in zip(texts, names, strict=True)
            ]
        except OSError as error:
            raise LakeError(f"the lake's generations cannot be read: {error}") from None
        check_generations(found)
        self.records = found
        self._newest = {one.day: one for one in found}

    def has_more(self) -> bool:
        """Whether another generation has been put since they were read."""
        return self._store.exists(f"{GENERATIONS}/{generation_name(len(self.records))}")

    @property
    def tip(self) -> str:
        """The hash of the last generation."""
        return self.records[-1].hash if self.records else GENESIS

    def of_day(self, day: int) -> Generation | None:
        """The generation that counts for a day; None if its batches are as they were archived."""
        return self._newest.get(day)

    def before(self, generation: Generation) -> Generation | None:
        """The generation that counted before it for the same day."""
        earlier = reversed(self.records[: generation.number])
        return next((one for one in earlier if one.day == generation.day), None)

    def by(self, attempt: str) -> Generation | None:
        """The generation that an attempt has put."""
        return next((one for one in self.records if one.attempt == attempt), None)

    def parts(
        self, generation: Generation, manifests: Callable[[], Sequence[Manifest]], *, ahead: bool = False
    ) -> list[Part]:
        """The parts of a day, whose manifests are requested only once; `ahead` is whether a copy may still
        add some.

        Raises `LakeError` if they cannot be determined.
        """
        if generation.listing not in self._listings:
            listing = self._listing(generation)
            check_day_listing(listing, generation, manifests(), ahead=ahead)
            self._listings[generation.listing] = listing
        return self._listings[generation.listing].parts

    def listed(self, generation: Generation) -> list[Part]:
        """The parts of a day from its listing alone. The hash of the listing is in the chain of generations;
        it is not compared with the manifests, of which a day may have thousands.

        Raises `LakeError` if they cannot be determined.
        """
        known = self._listings.get(generation.listing)
        return (known or self._listing(generation)).parts

    def _listing(self, generation: Generation) -> DayListing:
        name = day_listing_name(generation.day, generation.attempt)
        try:
            text = self._store.get(f"{DAY_LISTINGS}/{name}", DAY_RECORD_BYTES)
            listing = decode_day_listing(text, name)
        except FileNotFoundError as error:
            raise LakeError(f"the objects of a day cannot be told: {error}") from None
        if listing.hash != generation.listing:
            raise LakeError(f"the lake's listing {name} cannot be used: it is that of another generation")
        return listing

    def put(self, generation: Generation) -> bool:
        """Put a generation after the last; return whether nobody was faster. It counts from then on."""
        name = f"{GENERATIONS}/{generation_name(generation.number)}"
        if not self._store.put_new(name, encode_generation(generation)):
            return False
        self.records.append(generation)
        self._newest[generation.day] = generation
        return True


class ObjectErasures(Erasures):
    """The erasures from a lake in a bucket, whose records are in its generations."""

    def __init__(self, store: ObjectStore, generations: Generations) -> None:
        super().__init__(ObjectRecords(store, ERASED))
        self._generations = generations
        self._attempts: dict[int, str] = {}

    def load(self) -> None:
        found = [(one.erasure, one.attempt) for one in self._generations.records if one.erasure is not None]
        self.records = [record for record, _ in found]
        self._attempts = {record.number: attempt for record, attempt in found}

    def _tombstones_of(self, record: Erasure) -> str:
        return f"{self._attempts[record.number]}.jsonl"


def batches_of(parts: Sequence[Part], manifests: Sequence[Manifest]) -> list[list[Manifest]]:
    """The batches of each part. Parts and manifests are consecutive; each batch is in one part or in none."""
    begins = [manifest.after for manifest in manifests]
    return [
        list(manifests[bisect_left(begins, part.after) : bisect_left(begins, part.up_to)]) for part in parts
    ]
