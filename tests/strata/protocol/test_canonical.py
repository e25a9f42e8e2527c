"""The canonical form: RFC 8785's samples, what is refused, and a comparison with an independent reader."""

from __future__ import annotations

import copy
import json
import math
import struct
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import rfc8785
from hypothesis import example, given
from hypothesis import strategies as st
from strata.protocol import canonical
from strata.protocol.errors import ErrorCode, InvalidPacket

VECTORS = json.loads(Path(__file__).with_name("vectors.json").read_text("utf-8"))
MAX = 2**53 - 1
SHORT_ESCAPES = dict(
    zip('"\\/\b\f\n\r\t', ['\\"', "\\\\", "\\/", "\\b", "\\f", "\\n", "\\r", "\\t"], strict=True)
)


def refusal(raw: bytes, **options: int) -> str | None:
    with pytest.raises(InvalidPacket) as caught:
        canonical.parse(raw, **options)
    assert caught.value.code is ErrorCode.INVALID_SCHEMA
    return caught.value.detail


# --- RFC 8785 -----------------------------------------------------------------------------------------------


@pytest.mark.req("R-009")
@pytest.mark.parametrize("sample", VECTORS["numbers"], ids=lambda sample: sample["double"])
def test_numbers_of_rfc_8785_appendix_b(sample: dict[str, Any]) -> None:
    (number,) = struct.unpack(">d", bytes.fromhex(sample["double"]))
    expected = sample["text"]
    if expected is None:
        with pytest.raises(InvalidPacket, match="number_out_of_range"):
            canonical.encode(number)
    elif expected.lstrip("-").isdecimal() and abs(int(expected)) > MAX:
        # The text is correct, but refused because it is an integer that conversion to a double may change.
        assert rfc8785.dumps(number).decode() == expected
        with pytest.raises(InvalidPacket, match="integer_out_of_range"):
            canonical.encode(number)
    else:
        assert canonical.encode(number).decode() == expected
        assert canonical.encode([number]).decode() == f"[{expected}]"


@pytest.mark.req("R-009")
def test_sample_of_rfc_8785_section_3_2_2() -> None:
    raw = rb"""{
        "numbers": [333333333.33333329, 1E30, 4.50, 2e-3, 0.000000000000000000000000001],
        "string": "\u20ac$\u000F\u000aA'\u0042\u0022\u005c\\\"\/",
        "literals": [null, true, false]
    }"""
    expected = (
        '{"literals":[null,true,false],"numbers":[333333333.3333333,1e+30,4.5,0.002,1e-27],'
        '"string":"€$\\u000f\\nA\'B\\"\\\\\\\\\\"/"}'
    )
    assert canonical.canonicalize(raw).decode() == expected


@pytest.mark.req("R-009")
def test_members_are_sorted_by_utf_16_code_unit() -> None:
    names = ["€", "\r", "\ufb33", "1", "😀", "\x80", "ö"]
    expected = ["\r", "1", "\x80", "ö", "€", "😀", "\ufb33"]
    for raw in (
        msgspec.json.encode({name: {name: 0} for name in names}),
        json.dumps(dict.fromkeys(names)).encode(),
    ):
        assert list(json.loads(canonical.canonicalize(raw))) == expected
    assert list(json.loads(canonical.encode([dict.fromkeys(names)]))[0]) == expected


@pytest.mark.req("R-009")
def test_text_is_not_normalised() -> None:
    composed, decomposed = '["\u00e9"]'.encode(), '["e\u0301"]'.encode()
    assert canonical.canonicalize(composed) == composed
    assert canonical.canonicalize(decomposed) == decomposed


@pytest.mark.req("R-009")
def test_every_character_has_the_text_of_rfc_8785() -> None:
    for first in range(0, sys.maxunicode + 1, 4096):
        text = "".join(chr(c) for c in range(first, first + 4096) if not 0xD800 <= c < 0xE000)
        assert canonical.encode([text]) == rfc8785.dumps([text])


