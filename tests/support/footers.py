"""Parquet files whose footers tell something else than the writer wrote."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from strata_pipeline.lake.thrift import decode

__all__ = ["change", "chunk", "encode", "read", "statistics"]

_KINDS = {"B": 1, "Y": 3, "H": 4, "I": 5, "L": 6, "S": 8, "A": 9, "R": 12}


def change(path: Path, edit: Callable[[dict[str, Any], bytearray], object]) -> None:
    """Rewrite a file: `edit` gets its footer, and all bytes before it, and may change both."""
    body, footer = read(path)
    edit(footer, body)
    end = encode(footer)
    path.write_bytes(bytes(body) + end + len(end).to_bytes(4, "little") + b"PAR1")


def read(path: Path) -> tuple[bytearray, dict[str, Any]]:
    """The bytes before a footer, and the footer."""
    whole = path.read_bytes()
    end = len(whole) - 8 - int.from_bytes(whole[-8:-4], "little")
    return bytearray(whole[:end]), decode(whole, end)[0]


def chunk(footer: dict[str, Any], column: str, group: int = 0) -> dict[str, Any]:
    """A column of a row group."""
    chunks = footer["4A"][group]["1A"]
    return next(one for one in chunks if one["3R"]["3A"] == [column.encode()])


def statistics(footer: dict[str, Any], column: str, group: int = 0) -> dict[str, Any]:
    """The statistics of a column of a row group."""
    told: dict[str, Any] = chunk(footer, column, group)["3R"]["12R"]
    return told


def encode(told: dict[str, Any]) -> bytes:
    """A struct in Thrift's compact protocol, with the names of members that `decode` gives them."""
    out = bytearray()
    last = 0
    for name, value in sorted(told.items(), key=lambda one: int(one[0][:-1])):
        number, kind = int(name[:-1]), _KINDS[name[-1]]
        kind = 2 if value is False else kind
        step = number - last
        out += bytes([step << 4 | kind]) if step < 16 else bytes([kind]) + _varint(_zigzag(number))
        out += b"" if name[-1] == "B" else _value(value, kind)
        last = number
    return bytes(out) + b"\0"


def _value(value: Any, kind: int) -> bytes:
    match value:
        case bytes():
            return _varint(len(value)) + value
        case dict():
            return encode(value)
        case list():
            return _list(value)
        case _ if kind == _KINDS["Y"]:
            return bytes([value])
    return _varint(_zigzag(value))


def _list(values: list[Any]) -> bytes:
    first = values[0] if values else 0
    kind = next(
        number
        for type_, number in ((bool, 1), (bytes, 8), (dict, 12), (list, 9), (int, 6))
        if isinstance(first, type_)
    )
    size = len(values)
    out = bytes([size << 4 | kind]) if size < 15 else bytes([0xF0 | kind]) + _varint(size)
    if kind == 1:
        return out + bytes(1 if one else 2 for one in values)
    return out + b"".join(_value(one, kind) for one in values)


def _zigzag(number: int) -> int:
    return number << 1 if number >= 0 else (-number << 1) - 1


def _varint(number: int) -> bytes:
    out = bytearray()
    while number >= 128:
        out.append(number & 127 | 128)
        number >>= 7
    return bytes([*out, number])
