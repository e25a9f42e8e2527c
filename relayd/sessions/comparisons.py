"""Which sessions hold a set to compare: few at a time, for each may take tens of megabytes."""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

from typing import Final, Protocol

__all__ = ["Comparisons", "SetHolder"]

_MOST_OPEN: Final = 3


class SetHolder(Protocol):
    """Who holds the set of one comparison."""

    def superseded(self) -> None:
        """A newer comparison of this identity has begun: let go of the set."""


class Comparisons:
    """The comparisons that are open in a process: one for an identity, and the newest one counts."""

    def __init__(self, most: int = _MOST_OPEN) -> None:
        self._most = most
        self._holders: dict[str, SetHolder] = {}

    def __len__(self) -> int:
        return len(self._holders)

    def begin(self, identity: str, holder: SetHolder) -> bool:
        """Open one, in place of another one of this identity; False where too many are open."""
        before = self._holders.get(identity)
        if before is None and len(self._holders) >= self._most:
            return False
        self._holders[identity] = holder
        if before is not None and before is not holder:
            before.superseded()
        return True

    def holds(self, holder: SetHolder) -> bool:
        """Whether this one is open still."""
        return any(each is holder for each in self._holders.values())

    def end(self, holder: SetHolder) -> None:
        """It is over. Idempotent."""
        for identity, each in list(self._holders.items()):
            if each is holder:
                del self._holders[identity]
