"""Reading single members of decoded JSON: the value in the required form, or None.

Callers decide what a missing or malformed member means; nothing here raises.
"""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

import binascii
import re

__all__ = ["CONTENT_ID", "base64url", "hex_bytes", "integer", "is_content_id", "number", "unpadded_base64url"]

CONTENT_ID = "0x[0-9a-f]{64}"
"""The form of every packet id and every hash of bytes, as a regular expression (R-020, R-027)."""

_is_content_id = re.compile(CONTENT_ID).fullmatch
_is_base64url = re.compile(r"[A-Za-z0-9_-]*={0,2}").fullmatch


def is_content_id(text: str) -> bool:
    """Whether `text` has exactly that form."""
    return _is_content_id(text) is not None


def integer(value: object) -> int | None:
    """The value, if it is a whole number; `1.0` and `1` are the same number in canonical form (R-013)."""
    if type(value) is int:
        return value
    return int(value) if type(value) is float and value.is_integer() else None


def number(value: object) -> float | None:
    """The value, if it is a number; a boolean is not one."""
    return float(value) if type(value) is int or type(value) is float else None


def hex_bytes(value: object, size: int) -> bytes | None:
    """The bytes of `0x` and hex digits in either case, if there are `size` of them (R-024)."""
    if type(value) is not str or len(value) != 2 + 2 * size or not value.startswith("0x"):
        return None
    try:
        decoded = bytes.fromhex(value[2:])
    except ValueError:
        return None
    return decoded if len(decoded) == size else None  # fromhex skips blanks


def base64url(value: object, max_bytes: int) -> bytes | None:
    """The bytes of base64url text, with or without padding, if there are at most `max_bytes`."""
    if type(value) is not str or len(value) > -(-max_bytes // 3) * 4 or not _is_base64url(value):
        return None
    digits = value.rstrip("=")
    if len(digits) % 4 == 1:
        return None
    decoded = binascii.a2b_base64(
        digits.replace("-", "+").replace("_", "/") + "=" * (-len(digits) % 4), strict_mode=True
    )
    return decoded if len(decoded) <= max_bytes else None


def unpadded_base64url(data: bytes) -> str:
    """Encode as base64url text without padding."""
    return binascii.b2a_base64(data, newline=False).rstrip(b"=").translate(_TO_URL).decode("ascii")


_TO_URL = bytes.maketrans(b"+/", b"-_")
