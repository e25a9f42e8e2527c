"""Parts of a day: which are joined, and what a task makes of their rows."""

from __future__ import annotations

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from strata_pipeline.errors import ObjectStoreError
from strata_pipeline.jobs import parts
from strata_pipeline.jobs.parts import PartWork, groups_of, packets_there, rewrite_part
from strata_pipeline.lake.object_lake import ObjectLake
from strata_pipeline.lake.stores.objects import ObjectStore
from strata_pipeline.lake_format import LakeError, Part, StoredObject
from strata_pipeline.transforms.emptying import held_aside

from tests.support.object_lakes import put_batch, tombstones
from tests.support.toy_lakes import DAY, place, rows_table

ATTEMPT = "f" * 32


@pytest.fixture
def lake(in_memory) -> ObjectLake:
    """A finished day of two batches, and another that continues."""
    where = next(in_memory)
    put_batch(where, [1, 2, 3, 4], [5])
    put_batch(where, [6, 7, 8])
    put_batch(where, [1], day=DAY + 1)
    return ObjectLake.open(where)


def work(lake: ObjectLake, *gone: int) -> PartWork:
    """Both batches as one part."""
    before, manifests = lake.parts(DAY), lake.chain.of_day(DAY)
    objects = [one for part in before for one in part.objects]
    joined = Part(after=before[0].after, up_to=before[-1].up_to, objects=objects)
    return PartWork(ATTEMPT, joined, manifests, [one for one, _ in tombstones(*gone).values()])


def sequences(lake: ObjectLake, one: StoredObject) -> list[int]:
    with lake.shelf.at_hand([one]) as (folder, _):
        found: list[int] = pq.ParquetFile(folder / one.name).read(["sequence"])["sequence"].to_pylist()
        return found


def test_small_parts_that_follow_each_other_are_joined_and_joined_ones_are_not(lake):
    before, manifests = lake.parts(DAY), lake.chain.of_day(DAY)
    many = [Part(after=n, up_to=n + 1, objects=[]) for n in range(7)]
    sizes = [5, 4, 3, 20, 1, 1, 9]
    told = [
        msgspec.structs.replace(manifests[0], after=n, up_to=n + 1, body_bytes=size)
        for n, size in enumerate(sizes)
    ]
    groups = groups_of(many, told, 10)
    assert [[part.after for part in group] for group in groups] == [[0, 1], [2], [3], [4, 5], [6]]
    joined = [Part(after=group[0].after, up_to=group[-1].up_to, objects=[]) for group in groups]
    assert [len(group) for group in groups_of(joined, told, 10)] == [1] * 5
    assert len(groups_of(before, manifests, 150)) == 2 and len(groups_of(before, manifests, 200)) == 1


def test_rows_are_in_order_by_kind_and_large_objects_are_cut(lake, monkeypatch):
    done = rewrite_part(lake.store, work(lake))
    assert [one.name.split("/")[3] for one in done.part.objects[:2]] == ["kind=NOTE", "kind=POST"]
    assert [sequences(lake, one) for one in done.part.objects] == [
        [place(n) for n in some] for some in ((2, 4, 7), (1, 3, 6, 8), (5,))
    ]
    monkeypatch.setattr(parts, "OBJECT_BYTES", 300)
    monkeypatch.setattr(parts, "_AT_ONCE_BYTES", 300)
    cut = rewrite_part(lake.store, work(lake)).part.objects
    assert len(cut) > 3 and sorted(n for one in cut for n in sequences(lake, one)) == [
        place(n) for n in range(1, 9)
    ]


def test_what_tombstones_name_is_empty_afterwards_and_its_place_is_kept(lake):
    done = rewrite_part(lake.store, work(lake, place(2), place(99)))
    assert done.erased == [place(2)]
    [batch] = done.batches
    assert (batch.packets, batch.quarantined, batch.kinds) == (3, 2, {"NOTE": 1, "POST": 2})
    aside = done.part.objects[-1]
    assert sequences(lake, aside) == [place(2), place(5)]
    with lake.shelf.at_hand([aside]) as (folder, _):
        first = pq.ParquetFile(folder / aside.name).read().to_pylist()[0]
    assert not (first["body"] or first["author_id"] or first["annotation"])
    same = rewrite_part(lake.store, work(lake, place(99)))
    assert (same.erased, same.batches, same.part) == ([], [], work(lake).part)


def test_a_part_that_lacks_rows_or_was_put_otherwise_is_refused(lake, monkeypatch):
    asked = work(lake)
    few = Part(after=asked.part.after, up_to=asked.part.up_to, objects=asked.part.objects[1:])
    for gone in ([], work(lake, place(6)).tombstones):
        with pytest.raises(LakeError, match=r"disagree: .*; the day stays as it is\. Run audit"):
            rewrite_part(lake.store, PartWork(ATTEMPT, few, asked.manifests, gone))
    real = ObjectStore.put
    monkeypatch.setattr(ObjectStore, "put", lambda store, name, content: real(store, name, content[:-1]))
    with pytest.raises(ObjectStoreError, match="just now: nothing was committed"):
        rewrite_part(lake.store, asked)


def test_rows_without_an_id_or_a_time_are_not_those_of_a_tombstone(tmp_path):
    stones = [stone for stone, _ in tombstones(place(1)).values()]
    for column in ("packet_id", "received_at"):
        rows = rows_table([place(1)], quarantined=True)
        index = rows.schema.get_field_index(column)
        rows = rows.set_column(index, rows.schema.field(index), pa.nulls(1, rows[column].type))
        folder = tmp_path / column
        folder.mkdir()
        pq.write_table(rows, folder / "part-0.parquet")
        assert held_aside([folder], stones) == ([], stones)
    there = packets_there([tmp_path / "packet_id"], stones)
    assert there.found == [] and "names packet" in there.strangers[0]
