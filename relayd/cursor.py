"""Cursors: a position in the relay's log, as an opaque string that cannot be forged (A-041).

    "1." + hex( order and sequence, 8 bytes | keyed BLAKE2s of them, 8 bytes )

The key belongs to the database, so a cursor survives restarts, is good at every process on that database
and at no other relay. It is bound to the order of the walk and to nothing else (R-155, R-156): filters and
limit may change between pages.
"""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

import hashlib
import hmac
from binascii import hexlify
from typing import Final

__all__ = ["CursorCodec", "InvalidCursor"]

_VERSION: Final = "1."
_PREFIX: Final = _VERSION.encode("ascii")
_TEXT_LENGTH: Final = len(_VERSION) + 32
_DESCENDING: Final = 1 << 63


class InvalidCursor(ValueError):
    """The text is no cursor of this relay, or one for the other order."""


class CursorCodec:
    """Encodes and checks cursors under one secret key (32 bytes)."""

    def __init__(self, key: bytes) -> None:
        self._mac = hashlib.blake2s(key=key, digest_size=8)

    def encode(self, sequence: int, *, ascending: bool = True) -> str:
        """The cursor of a position."""
        return self.encode_bytes(sequence, ascending=ascending).decode("ascii")

    def encode_bytes(self, sequence: int, *, ascending: bool = True) -> bytes:
        """The same as ASCII, in half a microsecond: one is made for every packet of a page."""
        position = (sequence if ascending else sequence | _DESCENDING).to_bytes(8, "big")
        mac = self._mac.copy()
        mac.update(position)
        return _PREFIX + hexlify(position + mac.digest())

    def decode(self, text: str, *, ascending: bool) -> int:
        """The position a cursor stands for.

        Raises `InvalidCursor` for anything `encode` did not return under this key, and for a cursor of the
        other order.
        """
        if len(text) != _TEXT_LENGTH or not text.startswith(_VERSION):
            raise InvalidCursor("not a cursor of this relay")
        digits = text[len(_VERSION) :]
        try:
            raw = bytes.fromhex(digits)
        except ValueError:
            raise InvalidCursor("not a cursor of this relay") from None
        mac = self._mac.copy()
        mac.update(raw[:8])
        # One position has one text: upper case and blanks, which fromhex allows, do not pass.
        if not hmac.compare_digest(mac.digest(), raw[8:]) or raw.hex() != digits:
            raise InvalidCursor("the cursor fails its integrity check")
        position = int.from_bytes(raw[:8], "big")
        if bool(position & _DESCENDING) is ascending:
            raise InvalidCursor("the cursor belongs to the other order")
        return position & ~_DESCENDING
