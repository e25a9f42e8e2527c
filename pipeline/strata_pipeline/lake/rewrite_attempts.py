"""Attempts to rewrite a finished day in a bucket, and what may be deleted once one of them counts.

_attempts/day=2026-11-21-<attempt>.json        put before the attempt's first object

An attempt begins with what counts for its day, the *base*: a generation, or the batches as they were
archived. It may put only a generation that follows all generations it knows, and only while the base still
counts. So once there is a later generation of the day, or the record of the attempt says that its own process
has given it up, it can never commit: objects that it has left and that no listing names belong to nobody. And
objects that the base of a generation names but the generation does not are needed by no process that opens
the lake from then on. Neither proof needs a clock; a grace period is added for processes that opened the lake
earlier, and for tasks of an attempt that was given up. The record of an attempt that counts stays until these
objects are deleted.

Listings and generations are never deleted: they are small, and they prove the history.
"""

from __future__ import annotations

import contextlib
import re
import uuid
from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import NamedTuple, Protocol

import msgspec
from strata.protocol.sequences import day_text, parse_day

from strata_pipeline.errors import LakeError
from strata_pipeline.lake.attempts import ATTEMPTS, ROOTS, Left, attempt_of, records
from strata_pipeline.lake.object_generations import ERASED, Generations
from strata_pipeline.lake.stores.objects import ObjectStore
from strata_pipeline.lake_format import (
    DAY_LISTINGS,
    GENERATIONS,
    Generation,
    Part,
    day_listing_name,
    generation_name,
)

__all__ = [
    "DEFAULT_GRACE",
    "ERASED_GRACE",
    "NO_BASE",
    "Grace",
    "Rewrite",
    "give_up",
    "replaced",
    "rewrites",
    "sweep_days",
]

NO_BASE = -1
"""The base of an attempt that begins with the batches as they were archived."""
ERASED_GRACE = timedelta(hours=1)
_RECORD = re.compile(r"_attempts/day=(\d{4}-\d\d-\d\d)-([0-9a-f]{32})\.json")


class Grace(NamedTuple):
    """How long objects that are no longer needed stay."""

    left: timedelta = timedelta(days=1)
    """For objects that a compaction has replaced, and for records of attempts, whose tasks may still put
    objects, from the start of the attempt."""
    erased: timedelta = ERASED_GRACE
    """For objects that an erasure has replaced, which hold what was erased."""

    @property
    def unnamed(self) -> timedelta:
        """For objects that attempts have left: they too may hold what was erased, and nobody reads them."""
        return min(self)


DEFAULT_GRACE = Grace()


class _Record(msgspec.Struct, frozen=True, omit_defaults=True):
    base: int
    over: bool = False


class Rewrite(NamedTuple):
    """One attempt to rewrite a day."""

    day: int
    base: int
    """The number of the generation with which it begins, or `NO_BASE`."""
    name: str
    is_given_up: bool = False
    """Whether its own process has said that it will not commit."""

    @classmethod
    def begin(cls, store: ObjectStore, day: int, base: int) -> Rewrite:
        """A new attempt, recorded in the bucket before it writes anything."""
        rewrite = cls(day, base, uuid.uuid4().hex)
        store.put(rewrite.record, msgspec.json.encode(_Record(base)))
        return rewrite

    @property
    def record(self) -> str:
        """The name of its record."""
        return f"{ATTEMPTS}/day={day_text(self.day)}-{self.name}.json"

    @property
    def listing(self) -> str:
        """The name of its listing."""
        return f"{DAY_LISTINGS}/{day_listing_name(self.day, self.name)}"

    @property
    def tombstones(self) -> str:
        """The name of the file with the tombstones of what it erases."""
        return f"{ERASED}/{self.name}.jsonl"

    def written(self, store: ObjectStore) -> list[str]:
        """The objects with rows that it has put."""
        folders = (f"{root}/day={day_text(self.day)}" for root in ROOTS)
        return [name for one in folders for name in store.keys(one) if attempt_of(name) == self.name]


class Days(Protocol):
    """What a lake knows about its days."""

    generations: Generations

    def parts_of(self, day: int, generation: Generation | None) -> list[Part]:
        """The parts of a day in a generation, or as archived. Raises `LakeError`."""

    def may_grow(self, day: int) -> bool:
        """Whether the chain may still gain batches of a day."""


