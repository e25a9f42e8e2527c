"""Which sessions hold a set to compare: few at a time, because each set may take tens of megabytes."""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

from typing import Final, Protocol

__all__ = ["Comparisons", "SetHolder"]

_MOST_OPEN: Final = 3


class SetHolder(Protocol):
    """The holder of the set of one comparison."""

    def superseded(self) -> None:
        """A newer comparison of this identity has begun: release the set."""


class Comparisons:
    """The comparisons that are open in a process. Each identity has at most one, the newest."""

    def __init__(self, most: int = _MOST_OPEN) -> None:
        self._most = most
        self._holders: dict[str, SetHolder] = {}

    def __len__(self) -> int:
        return len(self._holders)

    def begin(self, identity: str, holder: SetHolder) -> bool:
        """Open a comparison, replacing an earlier one of this identity; False if too many are open."""
        before = self._holders.get(identity)
        if before is None and len(self._holders) >= self._most:
            return False
        self._holders[identity] = holder
        if before is not None and before is not holder:
            before.superseded()
        return True

    def holds(self, holder: SetHolder) -> bool:
        """Whether this holder's comparison is still open."""
        return any(each is holder for each in self._holders.values())

    def end(self, holder: SetHolder) -> None:
        """End the comparison of this holder. Idempotent."""
        for identity, each in list(self._holders.items()):
            if each is holder:
                del self._holders[identity]
