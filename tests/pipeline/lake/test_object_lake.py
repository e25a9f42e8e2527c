"""A lake in a bucket: killed at every request, written by two at once, distinguished from remains."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from msgspec.structs import replace
from strata_pipeline.errors import LakeBusy, ObjectStoreError
from strata_pipeline.jobs.object_days import compact_day
from strata_pipeline.lake.attempts import look_at_clock
from strata_pipeline.lake.object_lake import ObjectLake
from strata_pipeline.lake.rows import read_places
from strata_pipeline.lake.stores.objects import ObjectStore
from strata_pipeline.lake.witness_checks import surplus_witnesses
from strata_pipeline.lake_format import LakeError

from tests.support.file_faults import Killed
from tests.support.object_lakes import (
    NO_GRACE,
    compacted,
    drafted,
    inline,
    named,
    put_batch,
    requests,
    rows,
    unnamed,
)
from tests.support.object_stores import Asked, ObjectServer
from tests.support.toy_lakes import DAY, witnessed
from tests.support.toy_lakes import place as sequence

FIRST = [sequence(n) for n in (1, 2, 3, 4)]
BOTH = FIRST + [sequence(n) for n in (5, 6, 7, 8)]


def begun(place: str) -> None:
    """Make a lake of one batch, with the remains of a rival that came second."""
    with ObjectLake.write(place) as rival:
        late = drafted(rival, [1, 2], [3])
        put_batch(place, [1, 2, 3], [4])
        with pytest.raises(LakeBusy):
            rival.commit(*late)


def add(place: str) -> None:
    put_batch(place, [5, 6, 7], [8])


def test_killed_at_every_request_nothing_is_lost_or_half_and_the_next_run_goes_on(in_memory):
    place = next(in_memory)
    begun(place)
    assert rows(place) == FIRST and len(unnamed(place)) == 5  # three objects, a listing and a record
    with requests() as sent:
        add(place)
    assert rows(place) == BOTH and unnamed(place) == []
    commit = next(n for n, one in enumerate(sent) if one.startswith("put _manifests"))
    assert sent[commit - 1].startswith("put _objects") and len(sent) > 14

    for last in range(1, len(sent)):
        place = next(in_memory)
        begun(place)
        with requests(last), pytest.raises(Killed):
            add(place)
        assert rows(place) == (BOTH if last > commit else FIRST), sent[last]
        lake = ObjectLake.open(place)
        faults, left = lake.unexpected(lake.days())
        assert faults == [] and (left > 0 or last > 5)
        if last <= commit:
            add(place)
        with ObjectLake.write(place, NO_GRACE):
            pass
        assert rows(place) == BOTH and unnamed(place) == [], sent[last]


def test_witnesses_come_with_their_batch_and_those_of_a_loser_go(in_memory):
    def begin(place: str) -> None:
        with ObjectLake.write(place) as rival:
            manifest, attempt, objects = drafted(rival, [1, 2], [3])
            manifest, text = witnessed(manifest, {FIRST[0]: 7})
            put_batch(place, [1, 2, 3], [4], times={FIRST[1]: 5, FIRST[3]: 6})
            with pytest.raises(LakeBusy):
                rival.commit(manifest, attempt, objects, text)

    def surplus(lake: ObjectLake) -> set[str]:
        names = surplus_witnesses(lake.witnesses.names(), lake.manifests, 0, lake.chain.end.number)
        return set(names) - lake.kept_witnesses(names)

    place = next(in_memory)
    begin(place)
    assert len([name for name in unnamed(place) if name.startswith("_witnesses/")]) == 1
    with requests() as sent:
        put_batch(place, [5, 6, 7], [8], times={BOTH[4]: 9})
    put = next(n for n, one in enumerate(sent) if one.startswith("put _witnesses"))
    commit = next(n for n, one in enumerate(sent) if one.startswith("put _manifests"))
    assert put < commit and any(one.startswith("delete _witnesses/0000000000-") for one in sent)
    for last in range(1, len(sent)):
        place = next(in_memory)
        begin(place)
        with requests(last), pytest.raises(Killed):
            put_batch(place, [5, 6, 7], [8], times={BOTH[4]: 9})
        lake = ObjectLake.open(place)
        assert surplus(lake) == set()
        if last <= commit:
            put_batch(place, [5, 6, 7, 8], times={BOTH[5]: 9})
        with ObjectLake.write(place, NO_GRACE) as lake:
            pass
        assert rows(place) == BOTH and unnamed(place) == [], sent[last]
        times = lake.witnesses.times_of(lake.manifests)
        assert times.sequences.tolist() == [FIRST[1], FIRST[3], BOTH[4 if last > commit else 5]]
    stranger = f"0000000000-{'ab' * 32}.csv"
    lake.store.put(f"_witnesses/{stranger}", b"")
    assert surplus(lake) == {stranger}


SCRIPT = "from tests.support.object_lakes import put_batch; put_batch({!r}, [5, 6, 7], [8])"


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_process_that_is_killed_as_it_commits_has_committed_or_has_not(object_server, place, moment):
    put_batch(place, [1, 2, 3], [4])
    root = Path(__file__).parents[3]
    paths = os.pathsep.join(str(root / folder) for folder in ("client", "pipeline", "."))
    found: list[subprocess.Popen[bytes]] = []

    def kill(asked: Asked) -> str | None:
        if asked.method != "PUT" or "_manifests" not in asked.key:
            return None
        found[0].kill()
        found[0].wait()
        return "503 Nobody listens"

    setattr(object_server, moment, kill)
    environment = os.environ | {"PYTHONPATH": paths}
    found.append(subprocess.Popen([sys.executable, "-c", SCRIPT.format(place)], env=environment))
    assert found[0].wait(60) == -signal.SIGKILL
    object_server.behave()
    assert rows(place) == (FIRST if moment == "before" else BOTH)
    if moment == "before":
        add(place)
    assert rows(place) == BOTH


def test_of_two_writers_one_wins_and_the_other_says_so(object_server: ObjectServer, place):
    put_batch(place, [1, 2, 3], [4])
    met: list[str] = []

    def overtake(asked: Asked) -> None:
        if asked.is_conditional and asked.key.endswith("_manifests/0000000001.json") and not met:
            met.append(asked.key)
            add(place)  # exactly the same rows, in the same second

    object_server.before = overtake
    with pytest.raises(LakeBusy, match=r"another archive has put manifest 1 .* nothing is lost or"):
        add(place)
    assert met and rows(place) == BOTH
    assert len(unnamed(place)) == 5
    put_batch(place, [9])
    assert rows(place) == [*BOTH, sequence(9)] and unnamed(place) == []


def test_many_batches_by_two_writers_at_once_are_each_there_once(place):
    lost: list[int] = []

    def write() -> None:
        while True:
            try:
                with ObjectLake.write(place) as lake:
                    while lake.chain.end.number < 6:
                        lake.commit(*drafted(lake, [lake.chain.end.number + 1]))
                    return
            except LakeBusy:
                lost.append(1)

    writers = [threading.Thread(target=write) for _ in range(2)]
    for one in writers:
        one.start()
    for one in writers:
        one.join()
    assert rows(place) == [sequence(n) for n in range(1, 7)]
    lake = ObjectLake.open(place)
    assert lake.unexpected(lake.days())[0] == []


def test_what_an_attempt_has_left_stays_while_it_may_commit_and_for_the_grace_period(place):
    put_batch(place, [1])
    with ObjectLake.write(place) as slow:
        late = drafted(slow, [2, 3])
        with ObjectLake.write(place, NO_GRACE) as other:
            assert len(other.left.kept) == 2 and other.left.deleted == []  # it may still commit
        slow.commit(*late)
        early = drafted(slow, [4])
        put_batch(place, [4, 5])
        with pytest.raises(LakeBusy):
            slow.commit(*early)
    with ObjectLake.write(place) as next_day:
        assert len(next_day.left.kept) == 2 and next_day.left.deleted == []  # over, but less than a day ago
    with ObjectLake.write(place, NO_GRACE) as later:
        assert later.left.kept == [] and len(later.left.deleted) == 2
    assert rows(place) == [sequence(n) for n in (1, 2, 3, 4, 5)] and unnamed(place) == []


def test_what_an_attempt_puts_after_the_grace_period_is_known_and_goes_too(in_memory):
    place = next(in_memory)
    with ObjectLake.write(place) as lake:
        manifest, attempt, objects = drafted(lake, [1, 2])
        put_batch(place, [1, 2, 3])
        put_batch(place, [4])  # no grace is left: what the attempt has put is deleted
        objects = [
            replace(one, name=attempt.object_name("packets", "POST")) for one in objects
        ]  # but its process was only suspended
        for one in objects:
            lake.store.put(one.name, b"PAR1")
        with pytest.raises(LakeBusy):
            lake.commit(manifest, attempt, objects)
    now = ObjectLake.open(place)
    assert now.unexpected(now.days()) == ([], 2)
    put_batch(place, [5])
    assert unnamed(place) == []


def test_what_is_not_named_like_an_attempt_is_told_and_never_deleted(place):
    begun(place)
    lake = ObjectLake.open(place)
    [theirs, *_] = sorted(named(lake))
    planted = [
        theirs.replace(".parquet", "-copy.parquet"),
        "packets/day=2024-10-04/batch=1-9/kind=POST/part.parquet",
        "packets/day=2031-01-01/stray",
        "packets/part.parquet",
        "quarantine/part.parquet",
    ]
    for name in planted:
        lake.store.put(name, b"PAR1")
    faults, left = lake.unexpected(lake.days())
    assert {(fault.reason, fault.file) for fault in faults} == {
        ("surplus", lake.store.url(name)) for name in planted
    }
    assert left == 3
    put_batch(place, [5])
    assert unnamed(place) == sorted(planted)


def test_empty_objects_that_tools_put_for_folders_are_no_records_and_no_faults(object_server, place):
    begun(place)
    prefix = ObjectStore.at(place).prefix
    for name in ("packets", "_manifests", "_objects", "_attempts", "_generations", "_days", "_erased"):
        object_server.put_folder(f"/{prefix}/{name}/")
    put_batch(place, [5, 6, 7], [8])
    put_batch(place, [1], day=DAY + 1)
    assert compacted(place)
    lake = ObjectLake.open(place)
    assert lake.unexpected(lake.days())[0] == []


def test_a_chain_that_lost_its_end_or_its_listings_stops_writing(place):
    put_batch(place, [1])
    put_batch(place, [2])
    store = ObjectLake.open(place).store
    last = store.get("_manifests/0000000001.json")
    store.delete(["_manifests/0000000001.json"])
    with pytest.raises(LakeError, match=r"_objects/0000000001-.* manifests are missing"):
        put_batch(place, [3])
    store.put("_manifests/0000000001.json", last)
    [listing] = [name for name in store.keys("_objects") if "0000000001" in name]
    content = store.get(listing)
    store.put(listing, content.replace(b"kind=POST", b"kind=NOTE"))
    with pytest.raises(LakeError, match="hash does not recompute"):
        put_batch(place, [3])
    store.delete([listing])
    with pytest.raises(LakeError, match="is missing"):
        put_batch(place, [3])
    store.put(listing, content)
    [lost] = [name for name in store.keys("packets") if f"batch={sequence(2)}" in name]
    content = store.get(lost)
    store.delete([lost])
    with pytest.raises(LakeError, match="belongs to the lake's last batch"):
        put_batch(place, [3])
    store.put(lost, content)
    put_batch(place, [3])
    assert rows(place) == [sequence(n) for n in (1, 2, 3)]


def test_finished_days_get_summaries_by_which_the_lake_is_opened(place):
    put_batch(place, [1])
    put_batch(place, [2])
    put_batch(place, [1], day=DAY + 1)
    put_batch(place, [2], day=DAY + 1)
    lake = ObjectLake.open(place)
    assert [summary.batches for summary in lake.chain.sealed] == [2] and lake.chain.summary_faults() == []
    whole = ObjectLake.open(place)
    whole.chain.load(whole=True)
    assert whole.tip == lake.tip and whole.manifests == lake.manifests and lake.days() == [DAY, DAY + 1]
    lake.store.delete(["_manifests/0000000002.json"])
    with pytest.raises(LakeError, match="manifest 2 cannot be used"):
        ObjectLake.open(place)


def test_a_store_that_ignores_conditions_or_lists_late_is_refused_before_it_is_used(object_server, place):
    object_server.deaf = True
    with pytest.raises(ObjectStoreError, match="ignores If-None-Match"):
        put_batch(place, [1])
    object_server.behave()
    late = ObjectLake(object_server.store(place.rpartition("/")[2]))
    with pytest.raises(ObjectStoreError, match="does not list an object that it has just taken"):
        look_at_clock(late.store, "_attempts/probe-of-this-moment")
    with pytest.raises(LakeError, match="there is no lake"):
        ObjectLake.open(place)
    assert list(object_server.store(place.rpartition("/")[2]).keys("")) == []


def test_the_ends_of_finished_days_are_asked_for_together(object_server, place):
    for day in range(DAY, DAY + 3):
        put_batch(place, [1], day=day)
    together = threading.Barrier(2)  # each of the two waits for the other

    def waiting(asked: Asked) -> str | None:
        if asked.method == "HEAD":
            together.wait(60)
        return None

    object_server.before = waiting
    assert len(ObjectLake.open(place).chain.sealed) == 2


def test_what_is_seldom_is_found_without_the_manifests_of_days_that_lack_it(in_memory, monkeypatch):
    where, read = next(in_memory), _reading(monkeypatch)
    for day, ordinals in enumerate([[1], [1, 2], [1], [1, 2], [1]]):
        for batch in range(3):
            put_batch(where, [one + 9 * batch for one in ordinals], [5 + 9 * batch], day=DAY + day)
    assert compacted(where, DAY + 1, part_bytes=2**20)
    lake = ObjectLake.open(where)
    read.clear()
    found = lake.objects_of_kinds(["NOTE", "OTHER"])
    # Three manifests and three listings of the day that has several, the listing of the compacted one.
    assert len(read) == 7 and sum(name.startswith("_days/") for name in read) == 1
    every = lake.objects(lake.manifests, "packets")
    whole = [one for one in every if "/kind=NOTE/" in one.name or "/kind=OTHER/" in one.name]
    assert sorted(one.name for one in found) == sorted(one.name for one in whole) and len(found) == 4
    by_day = lake.objects_of_days(None, "packets", kinds=["NOTE", "OTHER"])
    assert sorted(by_day, key=str) == sorted(whole, key=str)
    lake = ObjectLake.open(where)
    read.clear()
    with lake.quarantine_at_hand(DAY + 1) as layout:
        aside = read_places(layout.folders_of_day(layout.quarantine, DAY + 1))["sequence"].to_pylist()
    assert aside == [sequence(n, DAY + 1) for n in (5, 14, 23)]
    assert len(read) == 2, "the day's listing and one object"


def test_a_day_is_compacted_with_each_of_its_manifests_read_once(in_memory, monkeypatch):
    where, read = next(in_memory), _reading(monkeypatch)
    for batch in range(1, 21):
        put_batch(where, [2 * batch])
    put_batch(where, [1], day=DAY + 1)
    with ObjectLake.replace(where) as lake:
        read.clear()
        assert compact_day(lake, DAY, inline, 2**20) == (20, 1)
    # Each manifest, its listing and its object, and the result made from them.
    assert len(read) == 3 * 20 + 1


def _reading(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the objects read from now on."""
    read, get = list[str](), ObjectStore.get

    def told(store: ObjectStore, name: str, most: int | None = None) -> bytes:
        read.append(name)
        return get(store, name, most)

    monkeypatch.setattr(ObjectStore, "get", told)
    return read
