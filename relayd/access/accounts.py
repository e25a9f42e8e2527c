"""The accounts of addresses, and of the networks that contain them.

The holder of an IPv6 /48 has 65 536 of the /64 networks that count as one address, and the holder of a /32
has as many /48. So each /48 has an account too, with the limits of `_SHARES[1]` addresses, and each /32 has
one with the limits of `_SHARES[2]` addresses. A charge goes up the whole line, and the first spent account
refuses. The account of a wider network remembers what its members did, so only a bounded number of their
accounts must be kept.
"""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

from typing import Final

from relayd.access.ledger import Book
from relayd.access.limits import Limits, Quota, Quotas
from relayd.addresses import Address, address_key, wider_keys

__all__ = ["AddressAccounts"]

_SHARES: Final = (1, 4, 64)
"""The limits of an address, a /48 and a /32, as multiples of one address's limits."""
_MAX_IDLE: Final = (20_000, 5_000, 1_000)


class AddressAccounts:
    """The quotas of addresses; the limits given are those of each address."""

    def __init__(self, limits: Limits, *, book: Book | None = None, name: str = "") -> None:
        self._tiers = [
            Quotas(limits.times(share), max_idle=most, book=book, name=f"{name}/{share}")
            for share, most in zip(_SHARES, _MAX_IDLE, strict=True)
        ]

    def __len__(self) -> int:
        """The number of accounts that are kept."""
        return sum(map(len, self._tiers))

    def hold(self, address: Address) -> Quota:
        """The quota of this address, for one more connection; `release` gives it back, with its parents."""
        parent: Quota | None = None
        wider = wider_keys(address)
        for tier in range(len(wider), 0, -1):
            quota = self._tiers[tier].hold(wider[tier - 1])
            quota.parent, parent = parent, quota
        quota = self._tiers[0].hold(address_key(address))
        quota.parent = parent
        return quota

    def release(self, quota: Quota, now: float) -> None:
        """Give back the quota of a connection that has ended."""
        for quotas, held in zip(self._tiers, quota.line, strict=False):
            quotas.release(held, now)

    def crowded(self, quota: Quota, most: int) -> bool:
        """Whether over `most` connections hold the address's quota, or that times its share a network's."""
        return any(
            tier.everywhere(held) > most * share
            for tier, held, share in zip(self._tiers, quota.line, _SHARES, strict=False)
        )
