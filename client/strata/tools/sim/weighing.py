"""How much a channel keeps: every container that can be reached from it, counted without knowing its parts.

A list of what to count would miss what is added later, so this follows references. It enters containers and
the library's own objects, and nothing else: not the network, not the event loop, not the program's handlers.
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
    """What is kept."""

    entries: int
    """Items of all containers."""
    size_bytes: int
    """Bytes of containers, texts and byte strings."""


def weigh(*roots: object) -> Weight:
    """Count what these objects keep. The cost is proportional to that."""
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
