"""The addresses of the open sessions: how many sessions each address has.

A relay behind a proxy or container gateway that it does not know of sees all its clients at one address, and
they share the limits of that address. Nothing else reveals this, so the sessions are counted.
"""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

from typing import Final

from relayd.addresses import Address

__all__ = ["Sources"]

_ENOUGH: Final = 16
"""With fewer sessions than this, one address for all of them means nothing."""


class Sources:
    """The sessions of each address, with one entry for each address that has a session."""

    def __init__(self) -> None:
        self._sessions: dict[Address, int] = {}
        self._total = 0

    def opened(self, address: Address | None) -> None:
        """A session from this address has begun."""
        if address is not None:
            self._sessions[address] = self._sessions.get(address, 0) + 1
            self._total += 1

    def closed(self, address: Address | None) -> None:
        """A session has ended; the address is the one that it began with."""
        if address is None:
            return
        self._total -= 1
        left = self._sessions[address] - 1
        if left:
            self._sessions[address] = left
        else:
            del self._sessions[address]

    @property
    def share(self) -> float:
        """The part of all sessions that the busiest address has; 0 while there are too few to tell."""
        return max(self._sessions.values()) / self._total if self._total >= _ENOUGH else 0.0

    @property
    def only(self) -> Address | None:
        """The address that all sessions come from, if there are enough sessions to tell; else None."""
        if self._total < _ENOUGH or len(self._sessions) > 1:
            return None
        return next(iter(self._sessions))
