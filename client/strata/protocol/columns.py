"""How strings are stored in the columns of a relay's log, and of a restored log.

author_id and content_type are stored as UTF-8 in bytea, because a JSON string may contain U+0000, which
PostgreSQL's text may not. A string that is too long to be indexed is stored as 0xFF, a byte that UTF-8 never
contains, followed by a hash. Equality is still exact, and the string itself is in the body.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection

__all__ = ["HASHED", "string_key", "string_keys"]

HASHED = b"\xff"
"""The first byte of the key of a long string."""

_MAX_KEY_BYTES = 512  # PostgreSQL indexes at most about 2700


def string_key(value: str) -> bytes:
    """The column's value for a string. Raises `UnicodeEncodeError` for a lone surrogate."""
    key = value.encode()
    return key if len(key) <= _MAX_KEY_BYTES else HASHED + hashlib.sha256(key).digest()


def string_keys(values: Collection[str]) -> list[bytes]:
    """The columns' values for many strings, in the same order; fast if most are short."""
    keys = list(map(str.encode, values))
    if max(map(len, keys), default=0) > _MAX_KEY_BYTES:
        return list(map(string_key, values))
    return keys
