"""A set for millions of names, at eight bytes for each name of any length.

Strangers create identities, and the relay must know for each DID whether the log says anything about it. Ten
million names take more than a gigabyte as strings, and 85 MB here. A name is known by its hash, so very
rarely a name counts as known that was never added: the caller then looks into the log and finds nothing. The
hash is Python's own, with a key that each process draws anew.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable
from typing import Final

__all__ = ["Names"]

_PARTS: Final = 4096
"""The number of short sorted lists: an insertion moves only some kilobytes, for any number of names."""
_MASK: Final = 2**64 - 1


class Names:
    """Names that were added; no name is ever removed."""

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
        """Add this name."""
        digest = hash(name) & _MASK
        part = self._parts[digest % _PARTS]
        place = bisect_left(part, digest)
        if place == len(part) or part[place] != digest:
            part.insert(place, digest)
            self._count += 1

    def update(self, names: Iterable[str]) -> None:
        """Add these names."""
        for name in names:
            self.add(name)
