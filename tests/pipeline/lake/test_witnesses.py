"""Files of witnesses on a disk: put there with their batches, wherever the writer is killed, and checked."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from msgspec.structs import replace
from strata_pipeline.jobs.archive import _commit
from strata_pipeline.jobs.audit import _Witnessed
from strata_pipeline.lake.generations import replace_day, staged_day
from strata_pipeline.lake.lake import Lake
from strata_pipeline.lake.layout import STAGED_WITNESSES
from strata_pipeline.lake.stores.records import DiskRecords
from strata_pipeline.lake.witness_checks import surplus_witnesses, witnesses_faults
from strata_pipeline.lake.witnesses import FirstReceived, Times, Witnesses
from strata_pipeline.lake_format import LakeError, Manifest, encode_witnesses, witnesses_hash, witnesses_name

from tests.support.file_faults import Killed, counted
from tests.support.toy_lakes import DAY, compacted, faults, place, read, staged, witnessed, write_batch

MIDNIGHT = DAY * 86_400
TIMES = {place(3): MIDNIGHT - 100, place(4): MIDNIGHT - 50}


@pytest.fixture
def lake(tmp_path: Path) -> Path:
    """A lake of four batches, of which the second and the third have witnesses."""
    write_batch(tmp_path, [1, 2], times={})
    write_batch(tmp_path, [3, 5], [4], times=TIMES)
    write_batch(tmp_path, [6, 7], times={place(7): MIDNIGHT})
    write_batch(tmp_path, [8, 9], times={})
    return tmp_path


def files_of(lake: Path) -> list[str]:
    return sorted(one.name for one in (lake / "_witnesses").iterdir())


def test_a_lake_keeps_the_witnesses_of_each_batch_that_has_some(lake):
    opened = Lake.open(lake)
    assert [bool(one.witnesses) for one in opened.manifests] == [False, True, True, False]
    assert files_of(lake) == [witnesses_name(one) for one in opened.manifests[1:3]]
    assert opened.witnesses.text_of(opened.manifests[1]) == encode_witnesses(TIMES.items())
    assert opened.witnesses.text_of(opened.manifests[0]) == b""
    times = opened.witnesses.times_of(opened.manifests)
    assert times.at(pa.array([place(1), place(4), place(7), None])).to_pylist() == [
        None, MIDNIGHT - 50, MIDNIGHT, None,
    ]  # fmt: skip


def test_a_lake_without_witnesses_has_no_folder_for_them(tmp_path):
    write_batch(tmp_path, [1, 2], times={})
    assert not (tmp_path / "_witnesses").exists() and not Lake.open(tmp_path).manifests[0].witnesses


def test_wherever_a_writer_is_killed_rows_and_witnesses_come_together(tmp_path):
    def write(folder: Path) -> None:
        with Lake.write(folder) as opened:
            if opened.reached < place(5):
                manifest, packets, quarantine = staged(opened, [3, 5], [4])
                manifest, text = witnessed(manifest, TIMES)
                opened.commit(manifest, packets, quarantine, text)

    with counted() as calls:
        write_batch(tmp_path / "whole", [1, 2])
        before = len(calls.names)
        write(tmp_path / "whole")
    for last in range(before, len(calls.names)):
        folder = tmp_path / str(last)
        with pytest.raises(Killed), counted(last):
            write_batch(folder, [1, 2])
            write(folder)
        opened = Lake.open(folder)  # a reader at that moment
        for manifest in opened.manifests:
            opened.witnesses.text_of(manifest)
        write(folder)
        opened = Lake.open(folder)
        assert len(opened.manifests) == 2 and read(folder) == [place(1), place(2), place(3), place(5)]
        assert faults(folder) == [] and files_of(folder) == [witnesses_name(opened.manifests[1])]
        assert opened.witnesses.text_of(opened.manifests[1]) == encode_witnesses(TIMES.items())


@pytest.mark.parametrize("rows", [[(place(1), 5), (place(1), 5)], [(place(3), 5)]], ids=["twice", "beyond"])
def test_witnesses_that_nobody_could_read_back_are_not_committed(tmp_path, rows):
    with Lake.write(tmp_path) as opened:
        manifest, packets, _ = staged(opened, [1, 2])
        draft = Mock(folder=Mock(return_value=packets))
        state = Mock(rows_expected=Mock(return_value=2))
        with pytest.raises(LakeError, match=r"do not rise|outside its batch"):
            _commit(opened, manifest.span, state, draft, 2, 0, encode_witnesses(rows))
        draft.commit.assert_not_called()


@pytest.mark.parametrize("is_in_place", [False, True])
def test_a_batch_with_altered_witnesses_is_archived_again(tmp_path, monkeypatch, is_in_place):
    write_batch(tmp_path, [1, 2])

    def dies(lake: Lake, manifest: Manifest) -> None:
        if is_in_place:
            folder = lake.root / "_witnesses"
            folder.mkdir()
            (lake.staged_batch(manifest.span) / STAGED_WITNESSES).rename(folder / witnesses_name(manifest))
        raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(Lake, "publish", dies)
        write_batch(tmp_path, [3, 5], times=TIMES)
    [path] = tmp_path.rglob("*.csv")
    path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    with Lake.write(tmp_path) as opened:
        assert opened.reached == place(2)
    assert not list(tmp_path.rglob("*.csv"))


def test_rows_have_the_time_at_which_the_first_relay_received_them(lake):
    opened = Lake.open(lake)
    first = FirstReceived(opened.witnesses, opened.manifests)
    sequences = pa.array([place(9), place(4), place(3), place(7), place(4), -1])
    received = pa.array([1, 2, 3, None, 5, 6], pa.int64())
    assert first.of(sequences, received).to_pylist() == [
        1,
        MIDNIGHT - 50,
        MIDNIGHT - 100,
        MIDNIGHT,
        MIDNIGHT - 50,
        6,
    ]
    assert first.of(pa.array([], pa.int64()), pa.array([], pa.int64())).to_pylist() == []
    (lake / "_witnesses" / witnesses_name(opened.manifests[1])).unlink()
    with pytest.raises(LakeError, match=r"cannot be read.*Bring it back"):
        FirstReceived(opened.witnesses, opened.manifests).of(sequences, received)
    # Where no row needs a file, it is not read.
    assert FirstReceived(opened.witnesses, opened.manifests).of(
        pa.array([place(7)]), pa.array([1])
    ).to_pylist() == [MIDNIGHT]


def test_each_row_is_looked_for_in_the_file_of_its_own_batch_alone(lake, monkeypatch):
    looked: list[int] = []
    find = Times.find

    def counted_find(times: Times, places: np.ndarray) -> object:
        looked.append(len(places))
        return find(times, places)

    monkeypatch.setattr(Times, "find", counted_find)
    opened = Lake.open(lake)
    sequences = pa.array([place(n) for n in (7, 3, 1, 4, 5, 9, 6)])
    FirstReceived(opened.witnesses, opened.manifests).of(sequences, pa.nulls(7, pa.int64()))
    assert looked == [3, 2]


def found(lake: Path, manifests: Sequence[Manifest] | None = None) -> list[tuple[str, int | None]]:
    opened = Lake.open(lake)
    folders = opened.day(DAY)
    some = opened.manifests if manifests is None else manifests
    told = witnesses_faults(opened.witnesses, some, *folders)
    assert all(fault.about == "witness" and fault.file is not None for fault in told)
    return [(fault.reason, fault.sequence) for fault in told]


def test_missing_and_changed_files_are_found(lake):
    assert found(lake) == []
    one, other = (lake / "_witnesses" / name for name in files_of(lake))
    text = one.read_bytes()
    one.write_bytes(text.replace(b"," + str(MIDNIGHT - 100).encode(), b"," + str(MIDNIGHT - 101).encode()))
    other.unlink()
    assert found(lake) == [("changed", place(5)), ("missing", place(7))]
    one.unlink()
    one.mkdir()
    assert found(lake)[0] == ("unreadable", place(5))


@pytest.mark.parametrize(
    ("text", "reasons"),
    [
        (b"sequence\n", [("malformed", place(5))]),
        (encode_witnesses([(place(7), MIDNIGHT)]), [("malformed", place(5))]),
        (encode_witnesses([(place(3), MIDNIGHT + 3 + 300)]), []),
        (encode_witnesses([(place(3), MIDNIGHT + 304), (place(4), 5)]), [("late", place(3))]),
    ],
)
def test_files_that_a_chain_binds_and_no_relay_has_told_are_found(lake, text, reasons):
    opened = Lake.open(lake)
    forged = replace(opened.manifests[1], witnesses=witnesses_hash(text))
    (lake / "_witnesses" / witnesses_name(forged)).write_bytes(text)
    assert found(lake, [forged]) == reasons


def test_a_compaction_leaves_witnesses_where_they_are(lake):
    write_batch(lake, [1], day=DAY + 1, times={})
    names = files_of(lake)
    with Lake.replace(lake) as opened:
        target = staged_day(opened, DAY)
        compacted(opened, DAY, target)
        replace_day(opened, DAY, target, 0)
        times = FirstReceived(opened.witnesses, opened.chain.of_day(DAY))
    assert found(lake) == [] and files_of(lake) == names
    sequences = pa.array([place(n) for n in range(1, 10)])
    assert times.of(sequences, pa.nulls(9, pa.int64())).to_pylist() == [
        None, None, MIDNIGHT - 100, MIDNIGHT - 50, None, None, MIDNIGHT, None, None,
    ]  # fmt: skip


def test_a_row_without_a_time_of_arrival_is_not_late(lake):
    [path] = lake.glob(f"packets/day=*/batch={place(3)}-*/kind=POST/*.parquet")
    rows = pq.read_table(path, partitioning=None)
    index = rows.schema.get_field_index("received_at")
    pq.write_table(rows.set_column(index, rows.schema.field(index), [pa.nulls(1, pa.int64())]), path)
    assert found(lake) == []  # it is a fault of its batch
    assert [one for one in faults(lake) if one.startswith("batch: digest")]


def test_a_witness_of_a_row_that_is_not_there_is_found(tmp_path):
    write_batch(tmp_path, [1, 3], times={place(1): 5, place(2): 6})
    assert found(tmp_path) == [("stranger", place(2))]


def test_files_that_no_manifest_binds_are_found(lake):
    manifests, names = Lake.open(lake).manifests, files_of(lake)
    others = [f"0000000001-{'ab' * 32}.csv", f"0000000003-{'ab' * 32}.csv"]
    beyond = f"0000000004-{'ab' * 32}.csv"  # perhaps that of a batch which is being committed
    there = [*names, *others, beyond, "notes"]
    assert surplus_witnesses(there, manifests, 0, 4) == [*others, "notes"]
    assert surplus_witnesses(there, manifests[2:], 2, 4) == [others[1], "notes"]
    assert Witnesses(DiskRecords(lake / "_witnesses")).names() == names


@pytest.mark.parametrize("first", [0, 2])
@pytest.mark.parametrize("portion", [1, 3, 4])
def test_an_audit_keeps_no_manifests_to_know_what_they_bind(lake, first, portion):
    manifests, names = Lake.open(lake).manifests, files_of(lake)
    others = [f"{number:010}-{'ab' * 32}.csv" for number in range(6)]
    bound = _Witnessed(sorted([*names, *others, "0000000001x", "notes"]))
    for begin in range(first, len(manifests), portion):
        bound.add(manifests[begin : begin + portion])
    bound.add([])
    bound.end()
    assert sorted(bound.surplus) == sorted(["0000000001x", *others[first:4], "notes"])
    assert bound.days == [DAY]


def test_a_chain_that_is_sent_to_tasks_reads_days_there(lake):
    write_batch(lake, [1], day=DAY + 1, times={})
    chain = Lake.open(lake).chain
    chain.seal()
    everything = chain.all()
    sent = pickle.loads(pickle.dumps(chain))
    assert sent.__dict__["_whole"] is None and sent.of_day(DAY) == everything[:4]
