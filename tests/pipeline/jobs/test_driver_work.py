"""What a job's driver process does for each batch: a day of thousands is listed and opened once."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from strata.protocol.sequences import day_text
from strata_pipeline.errors import LakeError
from strata_pipeline.jobs.audit import _portions
from strata_pipeline.jobs.file_checks import _faults, _work
from strata_pipeline.lake import batches, checking
from strata_pipeline.lake.batches import Batch
from strata_pipeline.lake.generations import replace_day, staged_day
from strata_pipeline.lake.lake import Lake
from strata_pipeline.lake.rows import read_places
from strata_pipeline.lake_format import manifests_of_day

from tests.support.toy_lakes import DAY, compacted, files_below, place, rows_table, write_batch


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    """A day of twelve batches, each with a quarantined row, between two other days."""
    write_batch(tmp_path, [1], day=DAY - 1)
    for first in range(1, 36, 3):
        write_batch(tmp_path, [first, first + 1], [first + 2])
    write_batch(tmp_path, [1], day=DAY + 1)
    return Lake.open(tmp_path)


def test_the_batches_of_a_day_are_read_together(lake, monkeypatch):
    reads: list[int] = []
    listings: list[int] = []
    folders = lake.folders_of_day

    def read_counted(*of):
        reads.append(1)
        return read_places(*of)

    def listed_counted(*of):
        listings.append(1)
        return folders(*of)

    monkeypatch.setattr(batches, "read_places", read_counted)
    monkeypatch.setattr(lake, "folders_of_day", listed_counted)
    together = Batch.read(lake, *manifests_of_day(lake.manifests, DAY))
    together.check_contents()
    assert len(reads) == 2 and len(listings) == 2
    assert together.packets.num_rows == 24 and together.rows.num_rows == 36
    assert together.rows["sequence"].to_pylist() == [place(n) for n in range(1, 37)]
    assert together.manifest_of(place(5)).number == 2
    spans = [part.span for part in together.parts(place(2), 20)]
    assert spans == [(place(2), place(22)), (place(22), place(36))]
    assert [part.packets for part in together.parts(0, 20)] == [14, 10]


def test_the_damaged_one_of_many_is_named(lake):
    damaged = next(path for path in files_below(lake.packets) if f"part-{place(8)}" in path.name)
    damaged.unlink()
    with pytest.raises(LakeError, match=r"\(manifest 3\) is damaged: it has 1 packets and 1 quarantined"):
        Batch.read(lake, *manifests_of_day(lake.manifests, DAY))


def test_the_manifests_of_a_day_are_found_without_looking_at_the_others(lake):
    class Counted(list):
        looks = 0

        def __getitem__(self, key):
            self.looks += isinstance(key, int)
            return super().__getitem__(key)

    chain = Counted(lake.manifests * 1)
    assert [one.number for one in manifests_of_day(chain, DAY)] == list(range(1, 13))
    assert manifests_of_day(chain, DAY - 7) == manifests_of_day(chain, DAY + 7) == []
    assert chain.looks <= 6 * 5


@pytest.mark.parametrize("is_sound", [True, False])
def test_of_a_day_that_was_compacted_since_the_new_batches_are_read_and_the_places_of_all(
    lake, monkeypatch, is_sound
):
    target = staged_day(lake, DAY)
    compacted(lake, DAY, target)
    replace_day(lake, DAY, target, 0)
    monkeypatch.setattr(checking, "_CHUNK_ROWS", 9)
    if not is_sound:
        [path] = (lake.packets / f"day={day_text(DAY)}").rglob("kind=NOTE/*.parquet")
        twice = [pq.ParquetFile(path).read(), rows_table([place(2)], kind="NOTE")]
        pq.write_table(pa.concat_tables(twice), path)
    [(units, faults)] = _portions(lake, [DAY], place(18))
    work = [one for unit in units for one in _work(unit, place(18))]
    assert faults == [] and [len(msgspec.json.decode(one[0])) for one in work] == [0, 0, 3, 3]
    names = ("manifests", "packets", "quarantine", "objects", "first", "last")
    asked = pa.RecordBatch.from_pylist([dict(zip(names, one, strict=True)) for one in work])
    found = [fault for some in _faults(iter([asked]), lake.shelf, None) for fault in some.to_pylist()]
    wanted = [] if is_sound else [("doubled", place(2))]
    assert [(one["reason"], one["sequence"]) for one in found] == wanted
