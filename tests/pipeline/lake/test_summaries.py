"""Summaries of finished days: they open a lake, need not be trusted, and nothing depends on them."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import msgspec
import pytest
from strata_pipeline.jobs.audit import Audited, _check_names
from strata_pipeline.lake import chain as chain_module
from strata_pipeline.lake.chain import manifest_name
from strata_pipeline.lake.lake import Lake
from strata_pipeline.lake_format import (
    GENESIS,
    LakeError,
    Manifest,
    decode,
    decode_summary,
    encode,
    encode_summary,
    manifests_of_day,
    seal,
    summarise,
)
from strata_pipeline.lake_format.sealing import with_hash

from tests.support.file_faults import Killed, counted
from tests.support.toy_lakes import DAY, faults, staged, write_batch


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three days of three batches, and a batch of a fourth."""
    folder = tmp_path_factory.mktemp("toy") / "lake"
    for day in range(DAY, DAY + 3):
        for first in (1, 4, 7):
            write_batch(folder, [first, first + 1], [first + 2], day=day)
    write_batch(folder, [1], day=DAY + 3)
    return folder


@pytest.fixture
def lake(original: Path, tmp_path: Path) -> Path:
    """The same with summaries."""
    path = shutil.copytree(original, tmp_path / "lake")
    with Lake.replace(path) as opened:
        assert opened.chain.seal() == 3 and opened.chain.seal() == 0
    return path


