"""Generations of days: bound to each other and to their listings, with names that lead nowhere else."""

from __future__ import annotations

import json

import msgspec
import pytest
from strata.protocol.sequences import first_of_day
from strata_pipeline.lake_format import (
    GENESIS,
    Erasure,
    Generation,
    LakeError,
    Manifest,
    Part,
    StoredObject,
    check_day_listing,
    check_generations,
    day_listing_name,
    decode_day_listing,
    decode_generation,
    encode_day_listing,
    encode_generation,
    generation_name,
    seal,
    seal_day_listing,
    seal_erasure,
    seal_generation,
)

DAY = 20_000
BORDER = first_of_day(DAY)
WRITER = "f" * 32


def manifest(number: int, after: int, up_to: int) -> Manifest:
    return seal(
        Manifest(
            number=number, after=BORDER + after, up_to=BORDER + up_to, packets=2, quarantined=0,
            rows="r" * 64, contents="c" * 64, body_bytes=1, kinds={"POST": 2}, last_packet_id="aa",
            last_received_at=1, written_at=1, previous="p" * 64,
        )
    )  # fmt: skip


MANIFESTS = [manifest(4, 0, 2), manifest(5, 2, 4), manifest(6, 4, 6)]


def part(after: int, up_to: int, name: str | None = None) -> Part:
    folder = f"packets/day=2024-10-04/batch={BORDER + after + 1}-{BORDER + up_to}/kind=POST"
    one = StoredObject(name=name or f"{folder}/a.parquet", size=7, rows=2, hash="b" * 64)
    return Part(after=BORDER + after, up_to=BORDER + up_to, objects=[one])


LISTING = seal_day_listing(DAY, WRITER, [part(0, 4), part(4, 6)])


def generation(number: int = 0, previous: str = GENESIS, erasure: Erasure | None = None) -> Generation:
    return seal_generation(
        Generation(
            number=number, day=DAY, attempt=WRITER, listing=LISTING.hash, written_at=1, erasure=erasure,
            previous=previous,
        )
    )  # fmt: skip


def erasure(day: int = DAY, number: int = 0) -> Erasure:
    return seal_erasure(
        Erasure(number=number, day=day, written_at=1, batches=[], tombstones="t", erased=1, previous=GENESIS)
    )


def test_a_generation_and_its_listing_are_read_as_they_were_written():
    made = generation(erasure=erasure())
    assert decode_generation(encode_generation(made), "name") == made
    assert decode_day_listing(encode_day_listing(LISTING), "name") == LISTING
    check_day_listing(LISTING, made, MANIFESTS)
    assert [one.span for one in LISTING.parts] == [(BORDER, BORDER + 4), (BORDER + 4, BORDER + 6)]
    assert generation_name(12) == "0000000012.json"
    assert day_listing_name(DAY, WRITER) == f"2024-10-04-{WRITER}.json"


@pytest.mark.parametrize(
    ("change", "why"),
    [({"number": 1}, "hash does not"), ({"format": 2}, "its format is 2"), ({"more": 1}, "damaged")],
)
def test_what_was_changed_is_refused(change, why):
    for text, read in (
        (encode_generation(generation()), decode_generation),
        (encode_day_listing(LISTING), decode_day_listing),
    ):
        told = json.loads(text) | change
        with pytest.raises(LakeError, match=r"damaged|" + why):
            read(json.dumps(told).encode(), "name")


def test_a_generation_that_names_what_is_none_is_refused():
    for made, why in (
        (msgspec.structs.replace(generation(), attempt="../../x"), "not the name of an attempt"),
        (msgspec.structs.replace(generation(), day=-1), "-1 is not a day"),
        (msgspec.structs.replace(generation(), day=2**53 - 1), "is not a day"),
        (generation(erasure=erasure(DAY + 1)), "erasure is that of another day"),
        (generation(erasure=msgspec.structs.replace(erasure(), erased=2)), "or was changed"),
    ):
        with pytest.raises(LakeError, match=why):
            decode_generation(encode_generation(seal_generation(made)), "name")
    listing = seal_day_listing(DAY, WRITER, [part(0, 6, "packets/../x.parquet")])
    with pytest.raises(LakeError, match="is not the name of an object"):
        decode_day_listing(encode_day_listing(listing), "name")


def test_a_listing_without_parts_is_of_no_day():
    empty = seal_day_listing(DAY, WRITER, [])
    made = seal_generation(msgspec.structs.replace(generation(), listing=empty.hash))
    for ahead in (False, True):
        with pytest.raises(LakeError, match="its parts are not the batches"):
            check_day_listing(empty, made, [], ahead=ahead)


def test_generations_follow_each_other_and_so_do_their_erasures():
    first = generation(erasure=erasure())
    second = generation(1, first.hash)
    check_generations([first, second])
    for wrong in (
        [second],
        [first, first],
        [first, generation(1, GENESIS)],
        [first, generation(2, first.hash)],
    ):
        with pytest.raises(LakeError, match="is missing, or does not follow"):
            check_generations(wrong)
    with pytest.raises(LakeError, match="erasure 1"):
        check_generations([first, generation(1, first.hash, erasure(number=1))])


def test_a_copy_lists_a_day_before_its_manifests():
    made = generation(erasure=erasure())
    ends = [one.up_to - BORDER for one in MANIFESTS]
    for number in range(len(MANIFESTS) + 1):
        some = MANIFESTS[:number]
        if not some or ends[number - 1] in (4, 6):
            check_day_listing(LISTING, made, some, ahead=True)
        else:  # the chain ends in the middle of a part
            with pytest.raises(LakeError, match="its parts are not the batches of 2024-10-04"):
                check_day_listing(LISTING, made, some, ahead=True)
        if number < len(MANIFESTS):
            with pytest.raises(LakeError, match="its parts are not the batches of 2024-10-04"):
                check_day_listing(LISTING, made, some)
    for parts in ([], [part(0, 2), part(4, 6)], [part(0, 4), part(2, 6)]):
        listing = seal_day_listing(DAY, WRITER, parts)
        with pytest.raises(LakeError, match="its parts are not the batches of 2024-10-04"):
            check_day_listing(
                listing, msgspec.structs.replace(made, listing=listing.hash), MANIFESTS[:1], ahead=True
            )


def test_a_listing_has_each_batch_of_its_day_once_and_in_its_folder():
    other = msgspec.structs.replace(generation(), listing="0" * 64)
    with pytest.raises(LakeError, match="that of another generation"):
        check_day_listing(LISTING, other, MANIFESTS)
    for parts in (
        [], [part(0, 4)], [part(2, 6)], [part(0, 2), part(4, 6)], [part(0, 4), part(2, 6)],
        [part(0, 3), part(3, 6)], [part(0, 4), part(4, 4), part(4, 6)], [part(0, 4), part(4, 8)],
    ):  # fmt: skip
        listing = seal_day_listing(DAY, WRITER, parts)
        made = msgspec.structs.replace(generation(), listing=listing.hash)
        with pytest.raises(LakeError, match="its parts are not the batches of 2024-10-04"):
            check_day_listing(listing, made, MANIFESTS)
    astray = seal_day_listing(DAY, WRITER, [part(0, 4), part(4, 6, part(2, 6).objects[0].name)])
    made = msgspec.structs.replace(generation(), listing=astray.hash)
    with pytest.raises(LakeError, match="lies elsewhere than its part"):
        check_day_listing(astray, made, MANIFESTS)
