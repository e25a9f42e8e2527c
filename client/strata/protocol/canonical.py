"""Canonical JSON: the one place that makes the bytes to hash, sign, store and send (R-009, R-010).

The form is RFC 8785 (JCS), exactly. Input that has no single canonical form is refused (R-011, R-012); so
is a number whose canonical text would be an integer beyond ±(2**53 − 1), however it was spelled: a
canonical form that we would refuse on reading it back is no canonical form (A-003).

Two ways lead to the same bytes. The slow one decodes strictly, looks at every value and lets `rfc8785`
write. The fast one lets msgspec decode and write, and is taken only where its result is provably the same
(where only the decoding is in doubt, msgspec still writes what the strict parser read):

* **Text.** msgspec writes every character as JCS does: itself, but for the two-character escapes and
  lowercase `\\u00xx` of control characters (a test goes through all of Unicode). It refuses what the strict
  parser refuses: bad UTF-8, lone surrogates, bare control characters, anything after the value.
* **Order.** It sorts members by code point, JCS by UTF-16 unit. These differ only where a character
  from U+E000 up meets one, so a name with such a character goes the slow way.
* **Numbers.** An integer within ±(2**53 − 1) has one canonical text. A double that is no integer and at least
  0.01 in size is written alike by both: its shortest digits, without exponent. Other floats go the slow way.
* **Nothing lost.** Of members with one name msgspec keeps the last and says nothing. But each part of what
  it writes is a shortest JSON spelling of that part: no whitespace, no avoidable escape, no `-0`. (A float
  of k digits takes k + 1 characters from 1 up, k + 2 from 0.1, k + 3 from 0.01; one with an exponent takes
  at least k + 3. Below 0.01 an exponent can be shorter, hence the bound.) A dropped member would therefore
  make the output shorter than the input. Equal length proves that nothing was dropped; any other length
  (whitespace, a long spelling, a duplicate) sends the input the slow way, which tells these apart.
"""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn, cast

import msgspec
import rfc8785

from strata.protocol.errors import ErrorCode, InvalidPacket

__all__ = ["DEEPEST", "MAX_DEPTH", "MAX_SAFE_INTEGER", "canonicalize", "encode", "parse", "parse_without"]

MAX_DEPTH = 64
"""Objects and arrays that may be nested in one another (R-321)."""

DEEPEST = 512
"""Nesting that whoever reads an admitted packet allows for: as deep as a relay can be told to admit. One
depth for all readers, so that none stumbles over what another has let in."""

MAX_SAFE_INTEGER = 2**53 - 1
"""The largest integer that every JSON reader keeps exactly (R-012)."""

_MAX_INTEGER_DIGITS = len(str(MAX_SAFE_INTEGER))
_FIRST_EXPONENT = 1e21
"""From here on ECMAScript writes a number with an exponent, so that its text is no integer."""

_SMALLEST_PLAIN_FLOAT = 0.01
"""From here up no spelling of a fraction is shorter than its canonical text."""

_FIRST_MISORDERED = "\ue000"
"""From here up the order of code points and that of UTF-16 units differ."""

_decode = msgspec.json.Decoder().decode
_encode_sorted = msgspec.json.Encoder(order="sorted").encode


def parse(raw: bytes, *, max_depth: int = MAX_DEPTH) -> tuple[object, bytes]:
    """Decode JSON text and return the value with its canonical bytes.

    Zero-fraction numbers keep the type they were decoded as: `1.0` is a float whose canonical text is `1`.
    Raises `InvalidPacket` (`invalid_schema`); `detail` is one of `malformed_json`, `not_utf8`,
    `duplicate_member`, `lone_surrogate`, `number_out_of_range`, `integer_out_of_range`, `too_deep`.
    """
    try:
        value = _decode(raw)
        if _is_plain(value, max_depth):
            text = _encode_sorted(value)
            if len(text) == len(raw):
                return value, text
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        pass  # The strict parser finds the same fault, and names it.
    value = _parse_strictly(raw)
    return value, encode(value, max_depth=max_depth)


def parse_without(
    raw: bytes, members: Sequence[str], *, max_depth: int = MAX_DEPTH
) -> tuple[object, bytes, bytes]:
    """As `parse`, and the canonical bytes of the same object without these members.

    The third is empty for what is no object. What is left of an object that msgspec writes as RFC 8785 does
    is written so as well, which saves looking through it a second time. Raises as `parse` does.
    """
    try:
        value = _decode(raw)
        if type(value) is dict and _is_plain(value, max_depth):
            text = _encode_sorted(value)
            if len(text) == len(raw):
                rest = value.copy()
                for name in members:
                    rest.pop(name, None)
                return value, text, _encode_sorted(rest)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        pass
    value, text = parse(raw, max_depth=max_depth)
    if type(value) is not dict:
        return value, text, b""
    rest = {name: item for name, item in value.items() if name not in members}
    return value, text, encode(rest, max_depth=max_depth)


