"""Packets erased from a lake are removed from its copies: all in one step, wherever it is killed."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import Mock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from strata_pipeline.errors import LakeBusy
from strata_pipeline.jobs import publishing
from strata_pipeline.jobs.copy import Copied, copy_lake
from strata_pipeline.lake.checking import unit_faults
from strata_pipeline.lake.delta import publish, published_files
from strata_pipeline.lake.generations import replace_day, staged_day
from strata_pipeline.lake.lake import Lake
from strata_pipeline.lake.object_lake import ObjectLake
from strata_pipeline.lake.places import AnyLake, open_lake
from strata_pipeline.lake.stores.objects import ObjectStore
from strata_pipeline.lake_format import LakeError

from tests.support import object_lakes
from tests.support.file_faults import Killed, counted
from tests.support.object_lakes import NO_GRACE, begin_with, erased, put_batch, requests, unnamed
from tests.support.toy_lakes import DAY, compacted, content_of, write_batch
from tests.support.toy_lakes import place as sequence

SOUND = [sequence(n) for n in (1, 2, 3, 5, 6, 7, 8)] + [sequence(n, DAY + 1) for n in (1, 2, 3)]
SOUND.append(sequence(1, DAY + 2))
ASIDE = [sequence(4)]
GONE = [sequence(n) for n in (2, 3, 4, 5, 8)] + [sequence(1, DAY + 1)]
LEFT = [n for n in SOUND if n not in GONE]
PUT_ASIDE = sorted({*ASIDE, *GONE})
Place = str | Path


def begun(where: str) -> None:
    """Put two batches of a day, with a quarantined row."""
    put_batch(where, [1, 2, 3], [4])
    put_batch(where, [5, 6])


def ended(where: str) -> None:
    """Put another batch of that day, and two more days."""
    put_batch(where, [7, 8])
    put_batch(where, [1, 2, 3], day=DAY + 1)
    put_batch(where, [1], day=DAY + 2)


def erased_all(where: str) -> None:
    """Make three erasures; the first and the last are from the same day, and from one batch twice: the second
    time they include a row that was quarantined when it was archived."""
    erased(where, sequence(2), sequence(8))
    erased(where, sequence(1, DAY + 1), day=DAY + 1)
    erased(where, sequence(3), sequence(4), sequence(5))


_kept: dict[Callable[[str], None], dict[str, bytes]] = {}


def grown(place: str, before: str | None, act: Callable[[str], None]) -> str:
    """The lake that an action makes of the one before: made once, and copied into each world."""
    store = ObjectStore.at(place)
    if act in _kept:
        for name, content in _kept[act].items():
            store.put(name, content)
        return place
    if before is not None:
        begin_with(place, before)
    act(place)
    names = list(store.keys(""))
    _kept[act] = dict(zip(names, store.get_all(names), strict=True))
    return place


class World:
    """A lake before and after an erasure, and places for copies."""

    def __init__(self, places: Iterator[str], folder: Path) -> None:
        self._places, self._folder, self._folders = places, folder, 0
        self.half = grown(next(places), None, begun)
        self.whole = grown(next(places), self.half, ended)
        self.source = grown(next(places), self.whole, erased_all)

    def new(self, kind: str) -> Place:
        self._folders += 1
        return next(self._places) if kind == "bucket" else self._folder / f"lake-{self._folders}"

    def copied(self, kind: str, source: Place | None) -> Place:
        place = self.new(kind)
        if source is not None:
            copy_lake(source, place)
        return place

    def again(self, place: Place) -> Place:
        """The same lake at another place."""
        if isinstance(place, Path):
            other = self.new("disk")
            return shutil.copytree(place, other) if place.exists() else other
        other = self.new("bucket")
        with contextlib.suppress(LakeError):
            begin_with(str(other), place)
        return other


@pytest.fixture
def world(in_memory: Iterator[str], tmp_path: Path) -> World:
    return World(in_memory, tmp_path)


_seen: dict[bytes, tuple[list[int], list[int]]] = {}


def seen(place: Place) -> tuple[list[int], list[int]]:
    """The rows that a lake shows, after checking all of it by its manifests and records; once, if several
    have the same files or objects."""
    content = content_of(place)
    if content not in _seen:
        _seen[content] = _checked(place)
    return _seen[content]


def _checked(place: Place) -> tuple[list[int], list[int]]:
    lake = open_lake(place)
    with lake.held():
        assert lake.unexpected(lake.days())[0] == []
        rows: tuple[list[int], list[int]] = [], []
        for day in lake.days():
            units, faults = lake.units(day)
            assert faults == [] and sum(len(unit.manifests) for unit in units) == len(lake.chain.of_day(day))
            for unit in units:
                with lake.shelf.at_hand(unit.objects) as (folder, damage):
                    folders = [[folder / one for one in some] for some in (unit.packets, unit.quarantine)]
                    there = unit_faults(unit._replace(packets=folders[0], quarantine=folders[1]))
                    assert [*damage, *there] == []
                    for some, found in zip(folders, rows, strict=True):
                        found += sequences_in(path for one in some for path in one.rglob("*.parquet"))
            assert lake.rows_of(day) == sum(n >> 32 == day for n in rows[0])
        told = [one for record in lake.erasures.records for one in lake.erasures.tombstones(record)]
        assert not {one.sequence for one in told} & set(rows[0])
        assert {one.sequence for one in told if one.sequence <= lake.reached} <= set(rows[1])
    return sorted(rows[0]), sorted(rows[1])


def sequences_in(paths: Iterator[Path]) -> list[int]:
    found = (pq.ParquetFile(path).read(["sequence"], use_threads=False) for path in paths)
    return [n for rows in found for n in rows["sequence"].to_pylist()]


def seen_if_there(place: Place) -> tuple[list[int], list[int]]:
    """As `seen`; nothing for a lake that has no manifest yet."""
    try:
        open_lake(place)
    except LakeError as error:
        assert "there is no lake" in str(error)
        return [], []
    return seen(place)


def bodies_in(place: Place) -> set[bytes]:
    """Every body in any file or object at the place."""
    if isinstance(place, Path):
        files = [path.read_bytes() for path in place.rglob("*.parquet")]
    else:
        store = ObjectLake.open(place).store
        files = [store.get(name) for name in store.keys("") if name.endswith(".parquet")]
    tables = [pq.ParquetFile(pa.BufferReader(one)).read(["body"], use_threads=False) for one in files]
    return {body for table in tables for body in table["body"].to_pylist()}


def settle(place: Place) -> None:
    """Let no grace be left; then nothing of the erased rows is left."""
    if not isinstance(place, Path):
        with ObjectLake.replace(place, NO_GRACE):
            pass
        assert unnamed(place) == []
    else:
        assert not [one for one in place.iterdir() if one.name in ("_staging", "_aside", "_retired")]
    assert not bodies_in(place) & {b'{"text":"%d"}' % n for n in GONE}


def is_copy(place: Place, source: Place) -> None:
    copy, lake = open_lake(place), open_lake(source)
    assert copy.tip == lake.tip and copy.erasures.records == lake.erasures.records
    assert texts(copy) == texts(lake)
    assert seen(place) == (LEFT, PUT_ASIDE)
    settle(place)
    assert seen(place) == (LEFT, PUT_ASIDE)


def texts(lake: AnyLake) -> list[bytes]:
    return [lake.erasures.text_of(record) for record in lake.erasures.records]


@pytest.mark.parametrize("target", ["disk", "bucket"])
@pytest.mark.parametrize("source", ["disk", "bucket"])
def test_in_every_direction_a_copy_gets_what_was_erased_at_once_or_later(world, source, target):
    erased_from = world.source if source == "bucket" else world.copied("disk", world.source)
    for state in (None, world.half, world.whole):
        place = world.copied(target, state)
        done = copy_lake(erased_from, place)
        assert (done.erasures, done.left) == (3, 0)
        is_copy(place, erased_from)
        assert copy_lake(erased_from, place).erasures == 0
        # A copy is as good a lake as the original: it is copied, and it continues.
        is_copy(world.copied("bucket" if target == "disk" else "disk", place), world.source)
        put = write_batch if target == "disk" else put_batch
        put(place, [2], day=DAY + 2)
        assert seen(place)[0] == [*LEFT, sequence(2, DAY + 2)]


@pytest.mark.parametrize(
    ("kind", "state", "at_once"),
    [
        ("bucket", "new", True),
        ("bucket", "half", True),
        ("bucket", "whole", True),
        ("disk", "new", True),
        ("disk", "half", True),
        ("disk", "whole", False),
    ],
)
def test_killed_at_every_step_a_copy_holds_and_the_next_run_ends_it(world, kind, state, at_once):
    source = world.source if kind == "bucket" else world.copied("disk", world.source)
    first = world.copied(kind, {"new": None, "half": world.half, "whole": world.whole}[state])
    whole = world.again(first)
    with changes(kind, at_once=at_once) as calls:
        copy_lake(source, whole)
    is_copy(whole, source)
    steps = len(calls)
    assert steps > 20
    known: set[frozenset[tuple[str, int]]] = set()
    for last in steps_of(steps, f"{kind} {state}"):
        place = world.again(first)
        with changes(kind, last, at_once=at_once), pytest.raises(Killed):
            copy_lake(source, place)
        if (looks := look_of(place)) in known:
            continue
        known.add(looks)
        if is_cut_off(place):
            with pytest.raises(LakeError, match=r"was cut off: .* or copy, finishes it"):
                seen(place)
        else:
            shown = seen_if_there(place)
            assert state != "new" or not set(shown[0]) & set(GONE)
        copy_lake(source, place)
        assert seen(place) == (LEFT, PUT_ASIDE)
        settle(place)
        if isinstance(place, Path):
            shutil.rmtree(place)


def steps_of(count: int, case: str) -> range:
    """Every twentieth step, with a different offset for each case; an option selects all of them."""
    stride = int(os.environ.get("STRATA_TEST_COPY_STRIDE", "20"))
    return range(zlib.crc32(case.encode()) % stride, count, stride)


@contextlib.contextmanager
def changes(kind: str, last: int | None = None, *, at_once: bool) -> Iterator[list[str]]:
    """The changes made by calls or requests; with `last`, kills after that many."""
    if kind == "bucket":
        with requests(last) as sent:
            yield sent
    else:
        with counted(last, at_once=at_once) as calls:
            yield calls.names


def look_of(place: Place) -> frozenset[tuple[str, int]]:
    """What makes two lakes equal: most calls change nothing that a later process sees."""
    if isinstance(place, Path):
        files = [path for path in place.rglob("*") if "lock" not in path.name]
        names = [re.sub(r"json\.\d+$", "json", str(path.relative_to(place))) for path in files]
        return frozenset(zip(names, (path.stat().st_size for path in files), strict=True))
    return frozenset({(place, 0)})  # each request changes something


def is_cut_off(place: Place) -> bool:
    return isinstance(place, Path) and (place / "_staging" / "erasure" / "record.json").exists()


@pytest.mark.parametrize("kind", ["disk", "bucket"])
def test_a_copy_that_was_compacted_gets_what_was_erased(world, kind):
    place = world.copied(kind, world.whole)
    if kind == "bucket":
        assert object_lakes.compacted(str(place))
    else:
        with Lake.replace(place) as lake:
            target = staged_day(lake, DAY)
            compacted(lake, DAY, target)
            replace_day(lake, DAY, target, 0)
    copy_lake(world.source, place)
    is_copy(place, world.source)


@pytest.mark.parametrize("kind", ["disk", "bucket"])
def test_a_lake_that_is_half_copied_takes_no_archive_and_is_no_source(world, kind):
    place = world.new(kind)

    def kill_amid_the_first_day(done: Copied) -> None:
        if done.batches == 2:
            raise Killed

    with pytest.raises(Killed):
        copy_lake(world.source, place, progress=kill_amid_the_first_day)
    assert seen(place)[0] and open_lake(place).is_half_copied
    with pytest.raises(LakeError, match="strata-pipeline copy again"):
        (write_batch if kind == "disk" else put_batch)(place, [9], day=DAY)
    with pytest.raises(LakeError, match=r"is a copy that is not complete: .* copy into it again first"):
        copy_lake(place, world.new("disk"))
    if kind == "bucket":  # if the copy is interrupted for longer than the grace
        with ObjectLake.write(str(place), NO_GRACE, copying=True):
            pass
        seen(place)
    # Packets erased meanwhile are not brought back either.
    erased(world.source, sequence(6))
    assert copy_lake(world.source, place).left == 0
    assert seen(place)[0] == [n for n in LEFT if n != sequence(6)]
    settle(place)
    assert b'{"text":"%d"}' % sequence(6) not in bodies_in(place)


@pytest.mark.parametrize("kind", ["disk", "bucket"])
def test_a_copy_that_was_erased_from_by_itself_is_refused(world, kind):
    itself = world.again(world.whole)
    erased(itself, sequence(2))
    place = world.copied(kind, itself)
    before = seen(place)
    with pytest.raises(
        LakeError, match=r"are not the first of .* Copy the lake to another place, and delete"
    ):
        copy_lake(world.source, place)
    with pytest.raises(LakeError, match="are not the first of"):
        copy_lake(world.whole, place)  # which has none
    assert seen(place) == before


def test_readers_of_a_copy_keep_their_files_and_the_erasure_waits(world):
    place = world.copied("disk", world.whole)
    with Lake.open(place).held(), pytest.raises(LakeBusy, match="jobs are reading"):
        copy_lake(world.source, place, patience=0)
    assert seen(place) == (SOUND, ASIDE) and not (place / "_staging").exists()
    copy_lake(world.source, place)
    is_copy(place, world.source)


def test_a_delta_log_of_a_copy_is_told_of_the_days_by_the_next_run_too(world, monkeypatch):
    place = world.copied("disk", world.whole)
    publish(Lake.open(place))
    with monkeypatch.context() as patch:
        patch.setattr(publishing, "publish", Mock(side_effect=Killed))
        with pytest.raises(Killed):
            copy_lake(world.source, place)
    assert {one.resolve() for one in published_files(place)} != set((place / "packets").rglob("*.parquet"))
    copy_lake(world.source, place)
    assert {one.resolve() for one in published_files(place)} == set((place / "packets").rglob("*.parquet"))
    is_copy(place, world.source)


def test_what_the_source_cannot_prove_is_not_brought(world):
    store = ObjectLake.open(world.source).store
    [stones, *_] = [name for name in store.keys("_erased") if name.endswith(".jsonl")]
    content = store.get(stones)
    store.put(stones, content.replace(b'"erased_at":7', b'"erased_at":8'))
    place = world.copied("bucket", world.whole)
    with pytest.raises(LakeError, match="its hash does not recompute"):
        copy_lake(world.source, place)
    store.put(stones, content)
    copy_lake(world.source, place)
    is_copy(place, world.source)


def test_a_copy_from_before_an_erasure_that_goes_on_beside_another_shows_nothing_erased(world):
    place = world.new("bucket")

    def stop_at_the_first_batch(done: Copied) -> None:
        raise Killed

    def bring_the_erasures_meanwhile(done: Copied) -> None:
        if done.batches == 1:
            with pytest.raises(Killed):
                copy_lake(world.source, place, progress=stop_at_the_first_batch)

    assert copy_lake(world.whole, place, progress=bring_the_erasures_meanwhile).left == 0
    assert copy_lake(world.source, place).erasures == 0
    is_copy(place, world.source)


def test_a_batch_that_a_killed_copy_had_listed_before_an_erasure_of_its_day_leaves_nothing(in_memory):
    source, place = next(in_memory), next(in_memory)
    put_batch(source, [1, 2])
    put_batch(source, [3, 4])
    put_batch(source, [1], day=DAY + 1)
    with requests() as sent:
        copy_lake(source, next(in_memory))
    with requests(sent.index("put _manifests/0000000001.json")), pytest.raises(Killed):
        copy_lake(source, place)
    assert len(list(ObjectStore.at(place).keys("_objects"))) == 2 and open_lake(place).chain.end.number == 1
    erased(source, sequence(1))

    def kill_after_the_erasure(done: Copied) -> None:
        raise Killed

    with pytest.raises(Killed):
        copy_lake(source, place, progress=kill_after_the_erasure)
    with ObjectLake.write(place, NO_GRACE, copying=True):  # it is interrupted for longer than the grace
        pass
    copy_lake(source, place)
    assert seen(place)[0] == [sequence(n) for n in (2, 3, 4)] + [sequence(1, DAY + 1)]
    for _ in range(2):
        with ObjectLake.replace(place, NO_GRACE):
            pass
    assert seen(place)[0] and unnamed(place) == []