def spellings(character: str) -> list[int]:
    """The length in bytes of each way to write a character inside a JSON string."""
    found = [len("\\u0000") * len(character.encode("utf-16-be")) // 2]
    if character in SHORT_ESCAPES:
        found.append(len(SHORT_ESCAPES[character]))
    if character >= " " and character not in '"\\':
        found.append(len(character.encode()))
    return found


@pytest.mark.slow
@pytest.mark.req("R-009", "R-011")
def test_no_spelling_of_a_character_is_shorter_than_the_one_the_fast_path_writes() -> None:
    # Half of the proof that equal length means nothing was dropped; numbers are the other half.
    for code in range(sys.maxunicode + 1):
        if not 0xD800 <= code < 0xE000:
            written = msgspec.json.encode(chr(code))[1:-1]
            assert len(written) == min(spellings(chr(code)))


# --- What has no canonical form -----------------------------------------------------------------------------


@pytest.mark.req("R-011")
@pytest.mark.parametrize(
    ("raw", "detail"),
    [
        (b"", "malformed_json"),
        (b"{", "malformed_json"),
        (b"[1,]", "malformed_json"),
        (b'{"a":1,}', "malformed_json"),
        (b"[1] 2", "malformed_json"),
        (b"[01]", "malformed_json"),
        (b"[1.]", "malformed_json"),
        (b"[.5]", "malformed_json"),
        (b"[+1]", "malformed_json"),
        (b"[0x10]", "malformed_json"),
        (b"{'a':1}", "malformed_json"),
        (b"{a:1}", "malformed_json"),
        (b"[1] // one", "malformed_json"),
        (b'["\x00"]', "malformed_json"),
        (b'["\x1f"]', "malformed_json"),
        (b'["\\x41"]', "malformed_json"),
        (b"\xef\xbb\xbf[]", "malformed_json"),
        (b"\x0b[]", "malformed_json"),
        ("[\u0661]".encode(), "malformed_json"),
        (b"[NaN]", "malformed_json"),
        (b"[Infinity]", "malformed_json"),
        (b"[-Infinity]", "malformed_json"),
        (b'["\xff"]', "not_utf8"),
        (b'["\xc0\x80"]', "not_utf8"),
        (b'["\xed\xa0\x80"]', "not_utf8"),
        (b'["\xf4\x90\x80\x80"]', "not_utf8"),
        (b'{"a":1,"a":1}', "duplicate_member"),
        (b'{"a":1,"\\u0061":2}', "duplicate_member"),
        (b'[{"x":[{"b":1,"a":2,"b":3}]}]', "duplicate_member"),
        (b'["\\ud800"]', "lone_surrogate"),
        (b'["\\udc00"]', "lone_surrogate"),
        (b'["\\ude00\\ud83d"]', "lone_surrogate"),
        (b'["\\ud83d\\u0041"]', "lone_surrogate"),
        (b'{"\\ud800":1}', "lone_surrogate"),
        (b'{"\\ud800":{"\\ue000":1},"\\ue000":1}', "lone_surrogate"),
        (b"[1e309]", "number_out_of_range"),
        (b"[-1e400]", "number_out_of_range"),
        (b"1e99999", "number_out_of_range"),
    ],
)
def test_input_without_one_canonical_form_is_refused(raw: bytes, detail: str) -> None:
    assert refusal(raw) == detail


@pytest.mark.req("R-011")
@pytest.mark.parametrize("filler", ["5e-3", "1e-5", "1E1", "1e15", "-0", "1.0", "0e9"])
def test_a_dropped_member_cannot_hide_behind_numbers_that_grow(filler: str) -> None:
    # msgspec keeps the last of two members. A number whose canonical text is longer than its spelling
    # would make up for the lost length, if only lengths were compared.
    for count in range(1, 40):
        numbers = ",".join([filler] * count)
        assert refusal(f'[{{"a":1,"a":2}},{numbers}]'.encode()) == "duplicate_member"


@pytest.mark.req("R-012")
@pytest.mark.parametrize(
    "literal",
    [
        "9007199254740992",
        "9007199254740993",
        "-9007199254740992",
        "18446744073709551616",
        "9" * 400,
        "9" * 5000,
        "-" + "9" * 200_000,
        # Their canonical text is an integer literal that the next reader would have to refuse.
        "9007199254740992.0",
        "9007199254740993.0",
        "1e16",
        "-1e20",
        "123456789e12",
    ],
    ids=lambda literal: literal[:24],
)
def test_integers_that_doubles_do_not_keep_are_refused(literal: str) -> None:
    assert refusal(literal.encode()) == "integer_out_of_range"
    assert refusal(f'{{"content":{{"deep":[{literal}]}}}}'.encode()) == "integer_out_of_range"


@pytest.mark.req("R-012", "R-013", "R-009")
@pytest.mark.parametrize(
    ("literal", "expected"),
    [
        ("9007199254740991", "9007199254740991"),
        ("-9007199254740991", "-9007199254740991"),
        ("9007199254740991.0", "9007199254740991"),
        ("1760000000.0", "1760000000"),
        ("176e7", "1760000000"),
        ("1.0", "1"),
        ("-0", "0"),
        ("-0.0", "0"),
        ("0e5", "0"),
        ("1e-7", "1e-7"),
        ("9.99e-7", "9.99e-7"),
        ("1e-6", "0.000001"),
        ("-1.5e-6", "-0.0000015"),
        ("9.999999999999999e-6", "0.000009999999999999999"),
        ("1e-5", "0.00001"),
        ("1.5e300", "1.5e+300"),
        ("-1.5e21", "-1.5e+21"),
        ("0.0000001", "1e-7"),
        ("1e21", "1e+21"),
        ("1000000000000000000000e0", "1e+21"),
        ("5e-3", "0.005"),
        ("0.95", "0.95"),
        ("0.9500", "0.95"),
        ("0.1e1", "1"),
        ("4503599627370495.5", "4503599627370495.5"),
        ("1e-400", "0"),
    ],
)
def test_numbers_have_ecmascript_text(literal: str, expected: str) -> None:
    assert canonical.canonicalize(f"[{literal}]".encode()) == f"[{expected}]".encode()
    assert canonical.canonicalize(literal.encode()) == expected.encode()


@pytest.mark.req("R-321")
def test_nesting_is_bounded() -> None:
    for opening, closing in ((b"[", b"]"), (b'{"a":', b"}")):
        inside = opening * 64 + b"1" + closing * 64
        assert canonical.canonicalize(inside) == inside
        assert refusal(opening * 65 + b"1" + closing * 65) == "too_deep"
        assert refusal(opening * 3 + b"1" + closing * 3, max_depth=2) == "too_deep"
        # A duplicate and a float, so that the strict parser detects the depth.
        assert refusal(opening * 65 + b"1.50" + closing * 65) == "too_deep"
        for deep in (1_000, 100_000):
            assert refusal(opening * deep + b"1" + closing * deep) == "too_deep"
            assert refusal(opening * deep) in ("too_deep", "malformed_json")


@pytest.mark.parametrize(
    "piece",
    [
        "1e-9",
        "0.001",
        "1e21",
        "1e5",
        "1.0",
        "2e-6",
        "1.5e300",
        "[]",
        "{}",
        '{"a":1}',
        '{"\uffff":0}',
        '"\\n"',
    ],
)
def test_no_valid_text_goes_the_slow_way(piece: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = [independent_reading(raw) for raw in (f"[{piece},{piece}]".encode(), f" [ {piece} ]".encode())]

    def slow(*_: Any) -> None:
        raise AssertionError("this takes up to a hundred times as long for a byte")

    monkeypatch.setattr(canonical, "_parse_strictly", slow)
    monkeypatch.setattr(rfc8785, "dumps", slow)
    assert canonical.canonicalize(f"[{piece},{piece}]".encode()) == expected[0]
    assert canonical.canonicalize(f" [ {piece} ]".encode()) == expected[1]
    _, text, rest = canonical.parse_without(f' {{"b":[{piece}],"a":1}}'.encode(), ["a"])
    assert text == b'{"a":1,' + rest[1:]


@pytest.mark.req("R-321")
def test_values_are_counted_before_anything_is_decoded() -> None:
    for text, values in (
        ("[1,2,3]", 4),
        ('{"a":[],"b":{"c":null}}', 4),
        ('["a,b,c","[[[{{{","\\",","]', 4),
        ("0", 1),
    ):
        raw = text.encode()
        canonical.require_few_values(raw, values + 1)  # an empty container counts as if it held a value
        with pytest.raises(InvalidPacket, match="too_many_values"):
            canonical.require_few_values(raw, values - 1)
        assert canonical.most_values(raw) >= values
    # Malformed JSON is also scanned once, not once per quote.
    for raw in (b'"' + b'\\"' * 200_000, b'","' * 100_000, b'"' * 300_001, b"\\" * 300_000 + b","):
        canonical.require_few_values(raw + b"," * 40_000, 10**6)
        canonical.require_few_values(raw, 400_000)


def test_long_hostile_input_raises_nothing_else() -> None:
    size = 262_144
    for piece in (
        b"[",
        b'{"a":',
        b"-",
        b"9",
        b" ",
        b'"',
        b"\\",
        b"1e9,",
        b'"\\ud800",',
        b'{"a":1,"a":1},',
        b"\xff",
    ):
        with pytest.raises(InvalidPacket):
            canonical.parse(b"[" + piece * (size // len(piece)))
    with pytest.raises(InvalidPacket):
        canonical.parse(b"1e" + b"9" * size)


# --- Python values ------------------------------------------------------------------------------------------


@pytest.mark.req("R-009", "R-011")
def test_python_values_without_json_form_are_refused() -> None:
    cyclic: list[Any] = []
    cyclic.append(cyclic)
    cases: list[tuple[Any, str]] = [
        (b"bytes", "not_json"),
        ({"a": b"bytes"}, "not_json"),
        ({"a": {1, 2}}, "not_json"),
        ({1: "a"}, "not_json"),
        ({None: 1}, "not_json"),
        ([object()], "not_json"),
        (["\ud800"], "lone_surrogate"),
        ({"\ud800": 1}, "lone_surrogate"),
        ([math.nan], "number_out_of_range"),
        ([math.inf], "number_out_of_range"),
        ({"a": 2**53}, "integer_out_of_range"),
        ({"a": 1e17}, "integer_out_of_range"),
        (cyclic, "too_deep"),
    ]
    for value, detail in cases:
        with pytest.raises(InvalidPacket) as caught:
            canonical.encode(value)
        assert caught.value.detail == detail


def test_tuples_and_string_enums_are_written_as_what_they_are() -> None:
    assert (
        canonical.encode({"b": (1, "x"), "a": ErrorCode.RATE_LIMITED}) == b'{"a":"rate_limited","b":[1,"x"]}'
    )


# --- Both ways, against an independent reader ---------------------------------------------------------------


def independent_reading(raw: bytes) -> bytes | None:
    """An independent, slow reader of RFC 8785 with R-011 and R-012; None where there is no canonical form."""

    def members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        if len(set(names)) != len(names):
            raise ValueError
        return dict(pairs)

    def constant(_: str) -> None:
        raise ValueError

    try:
        value = json.loads(raw.decode("utf-8"), object_pairs_hook=members, parse_constant=constant)
        text = rfc8785.dumps(value)
        # The canonical text must read back unchanged; floats whose text is too large an integer fail here.
        return text if rfc8785.dumps(json.loads(text)) == text else None
    except (ValueError, RecursionError):
        return None


finite = st.floats(allow_nan=False, allow_infinity=False)
white = st.sampled_from(["", "", "", "", " ", "\n\t", "\r"])
hex_unit = st.integers(0, 0xFFFF)
plain_character = st.characters(exclude_categories=["Cs"], exclude_characters='"\\', min_codepoint=0x20)
string_piece = st.one_of(
    plain_character,
    st.sampled_from(["a", "b", "\ue000", "\uffff", "😀", "é", "/", "\x7f"]),
    st.sampled_from(
        ["\\b", "\\f", "\\n", "\\r", "\\t", "\\/", '\\"', "\\\\", "\\ud83d\\ude00", "\\ud800", "\x01"]
    ),
    hex_unit.map("\\u{:04x}".format),
    hex_unit.map("\\u{:04X}".format),
)
string_text = st.lists(string_piece, max_size=4).map(lambda pieces: f'"{"".join(pieces)}"')
number_text = st.one_of(
    st.integers(-3, 3).map(str),
    st.integers(-(2**54), 2**54).map(str),
    st.integers().map(str),
    st.sampled_from([MAX, MAX + 1, -MAX, -MAX - 1, 2**63, 2**64, 10**21]).map(str),
    finite.map(repr),
    st.floats(1e-8, 1e-4).map(repr),
    st.floats(1e-7, 1e-5).map("{:.30f}".format),
    st.floats(1e15, 1e23).map(repr),
    st.floats(-1000, 1000).map("{:.3f}".format),
    st.tuples(st.integers(-9999, 9999), st.sampled_from("eE"), st.integers(-30, 30)).map(
        "{0[0]}{0[1]}{0[2]}".format
    ),
    st.sampled_from(["-0", "-0.0", "0e1", "1e309", "5e-3", "12e-3", "1E+2", "01", "1.", "NaN", "-Infinity"]),
)
scalar_text = st.one_of(st.sampled_from(["null", "true", "false"]), string_text, number_text)


def array_of(items: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    spaced = st.tuples(white, items, white).map("".join)
    return st.lists(spaced, max_size=4).map(lambda texts: f"[{','.join(texts)}]")


def object_of(items: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    name = st.one_of(st.sampled_from(['"a"', '"a"', '"b"', '"\\u0061"']), string_text)
    member = st.tuples(white, name, white, st.just(":"), white, items, white).map("".join)
    return st.lists(member, max_size=4).map(lambda texts: f"{{{','.join(texts)}}}")


json_text = st.recursive(
    scalar_text, lambda items: st.one_of(array_of(items), object_of(items)), max_leaves=12
)


@pytest.mark.req("R-009", "R-010", "R-011", "R-012")
@given(json_text)
@example('{"a":1,"a":0.005}')
@example('[{"\ue000":1,"😀":2}]')
@example("[1e20]")
def test_both_ways_agree_with_an_independent_reading(text: str) -> None:
    agree(text.encode())


@pytest.mark.req("R-011")
@given(json_text, st.data())
def test_damaged_text_is_refused_alike(text: str, data: st.DataObject) -> None:
    raw = bytearray(text.encode())
    at = data.draw(st.integers(0, len(raw) - 1))
    match data.draw(st.sampled_from(["replace", "insert", "cut", "repeat"])):
        case "replace":
            raw[at] = data.draw(st.integers(0, 255))
        case "insert":
            raw.insert(at, data.draw(st.integers(0, 255)))
        case "cut":
            del raw[at:]
        case _:
            raw += raw[at:]
    agree(bytes(raw))


@given(st.binary(max_size=64))
def test_arbitrary_bytes_raise_nothing_else(raw: bytes) -> None:
    agree(raw)


def agree(raw: bytes) -> None:
    expected = independent_reading(raw)
    try:
        value, text = canonical.parse(raw)
    except InvalidPacket as refused:
        assert expected is None
        assert refused.code is ErrorCode.INVALID_SCHEMA
        assert refused.detail is not None
        return
    assert text == expected
    assert canonical.encode(value) == text
    assert canonical.parse(text)[1] == text, "a canonical form is its own canonical form"


ANY_VALUE = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-MAX, MAX)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda items: st.lists(items, max_size=4) | st.dictionaries(st.text(), items, max_size=4),
    max_leaves=12,
)


@given(st.dictionaries(st.text(max_size=2), ANY_VALUE, min_size=1), st.data())
@pytest.mark.req("R-009")
def test_a_part_and_what_is_left_without_it_are_as_if_written_alone(value: Any, data: st.DataObject) -> None:
    try:
        text = canonical.encode(value)
    except InvalidPacket:
        return
    path: list[str] = []
    found, rest = value, copy.deepcopy(value)
    within = rest
    while type(found) is dict and found and (not path or data.draw(st.booleans())):
        name = data.draw(st.sampled_from(sorted(found)))
        within = within[path[-1]] if path else within
        path, found = [*path, name], found[name]
    del within[path[-1]]
    assert canonical.part(text, *path) == canonical.encode(found)
    assert canonical.without(text, *path) == canonical.encode(rest)
    assert canonical.part(text, *path, "not there") is None or "not there" in found
    assert canonical.without(text, "not there", *path) == text


@given(ANY_VALUE)
@pytest.mark.req("R-009")
def test_python_values_are_written_as_rfc8785_does(value: Any) -> None:
    expected = rfc8785.dumps(value)
    try:
        assert canonical.encode(value) == expected
    except InvalidPacket as refused:
        assert refused.detail == "integer_out_of_range"
        assert independent_reading(expected) is None
