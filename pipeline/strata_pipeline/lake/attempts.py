"""Attempts to archive a batch into a bucket, and the objects that killed attempts have left.

_attempts/0000000012-<attempt>.json        which batch an attempt writes, put before its first object

An attempt writes objects under names that begin with its own, and commits with a manifest that it may put
only if there is none with that number. So once the chain has a manifest with the number, no matter who put
it, the attempt can never commit any more: the objects that it has left and that no listing names belong to
nobody, and may be deleted, and so may files of witnesses with the number that the manifest does not bind.
This needs no clock; a grace period is added to it. `rewrite_attempts` covers attempts to rewrite a day.
Nothing else in a bucket is ever deleted.
"""

from __future__ import annotations

import contextlib
import re
import uuid
from collections.abc import Collection, Iterator
from datetime import datetime, timedelta
from itertools import takewhile
from typing import NamedTuple, TypeVar

import msgspec
from strata.protocol.sequences import Span

from strata_pipeline.errors import ObjectStoreError
from strata_pipeline.lake.layout import batch_path
from strata_pipeline.lake.state import LakeState
from strata_pipeline.lake.stores.limits import BATCH_LISTING_BYTES, RECORD_BYTES
from strata_pipeline.lake.stores.objects import ObjectStore
from strata_pipeline.lake_format import (
    LISTINGS,
    WITNESSES,
    LakeError,
    Manifest,
    decode_listing,
    listing_name,
    witnesses_name,
)

__all__ = [
    "ATTEMPTS",
    "ROOTS",
    "Attempt",
    "Left",
    "attempt_of",
    "attempts",
    "check_refuses",
    "forget",
    "look_at_clock",
    "object_name",
    "records",
    "sweep",
]

ATTEMPTS = "_attempts"
ROOTS = ("packets", "quarantine")
_RECORD = re.compile(r"_attempts/(\d{10})-([0-9a-f]{32})\.json")
_PART = re.compile(r".*/batch=\d+-\d+/(?:kind=[A-Za-z_]+/)?([0-9a-f]{32})-[0-9a-f]{32}\.parquet")
_PROBE = f"{ATTEMPTS}/probe-"
_PROBED = timedelta(hours=1)
"""After this time the process that put a probe has ended."""


_R = TypeVar("_R")


class _Record(msgspec.Struct, frozen=True):
    after: int
    up_to: int


class Attempt(NamedTuple):
    """One attempt to archive a batch."""

    number: int
    """The number of the manifest with which it commits."""
    name: str
    span: Span

    @classmethod
    def begin(cls, store: ObjectStore, number: int, span: Span) -> Attempt:
        """A new attempt, recorded in the bucket before it writes anything."""
        attempt = cls(number, uuid.uuid4().hex, span)
        attempt.put_record(store)
        return attempt

    def put_record(self, store: ObjectStore) -> None:
        """Put its record, so that what it leaves is found."""
        store.put(self.record, msgspec.json.encode(_Record(self.span.after, self.span.up_to)))

    @property
    def record(self) -> str:
        """The name of its record."""
        return f"{ATTEMPTS}/{self.number:010}-{self.name}.json"

    def folder(self, root: str) -> str:
        """The folder of its objects below a root; other attempts write there too."""
        return f"{root}/{batch_path(self.span).as_posix()}"

    def object_name(self, root: str, kind: str | None) -> str:
        """A new name for an object."""
        return object_name(self.name, self.span, root, kind)


class Left(NamedTuple):
    """The objects that attempts have left and that no listing names."""

    kept: list[str]
    """Objects that stay for now, because the attempt may still commit or the grace period is not over."""
    deleted: list[str]


def object_name(attempt: str, span: Span, root: str, kind: str | None) -> str:
    """A new name for an object that an attempt writes, with rows of these sequences."""
    below = "" if kind is None else f"kind={kind}/"
    return f"{root}/{batch_path(span).as_posix()}/{below}{attempt}-{uuid.uuid4().hex}.parquet"


def attempt_of(name: str) -> str | None:
    """The name of the attempt that is part of an object's name; None if there is none."""
    found = _PART.fullmatch(name)
    return None if found is None else found[1]


def attempts(store: ObjectStore) -> list[Attempt]:
    """The attempts of which the bucket has a record."""
    return [
        Attempt(int(match[1]), match[2], Span(told.after, told.up_to))
        for match, told in records(store, _RECORD, _Record)
    ]


