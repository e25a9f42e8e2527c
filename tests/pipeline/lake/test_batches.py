"""Batches of a lake checked against their manifests, and cut."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from blake3 import blake3
from strata.protocol.sequences import Span
from strata_pipeline.errors import LakeError
from strata_pipeline.lake.batches import Batch, BatchPart, leading_days_with_holes
from strata_pipeline.lake.lake import Lake
from strata_pipeline.lake.rows import digest_of
from strata_pipeline.lake_format import GENESIS, Manifest

FIRST = 20_000 << 32


def places(ordinals):
    return pa.table(
        {
            "sequence": pa.array([FIRST + n for n in ordinals], pa.int64()),
            "received_at": pa.array([1_000 + n // 4 for n in ordinals], pa.int64()),
            "packet_id": pa.array([blake3(b"%d" % n).digest() for n in ordinals], pa.binary()),
            "size": pa.array([7] * len(ordinals), pa.int32()),
        }
    )


def manifest(number, after, up_to, packets, quarantined=0, rows=""):
    return Manifest(
        number=number, after=after, up_to=up_to, packets=packets, quarantined=quarantined, rows=rows,
        contents="", body_bytes=0, kinds={}, last_packet_id="", last_received_at=0, written_at=0,
        previous=GENESIS,
    )  # fmt: skip


@pytest.fixture
def lake(tmp_path):
    """A lake of one batch: rows 1 to 9, of which 4 and 9 are quarantined."""
    with Lake.write(tmp_path) as lake:
        staged = lake.stage(Span(0, FIRST + 9))
        for name, ordinals in (("packets", [1, 2, 3, 5, 6, 7, 8]), ("quarantine", [4, 9])):
            (staged / name).mkdir(parents=True)
            pq.write_table(places(ordinals), staged / name / "part-0.parquet")
        digest = digest_of(places(range(1, 10)))
        lake.commit(manifest(0, 0, FIRST + 9, 7, 2, digest), staged / "packets", staged / "quarantine")
        return lake


def test_a_sound_batch_is_cut_by_rows_and_ends_with_its_last(lake):
    batch = Batch.read(lake, lake.manifests[0])
    assert batch.parts(0, 4) == [
        BatchPart(Span(0, FIRST + 4), 3, 1_001),
        BatchPart(Span(FIRST + 4, FIRST + 8), 4, 1_002),
        BatchPart(Span(FIRST + 8, FIRST + 9), 0, 1_002),
    ]
    assert batch.parts(FIRST + 6, 100) == [BatchPart(Span(FIRST + 6, FIRST + 9), 2, 1_002)]
    assert batch.parts(FIRST + 9, 100) == []
    assert (batch.packets_up_to(FIRST + 5), batch.quarantined_up_to(FIRST + 5)) == (4, 1)


def test_a_row_received_after_its_day_does_not_set_the_clock_of_a_log(tmp_path):
    rows = places([1, 2]).set_column(1, "received_at", pa.array([1_000, 2**40], pa.int64()))
    with Lake.write(tmp_path) as lake:
        staged = lake.stage(Span(0, FIRST + 2))
        (staged / "packets").mkdir(parents=True)
        pq.write_table(rows, staged / "packets" / "part-0.parquet")
        lake.commit(manifest(0, 0, FIRST + 2, 2, 0, digest_of(rows)), staged / "packets", None)
    assert Batch.read(lake, lake.manifests[0]).parts(0, 9) == [
        BatchPart(Span(0, FIRST + 2), 2, 20_001 * 86_400 - 1)
    ]


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda path: path.unlink(), "it has 0 packets and 2 quarantined rows, and must have 7 and 2"),
        (lambda path: path.write_bytes(b"PAR1 nothing PAR1"), "its files cannot be read"),
        (lambda path: path.write_bytes(path.read_bytes()[:-20]), "its files cannot be read"),
        (lambda path: pq.write_table(places([1, 2, 3, 5, 6, 7]), path), "it has 6 packets and 2 quarantined"),
        (lambda path: pq.write_table(places([1, 2, 3, 3, 6, 7, 8]), path), "its rows have other ids"),
    ],
)
def test_a_damaged_one_is_named(lake, damage, told):
    damage(next(lake.packets.rglob("*.parquet")))
    with pytest.raises(LakeError, match=rf"batch 1-\d+ \(manifest 0\) is damaged: .*{told}"):
        Batch.read(lake, lake.manifests[0])


def test_days_that_retention_had_emptied_before_they_were_archived_are_known_by_their_holes():
    def days(*counts):
        return [manifest(n, 0, ((20_000 + n) << 32) + 10, count - 1, 1) for n, count in enumerate(counts)]

    assert leading_days_with_holes(days(10, 10)) == 0
    assert leading_days_with_holes(days(2, 3, 10, 10)) == 20_002 << 32
    assert leading_days_with_holes(days(10, 3)) == 0  # a hole that came later remains a hole
    assert leading_days_with_holes([]) == 0
