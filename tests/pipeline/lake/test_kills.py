"""A writer killed at every system call: no file is lost, and no reader sees half a batch or half a day."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from strata_pipeline.lake.generations import replace_day, staged_day
from strata_pipeline.lake.lake import Lake

from tests.support.file_faults import Killed, counted
from tests.support.toy_lakes import (
    DAY,
    compacted,
    faults,
    newest_files,
    place,
    read,
    rows_in,
    staged,
    write_batch,
)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A lake of three batches in two days, with a quarantined row."""
    folder = tmp_path_factory.mktemp("toy") / "lake"
    write_batch(folder, [1, 2, 3], [4])
    write_batch(folder, [5, 6])
    write_batch(folder, [1, 2, 3], day=DAY + 1)
    return folder


BEFORE = [place(n) for n in (1, 2, 3, 5, 6)] + [place(n, DAY + 1) for n in (1, 2, 3)]
Tree = frozenset[tuple[str, int]]


def prepare_commit(path: Path) -> Callable[[], object]:
    # A killed writer loses the lock that it holds: so the lock is not part of the act.
    lake = Lake.open(path)
    made = staged(lake, [4, 5, 6], [7], day=DAY + 1)
    return lambda: lake.commit(*made)


def prepare_compaction(path: Path) -> Callable[[], object]:
    lake = Lake.open(path)
    target = staged_day(lake, DAY)
    compacted(lake, DAY, target)
    return lambda: replace_day(lake, DAY, target, 0)


def recover(path: Path) -> None:
    with Lake.write(path):
        pass


@pytest.mark.parametrize(
    ("prepare", "at_once"),
    [(prepare_commit, True), (prepare_compaction, True), (prepare_compaction, False)],
)
def test_killed_at_every_call_nothing_is_lost_and_nothing_is_half(original, tmp_path, prepare, at_once):
    whole = shutil.copytree(original, tmp_path / "whole", symlinks=True)
    act = prepare(whole)
    with counted(at_once=at_once) as calls:
        act()
    steps = len(calls.names)
    assert steps > 10 and {
        "rename" if not at_once or prepare is prepare_commit else "exchange",
        "fsync",
    } <= set(calls.names)
    after = read(whole), read(whole, "quarantine")
    assert faults(whole) == []

    unseen = 0
    known: set[Tree] = set()
    for last in range(steps):
        path = shutil.copytree(original, tmp_path / f"at-{last}", symlinks=True)
        act = prepare(path)
        opened = newest_files(path)
        with counted(last, at_once=at_once), pytest.raises(Killed):
            act()
        if is_known(path, known):
            continue
        # Who reads by the links finds a day even between two renames, and can open what was found before.
        assert rows_in(newest_files(path)) in (BEFORE, after[0]), (last, calls.names[last])
        assert rows_in(opened) == BEFORE, (last, calls.names[last])
        seen = read(path)
        if prepare is prepare_compaction and not at_once and seen == [n for n in BEFORE if n > place(6)]:
            unseen += 1  # between two renames the whole day is missing, not a part of it
        else:
            assert seen in (BEFORE, after[0]), (last, calls.names[last])
        kill_recovery_everywhere(path, tmp_path / "again", after, at_once, known)
        recover(path)
        assert read(path) in (BEFORE, after[0]) and faults(path) == []
        assert rows_in(opened) == BEFORE and rows_in(newest_files(path)) == read(path)
        prepare_again(path, prepare)
        assert (read(path), read(path, "quarantine")) == after
        assert rows_in(opened) == BEFORE and rows_in(newest_files(path)) == after[0]
        assert faults(path) == [] and not (path / "_staging").exists()
        assert not (path / "_aside").exists()
        shutil.rmtree(path)
    assert unseen <= (0 if at_once else 3)


def prepare_again(path: Path, prepare: Callable[[Path], Callable[[], object]]) -> None:
    lake = Lake.open(path)
    is_done = len(lake.manifests) > 3 if prepare is prepare_commit else len(lake.batches(DAY)) == 1
    if not is_done:
        prepare(path)()


def is_known(path: Path, known: set[Tree]) -> bool:
    """Whether a lake equals one that was checked before; if so, it is removed. Retired days are named by the
    clock."""
    found = frozenset(
        (
            re.sub(r"(_retired/[^.]+\.|generations/[^/]+/)[1-9]\d+", r"\1", str(file.relative_to(path))),
            file.lstat().st_size,
        )
        for file in path.rglob("*")
        if "lock" not in file.name
    )
    if found in known:
        shutil.rmtree(path)
        return True
    known.add(found)
    return False


def kill_recovery_everywhere(
    path: Path, copy: Path, after: tuple[list[int], list[int]], at_once: bool, known: set[Tree]
) -> None:
    """Kill the next start as well, at each of its calls."""
    last = 0
    while True:
        shutil.copytree(path, copy, symlinks=True)
        with counted(last, at_once=at_once):
            try:
                recover(copy)
                killed = False
            except Killed:
                killed = True
        if killed and is_known(copy, known):
            last += 1
            continue
        seen = read(copy)
        assert seen in (BEFORE, after[0], [n for n in BEFORE if n > place(6)])
        recover(copy)
        assert read(copy) in (BEFORE, after[0]) and faults(copy) == []
        shutil.rmtree(copy)
        if not killed:
            return
        last += 1
