"""Sound packets among quarantined rows are found, and no others."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from strata.protocol.sequences import Span
from strata_pipeline.jobs.audit import audit
from strata_pipeline.lake.lake import Lake
from strata_pipeline.transforms.put_aside import sound_rows

from tests.support import relay_logs
from tests.support.lakes import NOON
from tests.support.toy_lakes import DAY, manifest_of, place, rows_table

SOUND = [place(1), place(3), place(4)]


@pytest.fixture
def rows() -> pa.Table:
    """Five rows that a dishonest lake quarantines; the body of the second was altered."""
    made = relay_logs.make_many(5, at=NOON)
    faulty = rows_table([place(n) for n in range(1, 6)], quarantined=True).to_pylist()
    told = [
        row
        | {
            "received_at": NOON,
            "timestamp": packet.timestamp,
            "packet_id": packet.digest,
            "author_id": packet.author_id,
            "content_type": packet.content_type,
            "size": len(packet.canonical),
            "body": packet.canonical,
        }
        for row, packet in zip(faulty, made, strict=True)
    ]
    told[1]["body"] += b" "
    told[4]["author_id"] = "did:key:somebody"
    return pa.Table.from_pylist(told, schema=rows_table([], quarantined=True).schema)


def test_rows_of_the_span_that_have_no_fault_are_told_with_file_and_row(rows: pa.Table, tmp_path: Path):
    path = tmp_path / "part-0.parquet"
    pq.write_table(rows, path)
    (tmp_path / "part-1.parquet").write_bytes(b"torn")  # a finding for its batch
    span = Span(place(0), place(9))
    told = sound_rows([tmp_path], span)
    assert [(one.sequence, one.file, one.row) for one in told] == [
        (sequence, str(path), number) for sequence, number in zip(SOUND, (0, 2, 3), strict=True)
    ]
    assert {(one.about, one.reason) for one in told} == {("row", "sound")}
    assert [one.sequence for one in sound_rows([tmp_path], Span(place(1), place(3)))] == SOUND[1:2]
    assert sound_rows([], span) == []


def test_an_audit_finds_packets_that_a_false_lake_hides_in_quarantine(spark, rows: pa.Table, tmp_path: Path):
    with Lake.write(tmp_path) as lake:
        span = Span(lake.reached, place(5, DAY))
        aside = lake.stage(span) / "quarantine"
        aside.mkdir(parents=True)
        pq.write_table(rows, aside / "part-0.parquet")
        lake.commit(manifest_of(lake, span, 0, 5, [], [aside]), None, aside)
    audited = audit(spark, tmp_path)
    assert audited.counts == {"row: sound": 3}
    assert [one.sequence for one in audited.findings] == SOUND