def rewrites(store: ObjectStore) -> list[Rewrite]:
    """The attempts of which the bucket has a record."""
    found = []
    for match, told in records(store, _RECORD, _Record):
        with contextlib.suppress(ValueError):  # no such day: the record is not ours
            found.append(Rewrite(parse_day(match[1]), told.base, match[2], told.over))
    return found


def give_up(store: ObjectStore, rewrite: Rewrite) -> None:
    """Delete what an attempt of this process has put; it must not have committed, and never will.

    When one task fails, others are still running, and may put objects after this. The record stays because of
    these objects, and says that the attempt is over.
    """
    store.put(rewrite.record, msgspec.json.encode(_Record(rewrite.base, over=True)))
    store.delete([*rewrite.written(store), rewrite.listing, rewrite.tombstones])


def _discard(store: ObjectStore, rewrite: Rewrite, *, is_known: bool) -> None:
    """Delete what an attempt has left; the record stays if the attempt is to be known further on."""
    store.delete([*rewrite.written(store), rewrite.listing, rewrite.tombstones])
    if not is_known:
        store.delete([rewrite.record])


def sweep_days(store: ObjectStore, lake: Days, now: datetime, grace: Grace) -> Left:
    """Delete replaced objects, and leftovers of attempts that can no longer commit, after the grace."""
    began = {one.name: one.modified_at for one in store.listed(ATTEMPTS)}
    left = Left([], [])
    due: dict[int, int] = {}
    counting: list[tuple[Rewrite, Generation]] = []
    for rewrite in rewrites(store):
        generation = lake.generations.by(rewrite.name)
        if generation is not None:
            counting.append((rewrite, generation))
            waits = grace.left if generation.erasure is None else grace.erased
            if now - _put_at(store, generation, now) >= waits:
                due[rewrite.day] = max(due.get(rewrite.day, NO_BASE), generation.number)
            continue
        newest = lake.generations.of_day(rewrite.day)
        is_over = rewrite.is_given_up or (newest is not None and newest.number > rewrite.base)
        unnamed = rewrite.written(store)
        age = now - began.get(rewrite.record, now)
        if is_over and age >= grace.unnamed:
            _discard(store, rewrite, is_known=age < grace.left)
            left.deleted.extend(unnamed)
        else:
            left.kept.extend(unnamed)
    for rewrite, generation in counting:
        # With the objects that an erasure has replaced, those replaced earlier are deleted: they also hold
        # the erased rows.
        if generation.number <= due.get(rewrite.day, NO_BASE):
            left.deleted.extend(_delete_replaced(store, lake, rewrite, generation))
    return left


def replaced(lake: Days, generation: Generation) -> set[str]:
    """The objects that counted before a generation and do not count with it. Raises `LakeError`."""
    before = _names(lake.parts_of(generation.day, lake.generations.before(generation)))
    return before - _names(lake.parts_of(generation.day, generation))


def _delete_replaced(store: ObjectStore, lake: Days, rewrite: Rewrite, generation: Generation) -> list[str]:
    there = {name for root in ROOTS for name in store.keys(f"{root}/day={day_text(rewrite.day)}")}
    try:
        counting = _names(lake.parts_of(rewrite.day, lake.generations.of_day(rewrite.day)))
        leavings = set(rewrite.written(store)) - _names(lake.parts_of(rewrite.day, generation))
        gone = (replaced(lake, generation) | leavings) - counting
    except LakeError:
        return []  # nothing is deleted on a guess; an audit reports the listing
    if counting - there:
        return []  # an incomplete copy, or a damaged lake: the older objects may be all there is
    store.delete_all(gone & there)
    # On a day that is being copied, a batch may still come whose listing, by a killed copy, names other
    # objects than the generation: the next run deletes these.
    if not lake.may_grow(rewrite.day):
        store.delete([rewrite.record])
    return sorted(gone & there)


def _put_at(store: ObjectStore, generation: Generation, now: datetime) -> datetime:
    name = f"{GENERATIONS}/{generation_name(generation.number)}"
    at = (one.modified_at for one in store.listed(GENERATIONS, name[:-1]) if one.name == name)
    return next(at, now)


def _names(parts: Iterable[Part]) -> set[str]:
    return {one.name for part in parts for one in part.objects}
