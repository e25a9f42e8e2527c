"""Canonical JSON: the only module that makes the bytes to hash, sign, store and send (R-009, R-010).

The form is exactly that of RFC 8785 (JCS). Input that has no single canonical form is refused (R-011, R-012).
So is a number whose canonical text would be an integer beyond ±(2**53 − 1), however it was spelled: a
canonical form must not be refused when it is read back (A-003).

msgspec decodes and encodes wherever the result is provably the same:

* **Text.** msgspec writes every character as JCS does: as itself, except for the two-character escapes and
  lowercase `\\u00xx` of control characters (a test covers all of Unicode). It refuses what the strict parser
  refuses: bad UTF-8, lone surrogates, bare control characters, anything after the value.
* **Order.** msgspec sorts members by code point, JCS by UTF-16 unit. The two orders differ only for names
  with a character from U+E000 up. This module sorts objects with such a name itself.
* **Numbers.** An integer within ±(2**53 − 1) has one canonical text. For a double that is not an integer,
  both write the shortest digits, and both use an exponent below 1e-6. This module respells doubles from 1e-6
  to 1e-5, and those that are integers.
* **Duplicates.** If members have the same name, msgspec silently keeps the last. Nothing was lost if the
  output equals the input, or if both have the same number of colons outside strings: in JSON these only
  follow names. Otherwise the input goes through the strict parser.

The strict parser and `rfc8785` handle the rest: faults, which the strict parser names, and Python values
whose types are not exactly those of JSON.
"""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn, cast

import msgspec
import rfc8785

from strata.protocol.errors import ErrorCode, InvalidPacket

__all__ = [
    "DEEPEST",
    "MAX_DEPTH",
    "MAX_SAFE_INTEGER",
    "canonicalize",
    "encode",
    "most_values",
    "parse",
    "parse_without",
    "part",
    "require_few_values",
    "without",
]

MAX_DEPTH = 64
"""How deeply objects and arrays may be nested (R-321)."""

DEEPEST = 512
"""The nesting that readers of admitted packets allow: the deepest that a relay can be configured to admit.
All readers use it, so that none refuses a packet that another has admitted."""

MAX_SAFE_INTEGER = 2**53 - 1
"""The largest integer that every JSON reader represents exactly (R-012)."""

_MAX_INTEGER_DIGITS = len(str(MAX_SAFE_INTEGER))
_FIRST_EXPONENT = 1e21
"""From here on ECMAScript writes a number with an exponent, so that its text is not an integer."""

_RESPELLED_FROM, _RESPELLED_BELOW = 1e-6, 1e-5
"""Between these, msgspec writes an exponent and ECMAScript does not."""

_FIRST_MISORDERED = "\ue000"
"""From here on, the orders of code points and of UTF-16 units differ."""

_without_strings = functools.partial(re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL).sub, b"")
"""Reduces JSON text to its structure. An unterminated string extends to the end of the text, so that the time
is linear in the length for any text."""

_decode = msgspec.json.Decoder(float_hook=float).decode
"""Python reads floats: msgspec takes 45 µs for one such as `1.5e300`, a hundred times as long."""
_decode_members = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_encode_sorted = msgspec.json.Encoder(order="sorted").encode
_encode_as_it_stands = msgspec.json.Encoder().encode


def parse(raw: bytes, *, max_depth: int = MAX_DEPTH) -> tuple[object, bytes]:
    """Decode JSON text and return the value with its canonical bytes.

    Numbers with a zero fraction keep their decoded type: `1.0` is a float whose canonical text is `1`.
    Raises `InvalidPacket` (`invalid_schema`); `detail` is one of `malformed_json`, `not_utf8`,
    `duplicate_member`, `lone_surrogate`, `number_out_of_range`, `integer_out_of_range`, `too_deep`.
    """
    try:
        value = _decode(raw)
        text = _encode_sorted(value) if _is_plain(value, max_depth) else _encode_respelled(value, max_depth)
        if text == raw or _count_members(text) == _count_members(raw):
            return value, text
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        pass  # The strict parser finds the same fault, and names it.
    value = _parse_strictly(raw)
    return value, encode(value, max_depth=max_depth)


def parse_without(
    raw: bytes, members: Sequence[str], *, max_depth: int = MAX_DEPTH
) -> tuple[object, bytes, bytes]:
    """Do as `parse`, and also return the canonical bytes of the same object without these members.

    These bytes are empty if the value is not an object. The remaining members are already respelled, so they
    are not checked again. Raises as `parse` does.
    """
    try:
        value = _decode(raw)
        if type(value) is dict:
            spelled: Any = value if _is_plain(value, max_depth) else _respelled(value, max_depth)
            write = _encode_sorted if spelled is value else _encode_as_it_stands
            text = write(spelled)
            if text == raw or _count_members(text) == _count_members(raw):
                return value, text, write(_without(spelled, members))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        pass
    value, text = parse(raw, max_depth=max_depth)
    if type(value) is not dict:
        return value, text, b""
    return value, text, encode(_without(value, members), max_depth=max_depth)


def most_values(raw: bytes) -> int:
    """An upper bound on the number of values (numbers, strings, objects, …) in this JSON text.

    A member counts as one value. Brackets and commas inside strings are counted as if they were outside, so
    the bound may be too high; an exact count costs a hundred times as much.
    """
    return raw.count(b",") + raw.count(b"[") + raw.count(b"{") + 1


