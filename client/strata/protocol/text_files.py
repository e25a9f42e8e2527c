"""Text from files and pipes, as programs of Windows write it too."""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

import codecs

__all__ = ["utf8_of"]


def utf8_of(start: bytes) -> bytes:
    """The start of a text without the byte order mark, which UTF-8 does not need and parsers refuse.

    Raises `ValueError` for UTF-16 and UTF-32, with a mark or without.
    """
    if start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) or b"\0" in start[:2]:
        raise ValueError("the text is UTF-16; save it as UTF-8 (PowerShell: Out-File -Encoding utf8)")
    return start.removeprefix(codecs.BOM_UTF8)
