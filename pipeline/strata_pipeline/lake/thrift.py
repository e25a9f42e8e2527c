"""Thrift's compact protocol, in which footers and page headers of Parquet files are written. No I/O.

A member of a struct is named by its number and a letter for its type, `3L`: other programs skip a member
whose type is not the one that they expect, so the number alone does not tell what they see.
"""

from __future__ import annotations

from typing import Any, Final

__all__ = ["MOST_VALUES", "decode"]

MOST_VALUES: Final = 2**20
"""The most values that are decoded. A value may take one byte here and a hundred in memory. The footer
of a file with 12 columns and 1,600 row groups, in which Spark puts 200 GiB, has fewer."""
_DEEPEST: Final = 12
_TRUE, _FALSE, _BYTE, _I16, _I32, _I64, _DOUBLE, _BINARY, _LIST = range(1, 10)
_STRUCT: Final = 12
_BEYOND: Final = {_I16: 2**15, _I32: 2**31, _I64: 2**63}
_LETTERS: Final = {
    _TRUE: "B", _FALSE: "B", _BYTE: "Y", _I16: "H", _I32: "I", _I64: "L", _BINARY: "S", _LIST: "A",
    _STRUCT: "R",
}  # fmt: skip
_NAMES: Final = {
    (number, kind): f"{number}{letter}" for kind, letter in _LETTERS.items() for number in range(1, 32)
}
_NUMBERS: Final = frozenset((_I16, _I32, _I64))
_BOOLEANS: Final = frozenset((_TRUE, _FALSE))
_ONLY_ONE_BYTE: Final = 128
_LONGEST: Final = 63


def decode(data: bytes, at: int = 0) -> tuple[dict[str, Any], int]:
    """The struct that begins at a place in the data, and the place where it ends.

    Numbers become int, binaries bytes, lists list, structs dict. Raises ValueError for anything else, and for
    more than `MOST_VALUES`, before it makes these.
    """
    try:
        told, end = _struct(data, at, 0, _Room())
    except (IndexError, KeyError):
        raise ValueError("it is cut off, or has types that no writer of a lake uses") from None
    return told, end


class _Room:
    """How many values may still come."""

    def __init__(self) -> None:
        self._left = MOST_VALUES

    def take(self, values: int) -> None:
        self._left -= values
        if self._left < 0:
            raise ValueError(f"it has more than {MOST_VALUES:,} values")


def _struct(data: bytes, at: int, depth: int, room: _Room) -> tuple[dict[str, Any], int]:
    if depth > _DEEPEST:
        raise ValueError("it is nested too deeply")
    told: dict[str, Any] = {}
    number = 0
    while header := data[at]:
        at += 1
        kind = header & 15
        step = header >> 4
        if not step:
            later, at = _number(data, at, _I16)
            step = later - number
        if step <= 0:
            raise ValueError("a member is there twice, or out of order")
        number += step
        name = _NAMES[number, kind]
        if kind in _NUMBERS and (first := data[at]) < _ONLY_ONE_BYTE:  # most of them, so it is fast
            told[name] = (first >> 1) ^ -(first & 1)
            at += 1
        elif kind in _BOOLEANS:
            told[name] = kind == _TRUE
        else:
            told[name], at = _value(data, at, kind, depth, room)
    room.take(len(told))
    return told, at + 1


def _value(data: bytes, at: int, kind: int, depth: int, room: _Room) -> tuple[Any, int]:
    if kind == _BINARY:
        size, at = _size(data, at)
        return data[at : at + size], at + size
    if kind == _STRUCT:
        return _struct(data, at, depth + 1, room)
    if kind == _LIST:
        return _list(data, at, depth, room)
    if kind == _BYTE:
        return data[at], at + 1
    return _number(data, at, kind)


def _list(data: bytes, at: int, depth: int, room: _Room) -> tuple[list[Any], int]:
    if depth > _DEEPEST:
        raise ValueError("it is nested too deeply")
    header = data[at]
    kind, size = header & 15, header >> 4
    at += 1
    if size == 15:
        size, at = _size(data, at)
    if size > len(data) - at:
        raise IndexError
    room.take(size)
    if kind in _BOOLEANS:
        return [one == _TRUE for one in data[at : at + size]], at + size
    values = []
    for _ in range(size):
        value, at = _value(data, at, kind, depth + 1, room)
        values.append(value)
    return values, at


def _size(data: bytes, at: int) -> tuple[int, int]:
    size = data[at]
    at += 1
    if size >= _ONLY_ONE_BYTE:
        size, at = _unsigned(data, at - 1)
    if size > len(data) - at:
        raise IndexError
    return size, at


def _number(data: bytes, at: int, kind: int) -> tuple[int, int]:
    told, at = _unsigned(data, at)
    number = (told >> 1) ^ -(told & 1)
    if not -_BEYOND[kind] <= number < _BEYOND[kind]:
        raise ValueError("a number is too large")
    return number, at


def _unsigned(data: bytes, at: int) -> tuple[int, int]:
    number = shift = 0
    while (byte := data[at]) >= _ONLY_ONE_BYTE:
        at += 1
        number |= (byte & 127) << shift
        shift += 7
        if shift > _LONGEST:
            raise ValueError("a number is too large")
    return number | byte << shift, at + 1