def summaries(path: Path) -> list[Path]:
    return sorted((path / "_manifests" / "days").iterdir())


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the manifests that are read."""
    names: list[str] = []

    def recorded(text: bytes, name: str) -> Manifest:
        names.append(name)
        return decode(text, name)

    monkeypatch.setattr(chain_module, "decode", recorded)
    return names


def test_a_writer_that_goes_on_holds_no_manifests_of_days_that_are_over(lake, read):
    with Lake.write(lake) as opened:
        for day in (DAY + 3, DAY + 4, DAY + 5):
            for first in (2, 3):
                opened.commit(*staged(opened, [first], day=day))
        opened.commit(*staged(opened, [4], day=DAY + 5))
        assert len(opened.chain.sealed) == 5 and len(summaries(lake)) == 3
        read.clear()
        assert len(opened.chain.of_day(DAY + 5)) == 3 and read == []
        assert len(opened.chain.of_day(DAY + 4)) == 2 and len(read) == 2
        assert (again := Lake.open(lake)).tip == opened.tip and again.days() == opened.days()
        assert again.manifests == opened.manifests
        assert list(map(again.mark_of, again.days())) == list(map(opened.mark_of, opened.days()))
        # A compaction stores what it has in memory.
        assert again.chain.seal() == 2 and again.chain.sealed == opened.chain.sealed
        assert Lake.open(lake).chain.sealed == opened.chain.sealed
    assert faults(lake) == []


def test_a_lake_is_opened_by_summaries_and_says_the_same(original, lake, read):
    opened = Lake.open(lake)
    assert read == [manifest_name(9)]
    before = Lake.open(original)
    assert (opened.tip, opened.reached, opened.days()) == (before.tip, before.reached, before.days())
    assert [opened.chain.rows_of(day) for day in opened.days()] == [6, 6, 6, 1]
    read.clear()
    assert opened.chain.of_day(DAY + 1) == before.manifests[3:6] and len(read) == 3
    assert list(opened.chain.backwards()) == before.manifests[::-1]
    assert opened.manifests == before.manifests and faults(lake) == []
    read.clear()
    again = Lake.open(lake)
    for tip in (before.manifests[8].hash, "8"):
        assert again.chain.after(tip) == before.manifests[9:] and len(read) <= 4 + 3
        read.clear()
    assert [one.number for one in again.chain.after(before.manifests[1].hash)] == [2, 3, 4, 5, 6, 7, 8, 9]
    assert again.chain.after(GENESIS) == before.manifests


def test_it_is_written_on_and_the_next_days_are_sealed(lake, read):
    write_batch(lake, [2, 3], day=DAY + 3)
    manifest = write_batch(lake, [1], day=DAY + 4)
    assert manifest.number == 11 and len(summaries(lake)) == 3
    with Lake.replace(lake) as opened:
        assert opened.chain.seal() == 1
    read.clear()
    opened = Lake.open(lake)
    assert read == [manifest_name(11)] and opened.tip == manifest.hash and faults(lake) == []
    opened.chain.load(whole=True)
    assert opened.tip == manifest.hash and opened.chain.summary_faults() == []


def test_a_reader_that_does_not_know_summaries_finds_every_manifest(original, lake):
    names = [path.name for path in sorted((lake / "_manifests").glob("*.json"))]
    assert names == [path.name for path in sorted((original / "_manifests").glob("*.json"))]
    assert {path.name for path in (lake / "_manifests").iterdir()} == {*names, "days"}
    one = json.loads(summaries(lake)[1].read_text())
    assert (one["day"], one["first"], one["batches"], one["quarantined"]) == (DAY + 1, 3, 3, 3)


def test_summaries_that_do_not_fit_are_left_aside_and_told_of_and_made_again(original, lake):
    whole = Lake.open(original)
    forged = summarise(
        whole.manifests[3:5], decode_summary(summaries(lake)[0].read_bytes(), "2024-10-04.json").hash
    )
    no_day = with_hash(msgspec.structs.replace(forged, day=2**40))
    for harm in (
        lambda path: path.write_bytes(path.read_bytes().replace(b'"packets": 6', b'"packets": 7')),
        lambda path: path.write_bytes(encode_summary(no_day)),
        lambda path: path.write_bytes(b"{"),
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(encode_summary(forged)),
        lambda path: path.write_bytes(summaries(lake)[0].read_bytes()),
        lambda path: path.unlink(),
    ):
        path = summaries(lake)[1]
        harm(path)
        opened = Lake.open(lake)
        assert (opened.tip, opened.manifests) == (whole.tip, whole.manifests)
        assert opened.chain.sealed == []
        told = opened.chain.summary_faults()
        assert len(told) == 1 and "compact writes it again" in told[0][1]
        opened.chain.prove()
        assert opened.chain.summary_faults() == told and len(opened.chain.sealed) == 3
        with Lake.replace(lake) as again:
            assert again.chain.seal() == 3
        assert len(Lake.open(lake).chain.sealed) == 3


def test_an_audit_names_a_summary_that_is_not_what_the_manifests_say(lake):
    path = summaries(lake)[2]
    path.write_bytes(path.read_bytes().replace(b'"packets": 6', b'"packets": 5'))
    audited = Audited()
    _check_names(Lake.open(lake), [], audited)
    assert audited.counts == {"file: summary": 1} and audited.findings[0].file == str(path)


def test_a_chain_is_proven_a_day_at_a_time_whatever_its_summaries_say(original, lake, read):
    whole = Lake.open(original)
    for path in (lake, original):
        opened = Lake.open(path)
        read.clear()
        opened.chain.prove()
        assert len([name for name in read if name[0].isdigit()]) == 10 and opened.tip == whole.tip
        assert [one.batches for one in opened.chain.sealed] == [3, 3, 3]
        assert opened.chain.sealed == Lake.open(lake).chain.sealed
        assert opened.days() == whole.days() and opened.chain.summary_faults() == []
        read.clear()
        assert [opened.chain.of_day(day) for day in whole.days()] == [
            manifests_of_day(whole.manifests, day) for day in whole.days()
        ]
        assert len(read) == 9  # the last day's manifests are at hand
        told = [(opened.rows_of(day), opened.chain.quarantined_of(day)) for day in whole.days()]
        assert told == [(whole.rows_of(day), whole.chain.quarantined_of(day)) for day in whole.days()]
    (lake / "_manifests" / manifest_name(4)).unlink()
    with pytest.raises(LakeError, match="manifest 4 cannot be used: it is missing"):
        Lake(lake).chain.prove()


def test_a_forged_day_is_found_when_it_is_read_and_by_a_whole_reading(lake):
    # A batch of a sealed day and its summary, changed so that each is valid by itself.
    opened = Lake.open(lake)
    manifests = opened.chain.of_day(DAY)
    other = seal(msgspec.structs.replace(manifests[1], written_at=7))
    path = lake / "_manifests" / manifest_name(1)
    path.write_bytes(encode(other))
    again = Lake.open(lake)
    assert again.tip == opened.tip
    with pytest.raises(LakeError, match=r"manifest 2 cannot be used: it does not follow manifest 1"):
        again.chain.of_day(DAY)
    with pytest.raises(LakeError, match="does not follow manifest 1"):
        again.chain.load(whole=True)
    with pytest.raises(LakeError, match="does not follow manifest 1"):
        again.chain.prove()
    path.unlink()
    with pytest.raises(LakeError, match="cannot be read"):
        again.chain.of_day(DAY)


@pytest.mark.parametrize("left", [9, 8, 4])
def test_a_chain_that_lost_its_end_stops_writing_whatever_the_summaries_say(lake, left):
    for number in range(left, 10):
        (lake / "_manifests" / manifest_name(number)).unlink()
    assert Lake.open(lake).chain.end.number == left
    with pytest.raises(LakeError, match=r"behind it .*manifests are missing"), Lake.write(lake):
        pass
    assert len(list((lake / "_manifests").glob("*.json"))) == left


def test_a_hole_after_the_sealed_days_is_told(lake):
    for ordinal in range(2, 6):
        write_batch(lake, [ordinal], day=DAY + 3)
    (lake / "_manifests" / manifest_name(11)).unlink()
    with pytest.raises(
        LakeError, match="manifest 11 cannot be used: it is missing, and those after it prove"
    ):
        Lake.open(lake)


def test_a_kill_while_days_are_sealed_leaves_a_lake_that_opens(original, tmp_path):
    whole = Lake.open(original)
    last = 0
    while True:
        path = shutil.copytree(original, tmp_path / f"lake-{last}")
        try:
            with counted(last):
                opened = Lake(path)
                opened.load()
                opened.chain.seal()
        except Killed:
            pass
        else:
            break
        assert Lake.open(path).tip == whole.tip and Lake.open(path).manifests == whole.manifests
        with Lake.replace(path) as again:
            again.chain.seal()
        assert len(Lake.open(path).chain.sealed) == 3
        assert not any(name.startswith("_") for name in os.listdir(path / "_manifests" / "days"))
        last += 1
    assert last > 10
