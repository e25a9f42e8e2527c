"""Erased packets are found, and erased, wherever a lake holds them. No Spark."""

from __future__ import annotations

import pytest
from blake3 import blake3
from strata.protocol.errors import InvalidInput
from strata.protocol.ids import Identity
from strata.protocol.tombstones import Tombstone, sign_tombstone
from strata_pipeline.errors import LakeError
from strata_pipeline.jobs.audit_erasures import check_erasures
from strata_pipeline.jobs.audit_result import Audited
from strata_pipeline.jobs.elsewhere import ErasedIds
from strata_pipeline.jobs.object_days import erase_from_day, still_there
from strata_pipeline.lake.lake import Lake
from strata_pipeline.lake.object_lake import ObjectLake
from strata_pipeline.lake_format import line_elsewhere, read_tombstone_line
from strata_pipeline.log.database import LogTombstone

from tests.support.object_lakes import inline, put_batch, rows_apart
from tests.support.toy_lakes import DAY, place, write_batch

RELAY = Identity(bytes(32))


def tombstone(of: int, at: int) -> LogTombstone:
    """A tombstone of the packet that toy lakes have at `of`, which the log has had at `at`."""
    digest = blake3(b"%d" % of).digest()
    signed = sign_tombstone(Tombstone(f"0x{digest.hex()}", at, 5, 7, RELAY.did), RELAY)
    return LogTombstone(at, digest, signed)


ASKED = [
    tombstone(place(2), place(9, DAY + 5)),
    tombstone(place(5), place(3)),  # a place that holds another packet
    tombstone(place(6), place(6)),
    tombstone(place(1, DAY + 1), place(9, DAY + 5)),
]


def test_rows_with_an_erased_id_are_erased_at_any_place(in_memory, tmp_path):
    where = next(in_memory)
    for write, at in ((write_batch, tmp_path), (put_batch, where)):
        write(at, [1, 2, 3], [5])
        write(at, [6, 7])
        write(at, [1], day=DAY + 1)
    ids = ErasedIds(ASKED)
    with ObjectLake.replace(where) as lake:
        lines = ids.elsewhere(lake, DAY)
        assert lines == ids.elsewhere(Lake.open(tmp_path), DAY)
        assert [at for at, _ in lines] == [place(2), place(5)]
        assert [at for at, _ in ids.elsewhere(lake, DAY + 1)] == [place(1, DAY + 1)]
        found = {at: (read_tombstone_line(line)[0], line) for at, line in lines}
        asked = still_there(lake, DAY, found)
        assert erase_from_day(lake, DAY, asked.found, inline).rows == 2
    left = [place(n) for n in (1, 3, 6, 7)] + [place(1, DAY + 1)]
    assert rows_apart(where) == (left, [place(2), place(5)])
    lake = ObjectLake.open(where)
    check_erasures(lake, (), audited := Audited())
    assert (audited.holds, audited.erased) == (True, 2), audited.counts
    [record] = lake.erasures.records
    assert [(one.sequence, text) for one, text in lake.erasures.signed_tombstones(record)] == [
        (place(2), b""),
        (place(5), b""),
    ], "a restore has no tombstone for these places"
    next(Lake.open(tmp_path).day_folder(DAY).rglob("*.parquet")).write_bytes(b"torn")
    with pytest.raises(LakeError, match=r"2024-10-04 has a file that cannot be read: .*not known"):
        ids.elsewhere(Lake.open(tmp_path), DAY)


def test_a_line_with_a_place_must_hold_a_tombstone_that_is_signed():
    text = tombstone(2, 9).text
    line = line_elsewhere(text, 4, 6)
    told, alone = read_tombstone_line(line)
    assert (told.sequence, told.received_at, told.packet_id, alone) == (
        4,
        6,
        f"0x{blake3(b'2').hexdigest()}",
        b"",
    )
    assert read_tombstone_line(text)[1] == text
    for bad in (
        line.replace(b'"erased_at":7', b'"erased_at":8'),
        line[:-1] + b',"x":1}',
        b'{"received_at":6}',
    ):
        with pytest.raises(InvalidInput):
            read_tombstone_line(bad)