def require_few_values(raw: bytes, max_values: int) -> None:
    """Refuse JSON text with more than `max_values` values, before anything is decoded.

    The cost of decoding depends far more on the number of values than on the number of bytes. Raises
    `InvalidPacket` (`invalid_schema`) with detail `too_many_values`.
    """
    if len(raw) < max_values:
        return  # each value takes at least a byte
    if most_values(raw) > max_values and most_values(_without_strings(raw)) > max_values:
        _refuse(f"the text holds more than {max_values} values", "too_many_values")


def canonicalize(raw: bytes, *, max_depth: int = MAX_DEPTH) -> bytes:
    """The canonical bytes of JSON text. Raises as `parse` does."""
    return parse(raw, max_depth=max_depth)[1]


def part(text: bytes, *path: str) -> bytes | None:
    """The canonical text of the member at this path of names in a canonical text; None without it.

    A part of a canonical text is itself canonical. Decoding and encoding it again would take a hundred times
    as long, and strangers choose how large it is.
    """
    found: bytes | None = text
    for name in path:
        member = _decode_members(found).get(name) if found and found.startswith(b"{") else None
        found = None if member is None else bytes(member)
    return found


def without(text: bytes, *path: str) -> bytes:
    """A canonical text without the member at this path of names; the same text if it has none.

    The rest is copied, for the same reason as in `part`.
    """
    name, *inner = path
    members = _decode_members(text) if text.startswith(b"{") else {}
    if name not in members:
        return text
    if inner:
        members[name] = msgspec.Raw(without(bytes(members[name]), *inner))
    else:
        del members[name]
    return _encode_as_it_stands(members)


def encode(value: object, *, max_depth: int = MAX_DEPTH) -> bytes:
    """The canonical bytes of a Python value made of dict, list, tuple, str, int, float, bool and None.

    Raises `InvalidPacket` as `parse` does, with detail `not_json` for a value that JSON cannot express.
    """
    try:
        if _is_plain(value, max_depth):
            return _encode_sorted(value)
        return _encode_respelled(value, max_depth)
    except (TypeError, UnicodeEncodeError):
        pass  # A value of a type that is not exactly one of JSON's, or one with a fault that is found below.
    _require_canonical_form(value, max_depth)
    return rfc8785.dumps(cast(Any, value))


def _without(value: dict[str, object], members: Sequence[str]) -> dict[str, object]:
    rest = value.copy()
    for name in members:
        rest.pop(name, None)
    return rest


def _is_plain(value: object, depth: int) -> bool:
    """Whether msgspec's sorted text of `value` is certain to be its canonical form."""
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
        elif kind is float:
            if item.is_integer() or item - item != 0 or _RESPELLED_FROM <= abs(item) < _RESPELLED_BELOW:
                return False
        elif kind is dict or kind is list:
            if item:
                if not _is_plain(item, depth - 1):
                    return False
            elif depth <= 1:
                return False
        elif item is not None and kind is not bool:
            return False
    return True


def _count_members(text: bytes) -> int:
    """The number of members of all objects in a valid JSON text."""
    return _without_strings(text).count(b":")


def _encode_respelled(value: object, depth: int) -> bytes:
    return _encode_as_it_stands(_respelled(value, depth))


def _respelled(value: Any, depth: int) -> object:
    """An equal value that msgspec writes canonically without sorting.

    Raises `InvalidPacket`, and TypeError for a value whose type is not exactly one of JSON's.
    """
    kind = type(value)
    if kind is dict:
        if depth <= 0:
            _refuse("objects and arrays are nested too deeply", "too_deep")
        names = sorted(value)
        if names and max("".join(names), default="") >= _FIRST_MISORDERED:
            names.sort(key=_utf16_units)
        return {
            name: item if type(item := value[name]) is str else _respelled(item, depth - 1) for name in names
        }
    if kind is list:
        if depth <= 0:
            _refuse("objects and arrays are nested too deeply", "too_deep")
        return [item if type(item) is str else _respelled(item, depth - 1) for item in value]
    if kind is float:
        return _respelled_float(value)
    if kind is int:
        if not -MAX_SAFE_INTEGER <= value <= MAX_SAFE_INTEGER:
            _refuse_integer()
    elif value is not None and kind is not bool and kind is not str:
        raise TypeError
    return value


def _respelled_float(number: float) -> object:
    """A value that msgspec writes in the way that ECMAScript writes `number`."""
    if number.is_integer() and abs(number) <= MAX_SAFE_INTEGER:
        return int(number)
    if _RESPELLED_FROM <= abs(number) < _RESPELLED_BELOW:
        digits = repr(number).removesuffix("e-06")
        sign = "-" if number < 0 else ""
        return msgspec.Raw(f"{sign}0.00000{digits.removeprefix('-').replace('.', '')}".encode())
    _require_number(number)
    if abs(number) < _FIRST_EXPONENT:
        return number
    return msgspec.Raw(repr(number).encode())  # Python writes large exponents as ECMAScript does


def _utf16_units(name: str) -> bytes:
    return name.encode("utf-16-be")


def _parse_strictly(raw: bytes) -> object:
    """Decode JSON, refusing everything that different readers are known to treat differently."""
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


def _members(pairs: list[tuple[str, object]]) -> dict[str, object]:
    members = dict(pairs)
    if len(members) != len(pairs):
        _refuse("an object has two members of one name", "duplicate_member")
    return members


def _integer(literal: str) -> int:
    # Counted first, because the time to convert digits grows faster than their number.
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
    """Refuse values that have no form in RFC 8785. Recursion ends at `depth`, so a cycle ends too."""
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
