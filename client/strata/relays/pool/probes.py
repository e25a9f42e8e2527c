"""Asking relays for random packets that they should have (R-343). No I/O, no clock.

The pool reports which relay acknowledged or served which packet. A few hundred recent packets are remembered,
chosen evenly. If a relay does not find a packet that it had acknowledged to this client, that is a denial. If
it does not find one that it had only served, or that is widely held, that is a gap, which counts less: no
relay must have everything, and an operator may have removed what a stranger published.

*Widely held* is a packet that at least three other relays have, by an author whom this client has asked for
by name, and of whom the relay has served other packets. Other packets prove nothing: a stranger can publish
at every relay but one. For the same reason one such gap counts for each author and relay.
"""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass, field
from typing import Literal

from strata.protocol.packets import Packet
from strata.relays.conduct import Aspect

__all__ = ["KnownPackets", "Probe"]

_CAPACITY = 512
_WIDELY_HELD = 3
_MOST_GAPS = 4096
"""The authors of whom a relay lacked a widely held packet, with the relay; the oldest are forgotten first."""
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
    is_named: bool
    """Whether this client has asked for its author by name."""
    holders: dict[str, bool] = field(default_factory=dict)
    """The relays that have it, and whether each has acknowledged it to this client."""


class KnownPackets:
    """A sample of packets, and the relays that have them. `random` gives values in [0, 1)."""

    def __init__(self, *, random: Callable[[], float]) -> None:
        self._random = random
        self._held: dict[bytes, _Held] = {}
        self._slots: list[bytes] = []
        self._offered = 0
        self._gaps: dict[tuple[str, str], None] = {}

    def seen(
        self, packet: Packet, url: str, now: float, *, acknowledged: bool = False, named: bool = False
    ) -> None:
        """Note that a relay acknowledged or served the packet. `named`: a query that named its author."""
        held = self._held.get(packet.digest)
        if held is not None:
            held.is_named |= named
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
        self._held[packet.digest] = _Held(packet, now, named, {url: acknowledged})

    def lacked(self, packet: Packet, url: str) -> None:
        """Note that a relay does not have the packet, or not any more: it is not asked for it twice."""
        if (held := self._held.get(packet.digest)) is not None and held.holders.pop(url, None) is None:
            self._gaps[packet.author_id, url] = None
            if len(self._gaps) > _MOST_GAPS:
                del self._gaps[next(iter(self._gaps))]

    def forget(self, url: str) -> None:
        """Forget a relay that is no longer a member."""
        for held in self._held.values():
            held.holders.pop(url, None)

    def choose(self, url: str, now: float) -> Probe | None:
        """A probe for this relay, or None if there is no fair one."""
        fresh = [held for held in self._held.values() if now - held.seen_at <= _FRESH_SECONDS]
        own = [held for held in fresh if url in held.holders]
        served = {held.packet.author_id for held in own}
        common = [held for held in fresh if url not in held.holders and self._is_due(held, url, served)]
        if own and (not common or self._random() < 0.5):
            held = self._pick(own)
            return Probe(held.packet, Aspect.PRESENCE if held.holders[url] else Aspect.CONSISTENCY)
        if common:
            return Probe(self._pick(common).packet, Aspect.CONSISTENCY)
        return None

    def _is_due(self, held: _Held, url: str, served: Container[str]) -> bool:
        """Whether the packet is so widely held that this relay, which has `served` these authors, should have
        it."""
        author = held.packet.author_id
        if not held.is_named or author not in served or (author, url) in self._gaps:
            return False
        # This client publishes to some relays of its choice.
        return len(held.holders) >= _WIDELY_HELD and not any(held.holders.values())

    def _pick(self, some: list[_Held]) -> _Held:
        return some[min(int(self._random() * len(some)), len(some) - 1)]
