"""A lake in a bucket: the same names as on a disk, and a listing of the objects of each batch.

packets/day=2026-11-21/batch=<first>-<last>/kind=POST/<attempt>-….parquet
quarantine/day=2026-11-21/batch=<first>-<last>/<attempt>-….parquet
_objects/0000000000-<hash of the manifest>.json       which objects hold the rows of a batch
_witnesses/0000000000-<hash>.csv                      when other relays received packets (see `witnesses`)
_manifests/0000000000.json, 0000000001.json, …        the chain, as on a disk
_manifests/days/2026-11-21.json                       summaries of finished days
_attempts/0000000012-<attempt>.json                   a batch that is being written (see `attempts`)
_generations/0000000000.json, _days/…, _erased/…      days that were rewritten (see `object_generations`)
_searched/erased.json                                 what need not be searched again (see `searched`)

A batch takes four steps: a record of the attempt; its objects, each under a name that only this attempt uses,
and its witnesses, if any, under a name with their hash; its listing, under a name with the hash of the
manifest; its manifest, if there is none with that number yet.
The last step is the commit. A process that is killed before it leaves objects that no reader of manifests
sees, and a process that comes second gets an error. Nothing is renamed, and nothing that counts is ever
replaced.

A finished day can be rewritten in the same steps: a record of the attempt, objects, a listing of all objects
of the day, and as the commit a generation, if there is none with its number. From then on that listing
defines the day, and the listings of its batches do not count. `rewrite_attempts` describes what happens to
older objects.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from datetime import datetime
from pathlib import Path

import msgspec
from strata.protocol.sequences import Span, day_of, day_text

from strata_pipeline.errors import LakeBusy, LakeError, ObjectStoreError
from strata_pipeline.lake.attempts import (
    ROOTS,
    Attempt,
    Left,
    attempt_of,
    attempts,
    check_refuses,
    forget,
    look_at_clock,
    sweep,
)
from strata_pipeline.lake.chain import manifest_name
from strata_pipeline.lake.checking import Unit, batch_name, batches_faults
from strata_pipeline.lake.faults import Fault
from strata_pipeline.lake.layout import LakeLayout, batch_path, span_over
from strata_pipeline.lake.object_generations import Generations, ObjectErasures, batches_of
from strata_pipeline.lake.rewrite_attempts import (
    DEFAULT_GRACE,
    NO_BASE,
    Grace,
    replaced,
    rewrites,
    sweep_days,
)
from strata_pipeline.lake.state import LakeState
from strata_pipeline.lake.stores.limits import BATCH_LISTING_BYTES
from strata_pipeline.lake.stores.objects import ObjectStore
from strata_pipeline.lake.stores.records import ObjectRecords
from strata_pipeline.lake.stores.shelves import Bucket
from strata_pipeline.lake.witnesses import Witnesses
from strata_pipeline.lake_format import (
    DAY_LISTINGS,
    LISTINGS,
    WITNESSES,
    Generation,
    Listing,
    Manifest,
    Part,
    StoredObject,
    check_listing,
    day_listing_name,
    decode_listing,
    encode,
    encode_listing,
    listing_name,
    seal,
    seal_listing,
    witnesses_name,
)

__all__ = ["DELTA_LOG", "ObjectLake"]

MANIFESTS = "_manifests"
DELTA_LOG = "packets/_delta_log"
"""The log that `publish-delta` writes, which proves nothing and is not part of the lake."""
_KEPT = 20_000
"""The number of listings kept in memory; each has a few hundred bytes."""


class ObjectLake(LakeState):
    """A lake in a bucket."""

    def __init__(self, store: ObjectStore) -> None:
        self.store = store
        self.shelf = Bucket(store)
        self.left = Left([], [])
        """The leftovers of earlier attempts that opening the lake for writing has found."""
        self._listings: dict[str, Listing] = {}
        self.sealed = 0
        """The number of summaries that opening the lake with `replace` has written."""
        self.generations = Generations(store)
        erasures = ObjectErasures(store, self.generations)
        witnesses = Witnesses(ObjectRecords(store, WITNESSES))
        super().__init__(store.url(), ObjectRecords(store, MANIFESTS), erasures, witnesses)

    def load(self) -> None:
        # First, so that the chain, which is read afterwards, has all days of these generations, complete.
        self.generations.load()
        super().load()

    @classmethod
    def open(cls, place: str) -> ObjectLake:
        """The lake at `s3://bucket/prefix`, for reading; its chain is checked. Raises `LakeError`,
        `ObjectStoreError`, `UsageError`."""
        lake = cls(ObjectStore.at(place))
        lake.load()
        if not lake.chain.end.number:
            raise LakeError(f"there is no lake in {lake.place}: it has no manifests")
        return lake

    @classmethod
    @contextlib.contextmanager
    def write(
        cls, place: str, grace: Grace = DEFAULT_GRACE, *, copying: bool = False
    ) -> Iterator[ObjectLake]:
        """The lake at `s3://bucket/prefix`, for adding batches; it need not exist yet, but its bucket must.

        No lock excludes other writers: the one that commits second gets `LakeBusy` from `commit`. Leftovers
        of attempts to add batches that can no longer commit are deleted after the `grace`. Raises
        `LakeError`, before anything is changed, if chain and listings do not belong together, and
        `ObjectStoreError`, `UsageError`.

        With `copying`, a lake is accepted even if its generations name days that its chain has not reached,
        and replaced objects of days are deleted after the grace too.
        """
        lake = cls(ObjectStore.at(place))
        lake.load()
        lake._check(copying)
        if copying:
            lake.tidy(grace)
        else:
            lake.left = sweep(lake.store, lake, lake._now(), grace.left)
        lake.chain.seal()
        yield lake

    @classmethod
    @contextlib.contextmanager
    def replace(cls, place: str, grace: Grace = DEFAULT_GRACE) -> Iterator[ObjectLake]:
        """The lake at `s3://bucket/prefix`, for rewriting finished days (`superseding`). Archives may run
        meanwhile, and so may other processes that do the same.

        Replaced objects are deleted after the `grace` too. Raises what `open` and `write` raise.
        """
        lake = cls.open(place)
        lake._check()
        lake.tidy(grace)
        lake.sealed = lake.chain.seal()
        yield lake

    def _check(self, copying: bool = False) -> None:
        self._check_generations(copying)
        self._check_end()

    def _now(self) -> datetime:
        return look_at_clock(self.store, check_refuses(self.store))

    def tidy(self, grace: Grace) -> None:
        """Delete objects that have not been needed for as long as `grace` says; `left` then names them."""
        now = self._now()
        some = sweep(self.store, self, now, grace.unnamed, grace.left)
        more = sweep_days(self.store, self, now, grace)
        self.left = Left(some.kept + more.kept, some.deleted + more.deleted)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Do nothing: objects are never replaced, and not deleted before a grace period is over."""
        yield

    def contains(self, folder: Path) -> bool:
        """Whether a folder lies in the lake: no folder on a disk does."""
        return False

    def begin(self, span: Span) -> Attempt:
        """A new attempt to add a batch."""
        return Attempt.begin(self.store, self.chain.end.number, span)

    def commit(
        self, manifest: Manifest, attempt: Attempt, objects: Sequence[StoredObject], witnesses: bytes = b""
    ) -> Manifest:
        """Make the objects of an attempt a batch of the lake; return the manifest as written. `witnesses` is
        the file whose hash the manifest has, empty if it has none.

        Raises `LakeBusy` if another writer was faster: then nothing of this attempt counts.
        """
        self._put_witnesses(manifest, witnesses)
        while not self._list(sealed := seal(manifest), attempt, objects):
            # Another process has archived the very same rows in the same second: a manifest has one listing.
            manifest = msgspec.structs.replace(manifest, written_at=manifest.written_at + 1)
        self._finish(sealed, attempt, objects)
        return sealed

    def adopt(
        self,
        sealed: Manifest,
        now: Manifest,
        attempt: Attempt,
        objects: Sequence[StoredObject],
        witnesses: bytes = b"",
    ) -> None:
        """Make the objects of an attempt a batch of the lake, under an unchanged manifest of another lake;
        `now` says what the batch holds after erasures, and `witnesses` is as for `commit`.

        Raises `LakeBusy`.
        """
        self._put_witnesses(sealed, witnesses)
        if not self._list(sealed, attempt, objects):
            # Another copy has put the listing, and was killed or still runs: both put the same manifest.
            if self.store.exists(f"{MANIFESTS}/{manifest_name(sealed.number)}"):
                raise self._busy(sealed, attempt)
            # So its objects are the batch. If they were left out, that copy would remove the record of its
            # attempt although nothing names its objects. This attempt's objects are named only if those of
            # the other are damaged or incomplete.
            standing = self._objects_that_hold(sealed, now)
            if standing is None:
                listing = seal_listing(sealed, attempt.name, objects)
                self.store.put(f"{LISTINGS}/{listing_name(sealed)}", encode_listing(listing))
            else:
                objects = standing
        self._finish(sealed, attempt, objects)

    def _put_witnesses(self, manifest: Manifest, witnesses: bytes) -> None:
        if witnesses:  # two writers that put the same name put the same bytes
            self.store.put(f"{WITNESSES}/{witnesses_name(manifest)}", witnesses)

    def _objects_that_hold(self, sealed: Manifest, now: Manifest) -> list[StoredObject] | None:
        """The objects that the listing of a batch names; None if they do not hold what it should hold now."""
        try:
            objects = self.listing(sealed).objects
        except LakeError:
            return None
        unit = _unit([now], sealed.span, objects)
        with self.shelf.at_hand(objects) as (folder, faults):
            folders = ([folder / one for one in some] for some in (unit.packets, unit.quarantine))
            if faults or batches_faults([now], *folders):
                self._listings.pop(listing_name(sealed))  # another listing replaces it
                return None
        return objects

    def _list(self, sealed: Manifest, attempt: Attempt, objects: Sequence[StoredObject]) -> bool:
        """Put the listing of a batch; return whether there was none."""
        listing = seal_listing(sealed, attempt.name, objects)
        check_listing(listing, sealed)
        return self.store.put_new(f"{LISTINGS}/{listing_name(sealed)}", encode_listing(listing))

    def _finish(self, sealed: Manifest, attempt: Attempt, objects: Sequence[StoredObject]) -> None:
        """Commit by putting the manifest."""
        if not self.store.put_new(f"{MANIFESTS}/{manifest_name(sealed.number)}", encode(sealed)):
            raise self._busy(sealed, attempt)
        is_new_day = day_of(sealed.up_to) != day_of(self.chain.end.up_to)
        self.chain.append(sealed)
        forget(self.store, attempt, {one.name for one in objects})
        if is_new_day:
            self.chain.seal()

    def _busy(self, sealed: Manifest, attempt: Attempt) -> LakeBusy:
        """The error of an attempt that came second. What it has left is found by its record."""
        with contextlib.suppress(ObjectStoreError):
            # If it took longer than the grace, another process has deleted the record and the first objects.
            attempt.put_record(self.store)
        return LakeBusy(
            f"another archive has put manifest {sealed.number} of {self.place} while this one wrote the "
            "same batch: its batch counts, this one's does not, and nothing is lost or there twice. "
            "Let only one archive run; running this again goes on behind the other's batches"
        )

    def listing(self, manifest: Manifest) -> Listing:
        """The objects of a batch. Raises `LakeError` if they cannot be determined."""
        return self._listed([manifest])[0]

    def parts(self, day: int) -> list[Part]:
        """The parts of a day that count: its batches, or those of its rewritten form. Raises `LakeError`."""
        return self._reached(self.parts_of(day, self.generations.of_day(day)))

    def _is_ahead(self, generation: Generation) -> bool:
        """Whether a copy may have put this generation before the manifests of its day: a copy puts
        generations with erasures first."""
        return generation.erasure is not None and self.may_grow(generation.day)

    def _reached(self, parts: Iterable[Part]) -> list[Part]:
        """The parts that the chain has reached: a copy lists the others before it puts their manifests."""
        return [part for part in parts if part.up_to <= self.reached]

    def parts_of(self, day: int, generation: Generation | None) -> list[Part]:
        """The parts of a day in a generation, including those that the chain has not reached, or as archived.

        Raises `LakeError`.
        """
        if generation is not None:
            ahead = self._is_ahead(generation)
            return self.generations.parts(generation, lambda: self.chain.of_day(day), ahead=ahead)
        manifests = self.chain.of_day(day)
        pairs = zip(manifests, self._listed(manifests), strict=True)
        return [Part(after=one.after, up_to=one.up_to, objects=listing.objects) for one, listing in pairs]

    def base_of(self, day: int) -> int:
        """The number of the generation that counts for a day, or `NO_BASE`."""
        newest = self.generations.of_day(day)
        return NO_BASE if newest is None else newest.number

    def written_anew(self) -> list[int]:
        """The days whose objects are not those that the archive has put."""
        return sorted({one.day for one in self.generations.records})

    def units(self, day: int) -> tuple[list[Unit], list[Fault]]:
        """The batches of a day with their folders and objects, and a fault for each bad listing."""
        manifests = self.erasures.told(self.chain.of_day(day))
        generation = self.generations.of_day(day)
        if generation is not None:
            return self._units_of(generation, manifests)
        with contextlib.suppress(LakeError):
            self._listed(manifests)  # all at once
        units: list[Unit] = []
        faults: list[Fault] = []
        for manifest in manifests:
            objects: list[StoredObject] = []
            try:
                objects = self.listing(manifest).objects
            except LakeError as error:
                name = self.store.url(f"{LISTINGS}/{listing_name(manifest)}")
                faults.append(Fault("batch", "listing", str(error), manifest.up_to, file=name))
            units.append(_unit([manifest], manifest.span, objects))
        return units, faults

    def _units_of(
        self, generation: Generation, manifests: Sequence[Manifest]
    ) -> tuple[list[Unit], list[Fault]]:
        try:
            ahead = self._is_ahead(generation)
            parts = self._reached(self.generations.parts(generation, lambda: manifests, ahead=ahead))
        except LakeError as error:
            name = day_listing_name(generation.day, generation.attempt)
            where = self.store.url(f"{DAY_LISTINGS}/{name}")
            fault = Fault("batch", "listing", str(error), manifests[-1].up_to, file=where)
            return [_unit([one], one.span, []) for one in manifests], [fault]
        pairs = zip(parts, batches_of(parts, manifests), strict=True)
        return [_unit(inside, part.span, part.objects) for part, inside in pairs], []

    def objects(
        self, manifests: Sequence[Manifest], root: str, *, damaged: bool = False
    ) -> list[StoredObject]:
        """The objects with packets or quarantined rows of batches. If a day was rewritten, they may also hold
        rows of other batches of that day.

        Raises `LakeError` for a listing that is missing or damaged; with `damaged` it is skipped.
        """
        batches: list[Manifest] = []
        anew: dict[int, list[Manifest]] = {}
        for manifest in manifests:  # after years there are millions: each is looked at once
            day = day_of(manifest.up_to)
            written = batches if self.generations.of_day(day) is None else anew.setdefault(day, [])
            written.append(manifest)
        objects = self._objects_of_batches(batches, damaged)
        for day, some in sorted(anew.items()):
            whole = span_over(some)
            try:
                parts = self.parts(day)
            except LakeError:
                if not damaged:
                    raise
                continue
            objects += [one for part in parts if part.span.overlaps(whole) for one in part.objects]
        found = {one.name: one for one in objects}
        return [one for one in found.values() if _is_below(root, one)]

    def objects_of_day(self, day: int, root: str, *, damaged: bool = False) -> list[StoredObject]:
        """The objects with the packets, or the quarantined rows, of a day; those of a rewritten day come from
        its listing alone, without a look at its manifests.

        Raises `LakeError`; with `damaged`, a bad listing of a batch is skipped instead.
        """
        generation = self.generations.of_day(day)
        if generation is None:
            return self.objects(self.chain.of_day(day), root, damaged=damaged)
        return [
            one
            for part in self._reached(self.generations.listed(generation))
            for one in part.objects
            if _is_below(root, one)
        ]

    def objects_of_days(
        self, days: Iterable[int] | None, root: str, *, kinds: Collection[str] | None = None,
        damaged: bool = False,
    ) -> list[StoredObject]:  # fmt: skip
        """The objects with the packets, or the quarantined rows, of these days or of all, or only those of
        some `kinds`. The manifests, of which there are millions after years, are read one day at a time.

        Raises `LakeError`; with `damaged`, a bad listing is skipped instead.
        """
        found: list[StoredObject] = []
        for day in self.days() if days is None else days:
            try:
                objects = self.objects_of_day(day, root, damaged=damaged)
            except LakeError:
                if not damaged:
                    raise
                continue
            found += [one for one in objects if kinds is None or _has_kind(one.name, kinds)]
        return found

    def objects_of_kinds(self, kinds: Collection[str]) -> list[StoredObject]:
        """The objects with packets of some kinds, of all days, as far as they can be determined.

        After years most days have none. The names of a day's objects show this, so nothing else is read of
        such a day.
        """
        found: list[StoredObject] = []
        for day in self.days():
            if self.generations.of_day(day) is None:
                there = self.store.keys(f"packets/day={day_text(day)}")
                if not any(_has_kind(name, kinds) for name in there):
                    continue
            with contextlib.suppress(LakeError):
                objects = self.objects_of_day(day, "packets", damaged=True)
                found += [one for one in objects if _has_kind(one.name, kinds)]
        return found

    def _objects_of_batches(self, manifests: Sequence[Manifest], damaged: bool) -> list[StoredObject]:
        try:
            listings = self._listed(manifests)
        except LakeError:
            if not damaged:
                raise
            listings = []
            for manifest in manifests:
                with contextlib.suppress(LakeError):
                    listings.append(self.listing(manifest))
        return [one for listing in listings for one in listing.objects]

    @contextlib.contextmanager
    def at_hand(self, manifests: Sequence[Manifest], root: str | None = None) -> Iterator[LakeLayout]:
        """The files of batches on this machine's disk, those of one `root` or all; deleted after the block.

        Raises `LakeError` if one is missing or differs from what was written.
        """
        objects = [one for name in ROOTS if root in (None, name) for one in self.objects(manifests, name)]
        with self._at_hand(objects, f"{batch_name(manifests[0])}, or one after it,") as layout:
            yield layout

    @contextlib.contextmanager
    def quarantine_at_hand(self, day: int) -> Iterator[LakeLayout]:
        """The files of a day's quarantined rows on this machine's disk; deleted after the block.

        Raises `LakeError` as `at_hand` does.
        """
        with self._at_hand(self.objects_of_day(day, "quarantine"), day_text(day)) as layout:
            yield layout

    @contextlib.contextmanager
    def _at_hand(self, objects: Sequence[StoredObject], what: str) -> Iterator[LakeLayout]:
        with self.shelf.at_hand(objects) as (folder, faults):
            if faults:
                raise LakeError(
                    f"the lake's {what} is damaged: {faults[0].detail}. Bring its objects back from a copy "
                    "of the lake"
                )
            layout = LakeLayout(folder)
            layout.erasures.records = self.erasures.records
            yield layout

    def unexpected(self, days: Sequence[int]) -> tuple[list[Fault], int]:
        """Objects that no listing names, on these days and on days that the chain does not have; and the
        number of those that attempts have left or replaced, which are not faults. An archive may run
        meanwhile.
        """
        surplus = self._surplus(days)
        if surplus:
            # A batch or a day may have been completed just now, and its attempt forgotten.
            now = ObjectLake(self.store)
            now.load()
            surplus = now._surplus(days)
            known = now._known(surplus)
            surplus = [name for name in surplus if name not in known]
            return [_surplus_fault(self.store.url(name)) for name in surplus], len(known)
        return [], 0

    def kept_witnesses(self, names: Collection[str]) -> set[str]:
        """Those of these files of witnesses that attempts have left, which are deleted later."""
        known = {f"{attempt.number:010}" for attempt in attempts(self.store)}
        return {name for name in names if name.partition("-")[0] in known}

    def _known(self, surplus: Collection[str]) -> set[str]:
        """The objects among these that attempts have left, that were replaced and await deletion, or that a
        copy has listed before their manifests."""
        names = {attempt.name for attempt in attempts(self.store)}
        gone: set[str] = set()
        for rewrite in rewrites(self.store):
            names.add(rewrite.name)
            generation = self.generations.by(rewrite.name)
            if generation is not None:
                with contextlib.suppress(LakeError):
                    gone |= replaced(self, generation)
        for generation in self.generations.records:
            if self._is_ahead(generation):
                with contextlib.suppress(LakeError):
                    parts = self.parts_of(generation.day, generation)
                    gone |= {one.name for part in parts for one in part.objects}
        return {name for name in surplus if name in gone or attempt_of(name) in names}

    def _surplus(self, days: Sequence[int]) -> list[str]:
        there = {day_text(day): day for day in self.days()}
        asked = {day_text(day) for day in days}
        found: list[str] = []
        for root in ROOTS:
            folders, strays = self.store.directly_below(root)
            found += strays
            for folder in folders:
                if f"{root}/{folder}" == DELTA_LOG:
                    continue
                text = folder.removeprefix("day=")
                if text in there and text not in asked:
                    continue
                manifests = self.chain.of_day(there[text]) if text in there else []
                named = {one.name for one in self.objects(manifests, root, damaged=True)}
                found += [name for name in self.store.keys(f"{root}/{folder}") if name not in named]
        return found

    def _listed(self, manifests: Sequence[Manifest]) -> list[Listing]:
        wanted = {listing_name(one): one for one in manifests}
        missing = [name for name in wanted if name not in self._listings]
        if len(self._listings) > _KEPT:
            self._listings, missing = {}, list(wanted)
        texts = self.store.get_all((f"{LISTINGS}/{name}" for name in missing), BATCH_LISTING_BYTES)
        try:
            for name, text in zip(missing, texts, strict=True):
                listing = decode_listing(text, name)
                check_listing(listing, wanted[name])
                self._listings[name] = listing
        except FileNotFoundError as error:
            raise LakeError(f"the objects of a batch cannot be told: {error}") from None
        return [self._listings[name] for name in wanted]

    def _check_end(self) -> None:
        """Raise `LakeError` if the chain lacks manifests or is that of another lake."""
        last = next(self.chain.backwards(), None)
        lasts = [] if last is None else [last]
        for one in (one for root in ROOTS for one in self.objects(lasts, root)):
            if not self.store.exists(one.name):
                raise LakeError(
                    f"{self.store.url(one.name)} belongs to the lake's last batch and is not there: the lake "
                    "is being copied, or has lost objects. Bring them back; nothing was changed"
                )
        while strangers := self._beyond():
            number = self.chain.end.number
            self.load()
            if self.chain.end.number == number:  # else another archive was at work just now
                raise LakeError(
                    f"{self.place} has {strangers[0]}, and its chain ends before that: manifests are "
                    f"missing. Bring {MANIFESTS} back from a copy of the lake; nothing was changed"
                )

    def _check_generations(self, copying: bool) -> None:
        """Raise `LakeError` if generations are missing, or the manifests of their days, which a copy puts
        after the generations."""
        # In this order: an attempt has a record before its listing is put, and until it counts.
        listings = set(self.store.keys(DAY_LISTINGS))
        strangers = listings - {rewrite.listing for rewrite in rewrites(self.store)} - self._named_days()
        if strangers:
            self.generations.load()  # one of them may have begun to count just now
            self.erasures.load()
            strangers -= self._named_days()
        if strangers:
            raise LakeError(
                f"{self.place} has {min(strangers)}, and no generation that names it: generations are "
                "missing. Bring _generations back from a copy of the lake; nothing was changed"
            )
        last = max((one.day for one in self.generations.records), default=-1)
        if self.may_grow(last) and not copying:
            self.load()  # an archive may have continued just now
            if self.may_grow(last):
                raise LakeError(
                    f"{self.place} has a generation of {day_text(last)}, which is made when the day is over, "
                    f"and its chain ends before that: manifests are missing. Bring {MANIFESTS} back from a "
                    "copy of the lake; if the lake is being copied, run strata-pipeline copy again. Nothing "
                    "was changed"
                )

    def _named_days(self) -> set[str]:
        names = (day_listing_name(one.day, one.attempt) for one in self.generations.records)
        return {f"{DAY_LISTINGS}/{name}" for name in names}

    def _beyond(self) -> list[str]:
        """Listings of batches after the end of the chain that no running or killed attempt has put."""
        begin = f"{LISTINGS}/{self.chain.end.number:010}"
        known = {f"{LISTINGS}/{attempt.number:010}-" for attempt in attempts(self.store)}
        return [name for name in self.store.keys(LISTINGS, begin) if name[: len(begin) + 1] not in known]


def _has_kind(name: str, kinds: Collection[str]) -> bool:
    return any(f"/kind={kind}/" in name for kind in kinds)


def _is_below(root: str, one: StoredObject) -> bool:
    return one.name.startswith(f"{root}/")


def _unit(manifests: list[Manifest], span: Span, objects: list[StoredObject]) -> Unit:
    path = batch_path(span)
    packets, quarantine = (
        [Path(root, path)] if any(_is_below(root, one) for one in objects) else [] for root in ROOTS
    )
    return Unit(manifests, packets, quarantine, objects)


def _surplus_fault(url: str) -> Fault:
    return Fault("file", "surplus", f"{url} is named by no manifest: a plain reader would read it", file=url)
