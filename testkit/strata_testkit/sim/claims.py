"""Whether a channel that says it is synced has what its relays have.

A participant cannot know about a message that was lost on its way and that nobody has named yet. So the claim
is compared with the relays only in worlds whose network loses nothing: there, a participant that reaches its
relays could have received everything they store.
"""

from __future__ import annotations

from collections import defaultdict

from strata.channels.messaging.values import NodeMessageReceived
from strata.channels.reliable.values import SyncStatus

from strata_testkit.sim.checking import Evidence
from strata_testkit.sim.network import SimNetwork

__all__ = ["SyncClaims"]


class SyncClaims:
    """The stored messages in order of arrival, and the place up to which each participant has all of them."""

    def __init__(self, network: SimNetwork, evidence: Evidence, after: float) -> None:
        """`after` is how many virtual seconds a stored message may take to a connected participant."""
        self._network = network
        self._evidence = evidence
        self._after = after
        self._stored: list[tuple[float, NodeMessageReceived]] = []
        self._complete: dict[str, int] = defaultdict(int)
        """By participant: how many of the first stored messages it has."""
        self._blamed: set[str] = set()
        self._away_until: dict[str, float] = {}
        """By participant: when it was last seen without its relays. A program notices a little later."""
        network.on_stored = self.stored

    def stored(self, event: NodeMessageReceived, at: float) -> None:
        """Note that a relay has stored a message."""
        self._stored.append((at, event))

    def forget(self, name: str) -> None:
        """Note that a participant has lost its disk."""
        self._complete[name] = 0
        self._blamed.discard(name)

    def away(self, name: str) -> None:
        """Note that a participant sleeps, or does not reach all its relays."""
        self._away_until[name] = self._network.time()

    def look(self, name: str, status: SyncStatus) -> None:
        """Compare what a participant claims at this moment with what its relays have."""
        if len(self._network.reachable(name)) < len(self._network.relays):
            self.away(name)
        noticed = self._away_until.get(name, -self._after) + self._after < self._network.time()
        if not status.is_synced or status.inbox or name in self._blamed or not noticed:
            return
        self._evidence.checks.sync_claims += 1
        lacking = self._first_lacking(name)
        if lacking is not None:
            self._blamed.add(name)
            at, request_id = lacking
            self._evidence.problems.append(
                f"{name} said it is synced, and {request_id}, which its relays have had for "
                f"{self._network.time() - at:.0f} s, was still to come"
            )

    def _first_lacking(self, name: str) -> tuple[float, str] | None:
        now, place = self._network.time(), self._complete[name]
        relays = self._network.relays
        while place < len(self._stored) and self._stored[place][0] + self._after < now:
            at, event = self._stored[place]
            request_id = self._evidence.request_of(self._evidence.packet_id(event))
            sender = None if request_id is None else self._evidence.sender_of(request_id)
            wanted = request_id is not None and sender not in (None, name)
            if wanted and request_id is not None and not self._evidence.has_taken(name, request_id):
                if any(relay.serves(event.message_hash, now) for relay in relays):
                    self._complete[name] = place
                    return at, request_id
            place += 1
        self._complete[name] = place
        return None
