"""How a peer stands that has sent what only it can account for (R-381).

Three forged packets bar a peer: for an hour, and four times as long each further time. Only proof counts
(decision 35): a packet that a rule of this relay refuses, or that is too old, is no offence.
"""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

from dataclasses import dataclass, replace

__all__ = ["Standing"]

_OFFENCES = 3
_FIRST_BAR_SECONDS = 3600
_LONGEST_BAR_SECONDS = 90 * 86_400


@dataclass(frozen=True, slots=True)
class Standing:
    """What is held against a peer; kept in the database."""

    offences: int = 0
    """Since it was last barred."""
    bars: int = 0
    """How often it was barred."""
    barred_until: int = 0
    """In Unix seconds."""

    def offended(self, now: int) -> Standing:
        """The standing after one forged packet more."""
        if self.offences + 1 < _OFFENCES:
            return replace(self, offences=self.offences + 1)
        seconds = min(_FIRST_BAR_SECONDS * 4 ** min(self.bars, 16), _LONGEST_BAR_SECONDS)
        return Standing(0, self.bars + 1, now + seconds)

    def is_barred(self, now: int) -> bool:
        """Whether the peer is not to be read from."""
        return now < self.barred_until
