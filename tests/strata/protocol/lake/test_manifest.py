"""The chain of manifests: what it accepts, and that no change of it goes unseen."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strata.protocol.lake import (
    GENESIS,
    HASHED,
    LakeError,
    Manifest,
    RowsDigest,
    Span,
    check_chain,
    day_of,
    day_text,
    decode,
    encode,
    first_of_day,
    manifests_of_day,
    parse_day,
    row_bytes,
    seal,
    string_key,
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
    [b"", b"{", b"[]", b"null", b"\xff", b'{"format":1}', b"[" * 100_000, b'{"format":1,"x":1}', TOO_LARGE],
)
def test_what_is_no_manifest_is_refused_by_name(text: bytes):
    with pytest.raises(LakeError, match=r"0000000007\.json"):
        decode(text, "0000000007.json")


def test_another_version_says_which_program_to_use():
    told = json.loads(encode(chain(BORDER + 10)[0])) | {"format": 2}
    with pytest.raises(LakeError, match="format is 2 and this program knows 1"):
        decode(json.dumps(told).encode(), "0000000000.json")


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


def test_long_strings_are_hashes_that_no_string_is():
    for text in ("POST", "", "x" * 512, "\u00e9" * 256, "a\0b"):
        assert string_key(text) == text.encode()
    for text in ("x" * 513, "\u00e9" * 257):
        assert len(string_key(text)) == 33 and string_key(text).startswith(HASHED)


@given(st.integers(0, 60_000), st.integers(1, 2**32 - 1))
def test_sequences_and_days(day: int, ordinal: int):
    sequence = first_of_day(day) + ordinal
    assert day_of(sequence) == day == parse_day(day_text(day))
    assert Span(0, sequence).day == day and Span(0, sequence).ordinals == ordinal
