"""Records of erasures: sealed, chained, and only about rows of the manifests that they cover."""

from __future__ import annotations

import msgspec
import pytest
from strata_pipeline.lake_format import (
    GENESIS,
    ErasedBatch,
    Erasure,
    LakeError,
    Manifest,
    check_erasures,
    decode_erasure,
    encode_erasure,
    seal,
    seal_erasure,
    told,
)

BATCH = seal(
    Manifest(
        number=0,
        after=0,
        up_to=10,
        packets=9,
        quarantined=1,
        rows="a" * 64,
        contents="b" * 64,
        body_bytes=900,
        kinds={"POST": 9},
        last_packet_id="c" * 64,
        last_received_at=5,
        written_at=6,
        previous=GENESIS,
    )
)


def record(number: int = 0, previous: str = GENESIS, **changes: object) -> Erasure:
    batch = ErasedBatch(
        manifest=BATCH.hash, packets=7, quarantined=3, contents="d" * 64, body_bytes=700, kinds={"POST": 7}
    )
    return seal_erasure(
        Erasure(
            number=number,
            day=0,
            written_at=9,
            batches=[msgspec.structs.replace(batch, **changes)],
            tombstones="e" * 64,
            erased=2,
            previous=previous,
        )
    )


def test_what_is_written_reads_back_and_what_was_changed_does_not():
    written = encode_erasure(record())
    assert decode_erasure(written, "it") == record()
    for old, new in (
        (b'"erased": 2', b'"erased": 3'),
        (b'"packets": 7', b'"packets": 8'),
        (b'"format": 1', b'"format": 2'),
        (b'"number"', b'"other"'),
        (b"}", b""),
    ):
        with pytest.raises(LakeError, match="the lake's it cannot be used"):
            decode_erasure(written.replace(old, new), "it")


def test_a_record_of_a_day_that_is_none_is_refused():
    for day in (-1, 2**40):
        written = encode_erasure(seal_erasure(msgspec.structs.replace(record(), day=day)))
        with pytest.raises(LakeError, match="is not a day"):
            decode_erasure(written, "it")


def test_records_follow_each_other_without_a_gap():
    first = record()
    second = record(1, first.hash, packets=6, quarantined=4)
    check_erasures([])
    check_erasures([first, second])
    for wrong in ([second], [first, first], [first, record(1)], [first, record(2, first.hash)]):
        with pytest.raises(LakeError, match=r"erasure \d cannot be used: it is missing, or does not follow"):
            check_erasures(wrong)


def test_a_manifest_tells_what_its_batch_holds_now_and_keeps_its_hash():
    other = msgspec.structs.replace(BATCH, hash="f" * 64)
    first = record()
    second = record(1, first.hash, packets=6, quarantined=4, contents="9" * 64)
    assert told([BATCH, other], []) == [BATCH, other]
    now, untouched = told([BATCH, other], [first, second])
    assert (now.packets, now.quarantined, now.contents) == (6, 4, "9" * 64)
    assert (now.body_bytes, now.kinds) == (700, {"POST": 7})
    assert (now.hash, now.rows, now.up_to) == (BATCH.hash, BATCH.rows, BATCH.up_to) and untouched is other


@pytest.mark.parametrize(
    "changes",
    [{"packets": 6}, {"quarantined": 2}, {"packets": 10, "quarantined": 0}],
)
def test_a_record_of_other_rows_is_refused(changes):
    with pytest.raises(LakeError, match="it tells of other rows than the manifest"):
        told([BATCH], [record(**changes)])