def canonicalize(raw: bytes, *, max_depth: int = MAX_DEPTH) -> bytes:
    """The canonical bytes of JSON text. Raises as `parse` does."""
    return parse(raw, max_depth=max_depth)[1]


def encode(value: object, *, max_depth: int = MAX_DEPTH) -> bytes:
    """The canonical bytes of a Python value made of dict, list, tuple, str, int, float, bool and None.

    Raises `InvalidPacket` as `parse` does, with detail `not_json` for a value that JSON cannot express.
    """
    try:
        if _is_plain(value, max_depth):
            return _encode_sorted(value)
    except (TypeError, UnicodeEncodeError):
        pass  # A member name or a string that the check below names.
    _require_canonical_form(value, max_depth)
    return rfc8785.dumps(cast(Any, value))


def _is_plain(value: object, depth: int) -> bool:
    """Whether msgspec's sorted text of `value` is certainly its canonical form."""
    if type(value) is dict:
        names = "".join(value)
        if not names.isascii() and max(names) >= _FIRST_MISORDERED:
            return False
        items: Iterable[Any] = value.values()
    elif type(value) is list:
        items = value
    else:
        return False
    if depth <= 0:
        return False
    for item in items:
        kind = type(item)
        if kind is str:
            continue
        if kind is int:
            if not -MAX_SAFE_INTEGER <= item <= MAX_SAFE_INTEGER:
                return False
        elif kind is dict or kind is list:
            if not _is_plain(item, depth - 1):
                return False
        elif kind is float:
            if item.is_integer() or not _SMALLEST_PLAIN_FLOAT <= abs(item) <= MAX_SAFE_INTEGER:
                return False
        elif item is not None and kind is not bool:
            return False
    return True


def _parse_strictly(raw: bytes) -> Any:
    """Decode JSON, refusing everything that readers are known to treat differently."""
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError:
        _refuse("the text is not UTF-8", "not_utf8")
    try:
        return json.loads(
            text,
            object_pairs_hook=_members,
            parse_int=_integer,
            parse_float=_float,
            parse_constant=_constant,
        )
    except RecursionError:
        _refuse("objects and arrays are nested too deeply", "too_deep")
    except ValueError:
        _refuse("the text is not JSON", "malformed_json")


def _members(pairs: list[tuple[str, Any]]) -> dict[str, object]:
    members = dict(pairs)
    if len(members) != len(pairs):
        _refuse("an object has two members of one name", "duplicate_member")
    return members


def _integer(literal: str) -> int:
    # Counted first: converting digits takes time that grows faster than their number.
    if len(literal) > _MAX_INTEGER_DIGITS + 1 or abs(number := int(literal)) > MAX_SAFE_INTEGER:
        _refuse_integer()
    return number


def _float(literal: str) -> float:
    number = float(literal)
    _require_number(number)
    return number


def _constant(literal: str) -> NoReturn:
    _refuse("NaN and Infinity are not JSON", "malformed_json")


def _require_canonical_form(value: object, depth: int) -> None:
    """Refuse values that RFC 8785 has no form for. Recursion ends at `depth`, so a cycle ends too."""
    if value is None or isinstance(value, bool):
        return
    if isinstance(value, str):
        _require_text(value)
    elif isinstance(value, int):
        if abs(value) > MAX_SAFE_INTEGER:
            _refuse_integer()
    elif isinstance(value, float):
        _require_number(value)
    elif isinstance(value, dict | list | tuple):
        if depth <= 0:
            _refuse("objects and arrays are nested too deeply", "too_deep")
        if isinstance(value, dict):
            for name in value:
                _require_text(name)
            value = value.values()
        for item in value:
            _require_canonical_form(item, depth - 1)
    else:
        _refuse("the value has no form in JSON", "not_json")


def _require_text(value: object) -> None:
    if not isinstance(value, str):
        _refuse("a member name is not a string", "not_json")
    if value.isascii():
        return
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        _refuse("a string holds a lone surrogate", "lone_surrogate")


def _require_number(number: float) -> None:
    if not abs(number) < float("inf"):  # also true of NaN
        _refuse("a number is outside double range", "number_out_of_range")
    # Its canonical text is an integer literal, and one that R-012 refuses.
    if MAX_SAFE_INTEGER < abs(number) < _FIRST_EXPONENT and number.is_integer():
        _refuse_integer()


def _refuse_integer() -> NoReturn:
    _refuse("an integer is beyond 2**53 - 1", "integer_out_of_range")


def _refuse(reason: str, detail: str) -> NoReturn:
    raise InvalidPacket(ErrorCode.INVALID_SCHEMA, reason, detail=detail)
