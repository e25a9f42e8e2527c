"""Faults planted in the files of a lake, found without Spark and without the log."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from strata.protocol.sequences import Span
from strata_pipeline.errors import LakeError
from strata_pipeline.lake import checking
from strata_pipeline.lake.batches import Batch
from strata_pipeline.lake.checking import chunks, pieces, unit_faults, units_of_day
from strata_pipeline.lake.contents import UNREADABLE, read_rows
from strata_pipeline.lake.faults import Fault
from strata_pipeline.lake.generations import replace_day, staged_day
from strata_pipeline.lake.lake import Lake
from strata_pipeline.lake.slices import Slice, rows_of, slices
from strata_pipeline.lake_format import manifests_of_day

from tests.support.toy_lakes import (
    DAY,
    compacted,
    faults,
    file_faults,
    files_below,
    place,
    rows_table,
    write_batch,
)


def make(folder: Path) -> Path:
    write_batch(folder, [1, 2, 3, 4], [5, 6])
    write_batch(folder, [7, 8, 9, 10])
    write_batch(folder, [1, 2], day=DAY + 1)
    return folder


@pytest.fixture(scope="module")
def original(tmp_path_factory) -> Path:
    return make(tmp_path_factory.mktemp("toy") / "lake")


@pytest.fixture(scope="module")
def with_a_compacted_day(original, tmp_path_factory) -> Path:
    lake = Lake.open(shutil.copytree(original, tmp_path_factory.mktemp("compacted") / "lake"))
    target = staged_day(lake, DAY)
    compacted(lake, DAY, target)
    replace_day(lake, DAY, target, 0)
    return lake.root


@pytest.fixture(params=["batches", "compacted", "pieces"])
def lake(original, with_a_compacted_day, tmp_path, request, monkeypatch) -> Lake:
    """A lake as archived, one whose first day was compacted, and the latter checked piece by piece."""
    if request.param == "pieces":
        monkeypatch.setattr(checking, "_CHUNK_ROWS", 1)
    made = original if request.param == "batches" else with_a_compacted_day
    return Lake.open(shutil.copytree(made, tmp_path / "lake"))


def file_of(lake: Lake, ordinal: int, day: int = DAY) -> tuple[Path, int]:
    """The file with a place, and the row in it."""
    for path in [*files_below(lake.packets), *files_below(lake.quarantine)]:
        found = pq.ParquetFile(path).read(["sequence"])["sequence"].to_pylist()
        if place(ordinal, day) in found:
            return path, found.index(place(ordinal, day))
    raise AssertionError(ordinal)


def alter(path: Path, row: int, **values: Any) -> None:
    table = pq.ParquetFile(path).read()
    for name, value in values.items():
        column = table[name].to_pylist()
        column[row] = value
        index = table.schema.get_field_index(name)
        table = table.set_column(index, table.schema.field(index), pa.array(column, table[name].type))
    pq.write_table(table, path)


def append(path: Path, *tables: pa.Table) -> None:
    pq.write_table(pa.concat_tables([pq.ParquetFile(path).read(), *tables]), path)


def reasons(found: list[Fault]) -> set[str]:
    return {f"{fault.about}: {fault.reason}" for fault in found}


def rows_told(found: list[Fault]) -> set[tuple[str, str | None, int | None]]:
    return {(fault.reason, fault.file, fault.row) for fault in found if fault.about == "row"}


def test_a_sound_lake_has_no_fault(lake):
    assert faults(lake.root) == []
    for manifest in lake.manifests:
        batch = Batch.read(lake, manifest)
        batch.check_contents()
        assert batch.packets.num_rows == manifest.packets


ALTERED: dict[str, tuple[int, dict[str, Any]]] = {
    "an annotation": (3, {"annotation": b"{}"}),
    "an annotation gone": (3, {"annotation": None}),
    "an annotation come": (2, {"annotation": b"{}"}),
    "a body": (2, {"body": b'{"text":"x"}'}),
    "a quarantined body": (5, {"body": b"x"}),
    "a quarantined row's author": (5, {"author_id": "did:key:x"}),
    "a quarantined row's type": (5, {"content_type": None}),
    "a quarantined row's times": (6, {"timestamp": 7}),
    "a quarantined row's end": (6, {"expires_at": 7}),
    "a quarantined row's size": (6, {"size": 7}),
    "a quarantined row's reason": (6, {"reason": "null"}),
    "a quarantined row's detail": (6, {"detail": ""}),
}


@pytest.mark.parametrize("what", ALTERED)
def test_what_an_id_does_not_bind_is_bound_too(lake, what):
    ordinal, values = ALTERED[what]
    alter(*file_of(lake, ordinal), **values)
    found = file_faults(lake)
    assert reasons(found) == {"batch: contents"} and "manifest 0" in found[0].detail
    with pytest.raises(LakeError, match="a body, an annotation or a quarantined row was altered"):
        Batch.read(lake, lake.manifests[0]).check_contents()


@pytest.mark.parametrize("column", ["received_at", "packet_id", "sequence"])
@pytest.mark.parametrize("ordinal", [2, 5])
def test_places_and_ids_are_bound(lake, column, ordinal):
    values: dict[str, Any] = {column: bytes(32) if column == "packet_id" else place(1, DAY + 1)}
    alter(*file_of(lake, ordinal), **values)
    assert reasons(file_faults(lake)) & {"batch: digest", "batch: count"}


@pytest.mark.parametrize("ordinal", [2, 5])
def test_a_row_without_a_time_and_with_an_odd_id_is_a_fault_and_no_end_of_the_audit(lake, ordinal):
    alter(*file_of(lake, ordinal), received_at=None, packet_id=b"odd")
    assert "batch: digest" in reasons(file_faults(lake))


def test_rows_of_another_batch_are_named(lake):
    path, _ = file_of(lake, 2)
    rows = pq.ParquetFile(path).metadata.num_rows
    append(path, rows_table([place(2, DAY + 1), place(99, DAY + 1)], kind="NOTE"))
    assert rows_told(file_faults(lake)) == {("outside", str(path), rows), ("outside", str(path), rows + 1)}


def test_a_row_twice_is_named(lake):
    path, _ = file_of(lake, 2)
    rows = pq.ParquetFile(path).metadata.num_rows
    append(path, rows_table([place(2)], kind="NOTE"))
    found = file_faults(lake)
    assert rows_told(found) == {("doubled", str(path), rows)}
    assert reasons(found) == {"row: doubled", "batch: count"}


def test_a_row_that_is_a_packet_and_put_aside_is_named(lake):
    path, _ = file_of(lake, 5)
    append(path, rows_table([place(2)], quarantined=True))
    found = file_faults(lake)
    assert reasons(found) == {"row: doubled", "batch: count"}


def test_a_row_that_changed_sides_counts(lake):
    path, row = file_of(lake, 2)
    table = pq.ParquetFile(path).read()
    pq.write_table(pa.concat_tables([table.slice(0, row), table.slice(row + 1)]), path)
    append(file_of(lake, 5)[0], rows_table([place(2)], quarantined=True))
    assert reasons(file_faults(lake)) == {"batch: count"}


def test_a_file_in_another_place_is_named(lake):
    path, _ = file_of(lake, 2)
    other = path.parents[1] / "kind=other"
    other.mkdir()
    moved = other / path.name
    path.rename(moved)
    told = rows_told(file_faults(lake))
    assert told == {("misplaced", str(moved), n) for n in range(pq.ParquetFile(moved).metadata.num_rows)}
    target = file_of(lake, 1, DAY + 1)[0]
    moved.rename(target.with_name("moved.parquet"))
    assert {reason for reason, *_ in rows_told(file_faults(lake))} == {"outside", "misplaced"}


HARM: dict[str, Callable[[Path], object]] = {
    "torn": lambda path: path.write_bytes(path.read_bytes()[:-20]),
    "empty": lambda path: path.write_bytes(b""),
    "no table": lambda path: path.write_bytes(b"PAR1 nothing PAR1"),
    "other columns": lambda path: pq.write_table(pa.table({"sequence": pa.array([place(2)])}), path),
}


@pytest.mark.parametrize("harm", HARM)
def test_a_file_that_cannot_be_read_is_named(lake, harm):
    path, _ = file_of(lake, 2)
    HARM[harm](path)
    found = file_faults(lake)
    assert "batch: unreadable" in reasons(found) and str(path) in {fault.file for fault in found}


def test_a_missing_file_counts(lake):
    file_of(lake, 2)[0].unlink()
    assert "batch: count" in reasons(file_faults(lake))


def test_files_and_folders_that_belong_to_nothing_are_named(lake):
    source, _ = file_of(lake, 2)
    places = [
        lake.packets / "stray.parquet",
        lake.packets / "README",
        lake.day_folder(DAY) / "stray.parquet",
        lake.packets / "days" / "stray.parquet",
        lake.quarantine / "stray.parquet",
    ]
    for path in places:
        path.parent.mkdir(exist_ok=True)
        shutil.copyfile(source, path)
    assert set(lake.strays()) == {path if path.parent.name != "days" else path.parent for path in places}
    inside = source.parents[1] / "stray.parquet"  # in a batch's folder, in that of no kind
    shutil.copyfile(source, inside)
    assert ("misplaced", str(inside), 0) in rows_told(file_faults(lake))


@pytest.mark.parametrize("name", ["part.data", "more/part.parquet", "kind=POST/part.parquet"])
@pytest.mark.parametrize("ordinal", [1, 5], ids=["packets", "in quarantine"])
def test_a_file_that_some_readers_do_not_find_is_named(lake, ordinal, name):
    path, _ = file_of(lake, ordinal)
    moved = path.parent / name
    moved.parent.mkdir(exist_ok=True)
    path.rename(moved)
    found = duckdb.execute("SELECT file FROM glob(?)", [f"{path.parent}/*.parquet"]).fetchall()
    assert (str(moved),) not in found
    [fault] = [one for one in file_faults(lake) if one.about == "file"]
    assert (fault.reason, fault.file) == ("stray", str(moved))


def test_a_copied_back_batch_beside_a_compacted_day_is_found(original, tmp_path):
    lake = Lake.open(shutil.copytree(original, tmp_path / "lake"))
    kept = shutil.copytree(lake.day_folder(DAY), tmp_path / "kept")
    target = staged_day(lake, DAY)
    compacted(lake, DAY, target)
    replace_day(lake, DAY, target, 0)
    shutil.copytree(kept, lake.day_folder(DAY), dirs_exist_ok=True)
    found = file_faults(lake)
    assert reasons(found) == {"row: doubled", "batch: count"}
    assert len(rows_told(found)) == 8


@pytest.mark.parametrize("name", ["_x.parquet", ".x.parquet", "_x/x.parquet"])
@pytest.mark.parametrize("depth", [0, 1, 2], ids=["among files", "among kinds", "among batches"])
def test_a_hidden_file_is_told_of_for_duckdb_and_polars_read_it(lake, name, depth):
    path, _ = file_of(lake, 1)
    hidden = path.parents[depth] / name
    hidden.parent.mkdir(exist_ok=True)
    pq.write_table(rows_table([place(99)]), hidden)
    glob = "SELECT count(*) FROM read_parquet(?)"
    seen = duckdb.execute(glob, [f"{lake.packets}/day=*/**/*.parquet"]).fetchall()
    assert seen == [(sum(manifest.packets for manifest in lake.manifests) + 1,)]
    assert faults(lake.root)
    (hidden.parent if "/" in name else hidden).rename(lake.root / "_elsewhere")
    (path.parents[2] / "_note").touch()
    assert faults(lake.root) == []


@pytest.mark.parametrize("name", ["_metadata", "_common_metadata", "_x=1/part.parquet"])
@pytest.mark.parametrize("depth", range(4), ids=["among files", "among kinds", "among batches", "among days"])
def test_a_file_that_spark_reads_in_spite_of_its_name_is_told_of(lake, name, depth):
    path, _ = file_of(lake, 1)
    beside = path.parents[depth] / name
    beside.parent.mkdir(exist_ok=True)
    pq.write_table(rows_table([]), beside)
    assert any(str(beside if depth < 2 else beside.parent) in fault for fault in faults(lake.root))


@pytest.mark.parametrize("name", ["kind=POST/more", "kind=X"])
def test_a_link_to_a_folder_is_told_of_for_other_readers_follow_it(lake, tmp_path, name):
    path, _ = file_of(lake, 1)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    pq.write_table(rows_table([place(99)]), elsewhere / "part-0.parquet")
    link = path.parents[1] / name
    link.symlink_to(elsewhere, target_is_directory=True)
    found = file_faults(lake)
    assert any(fault.about == "batch" and fault.file == str(link) for fault in found), found


@pytest.mark.parametrize("beside", [False, True], ids=["in a file", "in another"])
@pytest.mark.parametrize("ordinal", [1, 5, 7], ids=["a packet", "in quarantine", "of the last piece"])
def test_a_row_without_a_sequence_is_none_of_the_lakes(lake, ordinal, beside):
    path, row = file_of(lake, ordinal)
    added = pq.ParquetFile(path).read().slice(row, 1)
    place_ = added.schema.get_field_index("sequence")
    added = added.set_column(place_, added.schema.field(place_), pa.array([None], pa.int64()))
    if beside:
        path, row = path.with_name("part-9.parquet"), 0
        pq.write_table(added, path)
    else:
        row = pq.read_metadata(path).num_rows
        append(path, added)
    found = file_faults(lake)
    assert rows_told(found) == {("outside", str(path), row)} and reasons(found) == {"row: outside"}


@pytest.mark.parametrize(
    "told",
    [(9, 9), (99, 99), (1, 1), (9, 1)],
    ids=["of another piece", "of none", "too few", "the wrong way round"],
)
def test_rows_that_false_statistics_hide_are_found(lake, told):
    path, row = file_of(lake, 1)
    rows = pq.ParquetFile(path).read().slice(row, 2)
    hidden = path.with_name("part-9.parquet")
    pq.write_table(rows, hidden)
    whole = hidden.read_bytes()
    end = len(whole) - 8 - int.from_bytes(whole[-8:-4], "little")
    footer = whole[end:]
    for n, real in enumerate(rows["sequence"].to_pylist()):
        assert footer.count(struct.pack("<q", real)) == 2
        footer = footer.replace(struct.pack("<q", real), b"%8d" % n)
    for n, false in enumerate(told):
        footer = footer.replace(b"%8d" % n, struct.pack("<q", place(false)))
    hidden.write_bytes(whole[:end] + footer)
    found = pq.read_metadata(hidden).row_group(0).column(0).statistics
    assert (found.min, found.max) == tuple(map(place, told))
    assert "file: statistics" in reasons(file_faults(lake))


def test_units_are_as_small_as_folders_allow(lake):
    days = [[one for one in lake.manifests if one.span.day == day] for day in lake.days()]
    units = [
        unit for day, told in zip(lake.days(), days, strict=True) for unit in units_of_day(lake, day, told)
    ]
    is_compacted = len(lake.batches(DAY)) == 1
    assert [len(unit.manifests) for unit in units] == ([2, 1] if is_compacted else [1, 1, 1])
    assert all(len(unit.packets) == 1 for unit in units)
    assert list(map(len, chunks(lake.manifests))) == ([1, 1, 1] if checking._CHUNK_ROWS == 1 else [3])


def test_pieces_share_all_sequences_and_none_holds_more_than_its_own(lake, monkeypatch):
    manifests = manifests_of_day(lake.manifests, DAY)
    found = list(pieces(manifests))
    assert [one for piece in found for one in piece.manifests] == manifests
    assert (found[0].first, found[-1].last) == (-(2**63), 2**63 - 1)
    assert all(one.last + 1 == other.first for one, other in itertools.pairwise(found))
    assert all(piece.last == piece.manifests[-1].up_to for piece in found[:-1])

    held: list[int] = []
    doubled = checking._doubled

    def counted(seen):
        held.append(sum(len(places.sequences) for places in seen))
        return doubled(seen)

    monkeypatch.setattr(checking, "_doubled", counted)
    [*units] = units_of_day(lake, DAY, manifests)
    assert [fault for unit in units for fault in unit_faults(unit)] == []
    assert held == ([10] if len(found) == len(units) == 1 else [6, 4])


BOUND = ["sequence", "received_at", "packet_id", "body", "annotation"]
"""The columns that digests cover."""
SEED, SPOILED = 2, 150


def test_whatever_bytes_a_file_has_a_check_tells_of_them_or_reads_what_was_there(tmp_path):
    lake = Lake.open(make(tmp_path / "lake"))
    path = next(path for path in files_below(lake.packets) if "kind=POST" in path.parts)
    sound, whole = pq.ParquetFile(path).read(BOUND), path.read_bytes()
    chance = random.Random(SEED)
    told = 0
    for _ in range(SPOILED):
        spoiled = bytearray(whole)
        for _ in range(chance.choice([1, 4, 40])):
            spoiled[chance.randrange(len(spoiled))] = chance.randrange(256)
        path.write_bytes(spoiled)
        if file_faults(lake):
            told += 1
            # A reader that continues gets this error, and no other.
            with contextlib.suppress(*UNREADABLE):
                for rows in rows_of(
                    Slice(os.fsencode(path), 1), Path(), [*BOUND, "author_id"], Span(0, 2**62)
                ):
                    rows.to_pylist()
        else:
            assert pq.ParquetFile(path).read(BOUND).equals(sound)
    assert told > SPOILED / 3


def test_only_groups_of_rows_that_may_be_asked_for_are_read(tmp_path):
    path = tmp_path / "rows.parquet"
    pq.write_table(rows_table([place(n) for n in range(1, 101)]), path, row_group_size=10)
    found = list(read_rows([path], ["sequence"], Span(place(34), place(41))))
    assert [(rows.first, rows.columns.num_rows) for rows in found] == [(30, 10), (40, 10)]
    assert sum(rows.columns.num_rows for rows in read_rows([path], ["sequence"])) == 100


@pytest.mark.parametrize(
    ("root", "column", "value"),
    [
        ("packets", "sequence", "1"), ("packets", "received_at", "1"), ("packets", "packet_id", "1"),
        ("packets", "content_type", 1.5), ("packets", "body", "{}"), ("packets", "annotation", 1),
        ("quarantine", "size", 2**40), ("quarantine", "reason", 1.5), ("quarantine", "detail", [1]),
        ("quarantine", "author_id", b"\xff"),
    ],
)  # fmt: skip
def test_a_column_of_another_type_is_a_fault_and_no_end_of_the_audit(tmp_path, root, column, value):
    lake = make(tmp_path / "lake")
    path = min((lake / root).rglob("*.parquet"))
    rows = pq.ParquetFile(path).read()
    other = rows.set_column(rows.schema.get_field_index(column), column, pa.array([value] * len(rows)))
    pq.write_table(other, path)
    found = {fault.reason for fault in file_faults(Lake.open(lake))}
    assert found and found <= {"unreadable", "digest"}  # a value read as a number may be a wrong one


@pytest.mark.parametrize("root", ["packets", "quarantine"])
@pytest.mark.parametrize("name", ["body", "BODY", "Sequence", "received_at"])
def test_a_column_that_some_readers_take_for_another_is_a_fault(tmp_path, root, name):
    lake = make(tmp_path / "lake")
    path = min((lake / root).rglob("*.parquet"))
    rows = pq.ParquetFile(path).read()
    false = pa.array(rows[name.lower()].to_pylist()[::-1], rows[name.lower()].type)
    pq.write_table(rows.add_column(0, name, false), path)
    if name == "BODY":
        found = duckdb.execute(f"SELECT body FROM read_parquet('{path}')").fetchall()
        assert [body for (body,) in found] == false.to_pylist()
    assert "unreadable" in {fault.reason for fault in file_faults(Lake.open(lake))}


@pytest.mark.parametrize(("root", "name"), [("packets", "kind"), ("packets", "reason"), ("quarantine", "x")])
def test_a_file_with_a_column_of_its_own_is_named_once(tmp_path, monkeypatch, root, name):
    monkeypatch.setattr(checking, "_CHUNK_ROWS", 1)
    lake = make(tmp_path / "lake")
    path = min((lake / root).rglob("*.parquet"))
    rows = pq.ParquetFile(path).read()
    pq.write_table(rows.append_column(name, pa.array(["x"] * len(rows))), path)
    if name == "kind":
        with pytest.raises(pa.ArrowTypeError, match="Field kind has incompatible types"):
            pq.read_table(lake / root)
    [found] = file_faults(Lake.open(lake))
    assert (found.about, found.reason, found.file) == ("file", "columns", str(path))
    assert f"has a column {name!r}: " in found.detail


def test_only_folders_within_a_lake_say_of_what_kind_its_rows_are(tmp_path):
    assert faults(make(tmp_path / "kind=X" / "lake")) == []


def test_a_link_that_leads_nowhere_is_divided_among_tasks_as_a_file_is(tmp_path):
    lake = Lake.open(make(tmp_path / "lake"))
    folder = next((tmp_path / "lake" / "packets" / "day=2024-10-04").rglob("kind=*"))
    (folder / "gone.parquet").symlink_to(tmp_path / "nowhere")
    names = [one.file for one in slices(lake.units(DAY)[0], 2)]
    assert os.fsencode(folder / "gone.parquet") in names
    assert "unreadable" in {fault.reason for fault in file_faults(lake)}
