"""Listings of the objects of a batch: bound to a manifest and to names that lead nowhere else."""

from __future__ import annotations

import json

import msgspec
import pytest
from strata.protocol.sequences import first_of_day
from strata_pipeline.lake_format import (
    LakeError,
    Listing,
    Manifest,
    StoredObject,
    check_listing,
    decode_listing,
    encode_listing,
    listing_name,
    seal,
    seal_listing,
)

DAY = 20_000
BORDER = first_of_day(DAY)
FOLDER = f"day=2024-10-04/batch={BORDER + 1}-{BORDER + 9}"

MANIFEST = seal(
    Manifest(
        number=12,
        after=BORDER,
        up_to=BORDER + 9,
        packets=8,
        quarantined=1,
        rows="r" * 64,
        contents="c" * 64,
        body_bytes=1,
        kinds={"POST": 8},
        last_packet_id="aa",
        last_received_at=1,
        written_at=1,
        previous="p" * 64,
    )
)


def listing(*names: str) -> Listing:
    objects = [StoredObject(name=name, size=7, rows=8, hash="b" * 64) for name in names]
    return seal_listing(MANIFEST, "f" * 32, objects)


def test_a_listing_is_read_as_it_was_written():
    made = listing(f"packets/{FOLDER}/kind=POST/part-0.zstd.parquet", f"quarantine/{FOLDER}/part-0.parquet")
    read = decode_listing(encode_listing(made), "name")
    assert read == made
    check_listing(read, MANIFEST)
    assert listing_name(MANIFEST) == f"0000000012-{MANIFEST.hash}.json"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"number": 13}, "hash does not recompute"),
        ({"format": 2}, "its format is 2"),
        ({"hash": ""}, "hash does not recompute"),
        ({"more": 1}, "damaged"),
    ],
)
def test_a_listing_that_was_changed_is_refused(change, why):
    told = json.loads(encode_listing(listing())) | change
    with pytest.raises(LakeError, match=why):
        decode_listing(json.dumps(told).encode(), "name")
    with pytest.raises(LakeError, match="damaged"):
        decode_listing(b"\xff", "name")


@pytest.mark.parametrize(
    "name",
    [
        "packets/../../etc/passwd.parquet",
        f"packets/{FOLDER}/kind=../x.parquet",
        f"packets/{FOLDER}/kind=POST/../x.parquet",
        f"packets/{FOLDER}/kind=POST/.x.parquet",
        f"/packets/{FOLDER}/kind=POST/x.parquet",
        f"_manifests/{FOLDER}/x.parquet",
        f"packets/{FOLDER}/kind=POST/x.parquet\n",
    ],
)
def test_names_that_lead_elsewhere_are_refused(name):
    with pytest.raises(LakeError, match="is not the name of an object"):
        decode_listing(encode_listing(listing(name)), "name")


def test_a_listing_of_another_manifest_or_of_other_batches_is_refused():
    other = seal(msgspec.structs.replace(MANIFEST, written_at=2))
    with pytest.raises(LakeError, match="another manifest"):
        check_listing(listing(), other)
    for folder in (
        f"day=2024-10-05/batch={BORDER + 1}-{BORDER + 9}",
        f"day=2024-10-04/batch={BORDER + 2}-{BORDER + 9}",
        f"day=2024-10-04/batch={BORDER + 1}-{BORDER + 8}",
        f"day=2024-10-04/batch={BORDER + 1}-{BORDER + 99}",
    ):
        with pytest.raises(LakeError, match="lies elsewhere than its batch"):
            check_listing(listing(f"packets/{folder}/kind=POST/a.parquet"), MANIFEST)
