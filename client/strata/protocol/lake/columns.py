"""How strings are written into the columns of a relay's log, and of a log that is restored.

author_id and content_type are their UTF-8 in bytea, for a JSON string may hold U+0000, which PostgreSQL's
text may not. A string too long to be indexed stands there as a hash behind 0xFF, a byte that no UTF-8
contains; equality is still exact, and the string itself is in the body.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection

__all__ = ["HASHED", "string_key", "string_keys"]

HASHED = b"\xff"
"""What the key of a long string begins with."""

_MAX_KEY_BYTES = 512  # PostgreSQL indexes at most about 2700


def string_key(value: str) -> bytes:
    """The column's value for a string. Raises `UnicodeEncodeError` for a lone surrogate."""
    key = value.encode()
    return key if len(key) <= _MAX_KEY_BYTES else HASHED + hashlib.sha256(key).digest()


def string_keys(values: Collection[str]) -> list[bytes]:
    """Those of many strings, in their order; nearly all are short."""
    keys = list(map(str.encode, values))
    if max(map(len, keys), default=0) > _MAX_KEY_BYTES:
        return list(map(string_key, values))
    return keys
