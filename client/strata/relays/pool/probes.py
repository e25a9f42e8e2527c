"""Asking relays for random packets that they should have (R-343). No I/O, no clock.

The pool reports which relay acknowledged or served which packet. A few hundred recent packets are remembered,
chosen evenly. If a relay does not find a packet that it had acknowledged to this client, that is a denial. If
it does not find one that it had only served, or that at least three others have, that is a gap, which counts
less: no relay must have everything, and an operator may have removed what a stranger published.
"""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from strata.protocol.packets import Packet
from strata.relays.conduct import Aspect

__all__ = ["KnownPackets", "Probe"]

_CAPACITY = 512
_WIDELY_HELD = 3
_FRESH_SECONDS = 3600
"""Older packets may have been dropped by a relay's retention, which is not an offence."""


@dataclass(frozen=True, slots=True)
class Probe:
    """A packet to ask a relay for, which it had itself or which is common; the answer counts as `kind`.

    `kind` is `PRESENCE` if the relay had acknowledged the packet.
    """

    packet: Packet
    kind: Literal[Aspect.PRESENCE, Aspect.CONSISTENCY]


@dataclass(slots=True)
class _Held:
    packet: Packet
    seen_at: float
    holders: dict[str, bool] = field(default_factory=dict)
    """The relays that have it, and whether each has acknowledged it to this client."""


class KnownPackets:
    """A sample of packets, and the relays that have them. `random` gives values in [0, 1)."""

    def __init__(self, *, random: Callable[[], float]) -> None:
        self._random = random
        self._held: dict[bytes, _Held] = {}
        self._slots: list[bytes] = []
        self._offered = 0

    def seen(self, packet: Packet, url: str, now: float, *, acknowledged: bool = False) -> None:
        """Note that a relay acknowledged or served the packet."""
        held = self._held.get(packet.digest)
        if held is not None:
            held.holders[url] = acknowledged or held.holders.get(url, False)
            return
        if packet.expires_at is not None:
            return  # a relay may rightly not have it any more
        self._offered += 1
        if len(self._slots) < _CAPACITY:
            self._slots.append(packet.digest)
        else:
            # One in sixteen takes a random place: the sample is recent, and spread over some time.
            if self._offered % 16:
                return
            place = min(int(self._random() * _CAPACITY), _CAPACITY - 1)
            del self._held[self._slots[place]]
            self._slots[place] = packet.digest
        self._held[packet.digest] = _Held(packet, now, {url: acknowledged})

    def lacked(self, packet: Packet, url: str) -> None:
        """Note that a relay does not have the packet any more: it is not asked for it twice."""
        if (held := self._held.get(packet.digest)) is not None:
            held.holders.pop(url, None)

    def forget(self, url: str) -> None:
        """Forget a relay that is no longer a member."""
        for held in self._held.values():
            held.holders.pop(url, None)

    def choose(self, url: str, now: float) -> Probe | None:
        """A probe for this relay, or None if there is no fair one."""
        fresh = [held for held in self._held.values() if now - held.seen_at <= _FRESH_SECONDS]
        own = [held for held in fresh if url in held.holders]
        common = [held for held in fresh if url not in held.holders and len(held.holders) >= _WIDELY_HELD]
        if own and (not common or self._random() < 0.5):
            held = self._pick(own)
            return Probe(held.packet, Aspect.PRESENCE if held.holders[url] else Aspect.CONSISTENCY)
        if common:
            return Probe(self._pick(common).packet, Aspect.CONSISTENCY)
        return None

    def _pick(self, some: list[_Held]) -> _Held:
        return some[min(int(self._random() * len(some)), len(some) - 1)]
