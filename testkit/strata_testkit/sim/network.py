"""Relays and the paths to them, in one process: they store, hand on, forget and fail on demand."""

from __future__ import annotations

import asyncio
import contextvars
import hashlib
import math
import random
from collections.abc import Callable, Iterable
from typing import Protocol

from strata.channels.messaging.values import NodeMessageReceived

from strata_testkit.sim.faults import FaultCounts, Faults
from strata_testkit.sim.loop import VirtualLoop

__all__ = ["EPOCH", "SimNetwork", "SimRelay", "Subscriber"]


class Subscriber(Protocol):
    """A receiver of messages from relays."""

    name: str

    def hears(self, topic: str) -> bool: ...

    def arrives(self, event: NodeMessageReceived) -> None: ...

    def reach_changed(self) -> None: ...


EPOCH = 1_760_000_000
"""The wall time, in Unix seconds, at which every simulation begins."""
_PAGE_MESSAGES = 20
_EPHEMERAL_SECONDS = 60


class SimRelay:
    """A relay, with its stored messages in the order of arrival."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.up = True
        self.stored: dict[bytes, NodeMessageReceived] = {}
        self.stored_at: dict[bytes, float] = {}
        self.retention: float = math.inf
        """How many virtual seconds it serves a message."""

    def keep(self, event: NodeMessageReceived, at: float) -> None:
        """Store a message that arrived at this virtual time."""
        self.stored[event.message_hash] = event
        self.stored_at[event.message_hash] = at

    def serves(self, message_hash: bytes, now: float) -> bool:
        """Whether a reader gets this message: it is stored and has not expired."""
        event = self.stored.get(message_hash)
        if event is None:
            return False
        lifetime = min(self.retention, _EPHEMERAL_SECONDS if event.message.ephemeral else math.inf)
        return self.stored_at[message_hash] + lifetime >= now

    def forget(self, message_hashes: Iterable[bytes]) -> None:
        """Lose messages permanently."""
        for message_hash in message_hashes:
            if self.stored.pop(message_hash, None) is not None:
                del self.stored_at[message_hash]


class SimNetwork:
    """Every relay and every path. All randomness comes from `rng`; time is that of the running loop.

    Readers of a relay's store get pages of `page_messages`.
    """

    def __init__(
        self, relays: int, faults: Faults, rng: random.Random, *, page_messages: int = _PAGE_MESSAGES
    ) -> None:
        self.relays = [SimRelay(f"relay-{number}") for number in range(relays)]
        self.faults = faults
        self.counts: FaultCounts = FaultCounts()
        self.bytes_sent = 0
        self.messages_sent = 0
        self.messages_handed_on = 0
        self.bytes_handed_on = 0
        self.messages_read = 0
        """Messages read from the relays' stores."""
        self.page_messages = page_messages
        self.deaf: set[str] = set()
        """Participants that are connected, but to which the relays hand on nothing."""
        self.on_stored: Callable[[NodeMessageReceived, float], None] = lambda event, at: None
        """Called with a message and the time when a relay has stored it."""
        self._rng = rng
        # A message on its way belongs to no process: it arrives even if its sender is dead or asleep.
        self._context = contextvars.Context()
        self._subscribers: dict[str, Subscriber] = {}
        self._cuts: set[tuple[str, str]] = set()
        self._apart: set[str] = set()
        self._sent = 0

    def hash_of(self, payload: bytes) -> bytes:
        """A transport hash, different for each transmission."""
        self._sent += 1
        return hashlib.sha256(self._sent.to_bytes(8, "big") + payload).digest()

    # Participants, and which relays they reach.

    def attach(self, subscriber: Subscriber) -> None:
        """Add a node; it replaces one of the same name."""
        self._subscribers[subscriber.name] = subscriber

    def detach(self, subscriber: Subscriber) -> None:
        """Remove a node: messages on their way to it are lost."""
        if self._subscribers.get(subscriber.name) is subscriber:
            del self._subscribers[subscriber.name]

    def reachable(self, name: str) -> list[SimRelay]:
        """The relays that a participant can reach at this moment."""
        if name in self._apart:
            return []
        return [relay for relay in self.relays if relay.up and (name, relay.name) not in self._cuts]

    def cut(self, name: str, relay: SimRelay) -> None:
        """Cut a participant off from a relay."""
        self.counts["partitions"] += 1
        self._cuts.add((name, relay.name))
        self._tell(name)

    def mend(self, name: str, relay: SimRelay) -> None:
        """Undo a cut."""
        self._cuts.discard((name, relay.name))
        self._tell(name)

    def part(self, name: str) -> None:
        """Cut a participant off from all relays until it rejoins."""
        self._apart.add(name)
        self._tell(name)

    def rejoin(self, name: str) -> None:
        """Undo `part`. Idempotent."""
        self._apart.discard(name)
        self._tell(name)

    def take_down(self, relay: SimRelay) -> None:
        """Crash a relay; it keeps its stored messages."""
        self.counts["relay_crashes"] += 1
        relay.up = False
        self._tell(*self._subscribers)

    def bring_up(self, relay: SimRelay) -> None:
        """Restart a relay."""
        relay.up = True
        self._tell(*self._subscribers)

    def heal(self, faults: Faults) -> None:
        """End all cuts and outages; from now on only these faults strike."""
        self.faults = faults
        self._cuts.clear()
        self._apart.clear()
        self.deaf.clear()
        for relay in self.relays:
            relay.up = True
        self._tell(*self._subscribers)

    def _tell(self, *names: str) -> None:
        for name in names:
            if (subscriber := self._subscribers.get(name)) is not None:
                subscriber.reach_changed()

    # Messages.

    def publish(
        self, name: str, relay: SimRelay, event: NodeMessageReceived, answer: Callable[[], None]
    ) -> None:
        """Send to one relay; `answer` is called if its OK arrives."""
        self.messages_sent += 1
        self.bytes_sent += len(event.message.payload)
        if self._strikes("lost_requests", self.faults.loss):
            return
        self._later(lambda: self._arrived(name, relay, event, answer))

    def _arrived(
        self, name: str, relay: SimRelay, event: NodeMessageReceived, answer: Callable[[], None]
    ) -> None:
        if relay not in self.reachable(name):
            return
        if event.message_hash not in relay.stored:
            if not self._strikes("forgotten", self.faults.forgetting):
                relay.keep(event, self.time())
                self.on_stored(event, self.time())
            for subscriber in list(self._subscribers.values()):
                if subscriber.hears(event.message.content_topic):
                    self._hand_on(relay, subscriber, event)
        if not self._strikes("lost_answers", self.faults.loss):
            self._later(lambda: answer() if relay in self.reachable(name) else None)

    def _hand_on(self, relay: SimRelay, subscriber: Subscriber, event: NodeMessageReceived) -> None:
        if subscriber.name in self.deaf:
            self.counts["lost_messages"] += 1
            return
        if self._strikes("lost_messages", self.faults.loss):
            return
        self.messages_handed_on += 1
        self.bytes_handed_on += len(event.message.payload)
        copies = 2 if self._strikes("duplicates", self.faults.duplication) else 1

        def arrives() -> None:
            if self._subscribers.get(subscriber.name) is subscriber:
                if relay in self.reachable(subscriber.name):
                    subscriber.arrives(event)

        for _ in range(copies):
            self._later(arrives)

    def stored(self, relay: SimRelay, topic: str, since: float) -> list[NodeMessageReceived]:
        """A relay's unexpired messages of a topic, last arrival first; `since` bounds the authors' times."""
        now = self.time()
        return [
            event
            for message_hash, event in reversed(relay.stored.items())
            if event.message.content_topic == topic
            and (event.message.timestamp or 0) >= since
            and relay.serves(message_hash, now)
        ]

    def pass_time(self) -> float:
        """How long a hop takes, drawn at random."""
        return self._rng.uniform(*self.faults.latency)

    def time(self) -> float:
        """Virtual seconds, the same for every process."""
        loop = asyncio.get_running_loop()
        return loop.now if isinstance(loop, VirtualLoop) else loop.time()

    def _strikes(self, name: str, probability: float) -> bool:
        struck = probability > 0 and self._rng.random() < probability
        self.counts[name] += struck
        return struck

    def _later(self, work: Callable[[], object]) -> None:
        asyncio.get_running_loop().call_later(self.pass_time(), work, context=self._context)
