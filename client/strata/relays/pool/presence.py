"""Checking that relays have the packets they acknowledged, and resending those they lack (C-274).

No I/O, no clock. A packet is watched from its first OK. After `delay`, every relay that said OK is asked for
it by id, many packets in one request. When all have answered:

- if it is present on `copies` relays, the check is done;
- if a relay that said OK does not have it, the packet is sent to that relay again and to another one;
- a relay that could not be asked is asked again in the next round. Before the last round, a packet that was
  found nowhere is sent to other relays anyway, if there are any.

Lacking the packet is a lie only if the relay says so itself (`Answer.DENIAL`) and had said OK without an
excuse: neither `QUEUED` (R-190) nor `duplicate`, which a relay also says of a packet that its operator has
removed. A packet is resent even without that.

The wait doubles each time. After `attempts` rounds the check gives up: a packet that waits for an absent
relay would keep a place that another packet needs. Time without any usable relay does not count as a round,
because then no other packet needs the place.
"""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

import enum
import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from strata.protocol.packets import Packet

__all__ = ["Answer", "Lookup", "PresenceWatch", "Resend"]

_BATCH = 64
"""The most packets in one request."""


class Answer(enum.Enum):
    """What a relay's answer says about the packets that are not in it."""

    DENIAL = enum.auto()
    """The relay marked the end of a complete answer: it does not have them."""
    SILENCE = enum.auto()
    """Nothing more came, but the relay did not mark the end: it does not have them, or is slow."""
    BROKEN = enum.auto()
    """The answer was interrupted, refused or too late: it says nothing about them."""


@dataclass(frozen=True, slots=True)
class Lookup:
    """A request to make: ask this relay which of these packets it has."""

    url: str
    packets: tuple[Packet, ...]
    excused: bool = False
    """Whether the relay may rightly not return them, by what it said with its OK."""


@dataclass(frozen=True, slots=True)
class Resend:
    """A packet to send again, and the relay to send it to."""

    url: str
    packet: Packet


@dataclass(slots=True)
class _Watched:
    packet: Packet
    due_at: float
    wait: float
    attempts: int = 0
    claimed: set[str] = field(default_factory=set)
    """Relays that said OK and have not yet been seen to have it."""
    verified: set[str] = field(default_factory=set)
    """Relays that have been seen to have it, or have a packet that it repeats."""
    denied: set[str] = field(default_factory=set)
    """Relays that did not have it in this round."""
    excused: set[str] = field(default_factory=set)
    """Relays that may rightly not return it, by what they said with their last OK."""
    outstanding: set[str] = field(default_factory=set)
    """Relays asked in this round that have not answered."""


class PresenceWatch:
    """The packets under check, at most `capacity`: the caller waits while it `is_full`."""

    def __init__(self, *, copies: int, delay: float, attempts: int, capacity: int) -> None:
        self.given_up = 0
        """Packets that had been found on no relay after the last round."""
        self.thin = 0
        """Packets that had been found on some relays, but on fewer than `copies`."""
        self._copies = copies
        self._delay = delay
        self._attempts = attempts
        self._capacity = capacity
        self._watched: dict[str, _Watched] = {}

    def __len__(self) -> int:
        return len(self._watched)

    @property
    def is_full(self) -> bool:
        """Whether there is no room for another packet."""
        return len(self._watched) >= self._capacity

    def claimed(self, packet: Packet, url: str, now: float, *, excused: bool = False) -> None:
        """Note that a relay says it has stored the packet; `excused` if it may rightly not return it."""
        watched = self._watched.get(packet.packet_id)
        if watched is None:
            watched = _Watched(packet, now + self._delay, self._delay)
            self._watched[packet.packet_id] = watched
        if url not in watched.verified:
            watched.claimed.add(url)
            (watched.excused.add if excused else watched.excused.discard)(url)

    def repeats(self, packet: Packet, url: str) -> None:
        """Note that a relay has another packet in this one's place, and so need not have this one."""
        watched = self._watched.get(packet.packet_id)
        if watched is not None:
            watched.claimed.discard(url)
            watched.verified.add(url)

    def due(self, now: float, usable: Collection[str]) -> list[Lookup]:
        """The requests to make now, to relays that are `usable`."""
        asked: dict[tuple[str, bool], list[Packet]] = {}
        for watched in self._watched.values():
            if watched.due_at > now or watched.outstanding:
                continue
            if not usable:
                watched.due_at = now + watched.wait
                continue
            watched.denied.clear()
            watched.outstanding = {url for url in watched.claimed if url in usable}
            watched.due_at = math.inf  # until `settle` closes the round
            for url in watched.outstanding:
                asked.setdefault((url, url in watched.excused), []).append(watched.packet)
        return [
            Lookup(url, tuple(some[start : start + _BATCH]), excused)
            for (url, excused), some in asked.items()
            for start in range(0, len(some), _BATCH)
        ]

    def answered(self, lookup: Lookup, found: Collection[str], answer: Answer) -> None:
        """Note a relay's answer: `found` has the ids of the packets it has.

        If the answer was broken, the relay's OK for the other packets stands until it can be asked again.
        """
        for watched in self._of(lookup):
            watched.outstanding.discard(lookup.url)
            if watched.packet.packet_id in found:
                watched.claimed.discard(lookup.url)
                watched.verified.add(lookup.url)
            elif answer is not Answer.BROKEN:
                watched.claimed.discard(lookup.url)
                watched.denied.add(lookup.url)

    def settle(self, now: float, targets: Sequence[str]) -> list[Resend]:
        """Close the rounds in which every relay has answered; return which packets to send where."""
        resends = []
        for watched in list(self._watched.values()):
            if watched.outstanding or watched.due_at != math.inf:
                continue
            missing = self._copies - len(watched.verified)
            # Every usable relay has it: with two relays alive, there is no place for a third copy.
            if missing <= 0 or (watched.verified and not set(targets) - watched.verified):
                del self._watched[watched.packet.packet_id]
                continue
            watched.attempts += 1
            if watched.attempts >= self._attempts:
                self.given_up += not watched.verified
                self.thin += bool(watched.verified)
                del self._watched[watched.packet.packet_id]
                continue
            watched.wait *= 2
            watched.due_at = now + watched.wait
            # In the last round, what a relay has said and not shown counts for nothing: it may never answer.
            if watched.attempts < self._attempts - 1:
                missing -= len(watched.claimed & set(targets))
            resends += [Resend(url, watched.packet) for url in self._again(watched, targets, missing)]
        return resends

    def get_timer(self) -> float:
        """When `due` may have requests to make."""
        return min((w.due_at for w in self._watched.values()), default=math.inf)

    def _again(self, watched: _Watched, targets: Sequence[str], missing: int) -> list[str]:
        """Relays to send to: first `missing` relays that have not denied the packet, then those that have."""
        others = [t for t in targets if t not in watched.verified | watched.claimed | watched.denied]
        chosen = others[: max(missing, 0)]
        return chosen + [t for t in targets if t in watched.denied]

    def _of(self, lookup: Lookup) -> Iterable[_Watched]:
        for packet in lookup.packets:
            watched = self._watched.get(packet.packet_id)
            if watched is not None:
                yield watched
