"""The chain of manifests: what it accepts, and that every change to it is noticed."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strata.protocol.sequences import first_of_day
from strata_pipeline.lake_format import (
    GENESIS,
    NOTHING,
    OTHERS,
    ChainEnd,
    ContentsDigest,
    LakeError,
    Manifest,
    RowsDigest,
    check_chain,
    decode,
    encode,
    manifests_of_day,
    others_hash,
    row_bytes,
    seal,
)

BORDER = first_of_day(20_000)


def chain(*ends: int) -> list[Manifest]:
    made: list[Manifest] = []
    for number, up_to in enumerate(ends):
        made.append(
            seal(
                Manifest(
                    number=number,
                    after=made[-1].up_to if made else 0,
                    up_to=up_to,
                    packets=10,
                    quarantined=0,
                    rows="ab" * 32,
                    contents="12" * 32,
                    witnesses="34" * 32,
                    body_bytes=1000,
                    kinds={"POST": 10},
                    last_packet_id="cd" * 32,
                    last_received_at=20_000 * 86_400,
                    written_at=1,
                    previous=made[-1].hash if made else GENESIS,
                )
            )
        )
    return made


def test_a_sealed_chain_is_accepted_and_survives_its_files():
    made = chain(BORDER + 10, BORDER + 20, first_of_day(20_001) + 5)
    assert [decode(encode(manifest), "name") for manifest in made] == made
    check_chain(made)
    assert manifests_of_day(made, 20_000) == made[:2]


@pytest.mark.parametrize("member", [name for name in Manifest.__struct_fields__ if name != "hash"])
def test_a_change_of_any_member_shows(member: str):
    told = json.loads(encode(chain(BORDER + 10)[0]))
    value = told[member]
    told[member] = value + 1 if isinstance(value, int) else {} if isinstance(value, dict) else "ef" * 32
    with pytest.raises(LakeError):
        decode(json.dumps(told).encode(), "0000000000.json")


TOO_LARGE = encode(chain(BORDER + 10)[0]).replace(b'"packets": 10', b'"packets": 9007199254740993')


@pytest.mark.parametrize(
    "text",
    [b"", b"{", b"[]", b"null", b"\xff", b'{"format":3}', b"[" * 100_000, b'{"format":3,"x":1}', TOO_LARGE],
)
def test_what_is_no_manifest_is_refused_by_name(text: bytes):
    with pytest.raises(LakeError, match=r"0000000007\.json"):
        decode(text, "0000000007.json")


@pytest.mark.parametrize("version", [1, 2, 4])
def test_another_version_is_refused_with_the_way_out(version: int):
    told = json.loads(encode(chain(BORDER + 10)[0])) | {"format": version}
    del told["witnesses"]
    why = f"format is {version} and this program reads 3 alone: archive the log anew into another folder"
    with pytest.raises(LakeError, match=why):
        decode(json.dumps(told).encode(), "0000000000.json")


@pytest.mark.parametrize("witnesses", ["../" * 20, "AB" * 32])
def test_witnesses_are_a_hash(witnesses: str):
    made = seal(msgspec.structs.replace(chain(BORDER + 10)[0], witnesses=witnesses))
    with pytest.raises(LakeError, match="`witnesses` is not a hash"):
        decode(encode(made), "0000000000.json")


def test_a_manifest_without_witnesses_survives_its_file():
    without = seal(msgspec.structs.replace(chain(BORDER + 10)[0], witnesses=""))
    assert decode(encode(without), "name") == without


def test_a_chain_is_looked_at_in_parts_and_tells_where_each_ends():
    made = chain(BORDER + 10, BORDER + 20, BORDER + 30)
    end = check_chain(made)
    assert end == ChainEnd(3, made[2].hash, BORDER + 30)
    assert check_chain(made[1:], check_chain(made[:1])) == end
    assert check_chain([], end) == end and check_chain([]) == ChainEnd()


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"number": 2}, "manifest 1 cannot be used: it is missing"),
        ({"up_to": BORDER + 10}, "it begins behind"),
    ],
)
def test_a_manifest_that_is_sealed_and_bound_has_the_next_number_and_sequences(change, why):
    made = chain(BORDER + 10, BORDER + 20)
    with pytest.raises(LakeError, match=why):
        check_chain([made[0], seal(msgspec.structs.replace(made[1], **change))])


def test_a_chain_with_a_manifest_missing_swapped_or_resealed_is_refused():
    made = chain(BORDER + 10, BORDER + 20, BORDER + 30)
    for broken in ([made[0], made[2]], made[1:], [made[1], made[0], made[2]]):
        with pytest.raises(LakeError):
            check_chain(broken)
    forged = seal(msgspec.structs.replace(made[1], packets=11))
    with pytest.raises(LakeError, match="one of the two was replaced"):
        check_chain([made[0], forged, made[2]])
    gap = seal(msgspec.structs.replace(made[1], after=BORDER + 11))
    with pytest.raises(LakeError, match="begins behind"):
        check_chain([made[0], gap])


ROWS = st.lists(
    st.tuples(st.integers(0, 2**53), st.integers(-(2**40), 2**40), st.binary(max_size=40)), max_size=8
)


@given(ROWS, ROWS)
def test_digests_agree_exactly_where_rows_do(
    one: list[tuple[int, int, bytes]], other: list[tuple[int, int, bytes]]
):
    def digest(rows: list[tuple[int, int, bytes]], cut: int) -> str:
        made = RowsDigest()
        made.update(rows[:cut])
        made.update_bytes(b"".join(row_bytes(*row) for row in rows[cut:]), len(rows) - cut)
        assert made.rows == len(rows)
        return made.hexdigest()

    assert digest(one, 0) == digest(one, len(one) // 2)
    assert (digest(one, 0) == digest(other, 0)) == (one == other)


CONTENTS = st.lists(
    st.tuples(
        st.integers(0, 2**53), st.none() | st.binary(max_size=8), st.none() | st.binary(max_size=8),
        st.just(NOTHING),
    ),
    max_size=4,
)  # fmt: skip


@given(CONTENTS, CONTENTS)
def test_second_digests_agree_exactly_where_rows_do(one, other):
    def digest(rows):
        made = ContentsDigest()
        made.update(rows[:1])
        made.update(rows[1:])
        return made.hexdigest()

    assert (digest(one) == digest(other)) == (one == other)


def test_every_column_of_a_quarantined_row_counts():
    row = dict.fromkeys(OTHERS, 1) | {"reason": "null", "detail": None, "author_id": "", "packet_id": b"\x12"}
    hashes = {others_hash(row)}
    for name in OTHERS:
        for value in (None, 2, "", "x", b"y"):
            if value != row[name]:
                hashes.add(others_hash(row | {name: value}))
    # The empty string and empty bytes are encoded alike; all other values differ.
    assert len(hashes) > 4 * len(OTHERS)
