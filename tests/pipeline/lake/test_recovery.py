"""What the next writer does with the remains: it completes, moves aside or refuses, and deletes nothing."""

from __future__ import annotations

import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from strata.protocol.sequences import Span
from strata_pipeline.lake import files
from strata_pipeline.lake.lake import Lake
from strata_pipeline.lake.layout import STAGED_MANIFEST
from strata_pipeline.lake_format import LakeError

from tests.support.file_faults import Killed
from tests.support.toy_lakes import DAY, faults, files_below, place, read, rows_table, staged, write_batch

ALL = [place(n) for n in range(1, 11)]


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A lake of five batches."""
    folder = tmp_path_factory.mktemp("toy") / "lake"
    for first in range(1, 11, 2):
        write_batch(folder, [first, first + 1])
    return folder


@pytest.fixture
def lake(original: Path, tmp_path: Path) -> Path:
    return shutil.copytree(original, tmp_path / "lake")


def tree(path: Path) -> set[tuple[str, int]]:
    return {(str(one.relative_to(path)), one.stat().st_size) for one in path.rglob("*") if one.is_file()}


def refused(path: Path, match: str) -> None:
    before = {one for one in tree(path) if "lock" not in one[0]}
    with pytest.raises(LakeError, match=match), Lake.write(path):
        pass
    assert {one for one in tree(path) if "lock" not in one[0]} == before


def test_a_lake_without_its_chain_is_refused_and_whole(lake):
    shutil.rmtree(lake / "_manifests")
    refused(lake, r"5 folders of batches .* and no manifests: bring _manifests back")
    (lake / "_manifests").mkdir()
    refused(lake, "no manifests")
    assert read(lake) == ALL
    with pytest.raises(LakeError, match="_manifests is missing"):
        shutil.rmtree(lake / "_manifests")
        Lake.open(lake)


@pytest.mark.parametrize("lost", [1, 4])
def test_a_chain_that_lost_its_end_stops_writing_and_not_reading(lake, lost):
    for number in range(5 - lost, 5):
        (lake / "_manifests" / f"{number:010}.json").unlink()
    refused(lake, rf"ends with manifest {4 - lost}, .*{lost} folders of batches behind it .*are missing")
    assert read(lake) == ALL and len(Lake.open(lake).manifests) == 5 - lost


def test_another_lakes_chain_is_refused(lake, tmp_path):
    other = tmp_path / "other"
    write_batch(other, [1, 2, 3])
    shutil.rmtree(lake / "_manifests")
    shutil.copytree(other / "_manifests", lake / "_manifests")
    refused(lake, "none of the lake's batches")
    # One that refers to other days altogether.
    shutil.rmtree(other)
    write_batch(other, [1, 2, 3], day=DAY + 9)
    shutil.rmtree(lake / "_manifests")
    shutil.copytree(other / "_manifests", lake / "_manifests")
    refused(lake, "none of the lake's batches")
    assert read(lake) == ALL


def test_a_chain_without_files_is_not_written_after(lake):
    shutil.rmtree(lake / "packets")
    refused(lake, "tells of 2 rows under packets/.*is not there: .*Complete the copy")


def test_a_strangers_folder_is_refused_wherever_it_is(lake):
    for name in ("batch=1-77", "batch=5-9", f"batch={place(3)}-{place(3)}"):
        folder = lake / "packets" / "day=2024-10-04" / name
        folder.mkdir()
        refused(lake, "none of the lake's batches")
        folder.rmdir()
    # A batch of the lake in a different day.
    source = next(iter(Lake.open(lake).batch_folders()))
    shutil.copytree(source, lake / "packets" / "day=2024-10-05" / source.name)
    refused(lake, "none of the lake's batches")


@pytest.mark.parametrize("order", [("packets", "_manifests"), ("_manifests", "packets")])
@pytest.mark.parametrize("backwards", [False, True])
def test_a_copy_in_any_order_loses_nothing_with_an_archive_after_each_file(
    original, tmp_path, order, backwards
):
    lake = tmp_path / "copy"
    added: list[int] = []
    copies = [path for root in order for path in sorted((original / root).rglob("*")) if path.is_file()]
    stopped = 0
    for source in reversed(copies) if backwards else copies:
        target = lake / source.relative_to(original)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)
        try:
            with Lake.write(lake) as opened:
                if opened.manifests and not added:  # the timer fires, and the log has grown
                    opened.commit(*staged(opened, [11, 12]))
                    added = [place(11), place(12)]
        except LakeError:
            stopped += 1
    assert stopped > 4
    assert read(lake) == ALL + added and faults(lake) == []
    assert not (lake / "_aside").exists()


@pytest.mark.parametrize("harm", ["a row", "a body", "the manifest"])
def test_a_batch_that_is_not_what_its_manifest_says_is_moved_aside(lake, harm):
    opened = Lake.open(lake)
    made = staged(opened, [11, 12, 13])
    with pytest.raises(Killed):
        cut_before_the_manifest(opened, made)
    path = next(path for path in files_below(lake / "packets") if f"part-{place(11)}" in path.name)
    if harm == "the manifest":
        (lake / "_staging" / f"batch={Span(place(10), place(13))}" / STAGED_MANIFEST).unlink()
    else:
        table = rows_table([place(11), place(14 if harm == "a row" else 13)])
        if harm == "a body":
            table = pq.ParquetFile(path).read()
            table = table.set_column(8, table.schema.field(8), [[b"other"] * table.num_rows])
        pq.write_table(table, path)
    with Lake.write(lake) as again:
        assert [moved.parent for moved in again.moved] == [lake / "_aside"]
        assert len(again.manifests) == 5 and not again.staging.exists()
        again.commit(*staged(again, [11, 12, 13]))
    assert read(lake) == [*ALL, place(11), place(12), place(13)] and faults(lake) == []
    assert len(list((lake / "_aside").rglob("*.parquet"))) == 2


def cut_before_the_manifest(lake: Lake, made: tuple) -> None:
    """Kill a commit when its packets are visible and the chain does not include them."""
    write_new = files.write_new

    def dies(path: Path, content: bytes) -> None:
        if path.parent.name == "_manifests":
            raise Killed
        write_new(path, content)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "write_new", dies)
        lake.commit(*made)


def test_halves_of_records_go_and_nothing_else_does(lake):
    days = lake / "_manifests" / "days"
    for folder in (days, lake / "_erased"):
        folder.mkdir()
    names = ("_erased/_0000000000.json.7", "_erased/_0000000000.jsonl.7", "_manifests/_0000000005.json.7",
             "_manifests/days/_2024-10-04.json.7")  # fmt: skip
    others = ("_erased/_notes", "_erased/._0000000000.json", "_manifests/days/_notes")
    for name in (*names, *others):
        (lake / name).write_text("half")
    with Lake.replace(lake), Lake.write(lake) as opened:
        opened.chain.seal()
    assert not any((lake / name).exists() for name in names) and all(
        (lake / name).exists() for name in others
    )
