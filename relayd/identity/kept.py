"""A cache: values kept in memory only because they are useful, within a bound in bytes."""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

__all__ = ["Kept"]

V = TypeVar("V")


class Kept(Generic[V]):
    """Values by name, together at most `max_bytes` as weighed by `weigh`. The first one put is evicted first.

    The last value put stays, whatever its weight, because it is about to be used. While the cache is `held`,
    all stay.
    """

    def __init__(self, max_bytes: int, weigh: Callable[[V], int]) -> None:
        self._max_bytes = max_bytes
        self._weigh = weigh
        self._values: OrderedDict[str, tuple[V, int]] = OrderedDict()
        self._holders = 0
        self.size_bytes = 0

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def __len__(self) -> int:
        return len(self._values)

    def get(self, name: str) -> V | None:
        """The value, if it is kept."""
        found = self._values.get(name)
        return None if found is None else found[0]

    def put(self, name: str, value: V, *, more: int | None = None) -> None:
        """Keep this value, replacing any other of that name.

        `more` is by how much it outweighs the value it replaces, for values that would take long to weigh.
        """
        is_known = name in self._values
        _, former = self._values.pop(name, (None, 0))
        weight = former + more if is_known and more is not None else self._weigh(value)
        self._values[name] = value, weight
        self.size_bytes += weight - former
        self._make_room()

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Evict nothing for lack of room meanwhile."""
        self._holders += 1
        try:
            yield
        finally:
            self._holders -= 1
            self._make_room()

    def _make_room(self) -> None:
        while not self._holders and self.size_bytes > self._max_bytes and len(self._values) > 1:
            _, (_, lost) = self._values.popitem(last=False)
            self.size_bytes -= lost

    def clear(self) -> None:
        """Drop all values."""
        self._values.clear()
        self.size_bytes = 0

    def drop(self, name: str) -> None:
        """Drop the value, if it is kept."""
        _, weight = self._values.pop(name, (None, 0))
        self.size_bytes -= weight
