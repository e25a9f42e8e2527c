"""Cursors: a position in the relay's log, as an opaque string that cannot be forged (A-041).

    "2." + hex( tag of the term, 4 bytes | epoch, 4 | order and sequence, 8 | keyed BLAKE2s of these, 8 )

The key belongs to the database, so a cursor survives restarts and is valid at every process on that database
and at no other relay. It is bound to the order of the walk and to nothing else (R-155, R-156): filters and
limit may change between pages. The term says which log the position belongs to (`lineage`): a log that has
lost its end gives out the same sequences again.
"""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

import hashlib
import hmac
from binascii import hexlify
from typing import Final

from relayd.lineage import KnownLog, Lineage, Mark, Term

__all__ = ["CursorCodec", "InvalidCursor"]

_PREFIX: Final = b"2."
_PLACE_BYTES: Final = 16
_MAC_BYTES: Final = 8
_DESCENDING: Final = 1 << 63


class InvalidCursor(ValueError):
    """The text is not a cursor of this relay, or is one for the other order."""


class CursorCodec:
    """Encodes and checks cursors under one secret key (32 bytes), for the log that `known` describes."""

    def __init__(self, key: bytes, known: KnownLog | None = None) -> None:
        self.known = known or KnownLog()
        self._mac = hashlib.blake2s(key=key, digest_size=_MAC_BYTES)
        # Kept ready for nearly every cursor: the current term as text, and the MAC begun with it.
        self._lineage: Lineage | None = None
        self._current_after = 0
        self._current_text = b""
        self._current_mac = self._mac

    def encode(self, sequence: int, *, ascending: bool = True) -> str:
        """The cursor of a position."""
        return self.encode_bytes(sequence, ascending=ascending).decode("ascii")

    def encode_bytes(self, sequence: int, *, ascending: bool = True) -> bytes:
        """The same as ASCII bytes, in a microsecond: one is made for every packet of a page."""
        if self.known.lineage is not self._lineage:
            self._follow(self.known.lineage)
        text, begun = self._current_text, self._current_mac
        if sequence <= self._current_after:
            text, begun = self._begin(self.known.lineage.term_of(sequence))
        position = (sequence if ascending else sequence | _DESCENDING).to_bytes(8, "big")
        mac = begun.copy()
        mac.update(position)
        return text + hexlify(position + mac.digest())

    def _follow(self, lineage: Lineage) -> None:
        self._lineage, self._current_after = lineage, lineage.current.begins_after
        self._current_text, self._current_mac = self._begin(lineage.current)

    def _begin(self, term: Term) -> tuple[bytes, hashlib.blake2s]:
        head = term.tag + term.epoch.to_bytes(4, "big")
        mac = self._mac.copy()
        mac.update(head)
        return _PREFIX + hexlify(head), mac

    def decode(self, text: str, *, ascending: bool) -> int:
        """The sequence that a cursor stands for. Raises as `open` does."""
        return self.open(text, ascending=ascending).sequence

    def open(self, text: str, *, ascending: bool) -> Mark:
        """The place that a cursor stands for; only the database knows whether the log has it.

        Raises `InvalidCursor` for anything that `encode` did not return under this key, and for a cursor of
        the other order.
        """
        digits = text[2:]
        if text[:2] != _PREFIX.decode() or len(digits) != 2 * (_PLACE_BYTES + _MAC_BYTES):
            raise InvalidCursor("not a cursor of this relay")
        try:
            raw = bytes.fromhex(digits)
        except ValueError:
            raise InvalidCursor("not a cursor of this relay") from None
        mac = self._mac.copy()
        mac.update(raw[:_PLACE_BYTES])
        # Each position has exactly one text: upper case and blanks, which fromhex allows, are refused.
        if not hmac.compare_digest(mac.digest(), raw[_PLACE_BYTES:]) or raw.hex() != digits:
            raise InvalidCursor("the cursor fails its integrity check")
        position = int.from_bytes(raw[8:_PLACE_BYTES], "big")
        if bool(position & _DESCENDING) is ascending:
            raise InvalidCursor("the cursor belongs to the other order")
        sequence = position & ~_DESCENDING
        return Mark(sequence, raw[:4], int.from_bytes(raw[4:8], "big"))
