"""How much a channel keeps: all containers reachable from it, counted without knowledge of its parts.

A list of parts to count would miss those that are added later, so this follows references. It enters only
containers and the library's own objects: not the network, the event loop or the program's handlers.
"""

from __future__ import annotations

import gc
import sys
from collections import deque
from dataclasses import dataclass

__all__ = ["Weight", "weigh"]

_CONTAINERS = (dict, list, tuple, set, frozenset, deque)
_LEAVES = (bytes, bytearray, str)


@dataclass(frozen=True, slots=True)
class Weight:
    """The amount that is kept."""

    entries: int
    """Items of all containers."""
    size_bytes: int
    """Bytes of containers, strings and byte strings."""


def weigh(*roots: object) -> Weight:
    """Count what these objects keep, in time proportional to it."""
    seen: set[int] = set()
    waiting: list[object] = [each for each in roots if each is not None]
    entries = size_bytes = 0
    while waiting:
        found = waiting.pop()
        if id(found) in seen:
            continue
        seen.add(id(found))
        if isinstance(found, _LEAVES):
            size_bytes += sys.getsizeof(found)
        elif isinstance(found, _CONTAINERS):
            entries += len(found)
            size_bytes += sys.getsizeof(found)
            waiting += gc.get_referents(found)
        elif _is_ours(found):
            waiting += gc.get_referents(found)
    return Weight(entries, size_bytes)


def _is_ours(found: object) -> bool:
    if isinstance(found, type):
        return False
    module = type(found).__module__
    return module.startswith("strata.") and not module.startswith("strata.tools.")
