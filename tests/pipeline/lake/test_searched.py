"""What `erase` has searched for the same tombstones is not read again, and everything else is. No Spark."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
from blake3 import blake3
from strata_pipeline.errors import LakeError
from strata_pipeline.jobs.elsewhere import ErasedIds, lines_elsewhere, recorded
from strata_pipeline.jobs.failures import Refused
from strata_pipeline.jobs.object_days import compact_day, erase_from_day, still_there
from strata_pipeline.lake.generations import replace_day, staged_day
from strata_pipeline.lake.lake import Lake
from strata_pipeline.lake.object_lake import ObjectLake
from strata_pipeline.lake.places import AnyLake, open_lake
from strata_pipeline.lake.stores.limits import NOTE_BYTES
from strata_pipeline.lake.stores.objects import ObjectStore
from strata_pipeline.lake_format import read_tombstone_line
from strata_pipeline.log.database import LogTombstone

from tests.support import object_lakes, toy_lakes
from tests.support.file_faults import Killed, counted
from tests.support.object_lakes import NO_GRACE, inline, put_batch
from tests.support.toy_lakes import DAY, place, write_batch

NOTE = "_searched/erased.json"


class OnDisk:
    """A lake in a folder."""

    def __init__(self, path: Path) -> None:
        self.place = str(path)

    def write(self, *ordinals: int, day: int) -> None:
        write_batch(Path(self.place), ordinals, day=day)

    def get(self, name: str) -> bytes:
        return Path(self.place, name).read_bytes()

    def put(self, name: str, content: bytes) -> None:
        Path(self.place, name).write_bytes(content)

    def delete(self, name: str) -> None:
        Path(self.place, name).unlink()

    def compact(self, day: int) -> None:
        with Lake.replace(self.place) as lake:
            toy_lakes.compacted(lake, day, staged := staged_day(lake, day))
            replace_day(lake, day, staged, 0)

    def files(self, day: int) -> list[str]:
        folder = Lake.open(self.place).day_folder(day)
        return sorted(str(one.relative_to(self.place)) for one in folder.rglob("*.parquet"))


class InBucket:
    """A lake in a bucket."""

    def __init__(self, place: str) -> None:
        self.place, store = place, ObjectStore.at(place)
        self.get, self.put = store.get, store.put

    def write(self, *ordinals: int, day: int) -> None:
        put_batch(self.place, ordinals, day=day)

    def delete(self, name: str) -> None:
        ObjectStore.at(self.place).delete([name])

    def compact(self, day: int) -> None:
        object_lakes.compacted(self.place, day)

    def files(self, day: int) -> list[str]:
        return sorted(one.name for one in ObjectLake.open(self.place).objects_of_day(day, "packets"))


Made = OnDisk | InBucket


@pytest.fixture(params=["disk", "bucket"])
def made(request, in_memory, tmp_path) -> Made:
    """A lake of three days."""
    lake = OnDisk(tmp_path) if request.param == "disk" else InBucket(next(in_memory))
    lake.write(1, 2, 3, day=DAY)
    lake.write(6, 7, day=DAY)
    lake.write(1, 2, day=DAY + 1)
    lake.write(1, day=DAY + 2)
    return lake


def tombstone(of: int, at: int) -> LogTombstone:
    """A tombstone of the packet that toy lakes have at `of`, which the log has had at `at`."""
    [(_, text)] = object_lakes.tombstones(of).values()
    return LogTombstone(at, blake3(b"%d" % of).digest(), text)


HERE = tombstone(place(2), place(2))
"""Its packet is nowhere but at its place."""
NOWHERE = place(9, DAY + 5)
"""A place beyond the end."""


def searched(lake: str | Path | AnyLake, *tombstones: LogTombstone) -> list[int]:
    """Search a lake; return the days that were read, counted from the first."""
    days: list[int] = []
    real, refused = ErasedIds.elsewhere, Refused(LakeError)

    def elsewhere(ids: ErasedIds, lake: AnyLake, day: int) -> Any:
        days.append(day - DAY)
        return real(ids, lake, day)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ErasedIds, "elsewhere", elsewhere)
        opened = open_lake(lake) if isinstance(lake, str | Path) else lake
        _, read = lines_elsewhere(opened, ErasedIds(tombstones or [HERE]), refused)
    refused.tell("")
    assert read == len(days)
    return days


def found(lake: str | Path, *tombstones: LogTombstone) -> list[int]:
    """The places that a search finds."""
    return [at for at, _ in lines_elsewhere(open_lake(lake), ErasedIds(tombstones), Refused())[0]]


def test_what_was_searched_for_the_same_tombstones_is_not_read_again(made):
    assert searched(made.place) == [0, 1, 2]
    assert searched(made.place) == []
    made.write(4, day=DAY + 2)
    made.write(1, day=DAY + 3)
    assert searched(made.place) == [2, 3]
    assert searched(made.place) == []


def test_for_other_tombstones_all_is_read(made):
    assert found(made.place, HERE) == []
    later = tombstone(place(1, DAY + 1), NOWHERE)
    assert found(made.place, HERE, later) == [place(1, DAY + 1)]
    assert searched(made.place, HERE, later) == [1], "it was not erased yet"
    assert found(made.place, HERE, later) == [place(1, DAY + 1)]
    assert searched(made.place) == [0, 1, 2], "fewer may be those of an older backup of the log"
    # The same packet, of which the log says another place now.
    assert found(made.place, HERE._replace(sequence=place(9))) == [place(2)]


def erase(where: str, *tombstones: LogTombstone) -> None:
    """Erase from a bucket what a search finds."""
    with ObjectLake.replace(where) as lake:
        for at, line in lines_elsewhere(lake, ErasedIds(tombstones), Refused())[0]:
            asked = still_there(lake, at >> 32, {at: (read_tombstone_line(line)[0], line)})
            if asked.found and not lake.may_grow(at >> 32):
                erase_from_day(lake, at >> 32, asked.found, inline)


def test_a_day_from_which_something_was_erased_is_read_once_more(in_memory):
    put_batch(where := next(in_memory), [1, 2, 3])
    put_batch(where, [1], day=DAY + 1)
    elsewhere = tombstone(place(2), NOWHERE)
    erase(where, elsewhere)
    assert searched(where, elsewhere) == [0], "its empty row is found, and recorded"
    assert searched(where, elsewhere) == []
    with ObjectLake.replace(where, NO_GRACE):
        pass  # the replaced objects are deleted
    assert searched(where, elsewhere) == [0] and searched(where, elsewhere) == []


def test_a_compacted_day_is_read_again(made):
    searched(made.place)
    made.compact(DAY)
    assert searched(made.place) == [0]
    assert searched(made.place) == []


def test_a_generation_that_comes_during_a_search_was_not_searched(in_memory):
    put_batch(where := next(in_memory), [1, 2])
    put_batch(where, [3])
    put_batch(where, [1], day=DAY + 1)
    for again in (False, True):
        before = ObjectLake.open(where)
        with ObjectLake.replace(where) as lake:
            assert compact_day(lake, DAY, inline, 1_000, again=again)
        assert 0 in searched(before), "the objects of before, beside those that count now"
        assert searched(where) == [0]


def test_rows_whose_manifest_comes_later_are_read_then(made):
    made.write(5, day=DAY + 2)
    last = "_manifests/0000000004.json"
    text = made.get(last)
    made.delete(last)
    elsewhere = tombstone(place(5, DAY + 2), NOWHERE)
    assert found(made.place, elsewhere) == [], "the lake does not reach there"
    made.put(last, text)
    assert found(made.place, elsewhere) == [place(5, DAY + 2)]


def test_files_that_were_damaged_or_away_are_read_when_they_are_back(made):
    name = made.files(DAY + 1)[0]
    content = made.get(name)
    for damaged in (content[::-1], content[:-9], b"torn"):
        made.put(name, damaged)
        with pytest.raises(LakeError, match="2024-10-05 has a file that cannot be read"):
            searched(made.place)
    made.put(name, content)
    assert searched(made.place) == [1]
    made.put(name, content)
    assert searched(made.place) == [1], "it may be another with the same name"
    assert searched(made.place) == []


def test_files_that_lack_or_come_from_elsewhere_are_seen(tmp_path):
    lake = OnDisk(tmp_path)
    lake.write(1, 2, day=DAY)
    lake.write(1, day=DAY + 1)
    path = tmp_path / lake.files(DAY)[0]
    aside = path.rename(tmp_path / "aside")
    assert searched(tmp_path) == [0, 1], "a search cannot tell that rows are missing"
    aside.rename(path)
    assert searched(tmp_path) == [0]
    shutil.copy2(path, path.with_name("part-9.parquet"))
    assert searched(tmp_path) == [0]
    # Another file in the place of one, with the same size and time.
    told = path.stat()
    shutil.copyfile(path, aside)
    os.utime(aside, ns=(told.st_atime_ns, told.st_mtime_ns))
    aside.replace(path)
    assert path.stat().st_mtime_ns == told.st_mtime_ns and searched(tmp_path) == [0]


def test_a_lake_that_was_copied_is_searched_anew_and_one_that_was_moved_is_not(tmp_path):
    old, new, copy = (tmp_path / name for name in ("old", "new", "copy"))
    write_batch(old, [1, 2])
    write_batch(old, [1], day=DAY + 1)
    assert searched(old) == [0, 1]
    old.rename(new)
    assert searched(new) == []
    shutil.copytree(new, copy)  # with the note, and with the times of files
    assert searched(copy) == [0, 1]


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[:-1],
        lambda text: b"",
        lambda text: b"[1]",
        lambda text: text.replace(b'"format":1', b'"format":2'),
        lambda text: text.replace(b'"format":1', b'"format":1,"more":1'),
        lambda text: text.replace(b"2024-10-04", b"2024-10-09"),
        lambda text: text.replace(b'-04":"', b'-04":"0'),
        lambda text: text.replace(b'-04":"', b'-04":1,"-05":"'),
        lambda text: text + b" " * NOTE_BYTES,
    ],
)
def test_a_note_that_is_damaged_or_too_large_is_not_believed(made, damage):
    searched(made.place)
    made.put(NOTE, damage(made.get(NOTE)))
    assert 0 in searched(made.place)
    assert searched(made.place) == []


def test_the_note_is_disposable_and_tells_only_hashes(made):
    searched(made.place)
    note = msgspec.json.decode(made.get(NOTE))
    assert note.keys() == {"tombstones", "days", "format"} and len(note["days"]) == 3
    assert {len(one) for one in (note["tombstones"], *note["days"].values())} == {64}
    lake = open_lake(made.place)
    assert lake.unexpected(lake.days()) == ([], 0)
    made.delete(NOTE)
    assert searched(made.place) == [0, 1, 2]


def test_a_note_that_cannot_be_written_keeps_nobody_from_erasing(tmp_path):
    write_batch(tmp_path, [1, 2])
    (tmp_path / "_searched").touch()
    assert searched(tmp_path) == searched(tmp_path) == [0]


def test_a_search_that_is_cut_off_is_noted_as_far_as_it_came(made, monkeypatch):
    real = ErasedIds.elsewhere

    def cut(ids: ErasedIds, lake: AnyLake, day: int) -> Any:
        if day == DAY + 1:
            raise KeyboardInterrupt
        return real(ids, lake, day)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(ErasedIds, "elsewhere", cut)
        found(made.place, HERE)
    assert searched(made.place) == [1, 2]


def test_a_run_killed_while_it_writes_the_note_leaves_nothing_behind_the_next_one(tmp_path, monkeypatch):
    def others(step: int) -> list[LogTombstone]:
        """Tombstones that no run before has searched for."""
        return [HERE, tombstone(place(1), NOWHERE + step)]

    write_batch(tmp_path, [1, 2])
    assert searched(tmp_path) == [0]
    note = tmp_path / NOTE
    names = ("_erased.json.old", "_erased.json", "erased.json.7", "_more.json.7")
    kept = {note, *map(note.with_name, names)}
    for path in kept - {note}:
        path.touch()
    with counted() as calls:
        assert searched(tmp_path, *others(0)) == [0]
    drafts = 0
    for last in range(len(calls.names)):
        with monkeypatch.context() as patch, counted(last), pytest.raises(Killed):
            patch.setattr(os, "getpid", lambda: 1)  # that of another process
            searched(tmp_path, *others(1 + last))
        drafts += len({*note.parent.iterdir()} - kept)
        assert searched(tmp_path) == [0] and searched(tmp_path) == []
        assert {*note.parent.iterdir()} == kept
    assert drafts > 2


@pytest.mark.parametrize("seed", range(3))
def test_whatever_happens_to_a_lake_a_search_finds_what_one_without_a_note_finds(made, seed):
    chance = random.Random(seed)
    gone: dict[str, bytes] = {}
    asked = [HERE]
    for step in range(25):
        day = DAY + chance.randrange(3)
        names = made.files(day)
        match chance.randrange(7):
            case 0:
                made.write(10 + step, day=DAY + 2)
            case 1 if not gone:
                made.compact(day if day < DAY + 2 else DAY)
            case 2 if gone:
                made.put(*gone.popitem())
            case 3 if names and isinstance(made, OnDisk):
                gone[names[0]] = made.get(names[0])
                made.delete(names[0])
            case 4 if names:
                made.put(names[-1], made.get(names[-1]))
            case 5:
                asked.append(tombstone(place(chance.randrange(1, 8), day), NOWHERE))
            case 6 if isinstance(made, InBucket):
                erase(made.place, *asked)
        opened = open_lake(made.place)
        known = recorded(opened, opened.erasures.records)
        ids = ErasedIds(asked)
        noted = {line for line in lines_elsewhere(opened, ids, Refused())[0] if line[1] not in known}
        whole = {line for day in opened.days() for line in ids.elsewhere(opened, day) if line[1] not in known}
        assert noted == whole
