"""Files of witnesses: one text for the same rows, and no other text is read."""

from __future__ import annotations

import msgspec
import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st
from strata.protocol.sequences import first_of_day
from strata_pipeline.lake_format import (
    GENESIS,
    LakeError,
    Manifest,
    decode_witnesses,
    encode_witnesses,
    read_witnesses,
    seal,
    witnesses_hash,
    witnesses_name,
)

BORDER = first_of_day(20_000)
ROWS = [(BORDER + 1, 1_728_000_000), (BORDER + 4, 1_727_999_000)]
TEXT = encode_witnesses(ROWS)
NUMBERS = st.integers(-(2**63), 2**63 - 1)

MANIFEST = seal(
    Manifest(
        number=12,
        after=BORDER,
        up_to=BORDER + 9,
        packets=8,
        quarantined=1,
        rows="r" * 64,
        contents="c" * 64,
        witnesses=witnesses_hash(TEXT),
        body_bytes=1,
        kinds={"POST": 8},
        last_packet_id="aa",
        last_received_at=1,
        written_at=1,
        previous=GENESIS,
    )
)


def test_a_file_is_plain_text_with_a_name_that_its_manifest_gives():
    assert TEXT == b"sequence,witnessed_at\n85899345920001,1728000000\n85899345920004,1727999000\n"
    assert witnesses_name(MANIFEST) == f"0000000012-{blake3(TEXT).hexdigest()}.csv"
    assert (encode_witnesses([]), witnesses_hash(b"")) == (b"", "")


@given(st.dictionaries(NUMBERS, NUMBERS, min_size=1))
def test_rows_survive_their_file(times: dict[int, int]):
    rows = sorted(times.items())
    assert decode_witnesses(encode_witnesses(rows), "name", len(rows)) == rows


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"sequence,witnessed_at\n",
        b"sequence;witnessed_at\n1,2\n",
        TEXT[:-1],
        TEXT.replace(b"\n", b"\r\n"),
        TEXT.replace(b",", b", "),
        b"sequence,witnessed_at\n1,2,3\n",
        b"sequence,witnessed_at\n1,x\n",
        b"sequence,witnessed_at\n1,+2\n",
        b"sequence,witnessed_at\n1,02\n",
        b"sequence,witnessed_at\n1,\xff\n",
        b"sequence,witnessed_at\n1,2\n1,2\n",
        b"sequence,witnessed_at\n2,2\n1,2\n",
        b"sequence,witnessed_at\n1,9223372036854775808\n",
        b"sequence,witnessed_at\n1,%s\n" % (b"9" * 50),
        b"sequence,witnessed_at\n" + b"1,2\n" * 100,
    ],
)
def test_what_is_no_file_of_witnesses_is_refused_by_name(text: bytes):
    with pytest.raises(LakeError, match="the lake's file 7 cannot be used"):
        decode_witnesses(text, "file 7", 2)


@given(st.binary(max_size=60))
def test_any_bytes_are_read_as_written_or_refused(text: bytes):
    text = b"sequence,witnessed_at\n" + text
    try:
        rows = decode_witnesses(text, "name", 60)
    except LakeError:
        return
    assert encode_witnesses(rows) == text


def test_a_file_is_the_one_that_its_manifest_binds():
    assert read_witnesses(TEXT, MANIFEST) == ROWS
    with pytest.raises(LakeError, match=r"0000000012-[0-9a-f]{64}\.csv was changed"):
        read_witnesses(TEXT.replace(b"1728", b"1729"), MANIFEST)


@pytest.mark.parametrize("sequence", [BORDER, BORDER + 10])
def test_a_row_of_another_batch_is_refused(sequence: int):
    text = encode_witnesses([(sequence, 1)])
    manifest = seal(msgspec.structs.replace(MANIFEST, witnesses=witnesses_hash(text)))
    with pytest.raises(LakeError, match="names a row outside its batch"):
        read_witnesses(text, manifest)
