"""A set of names that may be had by millions: eight bytes for each, whatever its length.

Strangers make identities, and the relay has to know for each DID whether the log has something to say about
it. Ten million names as strings are more than a gigabyte, and here 85 MB. A name is known by its hash, so
once in a great while a name counts as known that was never added: whoever asks then looks into the log for
nothing, and finds so. The hash is Python's own, with a key that each process draws anew.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable
from typing import Final

__all__ = ["Names"]

_PARTS: Final = 4096
"""A name goes into a short sorted list: to make room there moves some kilobytes, for any number of names."""
_MASK: Final = 2**64 - 1


class Names:
    """Names that were added. None is ever taken out."""

    def __init__(self, names: Iterable[str] = ()) -> None:
        self._parts = [array("Q") for _ in range(_PARTS)]
        self._count = 0
        self.update(names)

    def __len__(self) -> int:
        return self._count

    def __contains__(self, name: str) -> bool:
        digest = hash(name) & _MASK
        part = self._parts[digest % _PARTS]
        place = bisect_left(part, digest)
        return place < len(part) and part[place] == digest

    def add(self, name: str) -> None:
        """Know this name from now on."""
        digest = hash(name) & _MASK
        part = self._parts[digest % _PARTS]
        place = bisect_left(part, digest)
        if place == len(part) or part[place] != digest:
            part.insert(place, digest)
            self._count += 1

    def update(self, names: Iterable[str]) -> None:
        """Know these names from now on."""
        for name in names:
            self.add(name)
