"""Text from files and pipes as other programs write it, and text for them."""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

import codecs
import json

import msgspec

__all__ = ["json_of", "utf8_of"]


def utf8_of(start: bytes) -> bytes:
    """The start of a text without the byte order mark, which UTF-8 does not need and parsers refuse.

    Raises `ValueError` for UTF-16 and UTF-32, with a mark or without.
    """
    if start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) or b"\0" in start[:2]:
        raise ValueError("the text is UTF-16; save it as UTF-8 (PowerShell: Out-File -Encoding utf8)")
    return start.removeprefix(codecs.BOM_UTF8)


def json_of(value: object) -> bytes:
    """JSON on one line. Names of files that are not UTF-8 have ? in place of what JSON cannot hold."""
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:
        plain = json.dumps(msgspec.to_builtins(value), ensure_ascii=False, separators=(",", ":"))
        return plain.encode("utf-8", "replace")
