"""Noticing that places lead in a circle, as those of a relay that says "more" for ever."""

from __future__ import annotations

__all__ = ["Circle"]


class Circle:
    """Looks at one place after the other. It keeps one of them, and another one after twice as many each
    time: that is enough for any circle (Brent)."""

    __slots__ = ("_kept", "_number")

    def __init__(self) -> None:
        self._kept: str | None = None
        self._number = 0

    def closes(self, place: str | None) -> bool:
        """Whether this place was there before; in a circle, once it was gone round a few times at most."""
        if place == self._kept:
            return True
        self._number += 1
        if self._number.bit_count() == 1:
            self._kept = place
        return False
