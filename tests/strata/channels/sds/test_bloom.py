"""The filter, byte for byte as in the JavaScript package."""

from __future__ import annotations

import base64
import hashlib
import json
import zlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strata.channels.sds import BloomFilter, BloomParameters
from strata.channels.sds.bloom import RollingFilter

ROOT = Path(__file__).parents[4]
VECTORS = json.loads((ROOT / "docs/requirements/vectors/sds_js.json").read_text())["bloom"]["filters"]
HEX_IDS = [hashlib.sha256(str(number).encode()).hexdigest() for number in range(400)]
W3_ID = "5e44db411d8182597dfe499092c836ecb77603aead6fc6ed34ec4f2d082d085b"


@pytest.mark.req("C-103")
def test_one_id_sets_the_bits_of_the_document() -> None:
    parameters = BloomParameters(10_000, 0.001)
    positions = [114128, 100686, 87244, 73802, 60360, 46918, 33476, 20034, 6592, 143150]
    assert list(parameters.positions(W3_ID)) == positions
    one = BloomFilter(parameters)
    one.insert(W3_ID)
    digest = "c20b6dabbf69f5eb995867a481b686e784796fd7124a173505ab7fb6520d9bad"
    assert hashlib.sha256(one.to_bytes()).hexdigest() == digest
    assert len(one.to_bytes()) == 18_752


@pytest.mark.req("C-103")
@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: str(vector["parameters"]["capacity"]))
def test_filters_of_the_javascript_package(vector: dict[str, Any]) -> None:
    parameters = BloomParameters(vector["parameters"]["capacity"], vector["parameters"]["error_rate"])
    assert parameters.bits == vector["total_bits"]
    assert parameters.hashes == vector["k"]
    assert parameters.size_bytes == vector["byte_length"]
    for after in vector["after"]:
        made = BloomFilter(parameters)
        for message_id in HEX_IDS[: int(after["inserted"].split()[2])]:
            made.insert(message_id)
        assert made.to_bytes() == zlib.decompress(base64.b64decode(after["bytes_zlib"]))
    hundred = BloomFilter(parameters)
    for message_id in HEX_IDS[:100]:
        hundred.insert(message_id)
    assert all(message_id in hundred for message_id in HEX_IDS[:100])
    found = [number for number in range(100, 400) if HEX_IDS[number] in hundred]
    assert found == vector["lookup_after_100"]["false_positives_among_hex_ids_100_to_399"]


@given(st.lists(st.text(max_size=20), unique=True, max_size=50))
def test_nothing_that_is_in_it_is_denied(texts: list[str]) -> None:
    made = BloomFilter(BloomParameters(64, 0.01))
    for text in texts:
        made.insert(text)
        assert made.to_bytes() == made.to_bytes()
    assert all(text in made for text in texts)


@pytest.mark.req("C-102")
def test_a_full_filter_rolls_over_and_keeps_the_latest_half() -> None:
    rolling = RollingFilter(BloomParameters(100, 0.001))
    for number in range(1_000):
        rolling.insert(HEX_IDS[number % 400] + str(number))
        last = range(max(0, number - 49), number + 1)
        assert all(HEX_IDS[each % 400] + str(each) in rolling for each in last)
    strangers = sum(f"stranger {number}" in rolling for number in range(2_000))
    assert strangers < 10  # 2 expected at this error rate; thousands without the roll-over
