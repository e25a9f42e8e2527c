"""Detecting that positions go in a circle, as those of a relay that says "more" forever."""

from __future__ import annotations

__all__ = ["Circle"]


class Circle:
    """Detects a circle in a sequence of places. It keeps one place, and replaces it at each power of two,
    which is enough for any circle (Brent)."""

    __slots__ = ("_kept", "_number")

    def __init__(self) -> None:
        self._kept: str | None = None
        self._number = 0

    def closes(self, place: str | None) -> bool:
        """Whether this place has occurred before; a circle is noticed after a few rounds at most."""
        if place == self._kept:
            return True
        self._number += 1
        if self._number.bit_count() == 1:
            self._kept = place
        return False
