"""Whatever a stranger has put into a copy of a lake, small files are not read beyond their limits."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from strata_pipeline.errors import LakeError
from strata_pipeline.jobs.audit_erasures import check_erasures
from strata_pipeline.jobs.audit_result import Audited
from strata_pipeline.lake.erasure_commit import put_record
from strata_pipeline.lake.lake import Lake
from strata_pipeline.lake.object_lake import ObjectLake
from strata_pipeline.lake.stores.limits import RECORD_BYTES
from strata_pipeline.lake.witness_checks import witnesses_faults

from tests.support.object_lakes import put_batch, tombstones
from tests.support.toy_lakes import DAY, place, write_batch

HUGE = 2**40


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    """A lake with a record of an erasure and a file of witnesses."""
    write_batch(tmp_path, [1, 2], times={place(1): 5})
    write_batch(tmp_path, [1], day=DAY + 1, times={})
    lake = Lake.open(tmp_path)
    [(_, text)] = tombstones(place(1)).values()
    put_record(lake, lake.erasures.next(DAY, 0, [], text + b"\n"), text + b"\n")
    return Lake.open(tmp_path)


@pytest.mark.parametrize(
    ("file", "limit"),
    [("_manifests/0000000001.json", "1,048,576"), ("_erased/0000000000.json", "536,870,912")],
)
def test_a_lake_with_a_record_that_is_too_large_is_refused_by_name(lake, file, limit):
    os.truncate(path := lake.root / file, HUGE)
    why = f"^{path} has 1,099,511,627,776 bytes, and may have {limit}: no writer of a lake has written it$"
    with pytest.raises(LakeError, match=why):
        Lake.open(lake.root)


def test_files_with_a_line_for_each_row_are_findings_if_they_are_too_long_for_the_rows(lake):
    stones, times = lake.erased / "0000000000.jsonl", next(lake.witnesses_folder.iterdir())
    assert len(next(lake.erasures.signed_tombstones(lake.erasures.records[0]))[1]) < 500
    for one in (stones, times):
        os.truncate(one, HUGE)
    check_erasures(lake, (), audited := Audited())
    assert f"{stones} has 1,099,511,627,776 bytes, and may have 1,024:" in str(audited.findings)
    [fault] = witnesses_faults(lake.witnesses, lake.chain.of_day(DAY), *lake.day(DAY))
    assert (fault.reason, fault.file) == ("malformed", str(times)) and "may have 106" in fault.detail


def test_an_object_is_not_downloaded_beyond_its_limit(in_memory):
    put_batch(where := next(in_memory), [1, 2])
    lake = ObjectLake.open(where)
    lake.store.put("_manifests/0000000000.json", bytes(RECORD_BYTES + 1))
    with pytest.raises(LakeError, match=r"^s3://memory/0/_manifests/0000000000\.json has 1,048,577 bytes"):
        ObjectLake.open(where)