def records(
    store: ObjectStore, pattern: re.Pattern[str], kind: type[_R]
) -> Iterator[tuple[re.Match[str], _R]]:
    """The records of attempts whose names match a pattern, each with the match."""
    for match in filter(None, map(pattern.fullmatch, store.keys(ATTEMPTS))):
        try:
            told = msgspec.json.decode(store.get(match[0], RECORD_BYTES), type=kind)
        except (FileNotFoundError, LakeError, msgspec.DecodeError, UnicodeDecodeError):
            continue  # it has just been forgotten, or is not ours
        yield match, told


def check_refuses(store: ObjectStore) -> str:
    """Raise `ObjectStoreError` for a store that lets two writers put one name, where no commit would be safe.

    Return the name of the object that this has put, for `look_at_clock`.
    """
    name = f"{_PROBE}{uuid.uuid4().hex}"
    if store.put_new(name, b"1") and store.put_new(name, b"2"):
        store.delete([name])
        raise ObjectStoreError(
            f"the object store of {store.url()} ignores If-None-Match: two archives would overwrite each "
            "other's manifests. Use a store that can put an object only where there is none"
        )
    return name


def forget(store: ObjectStore, attempt: Attempt, named: Collection[str]) -> None:
    """Remove the record of an attempt after its commit, unless its tasks have left objects that its listing
    does not name."""
    with contextlib.suppress(ObjectStoreError):  # then a later run does it
        if not set(_written_by(store, attempt)) - set(named):
            store.delete([attempt.record])


def look_at_clock(store: ObjectStore, probe: str) -> datetime:
    """The time by the clock of the store: when it took `probe`, which `check_refuses` has just put.

    Delete the probe, and others that killed processes have left. Raises `ObjectStoreError` if the probe is
    not in the list.
    """
    there = {one.name: one.modified_at for one in store.listed(ATTEMPTS, _PROBE)}
    now = there.get(probe)
    if now is None:
        raise ObjectStoreError(
            f"the object store of {store.url()} does not list an object that it has just taken: a lake needs "
            "a store whose lists are up to date"
        )
    old = [name for name, at in there.items() if name.startswith(_PROBE) and now - at > _PROBED]
    store.delete([probe, *old])
    return now


def sweep(
    store: ObjectStore, lake: LakeState, now: datetime, grace: timedelta, known_for: timedelta = timedelta()
) -> Left:
    """Delete the leftovers of attempts that can no longer commit and that began `grace` ago or earlier.

    The record of an attempt stays for as long as `known_for`, because its tasks may still put objects.
    """
    began = {one.name: one.modified_at for one in store.listed(ATTEMPTS)}
    left = Left([], [])
    for attempt in attempts(store):
        is_over = attempt.number < lake.chain.end.number
        try:
            unnamed = _unnamed(store, lake, attempt, is_over)
        except (LakeError, FileNotFoundError):
            continue  # nothing is deleted on a guess; an audit reports the listing
        age = now - began.get(attempt.record, now)
        if is_over and age >= grace:
            store.delete([*unnamed, *([attempt.record] if age >= known_for else [])])
            left.deleted.extend(unnamed)
        else:
            left.kept.extend(unnamed)
    # Two attempts with one number share their other witnesses.
    return Left(list(dict.fromkeys(left.kept)), left.deleted)


def _unnamed(store: ObjectStore, lake: LakeState, attempt: Attempt, is_over: bool) -> list[str]:
    """The objects and listings of an attempt that do not count. Raises `LakeError`, `FileNotFoundError`."""
    committed = ""
    unnamed = _written_by(store, attempt)
    if is_over:
        manifest = lake.chain.one(attempt.number)
        committed = f"{LISTINGS}/{listing_name(manifest)}"
        listing = decode_listing(store.get(committed, BATCH_LISTING_BYTES), committed)
        unnamed = sorted(set(unnamed) - {one.name for one in listing.objects})
        unnamed += _other_witnesses(store, manifest)
    begin = f"{LISTINGS}/{attempt.number:010}-"
    for name in takewhile(lambda one: one.startswith(begin), store.keys(LISTINGS, begin)):
        with contextlib.suppress(LakeError):
            if (
                name != committed
                and decode_listing(store.get(name, BATCH_LISTING_BYTES), name).attempt == attempt.name
            ):
                unnamed.append(name)
    return unnamed


def _other_witnesses(store: ObjectStore, manifest: Manifest) -> list[str]:
    """The files of witnesses with the number of a manifest that the manifest does not bind."""
    begin = f"{WITNESSES}/{manifest.number:010}-"
    there = takewhile(lambda one: one.startswith(begin), store.keys(WITNESSES, begin))
    return [one for one in there if one != f"{WITNESSES}/{witnesses_name(manifest)}"]


def _written_by(store: ObjectStore, attempt: Attempt) -> list[str]:
    return [
        name
        for root in ROOTS
        for name in store.keys(attempt.folder(root))
        if attempt_of(name) == attempt.name
    ]
